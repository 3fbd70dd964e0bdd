"""All pictures: sheets, grids of maps, tiles, plots, HTML pages, labels."""

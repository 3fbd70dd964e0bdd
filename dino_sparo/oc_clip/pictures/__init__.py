"""What the entities of a caption look at in an image, and what they and their relations score.

looks.py     a model, an image and its caption's graph -> shares of patches, cosines, scores
draw.py      a model and pairs -> the sheet and the page
tiles.py     a look -> the tiles of a row
sheet.py     the PNG
page.py      the HTML page
options.py   the options, without torch
"""

"""One file per benchmark: its folder -> questions."""

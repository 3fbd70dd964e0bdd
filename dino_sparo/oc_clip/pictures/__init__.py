"""Attention of a caption's entities in an image, and the scores of entities and relations.

explain.py   a model, an image and its caption's graph -> shares of patches, cosines, scores
tiles.py     maps of a pair -> the tiles of a row
draw.py      a model and pairs -> the sheet and the page
options.py   the options, without torch
"""

"""Attention of a caption's entities in an image, and the scores of entities and relations.

explain.py   a model, an image and its caption's graph -> shares of patches, cosines, scores, tiles
draw.py      a model and pairs -> the sheet and the page
"""

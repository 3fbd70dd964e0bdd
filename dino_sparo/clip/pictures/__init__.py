"""Attention of a CLIP's slots to image and caption.

concepts.py    a model and pairs -> attention; which slots and pairs are worth a look
words.py       tokens -> words and their attention
draw.py        a model and pairs -> the sheet and the page
"""

"""Attention maps of one image, and the atlas: the images that light up each slot most."""

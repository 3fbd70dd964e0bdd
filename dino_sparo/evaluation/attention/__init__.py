"""Attention maps of images, and the atlas: the images that activate each slot most."""

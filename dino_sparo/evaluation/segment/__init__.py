"""Images with masks of classes -> segmentation by a small head on frozen patch tokens, and by slots without a head.

data (masks of class numbers) -> tokens (windows, cache) -> head (training, measures) -> command; pictures draws.
"""

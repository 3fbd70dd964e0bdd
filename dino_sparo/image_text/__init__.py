"""Shared parts of image-text objectives: text tower, pairs of images and captions, scores, training, evaluations.

Nothing here imports an objective: a model comes in as what encodes images and captions.
"""

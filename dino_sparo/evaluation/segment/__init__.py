"""Images with masks of classes -> segmentation by a small head on frozen patch tokens, and by slots without a head."""

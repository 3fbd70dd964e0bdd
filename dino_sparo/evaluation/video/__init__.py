"""Videos: segmentation by label propagation on DAVIS, and the attention of heads or slots as a video."""

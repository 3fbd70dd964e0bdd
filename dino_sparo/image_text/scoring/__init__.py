"""The scorer that all evaluations of images and captions ask, and the rows it reads."""

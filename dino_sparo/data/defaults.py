"""Limits of image files, and the normalisation of images, as plain values; no torch here, so that `--help` is fast."""

# Up to this many unreadable images are always tolerated: of 100 images, a share would be one or two.
MIN_CORRUPT = 5

# Larger image files (10^6 bytes) and images (10^6 pixels) are not decoded; see `sources/decode.py`.
MAX_IMAGE_MB, MAX_IMAGE_MPIX = 256.0, 64.0
# The value of a 16-bit grayscale image that is white.
MAX_VALUE = 65535
EXIF = ("apply", "ignore")  # an image's orientation in its EXIF data

SCENE_SIZE = 64  # side of a built-in scene in pixels

# Per channel, of pixels in 0..1; ImageNet's.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# CLIP's own.
OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

"""Defaults that options of image-text objectives name, as plain values: no torch, so that `--help` is fast."""

# Images are cropped little, since a caption describes all of the image. Source: OpenCLIP's default augmentation.
CROP_SCALE = (0.9, 1.0)
AUTO = "auto"  # class names, or templates, of the set of images itself
PROBE_BATCH_SIZE = 64  # of CLIP benchmark's linear probe
PICTURE_SCENES = "scenes:400:384"  # held-out ones, large enough to be looked at

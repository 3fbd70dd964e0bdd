"""Defaults that options of image-text objectives name, as plain values: no torch, so that `--help` is fast."""

# Images are cropped little, since a caption describes all of the image. Source: OpenCLIP's default augmentation.
CROP_SCALE = (0.9, 1.0)
AUTO = "auto"  # class names, or templates, of the set of images itself
PROBE_BATCH_SIZE = 64  # of CLIP benchmark's linear probe
PICTURE_SCENES = "scenes:400:384"  # held-out ones, large enough to look at

# A recipe for models of the built-in scenes, trained from scratch on a few CPU cores: for trials, not for accuracy.
# Demos and studies share it, so that the models they compare have the same towers and the same optimizer.
SCENE_TOWERS = {
    "arch": "vit_micro",
    "patch_size": "8",
    "img_size": "48",
    "text_width": "64",
    "text_heads": "2",
    "text_layers": "3",
    "context_length": "20",
}
# Encodings of one width, with slots and without.
CLIP_READOUTS = {"sparo_slots": "16", "sparo_slot_dim": "16", "sparo_key_dim": "32", "embed_dim": "256"}
OPTIMISATION = {"batch_size": "256", "lr": "0.0015", "weight_decay": "0.1", "clip_grad": "1"}

"""Checkpoint -> numbers and pictures: what a pretrained encoder is worth.

    task.py      options -> encoder, images, folder and protocol of the result: where every evaluation starts
    features.py  encoder + images -> features (images, F), labels, indices, over all processes; on disk
    knn.py       features -> weighted k-NN accuracy
    linear/      features -> linear probes, one per learning rate
    slots/       features -> accuracy of slots alone and together
    attention/   images -> attention maps, slot atlas
    objects/     maps and true masks -> how well maps find objects

`options.py` has the options of the commands, without torch. Letters are those of `dino_sparo`. Numbers of images,
classes and probes are spelled out.
"""

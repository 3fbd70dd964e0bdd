"""Evaluations of a pretrained encoder: accuracy, slots, attention, embeddings.

    task.py      options -> one evaluation: processes, subject, images, result; where every evaluation starts
    encoders.py  options -> the encoder
    result.py    the file of a result: name, protocol, options, and when it may be overwritten
    features.py  encoder + images -> features (images, F), labels, indices, over all processes; on disk
    knn.py       features -> weighted k-NN accuracy
    linear/      features -> linear probes, one per learning rate
    slots/       features -> accuracy of slots alone and together
    attention/   images -> attention maps, slot atlas
    objects/     maps and true masks -> how well maps find objects

Each `options.py` has the options of its commands, without torch. Letters are those of `dino_sparo`.
"""

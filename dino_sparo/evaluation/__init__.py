"""Checkpoint -> numbers and pictures: what a pretrained encoder is worth.

`knn/command.py`, `linear/command.py`, `slots/command.py` and `attention/command.py` are the commands: they print
tables and write files.
`options.py` has their options, without torch. The other files compute:

    protocol.py    checkpoint -> the encoder to evaluate, and the record of how it was evaluated
    features.py    encoder + images -> features (images, F), labels, indices, over all processes
    feature_cache.py  features <-> files
    neighbours.py  features -> the most similar training images, over all processes
    knn.py         features -> weighted k-NN accuracy
    linear.py      features -> linear probes, one per learning rate: one epoch, one test
    linear_run.py  linear probes -> a whole training of them, saved and resumed
    slot_choice.py  some of an encoder's slots, by number or by a file
    slot_study.py  features -> accuracy of slots alone and together
    views.py       image file -> the view of it that is looked at, in whole patches
    attention.py   views -> one attention map per slot (sparo) or per head (cls)
    names.py       what runs, images and files are called
    page.py        words, pictures and panels -> one sheet; words are measured
    pictures.py    attention maps -> labelled figures of an image, of many images, of two models
    atlas.py       images -> for each slot those that light it up most, with its maps on them
    atlas_html.py  slot atlas -> one HTML page that opens from disk; html_page.py: what such pages share
    plots.py       the look of plots
    objects/       maps and true masks -> how well maps find objects: a command of its own

Letters are those of `dino_sparo`. Numbers of images, classes and probes are spelled out.
"""

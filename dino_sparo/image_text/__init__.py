"""Shared parts of image-text objectives: captions, pairs of images and captions, evaluation.

    text.py            captions -> token ids -> slots: the text tower
    classes.py         folders of images -> names of classes
    prompts.py         names of classes -> captions
    contrastive.py     scores -> the contrastive loss
    choices.py         defaults, without torch
    recipes.py         presets and defaults of options
    options.py         the options that trainings share
    objective.py       data, validation, optimizer of a training
    start.py           the weights of one model -> the start of another
    step.py            one contrastive step, whole or in parts
    picture_pairs.py   pairs that are drawn
    demos.py           what the objectives' demos share
    pairs/             any pairs of images and captions -> batches
    evaluation/        zero-shot, retrieval, probe, true or false captions

Nothing here imports an objective: a model comes in as what encodes images and captions.
"""

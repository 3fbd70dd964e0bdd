"""Shared parts of image-text objectives: captions, pairs of images and captions, evaluation.

    towers.py          the text tower; sizes, start weights and checkpoints of both towers
    scorer.py          images and captions -> scores
    prompts.py         folders of images -> names of classes -> captions
    options.py         the options that trainings share
    objective.py       data, validation, optimizer of a training
    step.py            the contrastive loss; one step, whole or in parts
    picture_pairs.py   pairs that are drawn
    pairs/             any pairs of images and captions -> batches
    evaluation/        zero-shot, retrieval, probe, true or false captions

Nothing here imports an objective: a model comes in as what encodes images and captions.
"""

"""A training run, for any objective.

    objective.py   the contract between an objective and the trainer
    run.py         the life of a run: build, resume, epochs, evaluations, checkpoints
    resume.py      content of a checkpoint; saving and resuming
    loop.py        one epoch: fetch, step, agree, log; memory of the first step
    updater.py     gradients -> weights: precision, accumulation, schedules, skipped steps
    optim.py       parameter groups, optimizers, schedules, clipping
    compile.py     torch.compile of the networks
    options.py     options of a run that all objectives share

`dino/`, `simdino/`, `ibot/`, `clip/` and `oc_clip/` each supply an `Objective`.
"""

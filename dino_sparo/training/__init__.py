"""What keeps a run going, for every objective.

    objective.py   what an objective is: the contract between it and everything below
    updates.py     gradients -> weights: precision, accumulation, schedules, steps that are skipped
    loop.py        one epoch: fetch, step, agree, log
    rehearsal.py   compile the networks; what a step keeps in memory
    run.py         build, resume, epochs, save

`dino/` and `clip/` each supply an `Objective`; everything else about a run stands here, once.
"""

"""Attention maps and true masks of objects -> how well maps find objects: `dino-sparo slots score`.

    layouts.py    built-in scenes, VOC, images beside masks, COCO -> images with masks
    measures.py   maps and objects -> Jaccard, mBO, foreground ARI, pointing; bounds, moved maps, subsets
    slots.py      classes that maps find, redundancy of slots, matching of two models' slots
    survey.py     encoders + images with objects -> all measures, image by image, with controls and intervals
    report.py     results -> table and plots
    command.py    options -> table, slot_score.json and plots

For measures and controls see `docs/slot_score.md`.
"""

"""Attention maps and true masks of objects -> how well maps find objects: `dino-sparo slots score`.

    layouts.py    built-in scenes, VOC, images beside masks, COCO -> images with masks, as an encoder sees them
    measures.py   maps and objects -> Jaccard, mBO, foreground ARI, pointing; bounds, moved maps, subsets
    slots.py      which map finds which class; how alike slots are; the best matching of two models' slots
    survey.py     encoders + images with objects -> all of this, image by image, with controls and intervals
    report.py     results -> table and plots
    command.py    options -> table, slot_score.json and plots

Maps are those of `evaluation/attention/maps.py`. `docs/slot_score.md` explains the measures and the controls.
"""

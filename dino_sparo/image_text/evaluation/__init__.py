"""An image-text model -> numbers.

protocol.py         what a result file says of model, images and versions; where it is written
encode.py           images or captions -> features, over all processes
zero_shot.py        images + names of classes -> accuracy
zero_shot_probe.py  the same during training
retrieval.py        images + captions -> recall
caption_sets.py     annotation files -> images with all their captions
sugarcrepe.py       true against false captions
scene_pairs.py      such captions of the built-in scenes
winoground.py       two images, two captions
image_files.py      the images that annotations name
probe.py            frozen image features -> linear probe
validation.py       loss and recall on held-out pairs, during training
options.py          the options of these commands, without torch
"""

"""An image-text model -> numbers.

protocol.py         what a result file says of model, images and versions; where it is written
scorer.py           what an evaluation asks of a model: scores of images and captions
dot_product.py      images or captions -> features, whose dot products are the scores
zero_shot.py        images + names of classes -> accuracy
zero_shot_probe.py  the same during training
retrieval.py        images + captions -> recall
caption_sets.py     annotation files -> images with all their captions
questions.py        true against false captions or images: asked and judged, for any benchmark
sugarcrepe.py       true against false captions
scene_pairs.py      such captions of the built-in scenes
winoground.py       two images, two captions
compositional/      these and other benchmarks of true and false captions, all in one table
image_files.py      the images that annotations name
probe.py            frozen image features -> linear probe
validation.py       loss and recall on held-out pairs, during training
options.py          the options of these commands, without torch
"""

"""The demos: small models are trained on the built-in scenes, evaluated, drawn and compared, in minutes without a GPU.

dino.yaml      recipe of DINO; clip.yaml of CLIP + SPARO; oc-clip.yaml of OC-CLIP beside CLIP
options.py     options of `dino-sparo demo`
run.py         a recipe -> trained models, a table of their scores, pictures
"""

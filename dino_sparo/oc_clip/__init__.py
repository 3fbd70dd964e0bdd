"""OC-CLIP: a caption's scene graph is bound to the patches of an image, entity by entity, and scored.

The third objective. The encoder and the text tower are the shared rooms of `dino_sparo`. Here is its core, not yet a
training:

    caption -> its graph                   parsers/  graph_files.py  graph_index.py  json_lines.py
    caption's graph -> padded tensors      graphs.py (canonical.py)  negatives.py  graph_batches.py
    patches, entities -> slots             binding.py
    slots, entities, relations -> scores   scoring.py  pair_scores.py
    scores -> loss                         loss.py

Letters are those of `dino_sparo`: E entities, R relations, U captions are the paper's M, P and B. `dim` is its d, the
width of entities, keys, values and slots; `rel_dim` is the width of relations; `num_default` its N_d. Source: OC-CLIP,
"Object-Centric Binding in Contrastive Language-Image Pretraining", arXiv 2502.14113.
"""

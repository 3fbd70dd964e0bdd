"""OC-CLIP: a caption's scene graph is bound to the patches of an image, entity by entity, and scored.

Encoder, text encoder, trainer and evaluations are those of all objectives. OC-CLIP adds:

    caption -> its graph                   graphs/  parsers/
    caption's graph -> padded tensors      batches.py
    patches, entities -> slots             binding.py
    slots, entities, relations -> scores   scoring.py
    images, captions -> scores             model.py
    scores -> loss                         loss.py
    a whole training                       train.py  options.py
    checkpoint -> evaluation               load.py
    checkpoint -> maps of entities         explain.py  pictures.py

Letters: E entities, R relations, U captions are the paper's M, P and B. `dim` is the paper's D, the width of entities,
keys, values and slots; `rel_dim` is the width of relations; `num_default` is the paper's N_d. Source: OC-CLIP,
"Object-Centric Binding in Contrastive Language-Image Pretraining", arXiv 2502.14113.
"""

from typing import TYPE_CHECKING

from dino_sparo.runtime import lazy_names

if TYPE_CHECKING:
    from dino_sparo.oc_clip.binding import BindingConfig
    from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
    from dino_sparo.oc_clip.load import load_oc_clip
    from dino_sparo.oc_clip.model import OCCLIP, OCCLIPConfig, create_oc_clip

__all__ = ["OCCLIP", "BindingConfig", "OCCLIPConfig", "Relation", "SceneGraph", "create_oc_clip", "load_oc_clip"]

# The modules import torch, which takes seconds.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "oc_clip.binding": ("BindingConfig",),
        "oc_clip.graphs.graph": ("Relation", "SceneGraph"),
        "oc_clip.load": ("load_oc_clip",),
        "oc_clip.model": ("OCCLIP", "OCCLIPConfig", "create_oc_clip"),
    },
)

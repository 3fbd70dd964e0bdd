"""A CLIP checkpoint -> the scorer of images and captions that evaluations use."""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from dino_sparo.clip.model import CLIP, load_clip
from dino_sparo.clip.pictures.explain import SlotScorer
from dino_sparo.clip.slots.subsets import open_slots
from dino_sparo.data.views import ClipView
from dino_sparo.evaluation.task import view_record
from dino_sparo.image_text.scoring.dot_product import DotProductScorer
from dino_sparo.image_text.text import tokenize
from dino_sparo.runtime.faults import require
from dino_sparo.runtime.launch import Distributed
from dino_sparo.runtime.precision import PRECISIONS
from dino_sparo.runtime.records import versions


def clip_scorer(
    args: argparse.Namespace, process: Distributed, border: int = 0, checkpoint: Mapping[str, Any] | None = None
) -> DotProductScorer:
    """The model of an evaluation.

    Args:
        args: the options of `MODEL` and of `computation` in image_text/evaluation/options.py.
        process: this process and its device.
        border: pixels cut off every side of an image.
        checkpoint: content of `--pretrained_weights`; None: read the file.

    Raises:
        ValueError: no checkpoint is named, it holds no CLIP, or options do not fit it.
    """
    if getattr(args, "graphs", None):
        raise ValueError(f"--graphs {args.graphs} with a CLIP, which reads captions as they are; leave it out")
    if not args.pretrained_weights:
        raise ValueError(
            "--pretrained_weights is empty: there is nothing to evaluate; give a checkpoint of CLIP training"
        )
    require("open_clip", "captions")
    loaded = load_clip(args.pretrained_weights, args.text_heads, args.quick_gelu, checkpoint)
    config = loaded.model.config
    transform = ClipView(args.img_size or config.image.img_size, loaded.mean, loaded.std, border)
    model, slots = open_slots(args.slots, loaded)
    dim = config.embed_dim if isinstance(model, CLIP) else model.encoding_dim
    record = {
        "model": loaded.record,
        "slots": slots,
        "feature": {"name": "normalised encoding", "dim": dim, "precision": args.precision},
        "view": {**view_record(transform), "border": border},
        "versions": versions(open_clip="open_clip_torch"),
    }
    has_slots = isinstance(model, CLIP) and config.image.kind.has_slots
    kind: type[DotProductScorer] = SlotScorer if has_slots else DotProductScorer
    return kind(
        model.to(process.device),
        partial(tokenize, context_length=config.text.context_length),
        transform,
        process.device,
        args.batch_size_per_gpu,
        args.num_workers,
        PRECISIONS[args.precision],
        record,
    )

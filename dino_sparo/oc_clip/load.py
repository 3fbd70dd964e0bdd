"""An OC-CLIP checkpoint -> what the evaluations of `image_text/` ask for: a scorer of images and captions."""

import argparse
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dino_sparo.data.views import ClipView
from dino_sparo.evaluation.load import view_record
from dino_sparo.image_text.loaded import refuse_foreign_options
from dino_sparo.oc_clip.graphs.files import MAX_MISSING, CaptionGraphs, open_graphs
from dino_sparo.oc_clip.graphs.graph import SceneGraph
from dino_sparo.oc_clip.model import LoadedOCCLIP, load_oc_clip
from dino_sparo.oc_clip.options import DEFAULT_GRAPHS
from dino_sparo.oc_clip.scorer import GraphScorer
from dino_sparo.runtime.distributed import Distributed
from dino_sparo.runtime.precision import PRECISIONS
from dino_sparo.runtime.records import versions

logger = logging.getLogger(__name__)


def open_oc_clip_model(
    args: argparse.Namespace, process: Distributed, border: int = 0, checkpoint: Mapping[str, Any] | None = None
) -> GraphScorer:
    """What the options of `add_model_options` and `add_computation_options` ask for.

    Args:
        args: parsed options.
        process: where to compute.
        border: pixels cut off every side of an image.
        checkpoint: what was read from `--pretrained_weights`; None: read it now.

    Raises:
        ValueError: an option that OC-CLIP has no use for, or graphs that cannot be read.
    """
    if args.slots:
        raise ValueError(
            "--slots with an OC-CLIP: its score is no dot product, so there are no slots to choose among; leave it out"
        )
    refuse_foreign_options(args.pretrained_weights, args.text_heads, args.quick_gelu)
    loaded = load_oc_clip(args.pretrained_weights, checkpoint)
    size = loaded.model.config.image.img_size
    if args.img_size not in (None, size):
        raise ValueError(
            f"--img_size {args.img_size}: the binding was trained for images of {size} px, whose patches have a "
            "position each; leave it out"
        )
    scorer = scorer_of(
        loaded,
        args.graphs or DEFAULT_GRAPHS,
        process.device,
        args.batch_size_per_gpu,
        args.num_workers,
        PRECISIONS[args.precision],
        border,
        args.max_missing_graphs,
    )
    trained_on = loaded.record.get("trained_on_graphs") or {}
    if args.graphs is None and trained_on.get("parser") != DEFAULT_GRAPHS:
        logger.warning(
            "the captions' graphs are those of the parser %s, and the model was trained on graphs of %s: give --graphs "
            "that were made in the same way",
            DEFAULT_GRAPHS,
            trained_on.get("file") or trained_on.get("shards") or trained_on.get("parser") or "another kind",
        )
    scorer.model_record.update(
        feature={"name": "keys and values of patches", "precision": args.precision},
        view={**view_record(scorer.transform), "border": border},
        versions=versions(open_clip="open_clip_torch"),
    )
    return scorer


def scorer_of(
    loaded: LoadedOCCLIP,
    graphs: str | Callable[[str], SceneGraph],
    device: torch.device | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    dtype: torch.dtype = torch.float32,
    border: int = 0,
    max_missing: float = MAX_MISSING,
) -> GraphScorer:
    """The model as evaluations ask it.

    Args:
        loaded: the model.
        graphs: what `graph_files.open_graphs` takes, or a function from a caption to its graph.
        device: where to compute; None: where the model is.
        batch_size: images per step.
        num_workers: processes that load images.
        dtype: of autocast.
        border: pixels cut off every side of an image.
        max_missing: share of captions that may have no graph.

    Raises:
        ValueError: there is no such parser or file of graphs.
    """
    if isinstance(graphs, str):
        caption_graphs = open_graphs(graphs, max_missing=max_missing)
    else:
        caption_graphs = CaptionGraphs(graphs, {"parser": repr(graphs)}, max_missing=max_missing)
    device = loaded.model.node_proj.weight.device if device is None else device
    view = ClipView(loaded.model.config.image.img_size, loaded.mean, loaded.std, border)
    record = {"model": loaded.record, "slots": None}
    return GraphScorer(loaded.model.to(device), caption_graphs, view, device, batch_size, num_workers, dtype, record)

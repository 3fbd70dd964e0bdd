"""An OC-CLIP checkpoint -> its model, and the scorer of images and captions that evaluations use."""

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dino_sparo.data.views import ClipView
from dino_sparo.evaluation.task import view_record
from dino_sparo.image_text.scoring.scorer import require_both
from dino_sparo.image_text.towers import LoadedModel, refuse_foreign_options
from dino_sparo.oc_clip.config import OCCLIPConfig
from dino_sparo.oc_clip.graph import SceneGraph
from dino_sparo.oc_clip.graph_files import MAX_MISSING, CaptionGraphs, open_graphs
from dino_sparo.oc_clip.model import OCCLIP, oc_clip_from_config
from dino_sparo.oc_clip.options import DEFAULT_GRAPHS
from dino_sparo.oc_clip.scorer import GraphScorer
from dino_sparo.runtime.launch import Distributed
from dino_sparo.runtime.precision import PRECISIONS
from dino_sparo.runtime.records import versions
from dino_sparo.weights.checkpoint import CheckpointError, load_checkpoint, load_strictly

logger = logging.getLogger(__name__)

MAX_BATCH = 64  # images that `LoadedOCCLIP.similarity` encodes at a time


class LoadedOCCLIP(LoadedModel):
    """A trained model and its description for result files; see `LoadedModel`."""

    model: OCCLIP

    def similarity(
        self,
        images: Sequence[Any] | Tensor,
        captions: Sequence[str],
        parser: str | Callable[[str], SceneGraph] = DEFAULT_GRAPHS,
    ) -> Float[Tensor, "images captions"]:
        """S of every image and the graph of every caption, in [-1, 1].

            loaded = load_oc_clip("output/checkpoint.pth")
            loaded.similarity([Image.open("dog.jpg")], ["a dog left of a cat", "a cat left of a dog"])  # (1, 2)

        Args:
            images: images of any size and mode; or (images, C, H, W), resized and normalised with `mean` and `std`.
            captions: texts.
            parser: value of `--graphs`, or a function from a caption to its graph.

        Returns:
            (images, captions), fp32, on the model's device.
        """
        require_both(images, captions)
        batch_size = min(max(len(images), len(captions)), MAX_BATCH)
        return scorer_of(self, parser, batch_size=batch_size).similarity(images, captions)


def load_oc_clip(path: str | Path, checkpoint: Mapping[str, Any] | None = None) -> LoadedOCCLIP:
    """The model of a checkpoint of `dino-sparo train-oc-clip`, in eval mode, on the CPU.

    Args:
        path: of the checkpoint.
        checkpoint: content of the file; None: read the file.

    Raises:
        CheckpointError: the file cannot be read, holds no OC-CLIP, or its weights do not fit.
        ValueError: the checkpoint has settings that this version does not know.
    """
    checkpoint, source = load_checkpoint(path) if checkpoint is None else checkpoint, str(path)
    description = checkpoint.get("oc_clip")
    if not isinstance(description, dict):
        raise CheckpointError(f"{source} holds no OC-CLIP: there is no `oc_clip`, which says how one is built")
    if missing := {"image", "text", "binding", "mean", "std"} - description.keys():
        raise CheckpointError(f"{source} does not say {', '.join(sorted(missing))} of its OC-CLIP under `oc_clip`")
    config = OCCLIPConfig.from_dict(description)
    model = oc_clip_from_config(config)
    load_strictly(model, checkpoint["model"], source)
    return LoadedOCCLIP.of(model, checkpoint, path, trained_on_graphs=description.get("graphs"))


def open_oc_clip_model(
    args: argparse.Namespace, process: Distributed, border: int = 0, checkpoint: Mapping[str, Any] | None = None
) -> GraphScorer:
    """The scorer of a checkpoint by the options of an evaluation.

    Args:
        args: parsed options.
        process: this process and its device.
        border: pixels cut off every side of an image.
        checkpoint: content of `--pretrained_weights`; None: read the file.
    """
    if args.slots:
        raise ValueError(
            "--slots with an OC-CLIP: its score is no dot product, so there are no slots to choose from; leave it out"
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
        border,
        args.max_missing_graphs,
        batch_size=args.batch_size_per_gpu,
        num_workers=args.num_workers,
        dtype=PRECISIONS[args.precision],
    )
    trained_on = loaded.record.get("trained_on_graphs") or {}
    if args.graphs is None and trained_on.get("parser") != DEFAULT_GRAPHS:
        logger.warning(
            "the parser %s makes the graphs of the captions, but the model was trained on graphs of %s: give --graphs "
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
    border: int = 0,
    max_missing: float = MAX_MISSING,
    **settings: Any,
) -> GraphScorer:
    """The scorer of a loaded model.

    Args:
        loaded: the model.
        graphs: argument of `open_graphs`, or a function from a caption to its graph.
        device: None: the device of the model.
        border: pixels cut off every side of an image.
        max_missing: share of captions that may have no graph.
        settings: `batch_size`, `num_workers` and `dtype` of `GraphScorer`.
    """
    if isinstance(graphs, str):
        caption_graphs = open_graphs(graphs, max_missing=max_missing)
    else:
        caption_graphs = CaptionGraphs(graphs, {"parser": repr(graphs)}, max_missing=max_missing)
    device = loaded.model.node_proj.weight.device if device is None else device
    view = ClipView(loaded.model.config.image.img_size, loaded.mean, loaded.std, border)
    record = {"model": loaded.record, "slots": None}
    return GraphScorer(loaded.model.to(device), caption_graphs, view, device, model_record=record, **settings)

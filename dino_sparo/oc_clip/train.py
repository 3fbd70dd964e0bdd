"""Train OC-CLIP on pairs of images and captions, whose scene graphs come from a file or from a parser.

    dino-sparo train-oc-clip --preset oc-scenes --data_path scenes:12800:48 --output_dir runs/oc   # this machine
    torchrun --nproc_per_node=8 -m dino_sparo train-oc-clip --preset oc-coco --init_clip ViT-B-16.pt \\
        --data_path coco/captions_train2017.json --graphs coco_graphs.jsonl --output_dir runs/oc-coco
    python run_with_submitit.py --module dino_sparo.oc_clip.train ...                # the same on Slurm

Options are those of `options.py`. What they describe is built here; a step is `step.py`, what all image-text objectives
share is `image_text/objective.py`, the run is `training/run.py`. Starting the same command again goes on from the last
checkpoint.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dino_sparo.checkpoint import CheckpointError, initialize_encoder
from dino_sparo.image_text.evaluation.image_rows import ClipView
from dino_sparo.image_text.objective import (
    ModelPart,
    PairObjective,
    check_same_description,
    create_updater,
    default_options,
    pixel_statistics,
    prepare_model,
)
from dino_sparo.image_text.pairs.batches import PairDataset, PairItem
from dino_sparo.image_text.pairs.captions import TarCaptions
from dino_sparo.image_text.pairs.run_data import BatchForm
from dino_sparo.image_text.start import initialize_towers
from dino_sparo.oc_clip.config import BindingConfig, OCCLIPConfig
from dino_sparo.oc_clip.graph_files import CaptionGraphs, LookupCounts, graph_of, graphs_in_shards, open_graphs
from dino_sparo.oc_clip.graphs import SceneGraph
from dino_sparo.oc_clip.model import OCCLIP, create_oc_clip, oc_clip_description
from dino_sparo.oc_clip.negatives import read_symmetric
from dino_sparo.oc_clip.options import check_options, get_args_parser
from dino_sparo.oc_clip.pairs import GraphPairBatch, GraphPairDataset, collate_graph_pairs
from dino_sparo.oc_clip.presets import RECIPES
from dino_sparo.oc_clip.scorer import GraphScorer
from dino_sparo.oc_clip.step import OCTraining
from dino_sparo.runtime.distributed import Distributed, all_or_none, wrap_ddp
from dino_sparo.runtime.extras import require
from dino_sparo.training import run

__all__ = ["check_options", "get_args_parser", "train"]

logger = logging.getLogger(__name__)


def train(args: argparse.Namespace) -> None:
    """Train OC-CLIP with these options, or go on from the last checkpoint; see `training.run.train` for errors."""
    run.train(args, OCCLIPObjective)


class OCCLIPObjective(PairObjective[GraphPairBatch]):
    """OC-CLIP: among the graphs of a batch find each image's own, and the other way round; see `PairObjective`."""

    counters: ClassVar[Mapping[str, str]] = {
        **PairObjective.counters,
        "num_missing_graphs": "missing_graphs",
        "num_whole_captions": "whole_caption_graphs",
        "num_dropped_nodes": "dropped_entities",
        "num_dropped_relations": "dropped_relations",
    }
    harmless_options: ClassVar[Sequence[str]] = (*PairObjective.harmless_options, "score_chunk_mb", "val_graphs")
    training: OCTraining

    @staticmethod
    def check_options(args: argparse.Namespace) -> None:
        """Refuse a missing package, and options that cannot be."""
        require("open_clip", "captions")
        check_options(args)

    @staticmethod
    def defaults_of(args: argparse.Namespace) -> dict[str, Any]:
        """What the options would be if none had been given."""
        return default_options(get_args_parser(), RECIPES)

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        caps = {"max_nodes": args.max_nodes, "max_relations": args.max_relations}
        caps |= {"max_missing": args.max_corrupt, "option": "--max_corrupt"}
        with all_or_none("opening graphs"):
            if args.graph_key is None:
                self.graphs = open_graphs(args.graphs, **caps)
            else:
                self.graphs = graphs_in_shards(args.data_path, args.graph_key, **caps)
            self.val_graphs = open_graphs(args.val_graphs, **caps) if args.val_graphs else self.graphs
            self.symmetric = read_symmetric(Path(args.symmetric)) if args.symmetric else frozenset()
        logger.info("graphs: %s", self.graphs.record)
        super().__init__(args, process)

    def batch_form(self, args: argparse.Namespace) -> BatchForm:
        """Images, the graphs of captions and the tokens of their phrases."""

        def with_graphs(pairs: PairDataset) -> GraphPairDataset:
            if args.graph_key is None:
                return GraphPairDataset(pairs, GraphOfCaption(self.graphs), args.rel_negatives, self.symmetric)
            captions = pairs.source.captions
            if not isinstance(captions, TarCaptions):
                raise ValueError(f"--graph_key is for tar shards; {pairs.source.name} has none. Give --graphs FILE")
            in_shard = GraphInShard(self.graphs, captions, args.graph_key)
            return GraphPairDataset(pairs, in_shard, args.rel_negatives, self.symmetric)

        return BatchForm(partial(collate_graph_pairs, context_length=args.context_length), with_graphs)

    def build_training(self, args: argparse.Namespace, process: Distributed, steps_per_epoch: int) -> OCTraining:
        """Model, loss, optimizer and schedule from the options."""
        torch.manual_seed(args.seed)
        model = build_model(args)
        dtype = prepare_model(model, args, process)
        model.binding.chunk_mb = args.score_chunk_mb
        RECIPES.fill_in_warmup(args, args.epochs * steps_per_epoch)
        for name in ("warmup_image", "warmup_text"):
            if getattr(args, name) is None:
                setattr(args, name, args.warmup_steps)
        parts = [
            ModelPart(("image.",), args.lr_image, args.warmup_image),
            ModelPart(("text.",), args.lr_text, args.warmup_text),
            ModelPart(("",), args.lr, args.warmup_steps),
        ]
        return OCTraining(
            model=wrap_ddp(model, process.device),
            updater=create_updater(model, parts, args, steps_per_epoch, process.device, dtype),
            clip_grad=args.clip_grad,
            rel_loss_weight=args.rel_loss_weight,
            **pixel_statistics(args, process.device),
        )

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's `oc_clip`."""
        config = self.training.network.config
        return {"oc_clip": oc_clip_description(config, self.graphs.record, self.args.norm_mean, self.args.norm_std)}

    @property
    def logit_scale(self) -> Tensor:
        """The inverse temperature; 1 where there is none."""
        scale: Tensor | None = self.training.network.inverse_temperature
        return torch.ones((), device=self.updater.device) if scale is None else scale

    @property
    def scorer(self) -> GraphScorer:
        """The model as evaluations ask it."""
        args, updater = self.args, self.updater
        return GraphScorer(
            self.training.network,
            self.val_graphs,
            ClipView(args.img_size, tuple(args.norm_mean), tuple(args.norm_std)),
            updater.device,
            self.sampler.batch_size,
            min(args.num_workers, 2),
            updater.dtype,
        )

    def check_same_model(self, checkpoint: Mapping[str, Any], source: str) -> None:
        """Refuse to resume a checkpoint of another model.

        Raises:
            CheckpointError: names each value that differs; other graphs alone are another run, not another model.
        """
        saved = checkpoint.get("oc_clip")
        if saved is None:
            raise CheckpointError(f"{source} holds no OC-CLIP, so it cannot be resumed; choose another --output_dir")
        saved = {**saved, **OCCLIPConfig.from_dict(saved).to_dict()}  # what it does not say has the default
        asked = {name: value for name, value in self.description["oc_clip"].items() if name != "graphs"}
        check_same_description(saved, asked, source)

    def start_from(self) -> None:
        """Start the image encoder, or both encoders, from other weights.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        args, model = self.args, self.training.network
        if args.init_clip:
            logger.info("start from %s", initialize_towers(model, args.init_clip, with_rest=False))
        if args.init_from:
            logger.info("image encoder: start from %s", initialize_encoder(model.image, args.init_from))

    def count(self, batch: Any) -> tuple[int, ...]:
        """Pairs that were replaced, phrases that were cut off, what was changed in graphs."""
        counts: LookupCounts = batch.graph_counts
        dropped = counts.dangling + counts.loops + counts.relations
        return *super().count(batch), counts.missing, counts.whole_caption, counts.nodes, dropped

    def watch_counts(self, counts: Mapping[str, int], num_seen: int) -> None:
        """Stop where more captions have no graph than `--max_corrupt` allows.

        Raises:
            ValueError: with the numbers.
        """
        super().watch_counts(counts, num_seen)
        self.graphs.check(LookupCounts(captions=num_seen, missing=counts["num_missing_graphs"]))


def build_model(args: argparse.Namespace) -> OCCLIP:
    """The model from the options, with random weights."""
    return create_oc_clip(
        arch=args.arch,
        patch_size=args.patch_size,
        img_size=args.img_size,
        text_width=args.text_width,
        text_heads=args.text_heads,
        text_layers=args.text_layers,
        context_length=args.context_length,
        pre_norm=args.pre_norm,
        quick_gelu=args.quick_gelu,
        binding=BindingConfig(
            dim=args.bind_dim,
            num_default=args.num_default,
            num_layers=args.bind_layers,
            num_heads=args.bind_heads,
            position_std=args.position_std,
            competition=args.competition,
            rel_dim=args.rel_dim,
            relation=args.relation,
            ent_coef=args.ent_coef,
            rel_coef=args.rel_coef,
            logit_scale=args.logit_scale == "learned",
        ),
    )


@dataclass(frozen=True)
class GraphOfCaption:
    """A pair's graph is that of its caption."""

    graphs: CaptionGraphs

    def __call__(self, item: PairItem) -> tuple[SceneGraph, LookupCounts]:
        """The graph, and what was changed in it."""
        return self.graphs.lookup(item.caption)


@dataclass(frozen=True)
class GraphInShard:
    """A pair's graph stands in the `.json` member of its shard, under `key`."""

    graphs: CaptionGraphs
    captions: TarCaptions
    key: str

    def __call__(self, item: PairItem) -> tuple[SceneGraph, LookupCounts]:
        """The graph, and what was changed in it; a ValueError names the shard and what is no graph there."""
        try:
            graph = graph_of(self.captions.json_of(item.index), self.key)
        except ValueError as error:
            raise ValueError(f"{self.captions.location(item.index)}: {error}") from error
        return self.graphs.normalized(graph, item.caption)

"""Train OC-CLIP on pairs of images and captions, whose scene graphs come from a file or from a parser.

    dino-sparo train-oc-clip --preset oc-scenes --data_path scenes:12800:48 --output_dir runs/oc   # this machine
    torchrun --nproc_per_node=8 -m dino_sparo train-oc-clip --preset oc-coco --init_clip open_clip_model.safetensors \\
        --data_path coco/captions_train2017.json --graphs coco_graphs.jsonl --output_dir runs/oc-coco
    python run_with_submitit.py --module dino_sparo.oc_clip.train ...                # the same on Slurm

Options are those of `options.py`. The loss is `loss.py`, what all image-text objectives share is
`image_text/objective.py`, the run is `training/run.py`. The same command resumes from the last checkpoint.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from dino_sparo.image_text.objective import ModelPart, PairObjective, tower_options
from dino_sparo.image_text.pairs.batches import PairDataset
from dino_sparo.image_text.step import batch_accuracy, contrastive_loss
from dino_sparo.oc_clip import options
from dino_sparo.oc_clip.batches import (
    GraphPairBatch,
    GraphPairDataset,
    collate_graph_pairs,
    join_graphs,
    look_up,
    read_symmetric,
)
from dino_sparo.oc_clip.binding import BindingConfig
from dino_sparo.oc_clip.graphs.files import CaptionGraphs, open_graphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts
from dino_sparo.oc_clip.load import GraphScorer
from dino_sparo.oc_clip.loss import graphs_of_all_ranks, local_loss
from dino_sparo.oc_clip.model import OCCLIP, create_oc_clip
from dino_sparo.oc_clip.scoring import score_all_pairs
from dino_sparo.runtime.collectives import all_or_none
from dino_sparo.runtime.launch import Distributed, rank, world_size

logger = logging.getLogger(__name__)

SLOW_START = 0.5  # a tower with a smaller share of the learning rate is meant to start from trained weights


class OCCLIPObjective(PairObjective[GraphPairBatch]):
    """OC-CLIP: match each image of a batch with its graph among all graphs, and each graph with its image."""

    command = "train-oc-clip"
    make_parser = options.get_args_parser
    model_name, model_key = "OC-CLIP", "oc_clip"
    check_combinations = options.check_options
    counters: ClassVar[Mapping[str, str]] = {
        **PairObjective.counters,
        "num_missing_graphs": "missing_graphs",
        "num_whole_captions": "whole_caption_graphs",
        "num_dropped_nodes": "dropped_entities",
        "num_dropped_relations": "dropped_relations",
    }
    harmless_options: ClassVar[Sequence[str]] = (*PairObjective.harmless_options, "score_chunk_mb", "val_graphs")

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        caps = {"max_nodes": args.max_nodes, "max_relations": args.max_relations, "max_missing": args.max_corrupt}
        with all_or_none("opening graphs"):
            if args.graph_key is None:
                self.graphs = open_graphs(args.graphs, **caps)
            else:
                # A caption alone does not say in which shard its graph stands: `GraphPairDataset` finds the graph.
                shards = {"shards": args.data_path, "graph_key": args.graph_key}
                self.graphs = CaptionGraphs(lambda _: None, shards, **caps)
            self.val_graphs = open_graphs(args.val_graphs, **caps) if args.val_graphs else self.graphs
            self.symmetric = read_symmetric(Path(args.symmetric)) if args.symmetric else frozenset()
        logger.info("graphs: %s", self.graphs.record)
        self.rel_loss_weight = args.rel_loss_weight
        collate = partial(collate_graph_pairs, context_length=args.context_length)
        super().__init__(args, process, collate, self.with_graphs)

    def with_graphs(self, pairs: PairDataset) -> GraphPairDataset:
        """Pairs -> pairs with the graphs of their captions."""
        return GraphPairDataset(pairs, self.graphs, self.args.graph_key, self.args.rel_negatives, self.symmetric)

    @staticmethod
    def build_model(args: argparse.Namespace) -> OCCLIP:
        """Both towers and the binding module from the options, with random weights."""
        options_of = {"dim": "bind_dim", "num_layers": "bind_layers", "num_heads": "bind_heads"}
        sizes = {one.name: getattr(args, options_of.get(one.name, one.name)) for one in fields(BindingConfig)}
        binding = BindingConfig(**{**sizes, "logit_scale": args.logit_scale == "learned"})
        model = create_oc_clip(**tower_options(args), binding=binding)
        model.binding.chunk_mb = args.score_chunk_mb
        return model

    def model_parts(self) -> list[ModelPart]:
        """Both towers and the binding module. Fills in the towers' warm-ups, by default that of the binding module."""
        args = self.args
        for name in ("warmup_image", "warmup_text"):
            if getattr(args, name) is None:
                setattr(args, name, args.warmup_steps)
        return [
            (("image.",), args.lr_image, args.warmup_image),
            (("text.",), args.lr_text, args.warmup_text),
            (("",), args.lr, args.warmup_steps),
        ]

    @property
    def compiled_modules(self) -> list[nn.Module]:
        """The image encoder; the number and length of phrases change with every batch."""
        return [self.network.image.backbone]

    @property
    def dynamic_modules(self) -> list[nn.Module]:
        """Binding and scoring of all pairs, in the padded form of a GPU."""
        return [self.network.binding, self.network.scoring]

    def loss(self, features: Sequence[Tensor], batches: Sequence[GraphPairBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The contrastive loss and the local loss of relations; see the top of `loss.py`.

        Logged are both, `itc_loss` and `rel_loss` (a mean over the pairs with altered relations), `batch_accuracy`, the
        share of this rank's images whose own graph scores highest among this rank's, `logit_scale`, and
        `ent_rel_ratio`, alpha / beta.
        """
        network, logit_scale = self.network, self.logit_scale
        keys, values, entities, relations = features  # of the images, of the phrases
        graphs = join_graphs([batch.graphs for batch in batches])
        rank_graphs = look_up(graphs, entities, relations)
        all_graphs = rank_graphs if world_size() == 1 else graphs_of_all_ranks(graphs, entities, relations)
        scores = score_all_pairs(network.binding, network.scoring, all_graphs, keys, values)
        contrast = loss = contrastive_loss(scores, logit_scale)
        rank_scores = scores[:, len(scores) * rank() :][:, : len(scores)]
        scalars = {"itc_loss": contrast.detach(), "batch_accuracy": batch_accuracy(rank_scores)}
        if self.rel_loss_weight:
            local, scalars["rel_loss"] = local_loss(network, graphs, rank_graphs, keys, values, logit_scale)
            loss = contrast + self.rel_loss_weight * local / 2
        if network.logit_scale is not None:
            scalars["logit_scale"] = logit_scale.detach()
        scalars["ent_rel_ratio"] = (network.scoring.ent_coef / network.scoring.rel_coef).detach()
        return loss, scalars

    @property
    def loss_parameters(self) -> list[nn.Parameter]:
        """Weights of the binding module that process entities and patches together, of scoring, and the temperature."""
        network: OCCLIP = self.network
        binding = network.binding
        parts = (binding.query_norm, binding.query_proj, binding.key_proj, binding.value_proj, network.scoring)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        if binding.num_default:
            parameters.append(binding.default_tokens)
        return parameters if network.logit_scale is None else [*parameters, network.logit_scale]

    def bound_weights(self) -> None:
        """Keep temperature and coefficients in their ranges."""
        super().bound_weights()
        self.network.scoring.clamp_coefs_()

    @property
    def description(self) -> dict[str, Any]:
        """The checkpoint's entry, with the record of the graphs; other graphs make another run, not another model."""
        return {self.model_key: {**self.model_description, "graphs": self.graphs.record}}

    @cached_property
    def data_hashes(self) -> dict[str, str]:
        """Fingerprints of the pairs, and of the file of graphs, if graphs come from a file."""
        graphs = {"graphs": self.graphs.record["sha256"]} if "sha256" in self.graphs.record else {}
        return super().data_hashes | graphs

    @property
    def scorer(self) -> GraphScorer:
        """The model as evaluations use it."""
        return GraphScorer(self.network, *self.scorer_settings, graphs=self.val_graphs)

    def initialize(self) -> None:
        """Start the image encoder, or both encoders, from other weights; scores differ from scores of the file."""
        self.initialize_encoders(with_rest=False)
        args = self.args
        is_started = {"image": args.init_clip or args.init_from or args.pretrained, "text": args.init_clip}
        for tower, is_trained in is_started.items():
            if not is_trained and (rate := getattr(args, f"lr_{tower}")) < SLOW_START * args.lr:
                logger.warning(
                    "the %s encoder has random weights, but the learning rate of trained weights, %g (--lr: %g). "
                    "It will hardly learn; give --init_clip, or another rate",
                    *(tower, rate, args.lr),
                )

    def count(self, batch: Any) -> dict[str, int]:
        """Pairs that were replaced, phrases that were cut off, changes to graphs."""
        counts: LookupCounts = batch.graph_counts
        return {
            **super().count(batch),
            "num_missing_graphs": counts.missing,
            "num_whole_captions": counts.whole_caption,
            "num_dropped_nodes": counts.nodes,
            "num_dropped_relations": counts.dangling + counts.loops + counts.relations,
        }

    def watch_counts(self, counts: Mapping[str, int], num_seen: int) -> None:
        """Stop where more captions have no graph than `--max_corrupt` allows."""
        super().watch_counts(counts, num_seen)
        self.graphs.check(LookupCounts(captions=num_seen, missing=counts["num_missing_graphs"]))

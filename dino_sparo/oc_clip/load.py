"""An OC-CLIP checkpoint -> its model, and the `Scorer` of images and captions that evaluations use.

Images become keys and values, 4 * 2 * N * dim bytes each (0.4 MB at N = 196, dim = 256), in the host's memory.
Captions become graphs in canonical form: isomorphic graphs are scored once, so that a tie between them is exact.
"""

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from dino_sparo.data.sources import ImageSource
from dino_sparo.data.views import ClipView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, Band
from dino_sparo.evaluation.features import Features, inference
from dino_sparo.evaluation.task import view_record
from dino_sparo.image_text.picture_pairs import ViewedPair
from dino_sparo.image_text.prompts import prompts
from dino_sparo.image_text.scorer import EncodedTexts, Explanation, ImageRows, computation_of
from dino_sparo.image_text.towers import LoadedModel
from dino_sparo.oc_clip.batches import EncodedGraphs, batch_graphs, look_up, tokenize_phrases
from dino_sparo.oc_clip.explain import ENDS, EXPLANATIONS, explain_pair, tiles_of
from dino_sparo.oc_clip.graphs.files import MAX_MISSING, CaptionGraphs, open_graphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts, SceneGraph, canonical_form, normalize
from dino_sparo.oc_clip.model import OCCLIP, OCCLIPConfig, oc_clip_from_config
from dino_sparo.oc_clip.options import DEFAULT_GRAPHS
from dino_sparo.oc_clip.scoring import score_all_pairs
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import versions
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import CheckpointError, load_strictly

logger = logging.getLogger(__name__)

MAX_BATCH = 64  # images that `LoadedOCCLIP.similarity` encodes at a time
PAIR_CHUNK = 128  # matched pairs that are bound at a time
IMAGE_CHUNK = 16  # images that are scored with all graphs at a time
PHRASE_BATCH = 512  # phrases encoded at a time


# Captions, or classes, as numbers of graphs; a class has a graph per template, whose scores are averaged.
GraphRows = Int64[Tensor, "captions templates"]


@dataclass(frozen=True, kw_only=True)
class GraphScorer(ImageRows):
    """A model, and all settings that determine its scores.

    Attributes:
        graphs: caption -> graph.
        model_record: description of the model for result files.
        embeddings: phrase -> entity and relation.
        truncated: phrases that are longer than the context.
        lookups: caption -> canonical graph and the changes in it.
        numbers: canonical graph -> its number in `GraphRows`.
    """

    measure: ClassVar[str] = "structured similarity of image and scene graph"
    ensemble: ClassVar[str] = "scores of the templates averaged; a class is one entity"
    default_templates: ClassVar[tuple[str, ...]] = ("{}",)
    storage: ClassVar[torch.device | None] = torch.device("cpu")  # the host's memory

    graphs: CaptionGraphs
    model_record: dict[str, Any] = field(default_factory=dict)
    embeddings: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    truncated: set[str] = field(default_factory=set, repr=False)
    lookups: dict[str, tuple[SceneGraph, LookupCounts]] = field(default_factory=dict, repr=False)
    numbers: dict[SceneGraph, int] = field(default_factory=dict, repr=False)

    @property
    def record(self) -> dict[str, Any]:
        """Description of the model and of the graphs, with the changes to graphs so far."""
        return {**self.model_record, "graphs": {**self.graphs.record, "counts": self.counts._asdict()}}

    @property
    def counts(self) -> LookupCounts:
        """Changes in the graphs of all captions so far; a caption counts once."""
        return LookupCounts.total(changes for _, changes in self.lookups.values())

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Keys and values of images, side by side, M = 2 N dim."""
        return torch.stack(self.model.encode_images(images), dim=1).flatten(1).float()

    def image_features(self, source: ImageSource, storage: torch.device | None = None) -> Features:
        """The mean of the patch tokens, normalised, on every process; the loss does not train the class token."""

        def encode(images: Tensor) -> Tensor:
            return torch.nn.functional.normalize(self.model.patches(images).mean(dim=1).float(), dim=-1)

        return self._rows(source, encode, storage)

    def expect_texts(self, captions: Sequence[str], desc: str = "captions") -> None:
        """Look up the graphs of new captions; ValueError if too many have none, or if a caption has no words."""
        new = [caption for caption in dict.fromkeys(captions) if caption not in self.lookups]
        for caption in new:
            graph, changes = self.graphs.lookup(caption)
            self.lookups[caption] = canonical_form(graph), changes
        counts = LookupCounts.total(self.lookups[caption][1] for caption in new)
        if counts.whole_caption or counts.nodes or counts.relations:
            logger.warning("%s: %s", desc, counts)
        if new:
            self.graphs.check(self.counts)

    def encode_texts(self, captions: Sequence[str], desc: str = "captions") -> EncodedTexts:
        """The graphs of captions; ValueError as in `expect_texts`."""
        self.expect_texts(captions, desc)
        graphs, all_changes = zip(*(self.lookups[caption] for caption in captions), strict=True)
        rows = self._rows_of([[graph] for graph in graphs])
        marks = {
            "truncated": torch.tensor([self._is_cut(graph) for graph in graphs]),
            "one_entity": torch.tensor([changes.whole_caption > 0 for changes in all_changes]),
        }
        return EncodedTexts(rows, int(marks["truncated"].sum()), rows[:, 0], marks)

    def encode_classes(self, names: Sequence[str], templates: tuple[str, ...]) -> EncodedTexts:
        """One row per class: its name in every template, as one entity; the paper does not say how it classifies."""
        if "file" in self.graphs.record:
            logger.warning("classes are one entity each: the graphs of %s are not used", self.graphs.record["file"])
        graphs = [[normalize(SceneGraph(()), sentence)[0] for sentence in prompts(templates, name)] for name in names]
        return EncodedTexts(self._rows_of(graphs), sum(self._is_cut(graph) for row in graphs for graph in row))

    def _rows_of(self, graphs: Sequence[Sequence[SceneGraph]]) -> GraphRows:
        """The numbers of graphs; phrases that are new are encoded."""
        batch = batch_graphs(tuple(dict.fromkeys(graph for row in graphs for graph in row)))
        phrases = [phrase for phrase in batch.phrases if phrase not in self.embeddings]
        with inference(self.model, self.device, self.dtype):
            for start in range(0, len(phrases), PHRASE_BATCH):
                some = phrases[start : start + PHRASE_BATCH]
                tokens = tokenize_phrases(some, self.model.config.text.context_length)
                self.truncated.update(some[index] for index in tokens.truncated)
                entities, relations = self.model.encode_phrases(tokens.ids.to(self.device))
                pairs = zip(entities.float(), relations.float(), strict=True)
                self.embeddings.update(zip(some, pairs, strict=True))
        return torch.tensor([[self.numbers.setdefault(graph, len(self.numbers)) for graph in row] for row in graphs])

    def _is_cut(self, graph: SceneGraph) -> bool:
        """Whether a phrase is longer than the context."""
        phrases = (*graph.entities, *(relation.predicate for relation in graph.relations))
        return not self.truncated.isdisjoint(phrases)

    def _encoded(self, numbers: Tensor) -> EncodedGraphs:
        """The graphs of some numbers with the embeddings of their phrases."""
        graphs = tuple(self.numbers)
        batch = batch_graphs([graphs[number] for number in numbers.tolist()])
        pairs = [self.embeddings[phrase] for phrase in batch.phrases]
        entities, relations = (torch.stack(column) for column in zip(*pairs, strict=True))
        return look_up(batch, entities, relations)

    def _keys_values(self, images: Float[Tensor, "images M"]) -> tuple[Tensor, Tensor]:
        pair = images.to(self.device).view(len(images), 2, self.model.config.num_patches, -1)
        return pair[:, 0], pair[:, 1]

    @torch.no_grad()
    def score_pairs(
        self, images: Float[Tensor, "images M"], image_of: Int64[Tensor, " pairs"], texts: GraphRows, text_of: Tensor
    ) -> Float[Tensor, " pairs"]:
        """The score of each pair; see `Scorer.score_pairs`. Each different pair of image and graph is scored once."""
        graph_of = texts[text_of.cpu()]  # (pairs, templates)
        wanted = torch.stack([image_of.cpu()[:, None].expand_as(graph_of), graph_of], dim=-1).flatten(0, 1)
        different, inverse = torch.unique(wanted, dim=0, return_inverse=True)
        model, scores = self.model, []
        for part in different.split(PAIR_CHUNK):
            keys, values = self._keys_values(images[part[:, 0]])
            graphs = self._encoded(part[:, 1])
            slots = model.binding.bind_matched(graphs.entities, graphs.entity_mask, keys, values)
            scores.append(model.scoring.scores(graphs, slots[None])[0])
        return torch.cat(scores)[inverse.to(self.device)].view(graph_of.shape).mean(dim=1)

    @torch.no_grad()
    def score_block(self, images: Float[Tensor, "images M"], texts: GraphRows) -> Float[Tensor, "images captions"]:
        """The score of every image with every caption or class."""
        numbers, inverse = torch.unique(texts, return_inverse=True)
        graphs = self._encoded(numbers)
        blocks = [
            score_all_pairs(self.model.binding, self.model.scoring, graphs, *self._keys_values(part))
            for part in images.split(IMAGE_CHUNK)
        ]
        return torch.cat(blocks)[:, inverse.to(self.device)].mean(dim=-1)

    def explain(self, image: Image.Image, captions: Sequence[str]) -> Explanation:
        """Maps of the shares of patches that each entity takes; see `ExplainableScorer`."""
        (view,) = self.views([image])
        with inference(self.model, self.device, self.dtype):
            explained = [
                explain_pair(self.model, ViewedPair(0, caption, caption, view), self.graphs(caption), self.device)
                for caption in captions
            ]
        seen = self.transform.view(image, self.model.image.backbone.patch_size)
        picture = view_pixels(image, seen, PICTURE_HEIGHT)
        captioned = [Band(lines=pair.sentences, tiles=tiles_of(pair, picture)) for pair in explained]
        competition = self.model.binding.competition
        return Explanation(picture, captioned, EXPLANATIONS[competition], ENDS[competition])


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
        if isinstance(captions, str):
            raise UserError(f"captions={captions!r} is one caption; give a list of captions")
        batch_size = min(max(len(images), len(captions)), MAX_BATCH)
        scorer = scorer_of(self, parser, batch_size=batch_size)
        return scorer.score_block(scorer.rows_of(images), scorer.encode_texts(captions).payload)


def load_oc_clip(path: str | Path, checkpoint: Mapping[str, Any] | None = None) -> LoadedOCCLIP:
    """The model of a checkpoint of `dino-sparo train-oc-clip`, in eval mode, on the CPU.

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
    args: argparse.Namespace, device: torch.device, checkpoint: Mapping[str, Any] | None = None
) -> GraphScorer:
    """The scorer of a checkpoint by the options of an evaluation."""
    loaded = load_oc_clip(args.pretrained_weights, checkpoint)
    size, border = loaded.model.config.image.img_size, getattr(args, "crop_border", 0)
    if args.img_size not in (None, size):
        raise UserError(
            f"--img_size {args.img_size}: the binding was trained for images of {size} px, whose patches have a "
            "position each; leave it out"
        )
    graphs = args.graphs or DEFAULT_GRAPHS
    scorer = scorer_of(loaded, graphs, device, border, args.max_missing_graphs, **computation_of(args))
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
        view={**view_record(scorer.transform, args.exif), "border": border},
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
    """The scorer of a loaded model; for `graphs` see `open_graphs`."""
    caption_graphs = open_graphs(graphs, max_missing=max_missing)
    device = loaded.model.node_proj.weight.device if device is None else device
    view = ClipView(loaded.model.config.image.img_size, loaded.mean, loaded.std, border)
    record = {"model": loaded.record, "slots": None}
    return GraphScorer(loaded.model.to(device), view, device, graphs=caption_graphs, model_record=record, **settings)

"""Images and the names of their classes -> zero-shot accuracy: top-1, top-5 and mean per-class recall.

    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenetv2 \
        --classnames imagenet
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/wds_vtab-dtd \
        --classnames data/wds_vtab-dtd/classnames.txt \
        --templates data/wds_vtab-dtd/zeroshot_classification_templates.txt

An image is of the class whose captions its feature is nearest to. ImageNet V1, Sketch, A and R
are recognised by their folders; V2, ObjectNet and sets of your own say with --classnames what their classes are called.
Prints a table and writes zero_shot.json, the numbers with all that they depend on.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data import ImageSource
from dino_sparo.image_text.classes import ClassList, apply_classes, open_classes
from dino_sparo.image_text.evaluation.encode import ClipEncoder, without_padding
from dino_sparo.image_text.evaluation.protocol import (
    OpenModel,
    open_evaluation_images,
    report,
)
from dino_sparo.image_text.prompts import open_templates, prompts
from dino_sparo.runtime.distributed import all_gather_ragged, all_reduce_sum, init_distributed, rank, world_size
from dino_sparo.runtime.logs import setup_logging

logger = logging.getLogger(__name__)

TOP = 5
MAX_NAMED = 5  # unreadable images named in the log
CAPTION_BATCHES = 8  # batches of captions whose features exist at a time


@dataclass(frozen=True)
class ZeroShotResult:
    """What `evaluate_zero_shot` finds; accuracies in percent.

    Attributes:
        top1: images whose class is the nearest.
        top5: images whose class is among the five nearest; of fewer than five classes, all of them.
        mean_per_class: mean over the classes that have images of the share of them that are recognised.
        num_images: how many were classified.
        num_corrupt: how many were left out because they cannot be read.
        num_ties: images that another class is exactly as near to as the nearest.
        per_class: for each class its number of images and of those recognised.
        truncated_prompts: captions of classes that are longer than the context.
    """

    top1: float
    top5: float
    mean_per_class: float
    num_images: int
    num_corrupt: int
    num_ties: int
    per_class: list[tuple[int, int]]
    truncated_prompts: int


def class_features(
    encoder: ClipEncoder, names: Sequence[str], templates: tuple[str, ...]
) -> tuple[Float[Tensor, "classes M"], int]:
    """What a zero-shot classifier compares images with: one feature per class, on every process.

        w_c = u_c / |u_c|,   u_c = mean over templates t of y(t, c)

    with y(t, c) the normalised feature of the caption that template t makes of class c. Source: OpenCLIP,
    `build_zero_shot_classifier`; CLIP, section 3.1.4. For SPARO it is applied to the whole encoding, as the paper's
    authors do: each caption's slots have length one over sqrt(L), their means are shorter the less the templates agree
    on them, and are not made equal again. So w_c . x is a weighted mean of the slots' cosines, in which a slot that
    says more about the template than about the class counts less. With a single template it is equation 2 again.

    Args:
        encoder: whose features.
        names: of the classes.
        templates: sentences with `{}`.

    Returns:
        (classes, M), of length one, and how many captions were cut off.
    """
    tokens = encoder.tokenize([text for name in names for text in prompts(templates, name)])
    by_class = without_padding(tokens.ids).unflatten(0, (len(names), len(templates)))
    own = by_class[len(names) * rank() // world_size() : len(names) * (rank() + 1) // world_size()]
    features = [torch.empty(0, 0, device=encoder.device)]
    # Some classes at a time, so that memory does not grow with their number.
    for ids in own.split(max(1, CAPTION_BATCHES * encoder.batch_size // len(templates))) if len(own) else ():
        encoded = encoder.encode_text(ids.flatten(0, 1)).unflatten(0, (len(ids), -1))
        features.append(F.normalize(encoded.mean(dim=1), dim=-1))
    part = torch.cat(features[1:] or features)
    # A process without classes does not know the features' width.
    width = int(all_gather_ragged(torch.tensor([part.shape[1]], device=part.device)).max())
    return all_gather_ragged(part.reshape(-1, width)), tokens.num_truncated


def count_hits(scores: Float[Tensor, "B classes"], labels: Int64[Tensor, "B"]) -> Int64[Tensor, "B 3"]:
    """Whether each image's class comes first, among the first five, and shares its place at the top.

    Of equally near classes the first comes first, as an argmax has it.

    Returns:
        (B, 3), 1 or 0 for top-1, top-5 and a tie for the first place.
    """
    right = scores.gather(1, labels[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    ranks = ((scores > right) | ((scores == right) & before)).sum(dim=1)
    is_tied = (scores == scores.amax(dim=1, keepdim=True)).sum(dim=1) > 1
    return torch.stack((ranks < 1, ranks < TOP, is_tied), dim=1).long()


@torch.no_grad()
def evaluate_zero_shot(
    encoder: ClipEncoder, source: ImageSource, names: Sequence[str], templates: tuple[str, ...]
) -> ZeroShotResult:
    """Images in, accuracy out. Every process takes part and gets the result.

    Args:
        encoder: the model.
        source: images labelled by their places in `names`.
        names: of the classes.
        templates: sentences with `{}`.

    Raises:
        ValueError: features that are not finite, or no image that can be read.
    """
    classifier, truncated = class_features(encoder, names, templates)
    counts = torch.zeros(len(names), 4, dtype=torch.int64, device=encoder.device)  # images, top-1, top-5, ties
    corrupt: list[tuple[str, str]] = []
    for batch in encoder.image_batches(source):
        scores = batch.features @ classifier.t()
        if not scores.isfinite().all():
            raise ValueError(f"features of {source.name} are not finite; the model is broken or overflowed")
        hits = count_hits(scores, batch.labels)
        counts.index_add_(0, batch.labels, torch.cat((torch.ones_like(hits[:, :1]), hits), dim=1))
        corrupt += batch.corrupt
    if corrupt:
        where = "; ".join(f"{location} ({reason})" for location, reason in sorted(set(corrupt))[:MAX_NAMED])
        logger.warning("%s: left out %d images that cannot be read: %s", source.name, len(corrupt), where)
    num_corrupt = all_reduce_sum(torch.tensor(len(corrupt), device=encoder.device))
    return _summary(all_reduce_sum(counts).cpu(), int(num_corrupt), truncated)


def _summary(counts: Int64[Tensor, "classes 4"], num_corrupt: int, truncated: int) -> ZeroShotResult:
    images, top1, top5, ties = counts.sum(dim=0).tolist()
    if not images:
        raise ValueError(f"none of {num_corrupt} images can be read; is the disk still there?")
    per_class = [(number, right) for number, right, _, _ in counts.tolist()]
    recalls = [right / number for number, right in per_class if number]
    mean = 100 * sum(recalls) / len(recalls)
    return ZeroShotResult(
        100 * top1 / images, 100 * top5 / images, mean, images, num_corrupt, ties, per_class, truncated
    )


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    place = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    setup_logging()
    evaluated = open_model(args, place, args.crop_border)
    source = open_evaluation_images(args.data_path, args.split, args.download)
    classes = open_classes(source, args.classnames, args.data_path)
    templates = open_templates(args.templates, args.data_path)
    chosen = apply_classes(source, classes)
    found = evaluate_zero_shot(evaluated.encoder, chosen, classes.names, templates)
    result = describe(found, classes, templates, evaluated.record, args)
    result["images"]["num_left_out"] = len(source) - len(chosen)
    return report(result, table(found), args, "zero_shot.json")


def describe(
    found: ZeroShotResult,
    classes: ClassList,
    templates: tuple[str, ...],
    record: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Accuracies and protocol, as zero_shot.json holds them."""
    return {
        "evaluation": "zero-shot classification",
        "top1": found.top1,
        "top5": found.top5,
        "mean_per_class_recall": found.mean_per_class,
        "ties": {"images": found.num_ties, "rule": "of equally near classes the first is preferred"},
        "similarity": "cosine, fp32",
        **record,
        "images": {
            "data_path": args.data_path,
            "split": args.split,
            "num_images": found.num_images,
            "num_corrupt": found.num_corrupt,
        },
        "prompts": {
            "classnames": classes.origin,
            "num_classes": len(classes.names),
            "ensemble": "normalised features of the templates averaged, the mean normalised as a whole",
            "num_truncated": found.truncated_prompts,
            "templates": list(templates),
        },
        "per_class": [
            {"name": name, "num_images": number, "recall": 100 * right / number if number else None}
            for name, (number, right) in zip(classes.names, found.per_class, strict=True)
        ],
    }


def table(found: ZeroShotResult) -> str:
    """Accuracies for people."""
    head = f"{'top-1 %':>8}  {'top-5 %':>8}  {'per class %':>11}  {'classes':>8}  {'images':>8}"
    row = f"{found.top1:>8.2f}  {found.top5:>8.2f}  {found.mean_per_class:>11.2f}"
    return f"{head}\n{row}  {len(found.per_class):>8}  {found.num_images:>8}"

"""Labelled images -> which slots separate the classes best, and how many slots to keep.

    dino-sparo slots select --pretrained_weights output/checkpoint.pth --data_path data/imagenet --keep 32
    dino-sparo compositional --pretrained_weights output/checkpoint.pth --data_root data/sugar-crepe \
        --slots output/slots_checkpoint_imagenet.json

Every slot is scored alone by zero-shot accuracy, and the k best are kept. How accuracy depends on k is measured for all
k; without --keep the best k is taken. Prints a table, writes slots_WEIGHTS_DATA.json (the selection, which every
evaluation takes as --slots, the scores, the curve and all that they depend on) and a plot of that name. Images that
chose the slots cannot test the choice: their curve is optimistic. Source: SPARO, section 5.1 and table 4.
"""

import argparse
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.load import clip_scorer
from dino_sparo.clip.slots.subsets import check_normalized_per_slot
from dino_sparo.data.sources import ImageSource
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.evaluation.features import Features, disjoint_subsets
from dino_sparo.evaluation.slots.curve import (
    Curve,
    best_slots,
    check_number,
    describe_selection,
    draw_slots,
    number_rule,
)
from dino_sparo.image_text.evaluation.task import ScorerTask
from dino_sparo.image_text.evaluation.zero_shot import count_hits
from dino_sparo.image_text.prompts import open_labelled
from dino_sparo.image_text.scorer import DotProductScorer
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.launch import is_main, rank, world_size
from dino_sparo.weights.results import scores_in_percent

IMAGE_CHUNK = 512  # images whose similarities to all classes exist at a time


@torch.no_grad()
def score_slots(
    scorer: DotProductScorer,
    source: ImageSource,
    held_out: ImageSource,
    names: Sequence[str],
    templates: tuple[str, ...],
    num_slots: int,
) -> dict[str, Any]:
    """Zero-shot accuracy of every slot alone, and of the best k together, for every k.

        s_l(x, c) = w_cl . x_l / |w_cl|                                                 slot l alone
        s_k(x, c) = sum over the k best l of w_cl . x_l / sqrt(sum over them |w_cl|^2)  the k best

    with x_l the normalised slots of an image and w_c the class feature of `DotProductScorer.encode_classes`, whose
    slots are as long as the templates agree on them. They are the numbers that `zero_shot.py` finds with the same slots
    selected. Every image is encoded once. Every process takes part and gets the result.

    Args:
        scorer: of a model with slots.
        source: images labelled by their places in `names`; they rank the slots.
        held_out: other images, on which the ranking is tried.
        names: of the classes.
        templates: sentences with `{}`.
        num_slots: L.

    Returns:
        Entries of the result, accuracies in percent: `ranking`, slots from the best to the worst, of equally good ones
        the first first; `curve`, of the k best together, k = 1 .. L; `images`; `prompts`.
    """
    classes = scorer.encode_classes(names, templates)
    images, others = (scorer.image_features(part, torch.device("cpu")) for part in (source, held_out))
    by_slot = classes.payload.unflatten(1, (num_slots, -1)).transpose(0, 1)  # (L, classes, V)
    units = F.normalize(by_slot, dim=2)
    alone = _accuracies(images, units, lambda slots: (slots[:, slot] @ w.t() for slot, w in enumerate(units)))
    ranking = sorted(range(num_slots), key=lambda slot: (-alone[slot], slot))
    ranked = by_slot[ranking]
    lengths = ranked.square().sum(dim=2).cumsum(dim=0).sqrt()  # (L, classes)

    def together(slots: Float[Tensor, "b L V"]) -> Iterator[Tensor]:
        products = (slots[:, slot] @ weights.t() for slot, weights in zip(ranking, ranked, strict=True))
        return map(operator.truediv, itertools.accumulate(products), lengths)

    curves = zip(*(_accuracies(part, by_slot, together) for part in (images, others)), strict=True)
    return {
        "ranking": [{"slot": slot, "top1": alone[slot]} for slot in ranking],
        "curve": [
            {"num_kept": k, "top1_choosing": choosing, "top1_held_out": held_out}
            for k, (choosing, held_out) in enumerate(curves, 1)
        ],
        "images": {
            "num_images": len(images.features),
            "num_held_out": len(others.features),
            "num_corrupt": images.num_corrupt,
        },
        "prompts": {"num_classes": len(names), "num_truncated": classes.num_truncated, "templates": list(templates)},
    }


def _accuracies(
    images: Features, classifier: Float[Tensor, "L classes V"], scores_of: Callable[[Tensor], Iterable[Tensor]]
) -> list[float]:
    """Top-1 accuracies, percent; each process classifies its share of the images.

    Args:
        images: with features on the CPU.
        classifier: for its device and its number of slots.
        scores_of: slots (b, L, V) of some images -> L scores (b, classes).
    """
    hits = torch.zeros(len(classifier), dtype=torch.int64, device=classifier.device)
    for start in range(rank() * IMAGE_CHUNK, len(images.features), world_size() * IMAGE_CHUNK):
        rows = slice(start, start + IMAGE_CHUNK)
        slots = images.features[rows].to(hits.device).unflatten(1, (len(classifier), -1))
        labels = images.labels[rows].to(hits.device)
        for number, scores in enumerate(scores_of(slots)):
            hits[number] += count_hits(scores, labels)[:, 0].sum()
    return [100 / len(images.features) * number for number in all_reduce_sum(hits).tolist()]


def select_slots(args: argparse.Namespace) -> dict[str, Any]:
    """Select slots of the model that the options name, write selection and curve, print the table."""
    task = ScorerTask.start(args, clip_scorer)
    require_matplotlib()
    scorer = task.scorer
    file = task.open_result("slots")
    config: CLIPConfig = scorer.model.config
    check_normalized_per_slot(config)
    num_slots = config.image.num_slots
    if args.keep is not None:
        check_number("keep", args.keep, num_slots)
    source = task.open_split(args.split)
    images, classes, templates = open_labelled(source, args.data_path, args.classnames, args.templates)
    if args.num_images is not None:
        (images,) = disjoint_subsets(images, (args.num_images,))
    # One half chooses, the other half measures the choice.
    choosing, held_out = disjoint_subsets(images, (len(images), len(images)))
    scores = score_slots(scorer, choosing, held_out, classes.names, templates, num_slots)
    result = describe(scores, task.weights["sha256"], args)
    result["prompts"]["classnames"] = classes.origin
    if is_main():
        draw(result, file.path.with_suffix(".png"))
    names = {"top1_all": "top-1, all slots", "top1_selected": "top-1, selected slots"}
    return file.write(result, table(result), headline=scores_in_percent(result, names))


def describe(scores: dict[str, Any], weights_sha256: str, args: argparse.Namespace) -> dict[str, Any]:
    """Selection, accuracies and protocol: the content of the result; `scores` are those of `score_slots`."""
    curve = scores["curve"]
    selection = describe_selection(scores["ranking"], curve, args.keep, weights_sha256)
    data = {"data_path": args.data_path, "split": args.split, "max_images": args.num_images}
    return {
        **selection,
        "evaluation": "slot selection by zero-shot accuracy",
        "top1_selected_on_choosing_images": curve[len(selection["slots"]) - 1]["top1_choosing"],
        "rule": {
            "ranking": "top-1 accuracy of each slot alone; of equally good slots the first is preferred",
            "number": number_rule(args.keep),
            "halves": "a random half of the images chose; top1_selected and top1_all are of the other half",
        },
        **scores,
        "images": {**data, **scores["images"]},
    }


def table(result: dict[str, Any]) -> str:
    """The best slots and their common accuracy, as lines to print."""
    ranking, curve, kept = result["ranking"], result["curve"], len(result["slots"])
    columns = {
        "alone top-1 %": [row["top1"] for row in ranking],
        "together top-1 %": [row["top1_choosing"] for row in curve],
    }
    lines = best_slots(columns, [row["slot"] for row in ranking])
    for images, entry, name in (
        ("num_held_out", "top1_held_out", "held-out images"),
        ("num_images", "top1_choosing", "images that chose"),
    ):
        words = f"kept {kept} of {len(ranking)} slots: {curve[kept - 1][entry]:.2f} % top-1"
        lines.append(f"{words}; all slots: {curve[-1][entry]:.2f} %, on the {result['images'][images]:,} {name}")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy of the k best slots against k, and of each slot alone."""
    rows = result["curve"]
    compared = ("held-out images", "images that chose", [row["top1_choosing"] for row in rows])
    curve = Curve("Best slots together", "zero-shot top-1", rows, *compared)
    chance = 100 / result["prompts"]["num_classes"]
    draw_slots(path, result, [curve], "top1", chance, "slot, best first")

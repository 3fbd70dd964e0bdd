"""Images with a true and a false caption -> how often the true one is nearer: SugarCrepe.

    dino-sparo sugarcrepe --pretrained_weights output/checkpoint.pth --data_path data/sugar-crepe/data \
        --images data/coco/val2017

The false caption differs from the true one in one object, attribute or relation that was
replaced, swapped or added: seven JSON files, each an object of `{"filename", "caption", "negative_caption"}`. The same
format with pictures of its own is written by `scene_pairs.py`. Prints a table and writes sugarcrepe.json, the numbers
with all that they depend on. Source: Hsieh et al., "SugarCrepe: fixing hackable benchmarks for vision-language
compositionality"; SPARO, section 4.1 and tables 4 and 0.B.1.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dino_sparo.image_text.evaluation.encode import ClipEncoder, TextFeatures
from dino_sparo.image_text.evaluation.image_files import encode_named_images
from dino_sparo.image_text.evaluation.protocol import (
    OpenModel,
    file_record,
    report,
)
from dino_sparo.runtime.distributed import init_distributed
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.sources.limits import parse_json

logger = logging.getLogger(__name__)

# Kinds of false captions by what was done to the true one, in the order of the paper's table.
GROUPS: dict[str, tuple[str, ...]] = {
    "replace": ("replace_obj", "replace_att", "replace_rel"),
    "swap": ("swap_obj", "swap_att"),
    "add": ("add_obj", "add_att"),
}
PAIR_CHUNK = 1024  # pairs whose features exist side by side


class CaptionPair(NamedTuple):
    """One question.

    Attributes:
        split: the kind of false caption, e.g. `swap_obj`.
        image: file name.
        positive: the true caption.
        negative: the false caption.
    """

    split: str
    image: str
    positive: str
    negative: str


@dataclass(frozen=True)
class PairFeatures:
    """Pairs and their features, on every process.

    Attributes:
        pairs: those whose image can be read.
        images: (different images, M), of length one.
        texts: of all captions.
        image_of: (pairs,), row of each pair's image in `images`.
        positive: (pairs,), number of each pair's true caption in `texts`.
        negative: (pairs,), number of its false caption.
        num_unreadable: pairs left out because their image cannot be read.
    """

    pairs: list[CaptionPair]
    images: Float[Tensor, "I M"]
    texts: TextFeatures
    image_of: Int64[Tensor, " pairs"]
    positive: Int64[Tensor, " pairs"]
    negative: Int64[Tensor, " pairs"]
    num_unreadable: int


class SplitResult(NamedTuple):
    """Of one kind of false captions: accuracy in percent, and the numbers of pairs and of ties among them."""

    accuracy: float
    num_pairs: int
    num_ties: int


def read_pairs(folder: Path) -> tuple[list[CaptionPair], int]:
    """The pairs of all splits that lie in a folder.

    Args:
        folder: holds `replace_obj.json` and so on; those of GROUPS that are there are read.

    Returns:
        The pairs, by split, and how many were left out because a caption is empty.

    Raises:
        ValueError: none of the files is there, or one holds something else.
    """
    names = [name for group in GROUPS.values() for name in group]
    there = [name for name in names if (folder / f"{name}.json").is_file()]
    if not there:
        raise ValueError(
            f"{folder} holds none of {', '.join(f'{name}.json' for name in names)}; give the folder of them"
        )
    if len(there) < len(names):
        logger.warning("%s has %d of SugarCrepe's %d files: %s", folder, len(there), len(names), ", ".join(there))
    pairs: list[CaptionPair] = []
    num_empty = 0
    for split in there:
        for pair in _read_split(folder / f"{split}.json", split):
            if pair.positive.strip() and pair.negative.strip():
                pairs.append(pair)
            else:
                num_empty += 1
    if num_empty:
        logger.warning("%s: left out %d pairs with an empty caption", folder, num_empty)
    return pairs, num_empty


def _read_split(path: Path, split: str) -> list[CaptionPair]:
    try:
        said = parse_json(path.read_text(encoding="utf-8"))
        # Keys are numbers with gaps in some of the files; they say nothing.
        rows = said.values() if isinstance(said, dict) else said
        return [CaptionPair(split, row["filename"], row["caption"], row["negative_caption"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not SugarCrepe's: expected an object of filename, caption and negative_caption ({error!r})"
        ) from error


@torch.no_grad()
def encode_pairs(encoder: ClipEncoder, pairs: Sequence[CaptionPair], image_folder: Path) -> PairFeatures:
    """Features of pairs; every image and every caption is encoded once.

    Args:
        encoder: the model.
        pairs: what to encode.
        image_folder: where the images lie.

    Raises:
        ValueError: more than 1 % of the images are missing or cannot be read.
    """
    images, row = encode_named_images(encoder, image_folder, list(dict.fromkeys(pair.image for pair in pairs)))
    kept = [pair for pair in pairs if pair.image in row]
    if len(kept) < len(pairs):
        logger.warning("left out %d of %d pairs, whose images cannot be read", len(pairs) - len(kept), len(pairs))
    if not kept:
        raise ValueError(f"none of {len(pairs)} pairs has an image in {image_folder}")
    number = {text: i for i, text in enumerate(dict.fromkeys(text for pair in kept for text in pair[2:]))}
    columns = [[row[pair.image], number[pair.positive], number[pair.negative]] for pair in kept]
    image_of, positive, negative = torch.tensor(columns, device=encoder.device).t()
    texts = encoder.text_features(list(number))
    return PairFeatures(kept, images, texts, image_of, positive, negative, len(pairs) - len(kept))


def similarities(
    images: Float[Tensor, "I M"],
    image_of: Int64[Tensor, " pairs"],
    texts: TextFeatures,
    text_of: Int64[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """The cosine of each pair's image and caption, fp32.

    Each is a sum of products by itself and not an entry of a matrix product, whose rounding might differ between two
    captions that are the same.
    """
    chunks = zip(image_of.split(PAIR_CHUNK), text_of.split(PAIR_CHUNK), strict=True)
    return torch.cat([(images[rows] * texts[captions]).sum(dim=1) for rows, captions in chunks])


def score_pairs(features: PairFeatures) -> dict[str, SplitResult]:
    """Accuracy per split: a pair is right if its true caption is strictly nearer than its false one.

    Raises:
        ValueError: features that are not finite.
    """
    positive = similarities(features.images, features.image_of, features.texts, features.positive)
    negative = similarities(features.images, features.image_of, features.texts, features.negative)
    if not (positive.isfinite() & negative.isfinite()).all():
        raise ValueError("the features are not finite; the model is broken or overflowed")
    right, tied = (positive > negative).tolist(), (positive == negative).tolist()
    results = {}
    for split in dict.fromkeys(pair.split for pair in features.pairs):
        places = [place for place, pair in enumerate(features.pairs) if pair.split == split]
        hits, ties = sum(right[place] for place in places), sum(tied[place] for place in places)
        results[split] = SplitResult(100 * hits / len(places), len(places), ties)
    return results


def averages(results: dict[str, SplitResult]) -> dict[str, Any]:
    """What one may call the accuracy on SugarCrepe, in percent.

    Returns:
        `groups`: of each group the mean over its splits; `macro_groups`: the mean of those; `macro_splits`: the mean
        over splits, which SPARO's tables call average; `micro`: the share of all pairs.
    """
    groups = {
        group: [results[split].accuracy for split in splits if split in results] for group, splits in GROUPS.items()
    }
    means = {group: sum(values) / len(values) for group, values in groups.items() if values}
    accuracies = [result.accuracy for result in results.values()]
    num_pairs = sum(result.num_pairs for result in results.values())
    return {
        "groups": means,
        "macro_groups": sum(means.values()) / len(means),
        "macro_splits": sum(accuracies) / len(accuracies),
        "micro": sum(result.accuracy * result.num_pairs for result in results.values()) / num_pairs,
    }


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    place = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    setup_logging()
    if not args.data_path:
        raise ValueError("--data_path is empty; give the folder of SugarCrepe's JSON files")
    folder = Path(args.data_path)
    images = Path(args.images) if args.images else folder / "images"
    pairs, num_empty = read_pairs(folder)
    evaluated = open_model(args, place)
    features = encode_pairs(evaluated.encoder, pairs, images)
    results = score_pairs(features)
    counts = {
        "num_pairs": len(features.pairs),
        "num_images": len(features.images),
        "num_without_image": features.num_unreadable,
        "num_with_empty_caption": num_empty,
        "num_truncated_captions": features.texts.num_truncated,
    }
    files = {split: file_record(folder / f"{split}.json") for split in results}
    result = describe(results, {"images": str(images), "files": files, **counts}, evaluated.record)
    return report(result, table(results), args, "sugarcrepe.json")


def describe(results: dict[str, SplitResult], data: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Accuracies and protocol, as sugarcrepe.json holds them."""
    return {
        "evaluation": "SugarCrepe",
        "splits": {split: result._asdict() for split, result in results.items()},
        **averages(results),
        "rule": "right if the true caption's cosine is strictly greater, in fp32; ties count as wrong",
        **record,
        "pairs": data,
    }


def table(results: dict[str, SplitResult]) -> str:
    """Accuracies for people."""
    lines = [f"{'split':<14}  {'accuracy %':>10}  {'pairs':>6}  {'ties':>5}"]
    lines += [f"{split:<14}  {r.accuracy:>10.2f}  {r.num_pairs:>6}  {r.num_ties:>5}" for split, r in results.items()]
    means = averages(results)
    lines += [f"{group:<14}  {value:>10.2f}" for group, value in means["groups"].items()]
    lines += [f"{name:<14}  {means[name]:>10.2f}" for name in ("macro_groups", "macro_splits", "micro")]
    return "\n".join(lines)

"""Images with captions -> Recall@k of captions by image and of images by caption.

    dino-sparo retrieval --pretrained_weights output/checkpoint.pth --data_path data/coco/val2014 \
        --captions data/coco/dataset_coco.json
    dino-sparo retrieval --pretrained_weights output/checkpoint.pth --data_path scenes:500:32

The processes share the images, and score some of them at a time with every caption. The command prints a table and
writes retrieval_WEIGHTS_DATA.json: the numbers and their protocol. Recall@k has two definitions, and both are reported:

    any    share of queries with at least one match among their k nearest candidates
    share  mean over queries of the share of matches among their k nearest candidates

Captions that differ in case and white space alone are one text, which matches all of their images. Separate texts would
tie, and ties count as wrong.

SPARO describes `share` in section 4.2. Its table 2, made with LAION's CLIP benchmark, reports `any`: with one image per
caption, `share` of five images is at most 0.2, and the table has up to 0.85.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dino_sparo.evaluation.features import check_features
from dino_sparo.image_text.evaluation.caption_sets import CaptionSet, open_caption_set
from dino_sparo.image_text.evaluation.protocol import file_record, require_few_missing
from dino_sparo.image_text.evaluation.task import OpenScorer, ScorerTask
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.results import Score

IMAGE_CHUNK = 256  # images whose scores with all captions exist at a time


Recall = dict[str, float]  # in percent, by the names of both definitions


@torch.no_grad()
def recall(
    scorer: Scorer, images: Any, texts: Any, matches: Int64[Tensor, "matches 2"], k: Sequence[int]
) -> tuple[dict[int, Recall], dict[int, Recall]]:
    """Recall of captions by image, and of images by caption.

    Ties count as wrong: a match ranks behind every other candidate with an equal score, so that the order of candidates
    never helps a model. Every process scores its share of the images and gets all scores, 4 bytes each.

    Args:
        scorer: the model.
        images: payload of images.
        texts: payload of captions.
        matches: (matches, 2), index of an image and of its caption, without repetition.
        k: numbers of candidates.
    """
    for candidates in (len(texts), len(images)):
        if max(k) > candidates:
            raise UserError(f"k={list(k)} of {candidates} candidates; give numbers from 1 to {candidates} with --k")
    blocks = [torch.empty(0, len(texts), device=scorer.device)]
    starts = range(0, len(images), IMAGE_CHUNK)
    share = starts[len(starts) * rank() // world_size() : len(starts) * (rank() + 1) // world_size()]
    for start in progress(share, total=len(share), desc="recall"):
        # The last block reaches back, so that all have one size and equal images have equal scores in any of them.
        first = max(0, min(start, len(images) - IMAGE_CHUNK))
        blocks.append(scorer.score_block(images[first : start + IMAGE_CHUNK], texts)[start - first :])
    scores = all_gather_ragged(torch.cat(blocks))
    for name, rows in (("images", scores), ("captions", scores.t())):
        check_features(rows, f"scores of {name}")
    is_match = torch.zeros_like(scores, dtype=torch.bool)
    is_match[matches[:, 0], matches[:, 1]] = True
    return _mean_recall(scores, is_match, k), _mean_recall(scores.t(), is_match.t(), k)


def _mean_recall(
    scores: Float[Tensor, "queries candidates"], is_match: Bool[Tensor, "queries candidates"], k: Sequence[int]
) -> dict[int, Recall]:
    """Both definitions of recall, for each k."""
    shares, numbers = [], torch.tensor(list(k), device=scores.device)
    for some, is_true in zip(scores.split(IMAGE_CHUNK), is_match.split(IMAGE_CHUNK), strict=True):
        # Captions beyond the max(k) highest scores are not hits.
        true, false = (some.masked_fill(left_out, -torch.inf).topk(max(k)).values for left_out in (~is_true, is_true))
        ahead = (false[:, None] >= true[:, :, None]).sum(dim=2) + torch.arange(max(k), device=scores.device)
        is_hit = (ahead[:, :, None] < numbers) & (true > -torch.inf)[:, :, None]
        shares.append(is_hit.sum(dim=1).double() / numbers)
    share = torch.cat(shares)
    means = 100 * torch.stack((share > 0, share), dim=2).sum(dim=0) / len(share)
    return {number: {"any": some, "share": mean} for number, (some, mean) in zip(k, means.tolist(), strict=True)}


@torch.no_grad()
def evaluate_retrieval(scorer: Scorer, data: CaptionSet, k: Sequence[int] = (1, 5, 10)) -> dict[str, Any]:
    """Recall on a set of images with captions: entries of a result, on every process.

    `text_recall` is of captions by image, `image_recall` of images by caption. Unreadable images are left out with
    their captions. Of `num_captions` captions `num_texts` are different.
    """
    scorer.expect_texts(merge_equal(data.captions)[0])
    images = scorer.encode_images(data.images)
    problem = f"images of {data.images.name} are missing or cannot be read"
    require_few_missing(images.num_corrupt, len(data.images), problem)
    row = torch.full((len(data.images),), -1)
    row[images.indices.cpu()] = torch.arange(len(images.indices))
    image_of = row[torch.from_numpy(data.image_of)]
    readable = (image_of >= 0).nonzero().flatten()
    texts, text_of = merge_equal([data.captions[index] for index in readable.tolist()])
    encoded = scorer.encode_texts(texts)
    # An image that has the same caption twice matches it once.
    matches = torch.unique(torch.stack((image_of[readable], text_of), dim=1), dim=0)
    text, image = recall(scorer, images.payload, encoded.payload, matches, k)
    return {
        "text_recall": {f"@{k}": recall for k, recall in text.items()},
        "image_recall": {f"@{k}": recall for k, recall in image.items()},
        "similarity": f"{scorer.measure}, fp32",
        "images": {
            "num_images": len(images.indices),
            "num_captions": len(readable),
            "num_texts": len(texts),
            "num_merged_captions": len(readable) - len(texts),
            "num_corrupt": images.num_corrupt,
            "num_truncated_captions": encoded.num_truncated,
            "captions_per_image": np.bincount(np.bincount(data.image_of)).tolist(),
            "left_out": data.left_out,
        },
    }


def merge_equal(captions: Sequence[str]) -> tuple[list[str], Int64[Tensor, " captions"]]:
    """Captions -> the different texts, and the text of each caption; case and white space make no difference."""
    keys = [" ".join(caption.lower().split()) for caption in captions]
    texts: dict[str, str] = {}
    for key, caption in zip(keys, captions, strict=True):
        texts.setdefault(key, caption)
    number = {key: index for index, key in enumerate(texts)}
    return list(texts.values()), torch.tensor([number[key] for key in keys], dtype=torch.int64)


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenScorer) -> dict[str, Any]:
    """Evaluate the model and the data of the options, write the result, show the table."""
    task = ScorerTask.start(args, open_model)
    scorer = task.scorer
    file = task.open_result("retrieval")
    data = open_caption_set(args.data_path, args.captions, args.split, args.allow_outside, task.limits)
    result = {
        "evaluation": "retrieval",
        **evaluate_retrieval(scorer, data, args.k),
        "definitions": {
            "any": "share of queries with at least one match among the k nearest (CLIP benchmark; SPARO's table 2)",
            "share": "mean share of the k nearest that match (the text of SPARO, section 4.2)",
            "ties": "count as wrong",
            "equal captions": "are one text, which all their images match",
        },
    }
    result["images"] |= {
        "data_path": args.data_path,
        "captions": file_record(Path(args.captions)) if args.captions else None,
        "split": data.split or args.split,
    }
    headline = [
        Score(f"{kind} R{k}", recall["any"])
        for kind in ("text", "image")
        for k, recall in result[f"{kind}_recall"].items()
    ]
    return file.write(result, table(result), headline=headline)


def table(result: dict[str, Any]) -> str:
    """Recall as a table to print."""
    lines = [f"{'':>24}" + "".join(f"  {'R' + k + ' %':>8}" for k in result["text_recall"])]
    for name, recalls in (("captions by image", result["text_recall"]), ("images by caption", result["image_recall"])):
        for definition in ("any", "share"):
            values = "".join(f"  {recall[definition]:>8.2f}" for recall in recalls.values())
            lines.append(f"{name:<18} {definition:<5}{values}")
    images = result["images"]
    lines.append(f"{images['num_images']} images, {images['num_captions']} captions, {images['num_texts']} different")
    return "\n".join(lines)

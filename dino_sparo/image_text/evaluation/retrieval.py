"""Images with captions -> Recall@k of captions by image and of images by caption.

    dino-sparo retrieval --pretrained_weights output/checkpoint.pth --data_path data/coco/val2014 \
        --captions data/coco/dataset_coco.json
    dino-sparo retrieval --pretrained_weights output/checkpoint.pth --data_path scenes:500:32

Every feature is compared with every other, a block at a time, in one process. Prints a table and
writes retrieval.json, the numbers with all that they depend on.

Two things are called Recall@k, both are reported:

    any    the share of queries that have at least one match among their k nearest
    share  the mean over queries of the share of the k nearest that match

Equal captions are one text: letters' case and white space aside, a caption that several images share is one query, and
each of these images is a match of it. (As texts of their own they would tie with each other, and ties count as wrong.)

`share` is what SPARO's section 4.2 describes. Its table 2, made with LAION's CLIP benchmark, reports `any`: a caption
has one image, so that among five images at most a fifth can match, and the table has up to 0.85.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dino_sparo.image_text.evaluation.caption_sets import CaptionSet, open_caption_set
from dino_sparo.image_text.evaluation.encode import ClipEncoder
from dino_sparo.image_text.evaluation.image_files import require_few_missing
from dino_sparo.image_text.evaluation.protocol import (
    OpenModel,
    file_record,
    report,
)
from dino_sparo.runtime.distributed import all_reduce_sum, init_distributed, is_main
from dino_sparo.runtime.logs import progress, setup_logging

logger = logging.getLogger(__name__)

QUERY_CHUNK = 256  # queries whose scores exist at a time


class Recall(NamedTuple):
    """Recall@k in percent, by both definitions."""

    any: float
    share: float


@dataclass(frozen=True)
class RetrievalResult:
    """What `evaluate_retrieval` finds.

    Attributes:
        text: k -> recall of captions by image.
        image: k -> recall of images by caption.
        num_images: images searched, and searched for.
        num_captions: captions of these images.
        num_texts: different ones among them, which are searched, and searched for.
        num_corrupt: images left out with their captions because they cannot be read.
        num_truncated: captions cut off because they are longer than the context.
    """

    text: dict[int, Recall]
    image: dict[int, Recall]
    num_images: int
    num_captions: int
    num_texts: int
    num_corrupt: int
    num_truncated: int

    @property
    def num_merged(self) -> int:
        """Captions that are equal to an earlier one."""
        return self.num_captions - self.num_texts


def recall_at_k(
    queries: Float[Tensor, "Q M"],
    candidates: Float[Tensor, "I M"],
    matches: Int64[Tensor, "Q P"],
    num_matches: Int64[Tensor, "Q"],
    k: Sequence[int],
) -> dict[int, Recall]:
    """How often the nearest candidates match.

    A match counts as behind every candidate that does not match and is exactly as near: ties count as wrong, so that a
    model which cannot tell things apart gains nothing from the order they are listed in.

    Args:
        queries: (Q, M), of length one.
        candidates: (I, M), of length one.
        matches: (Q, P), the candidates that match each query; rows with fewer are filled up with their first.
        num_matches: (Q,), how many of each row's P count, at least one.
        k: numbers of candidates to look at.

    Raises:
        ValueError: a k out of range, or features that are not finite.
    """
    if not k or min(k) < 1 or max(k) > len(candidates):
        raise ValueError(
            f"k={list(k)} of {len(candidates)} candidates; give numbers from 1 to {len(candidates)} with --k"
        )
    sums = torch.zeros(len(k), 2, dtype=torch.float64)
    chunks = range(0, len(queries), QUERY_CHUNK)
    for start in progress(chunks, total=len(chunks), desc="recall"):
        rows = slice(start, start + QUERY_CHUNK)
        scores = queries[rows] @ candidates.t()
        if not scores.isfinite().all():
            raise ValueError("the features are not finite; the model is broken or overflowed")
        ranks = _ranks_of_matches(scores, matches[rows], num_matches[rows], max(k))
        hits = torch.stack([(ranks < number).sum(dim=1) for number in k]).cpu()  # (k, queries)
        sums[:, 0] += (hits > 0).sum(dim=1)
        sums[:, 1] += (hits.double() / torch.tensor(list(k))[:, None]).sum(dim=1)
    means = (100 * sums / len(queries)).tolist()
    return {number: Recall(*row) for number, row in zip(k, means, strict=True)}


def _ranks_of_matches(
    scores: Float[Tensor, "Q I"], matches: Int64[Tensor, "Q P"], num_matches: Int64[Tensor, "Q"], most: int
) -> Int64[Tensor, "Q _"]:
    """The ranks of the `most` best matches among all candidates, from 0; beyond the last where a row has fewer."""
    counted = torch.arange(matches.shape[1], device=scores.device) < num_matches[:, None]
    own = scores.gather(1, matches).masked_fill(~counted, -torch.inf).sort(dim=1, descending=True).values
    own = own[:, :most]  # a later match is behind these
    others = scores.scatter(1, matches, -torch.inf)
    # One match at a time, so that no more than the scores themselves exist at once.
    ahead = torch.stack([(others >= own[:, place : place + 1]).sum(dim=1) for place in range(own.shape[1])], dim=1)
    ranks = ahead + torch.arange(own.shape[1], device=scores.device)
    return ranks.masked_fill(own == -torch.inf, scores.shape[1])


@torch.no_grad()
def evaluate_retrieval(encoder: ClipEncoder, data: CaptionSet, k: Sequence[int] = (1, 5, 10)) -> RetrievalResult:
    """Images and captions in, recall out. Every process takes part and gets the result.

    Args:
        encoder: the model.
        data: images with captions.
        k: numbers of candidates to look at.

    Raises:
        ValueError: more than 1 % of the images cannot be read; a k out of range.
    """
    images = encoder.image_features(data.images)
    require_few_missing(images.num_corrupt, len(data.images), f"images of {data.images.name}")
    place = torch.full((len(data.images),), -1)
    place[images.indices.cpu()] = torch.arange(len(images.indices))
    image_of = place[torch.from_numpy(data.image_of)]
    kept = (image_of >= 0).nonzero().flatten()
    texts, text_of = merge_equal([data.captions[index] for index in kept.tolist()])
    encoded = encoder.text_features(texts)
    found = torch.zeros(2, len(k), 2, dtype=torch.float64, device=encoder.device)
    if is_main():
        # An image that has the same caption twice matches it once.
        pairs = torch.unique(torch.stack((image_of[kept], text_of), dim=1), dim=0).to(encoder.device)
        captions = encoded[slice(None)]
        by_image = recall_at_k(images.features, captions, *rows_of_matches(pairs, len(images.indices)), k)
        by_caption = recall_at_k(captions, images.features, *rows_of_matches(pairs.flip(1), len(texts)), k)
        both = [list(by_image.values()), list(by_caption.values())]
        found += torch.tensor(both, dtype=torch.float64, device=encoder.device)
    text, image = all_reduce_sum(found).tolist()
    return RetrievalResult(
        {number: Recall(*row) for number, row in zip(k, text, strict=True)},
        {number: Recall(*row) for number, row in zip(k, image, strict=True)},
        len(images.indices),
        len(kept),
        len(texts),
        images.num_corrupt,
        encoded.num_truncated,
    )


def merge_equal(captions: Sequence[str]) -> tuple[list[str], Int64[Tensor, " captions"]]:
    """Captions -> the different ones among them, in order, and which of these each is.

    Letters' case and white space make no difference, as they make none to the tokenizer.
    """
    number: dict[str, int] = {}
    texts: list[str] = []
    text_of = []
    for caption in captions:
        words = " ".join(caption.lower().split())
        text_of.append(number.setdefault(words, len(texts)))
        if text_of[-1] == len(texts):
            texts.append(caption)
    return texts, torch.tensor(text_of, dtype=torch.int64)


def rows_of_matches(
    pairs: Int64[Tensor, "pairs 2"], num_queries: int
) -> tuple[Int64[Tensor, "Q P"], Int64[Tensor, "Q"]]:
    """The matches of every query, as `recall_at_k` takes them.

    Args:
        pairs: (pairs, 2), query and candidate; no pair twice.
        num_queries: Q, each of which is in a pair.

    Returns:
        (Q, P) candidates, rows with fewer filled up with their first; and how many each has.
    """
    queries, candidates = pairs[pairs[:, 0].argsort(stable=True)].t()
    counts = torch.bincount(queries, minlength=num_queries)
    starts = counts.cumsum(0) - counts
    offsets = torch.arange(int(counts.max()), device=pairs.device)
    return candidates[starts[:, None] + torch.where(offsets < counts[:, None], offsets, 0)], counts


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    place = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    setup_logging()
    evaluated = open_model(args, place)
    data = open_caption_set(args.data_path, args.captions, args.split, args.image_list)
    found = evaluate_retrieval(evaluated.encoder, data, args.k)
    result = describe(found, data, evaluated.record, args)
    return report(result, table(found), args, "retrieval.json")


def describe(
    found: RetrievalResult, data: CaptionSet, record: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Recall and protocol, as retrieval.json holds them."""
    return {
        "evaluation": "retrieval",
        "text_recall": {f"@{k}": recall._asdict() for k, recall in found.text.items()},
        "image_recall": {f"@{k}": recall._asdict() for k, recall in found.image.items()},
        "definitions": {
            "any": "share of queries with at least one match among the k nearest (CLIP benchmark; SPARO's table 2)",
            "share": "mean share of the k nearest that match (the text of SPARO, section 4.2)",
            "ties": "count as wrong",
            "equal captions": "are one text, which all their images match",
        },
        "similarity": "cosine, fp32",
        **record,
        "images": {
            "data_path": args.data_path,
            "captions": file_record(Path(args.captions)) if args.captions else None,
            "split": args.split if args.captions else None,
            "image_list": file_record(Path(args.image_list)) if args.image_list else None,
            "num_images": found.num_images,
            "num_captions": found.num_captions,
            "num_texts": found.num_texts,
            "num_merged_captions": found.num_merged,
            "num_corrupt": found.num_corrupt,
            "num_truncated_captions": found.num_truncated,
            "captions_per_image": np.bincount(np.bincount(data.image_of)).tolist(),
            "left_out": data.left_out,
        },
    }


def table(found: RetrievalResult) -> str:
    """Recall for people."""
    lines = [f"{'':>24}" + "".join(f"  {'R@' + str(k) + ' %':>8}" for k in found.text)]
    for name, recalls in (("captions by image", found.text), ("images by caption", found.image)):
        for definition in ("any", "share"):
            values = "".join(f"  {getattr(recall, definition):>8.2f}" for recall in recalls.values())
            lines.append(f"{name:<18} {definition:<5}{values}")
    merged = f" ({found.num_merged} merged with an equal one: {found.num_texts} texts)" if found.num_merged else ""
    lines.append(f"{found.num_images} images, {found.num_captions} captions{merged}")
    return "\n".join(lines)

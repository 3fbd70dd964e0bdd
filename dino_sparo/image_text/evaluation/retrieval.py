"""Images with captions -> Recall@k of captions by image and of images by caption.

    dino-sparo retrieval --pretrained_weights output/checkpoint.pth --data_path data/coco/val2014 \
        --captions data/coco/dataset_coco.json
    dino-sparo retrieval --pretrained_weights output/checkpoint.pth --data_path scenes:500:32

The processes share the images, and score some of them at a time with every caption. The command prints a table and
writes retrieval.json: the numbers and their protocol. Recall@k has two definitions, and both are reported:

    any    share of queries with at least one match among their k nearest candidates
    share  mean over queries of the share of matches among their k nearest candidates

Captions that differ in case and white space alone are one text, which matches all of their images. Separate texts would
tie, and ties count as wrong.

SPARO describes `share` in section 4.2. Its table 2, made with LAION's CLIP benchmark, reports `any`: with one image per
caption, `share` of five images is at most 0.2, and the table has up to 0.85.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dino_sparo.evaluation.task import start_evaluation
from dino_sparo.image_text.evaluation.caption_sets import CaptionSet, open_caption_set
from dino_sparo.image_text.evaluation.protocol import OpenModel, file_record, limits_of, report
from dino_sparo.image_text.scoring.image_files import require_few_missing
from dino_sparo.image_text.scoring.scorer import Scorer
from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.runtime.logs import progress

IMAGE_CHUNK = 256  # images whose scores with all captions exist at a time


class Recall(NamedTuple):
    """Recall@k in percent, by both definitions."""

    any: float
    share: float


@dataclass(frozen=True)
class RetrievalResult:
    """Recall in both directions.

    Attributes:
        text: k -> recall of captions by image.
        image: k -> recall of images by caption.
        num_images: readable images.
        num_captions: captions of the readable images.
        num_texts: different captions.
        num_corrupt: unreadable images, left out with their captions.
        num_truncated: captions that are longer than the context.
    """

    text: dict[int, Recall]
    image: dict[int, Recall]
    num_images: int
    num_captions: int
    num_texts: int
    num_corrupt: int
    num_truncated: int


@torch.no_grad()
def recall(
    scorer: Scorer, images: Any, texts: Any, matches: Int64[Tensor, "matches 2"], k: Sequence[int]
) -> tuple[dict[int, Recall], dict[int, Recall]]:
    """Recall of captions by image, and of images by caption.

    Ties count as wrong: a match ranks behind every other candidate with an equal score, so that the order of candidates
    never helps a model.

    Each score is computed once and serves both directions. The captions of an image are ranked at once. A caption keeps
    the scores of its matches and its max(k) highest other scores, which decide whether a match is among the k nearest.
    Every process scores its share of the images and gets the result.

    Args:
        scorer: the model.
        images: payload of images.
        texts: payload of captions.
        matches: (matches, 2), index of an image and of its caption, without repetition, sorted by image.
        k: numbers of candidates.
    """
    for candidates in (len(texts), len(images)):
        if max(k) > candidates:
            raise ValueError(f"k={list(k)} of {candidates} candidates; give numbers from 1 to {candidates} with --k")
    device, most = scorer.device, max(k)
    own = [torch.empty(0, device=device)]
    by_image = [torch.empty(0, len(k), dtype=torch.int64, device=device)]
    rivals = torch.full((len(texts), most), -torch.inf, device=device)
    starts = range(0, len(images), IMAGE_CHUNK)
    share = starts[len(starts) * rank() // world_size() : len(starts) * (rank() + 1) // world_size()]
    for start in progress(share, total=len(share), desc="recall"):
        # The last block reaches back, so that all have one size and equal images have equal scores in any of them.
        first = max(0, min(start, len(images) - IMAGE_CHUNK))
        scores = scorer.score_block(images[first : start + IMAGE_CHUNK], texts)[start - first :]
        if not scores.isfinite().all():
            raise ValueError("the scores are not finite; the model is broken or overflowed")
        is_here = (matches[:, 0] >= start) & (matches[:, 0] < start + IMAGE_CHUNK)
        rows, columns = (matches[is_here] - torch.tensor([start, 0])).to(device).t()
        own.append(scores[rows, columns])
        others = scores.index_put((rows, columns), scores.new_tensor(-torch.inf))
        by_image.append(_count_hits(_by_query(own[-1], rows, len(scores)), _greatest(others, most), k))
        rivals = _greatest(torch.cat((rivals, others.t()), dim=1), most)
    # From all processes: (processes, captions, most) -> (captions, processes * most) -> (captions, most).
    rivals = all_gather_ragged(rivals).unflatten(0, (-1, len(texts))).transpose(0, 1).flatten(1)
    by_text = _by_query(all_gather_ragged(torch.cat(own)), matches[:, 1].to(device), len(texts))
    hits = all_gather_ragged(torch.cat(by_image)), _count_hits(by_text, _greatest(rivals, most), k)
    return _mean_recall(hits[0], k), _mean_recall(hits[1], k)


def _greatest(scores: Float[Tensor, "queries candidates"], number: int) -> Float[Tensor, "queries _"]:
    """The highest scores of each row, at most `number`."""
    return scores.topk(min(number, scores.shape[1]), dim=1).values


def _by_query(
    own: Float[Tensor, " matches"], queries: Int64[Tensor, " matches"], num_queries: int
) -> Float[Tensor, "queries most_matches"]:
    """The scores of the matches of each query, one row per query, padded with -inf."""
    order = queries.argsort(stable=True)
    counts = torch.bincount(queries, minlength=num_queries)
    starts = counts.cumsum(0) - counts
    offsets = torch.arange(len(own), device=own.device) - starts[queries[order]]
    rows = torch.full((num_queries, max(1, int(counts.max()))), -torch.inf, device=own.device)
    rows[queries[order], offsets] = own[order]
    return rows


def _count_hits(
    own: Float[Tensor, "queries most_matches"], rivals: Float[Tensor, "queries rivals"], k: Sequence[int]
) -> Int64[Tensor, "queries k"]:
    """Number of matches among the k nearest candidates of each query, for each k.

    Args:
        own: scores of the matches, padded with -inf.
        rivals: the highest scores of other candidates: all of them, or at least max(k).
        k: numbers of candidates.
    """
    own = own.sort(dim=1, descending=True).values[:, : max(k)]  # a later match is behind these
    # One match at a time, so that no more than the rivals themselves exist at once.
    ahead = torch.stack([(rivals >= own[:, i : i + 1]).sum(dim=1) for i in range(own.shape[1])], dim=1)
    ranks = ahead + torch.arange(own.shape[1], device=own.device)
    is_match = own > -torch.inf
    return torch.stack([((ranks < number) & is_match).sum(dim=1) for number in k], dim=1)


def _mean_recall(hits: Int64[Tensor, "queries k"], k: Sequence[int]) -> dict[int, Recall]:
    """Both definitions of recall, for each k."""
    shares = hits.cpu().double() / torch.tensor(list(k))
    means = 100 * torch.stack((shares > 0, shares), dim=2).sum(dim=0) / len(hits)
    return {number: Recall(*row) for number, row in zip(k, means.tolist(), strict=True)}


@torch.no_grad()
def evaluate_retrieval(scorer: Scorer, data: CaptionSet, k: Sequence[int] = (1, 5, 10)) -> RetrievalResult:
    """Recall on a set of images with captions; every process gets the result."""
    scorer.expect_texts(merge_equal(data.captions)[0])
    images = scorer.encode_images(data.images)
    require_few_missing(images.num_corrupt, len(data.images), f"images of {data.images.name}")
    row = torch.full((len(data.images),), -1)
    row[images.indices.cpu()] = torch.arange(len(images.indices))
    image_of = row[torch.from_numpy(data.image_of)]
    readable = (image_of >= 0).nonzero().flatten()
    texts, text_of = merge_equal([data.captions[index] for index in readable.tolist()])
    encoded = scorer.encode_texts(texts)
    # An image that has the same caption twice matches it once.
    matches = torch.unique(torch.stack((image_of[readable], text_of), dim=1), dim=0)
    text, image = recall(scorer, images.payload, encoded.payload, matches, k)
    return RetrievalResult(
        text, image, len(images.indices), len(readable), len(texts), images.num_corrupt, encoded.num_truncated
    )


def merge_equal(captions: Sequence[str]) -> tuple[list[str], Int64[Tensor, " captions"]]:
    """Captions -> the different texts, and the text of each caption; case and white space make no difference."""
    keys = [" ".join(caption.lower().split()) for caption in captions]
    texts: dict[str, str] = {}
    for key, caption in zip(keys, captions, strict=True):
        texts.setdefault(key, caption)
    number = {key: index for index, key in enumerate(texts)}
    return list(texts.values()), torch.tensor([number[key] for key in keys], dtype=torch.int64)


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table."""
    process = start_evaluation(args)
    scorer = open_model(args, process)
    data = open_caption_set(
        args.data_path, args.captions, args.split, args.image_list, args.allow_outside, limits_of(args)
    )
    outcome = evaluate_retrieval(scorer, data, args.k)
    result = {
        "evaluation": "retrieval",
        "text_recall": {f"@{k}": recall._asdict() for k, recall in outcome.text.items()},
        "image_recall": {f"@{k}": recall._asdict() for k, recall in outcome.image.items()},
        "definitions": {
            "any": "share of queries with at least one match among the k nearest (CLIP benchmark; SPARO's table 2)",
            "share": "mean share of the k nearest that match (the text of SPARO, section 4.2)",
            "ties": "count as wrong",
            "equal captions": "are one text, which all their images match",
        },
        "similarity": f"{scorer.measure}, fp32",
        **scorer.record,
        "images": {
            "data_path": args.data_path,
            "captions": file_record(Path(args.captions)) if args.captions else None,
            "split": data.split or args.split,
            "image_list": file_record(Path(args.image_list)) if args.image_list else None,
            "num_images": outcome.num_images,
            "num_captions": outcome.num_captions,
            "num_texts": outcome.num_texts,
            "num_merged_captions": outcome.num_captions - outcome.num_texts,
            "num_corrupt": outcome.num_corrupt,
            "num_truncated_captions": outcome.num_truncated,
            "captions_per_image": np.bincount(np.bincount(data.image_of)).tolist(),
            "left_out": data.left_out,
        },
    }
    return report(result, table(outcome), args, "retrieval.json")


def table(outcome: RetrievalResult) -> str:
    """Recall for people."""
    lines = [f"{'':>24}" + "".join(f"  {'R@' + str(k) + ' %':>8}" for k in outcome.text)]
    for name, recalls in (("captions by image", outcome.text), ("images by caption", outcome.image)):
        for definition in ("any", "share"):
            values = "".join(f"  {getattr(recall, definition):>8.2f}" for recall in recalls.values())
            lines.append(f"{name:<18} {definition:<5}{values}")
    lines.append(f"{outcome.num_images} images, {outcome.num_captions} captions, {outcome.num_texts} different")
    return "\n".join(lines)

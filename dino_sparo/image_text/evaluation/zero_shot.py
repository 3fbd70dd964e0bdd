"""Images and the names of their classes -> zero-shot accuracy: top-1, top-5 and mean per-class recall.

    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenetv2 \
        --classnames imagenet
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/wds_vtab-dtd \
        --classnames data/wds_vtab-dtd/classnames.txt \
        --templates data/wds_vtab-dtd/zeroshot_classification_templates.txt

The class with the highest score is the prediction. ImageNet V1, Sketch, A and R are recognised by their folders; for
V2, ObjectNet and your own sets, name the classes with --classnames. The command prints a table and writes
zero_shot_WEIGHTS_DATA.json: the numbers and their protocol.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.features import check_features
from dino_sparo.image_text.evaluation.task import OpenScorer, ScorerTask
from dino_sparo.image_text.prompts import AUTO, open_labelled
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.runtime.collectives import all_reduce_sum
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.results import scores_in_percent

TOP = 5
ACCURACIES = {"top1": "top-1", "top5": "top-5", "mean_per_class_recall": "mean per class"}  # entry -> score
SAMPLED = 8  # images per batch whose scores are compared


def count_hits(scores: Float[Tensor, "B classes"], labels: Int64[Tensor, " B"]) -> Int64[Tensor, "B 3"]:
    """1 or 0 for each image: top-1, top-5, and a tie for the first place. Of equal scores the first class wins."""
    right = scores.gather(1, labels[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    ranks = ((scores > right) | ((scores == right) & before)).sum(dim=1)
    is_tied = (scores == scores.amax(dim=1, keepdim=True)).sum(dim=1) > 1
    return torch.stack((ranks < 1, ranks < TOP, is_tied), dim=1).long()


class ClassCounts:
    """Hits of a classifier, class by class.

    Attributes:
        counts: (classes, 4), of each class: images, top-1 hits, top-5 hits, ties for the first place.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_classes, 4, dtype=torch.int64, device=device)

    def add(self, scores: Float[Tensor, "B classes"], labels: Int64[Tensor, " B"]) -> None:
        """Count some images."""
        hits = count_hits(scores, labels)
        self.counts.index_add_(0, labels, torch.cat((torch.ones_like(hits[:, :1]), hits), dim=1))

    def accuracies(self) -> dict[str, float]:
        """Entries `ACCURACIES` of a result, in percent; the mean recall is of the classes that have images."""
        images, top1, top5, _ = self.counts.sum(dim=0).tolist()
        seen = self.counts[self.counts[:, 0] > 0].double()
        mean = 100 * (seen[:, 1] / seen[:, 0]).mean().item()
        return {"top1": 100 * top1 / images, "top5": 100 * top5 / images, "mean_per_class_recall": mean}


@torch.no_grad()
def evaluate_zero_shot(
    scorer: Scorer, source: ImageSource, names: Sequence[str], templates: tuple[str, ...]
) -> dict[str, Any]:
    """Accuracy on the images of a source, whose labels are indices of `names`: entries of a result, on every process.

    Top-5 counts images whose class has one of the five highest scores. `ties` are images for which several classes have
    the highest score. Unreadable images are left out.
    """
    classes = scorer.encode_classes(names, templates)
    hits, num_corrupt = ClassCounts(len(names), scorer.device), 0
    sample = [torch.empty(0, len(names), device=scorer.device)]
    for batch in scorer.image_batches(source):
        scores = scorer.score_block(batch.payload, classes.payload)
        if not scores.isfinite().all():
            raise UserError(f"scores of {source.name} are not finite; the model is broken or overflowed")
        sample.append(scores[:SAMPLED])
        hits.add(scores, batch.labels)
        num_corrupt += batch.num_corrupt
    check_features(torch.cat(sample), f"scores of {source.name}", scorer.device)
    num_corrupt = int(all_reduce_sum(torch.tensor(num_corrupt, device=scorer.device)))
    hits.counts = all_reduce_sum(hits.counts).cpu()
    images, _, _, ties = hits.counts.sum(dim=0).tolist()
    if not images:
        raise UserError(f"none of {num_corrupt} images can be read; is the disk still there?")
    return {
        **hits.accuracies(),
        "ties": {"images": ties, "rule": "of equally near classes the first is preferred"},
        "similarity": f"{scorer.measure}, fp32",
        "images": {"num_images": images, "num_corrupt": num_corrupt},
        "prompts": {
            "num_classes": len(names),
            "ensemble": scorer.ensemble,
            "num_truncated": classes.num_truncated,
            "templates": list(templates),
        },
        "per_class": [
            {"name": name, "num_images": number, "recall": 100 * right / number if number else None}
            for name, (number, right, *_) in zip(names, hits.counts.tolist(), strict=True)
        ],
    }


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenScorer) -> dict[str, Any]:
    """Evaluate the model and the data of the options, write the result, show the table."""
    task = ScorerTask.start(args, open_model)
    scorer = task.scorer
    file = task.open_result("zero_shot")
    source = task.open_split(args.split)
    chosen, classes, templates = open_labelled(source, args.data_path, args.classnames, args.templates)
    if args.templates == AUTO:
        templates = scorer.default_templates or templates
    accuracies = evaluate_zero_shot(scorer, chosen, classes.names, templates)
    result = {"evaluation": "zero-shot classification", **accuracies}
    result["images"] |= {
        "data_path": args.data_path,
        "split": args.split,
        "num_left_out": len(source) - len(chosen),
    }
    result["prompts"]["classnames"] = classes.origin
    return file.write(result, table(result), headline=scores_in_percent(result, ACCURACIES))


def table(result: dict[str, Any]) -> str:
    """The accuracies as a table to print."""
    head = f"{'top-1 %':>8}  {'top-5 %':>8}  {'per class %':>11}  {'classes':>8}  {'images':>8}"
    row = f"{result['top1']:>8.2f}  {result['top5']:>8.2f}  {result['mean_per_class_recall']:>11.2f}"
    return f"{head}\n{row}  {len(result['per_class']):>8}  {result['images']['num_images']:>8}"

"""Frozen image features -> accuracy of a linear probe, with a weight decay chosen on part of the training images.

    dino-sparo linear --pretrained_weights output/checkpoint.pth --data_path data/imagenet

Every image is encoded once, without crops and flips. Probes with different weight decays are trained side by side on
part of the training images and compared on the rest. A probe with the best decay is then trained on all training images
and tested. The command prints a table and writes probe_WEIGHTS_DATA.json: the numbers and their protocol.

Source: SPARO, appendix 0.C.1, which follows LAION's CLIP benchmark and CLIP, appendix A.3: features of length one,
AdamW with learning rate 0.1, 10 epochs, 97 decays from 1e-6 to 1e2, searched first coarsely and then finely around the
best. Batches of 64 and the initial weights of `nn.Linear` are the benchmark's. The share of images that choose the
decay is ours: none of the sources states it.

Every process keeps the features of all training images: images x width x 4 bytes, 21 GB for ImageNet and L*V = 4096.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dino_sparo.data.defaults import EXIF
from dino_sparo.evaluation.features import Features, check_dump, check_same_weights, load_features, save_features
from dino_sparo.evaluation.linear.attentive import warmup_cosine
from dino_sparo.evaluation.linear.probe import (
    LinearProbe,
    ProbeAdamW,
    ProbeSampler,
    cached_batches,
    probe_accuracy,
    train_one_epoch,
)
from dino_sparo.evaluation.result import ResultFile
from dino_sparo.image_text.evaluation.options import PROBE_BATCH_SIZE
from dino_sparo.image_text.evaluation.task import OpenScorer, ScorerTask
from dino_sparo.image_text.evaluation.zero_shot import ACCURACIES, ClassCounts
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import versions
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.weights.results import scores_in_percent

logger = logging.getLogger(__name__)

WEIGHT_DECAYS = np.logspace(-6, 2, 97).tolist()
COARSE = range(0, len(WEIGHT_DECAYS), 16)  # indices of WEIGHT_DECAYS that are tried first
SPANS = (8, 4, 2, 1)  # then the indices at these distances from the best
CPU = torch.device("cpu")
TEST_ROWS = 1024  # images whose logits exist at a time


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a probe's training; `batch_size` counts the images of all processes.

    The learning rate falls from `lr` to 0 on a cosine, step by step. The features may lie on another device.
    """

    num_classes: int
    lr: float = 0.1
    epochs: int = 10
    batch_size: int = PROBE_BATCH_SIZE
    seed: int = 0
    device: torch.device = CPU


def train_probes(
    train: Features, rows: Int64[Tensor, " n"], weight_decays: Sequence[float], settings: ProbeSettings
) -> LinearProbe:
    """Train one probe per weight decay, side by side on the same batches of the normalised features of some images."""
    share = max(1, settings.batch_size // world_size())
    size = (train.features.shape[1], settings.num_classes, len(weight_decays))
    probe = LinearProbe(*size, seed=settings.seed, torch_init=True).to(settings.device)
    optimizer = ProbeAdamW(probe, settings.lr, weight_decays)
    batches = cached_batches(train, settings.device, batch_size=share, seed=settings.seed, rows=rows)
    num_steps = len(ProbeSampler(len(rows), share))
    for epoch in range(settings.epochs):
        train_one_epoch(probe, optimizer, batches(epoch), warmup_cosine(epoch, settings.epochs, 0.0, num_steps))
    return probe


def search_weight_decay(accuracies_of: Callable[[list[int]], list[float]]) -> tuple[int, dict[int, float]]:
    """Find the best of `WEIGHT_DECAYS`: first every sixteenth, then 8, 4, 2 and 1 steps left and right of the best.

    Of equally good decays the smallest wins.

    Args:
        accuracies_of: indices of decays -> accuracies of their probes.

    Returns:
        The index of the best decay, and the accuracy of each index that was tried.
    """
    tried = dict(zip(COARSE, accuracies_of(list(COARSE)), strict=True))
    for span in SPANS:
        best = max(sorted(tried), key=lambda index: tried[index])
        neighbours = {max(best - span, 0), min(best + span, len(WEIGHT_DECAYS) - 1)}
        new = sorted(neighbours - tried.keys())
        tried |= zip(new, accuracies_of(new), strict=True)
    return max(sorted(tried), key=lambda index: tried[index]), dict(sorted(tried.items()))


def choose_weight_decay(train: Features, val_share: float, settings: ProbeSettings) -> tuple[float, dict[str, Any]]:
    """Train probes on part of the training images and compare them on the share `val_share`.

    Returns:
        The best weight decay; and for the result the share, the number of images that compared the decays, and the
        accuracy of each decay that was tried.
    """
    number = len(train.features)
    num_val = round(val_share * number)
    if not 0 < num_val < number:
        raise UserError(f"val_share={val_share} of {number} training images leaves none on one side; give e.g. 0.2")
    order = torch.from_numpy(np.random.default_rng(settings.seed).permutation(number)).to(train.features.device)
    val_rows, rows = (part.sort().values for part in order.tensor_split([num_val]))
    rank_rows = val_rows[num_val * rank() // world_size() : num_val * (rank() + 1) // world_size()]

    def accuracies_of(indices: list[int]) -> list[float]:
        decays = [WEIGHT_DECAYS[index] for index in indices]
        probe = train_probes(train, rows, decays, settings)
        accuracies = [row["top1"] for row in probe_accuracy(probe, train.features[rank_rows], train.labels[rank_rows])]
        words = ", ".join(f"{decay:.3g}: {value:.2f} %" for decay, value in zip(decays, accuracies, strict=True))
        logger.info("top-1 by weight decay on %d training images: %s", num_val, words)
        return accuracies

    best, tried = search_weight_decay(accuracies_of)
    trials = [{"weight_decay": WEIGHT_DECAYS[index], "top1": accuracy} for index, accuracy in tried.items()]
    return WEIGHT_DECAYS[best], {"val_share": val_share, "num_val": num_val, "tried": trials}


@torch.no_grad()
def probe_result(probe: LinearProbe, test: Features) -> dict[str, float]:
    """Accuracies of a single probe on all test images, in percent."""
    device = probe.bias.device
    hits = ClassCounts(probe.bias.shape[1], device)
    for features, labels in zip(test.features.split(TEST_ROWS), test.labels.split(TEST_ROWS), strict=True):
        logits = probe(features.to(device))[0]
        if not logits.isfinite().all():
            raise UserError("the probe has diverged; give a smaller --lr, or a --weight_decay below 2 / lr")
        hits.add(logits, labels.to(device))
    return hits.accuracies()


def probe_checkpoint(args: argparse.Namespace, open_model: OpenScorer) -> dict[str, Any]:
    """Train and test the probe that the options describe, write the result, print the table.

    The model has `image_features`, from a source and a device to `Features` of length one, and a scorer's `record`.
    """
    task = ScorerTask.start(args, open_model)
    train, test, record, file = _features(task)
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    settings = ProbeSettings(num_classes, args.lr, args.epochs, args.probe_batch_size, args.seed, task.device)
    sweep: dict[str, Any] | None = None
    weight_decay = args.weight_decay
    if weight_decay is None:
        weight_decay, sweep = choose_weight_decay(train, args.val_share, settings)
    everything = torch.arange(len(train.features), device=task.storage)
    accuracies = probe_result(train_probes(train, everything, [weight_decay], settings), test)
    result = {
        "evaluation": "linear probe",
        **accuracies,
        "weight_decay": weight_decay,
        "sweep": sweep,
        "training": {
            "optimizer": "AdamW, betas 0.9 and 0.999, cosine to 0 step by step, on features of length one",
            "lr": args.lr,
            "epochs": args.epochs,
            "batch_size": args.probe_batch_size,
            "initialisation": "nn.Linear's",
            "seed": args.seed,
        },
        "images": {
            **record.get("images", {}),
            "num_train": len(train.features),
            "num_test": len(test.features),
            "num_corrupt_train": train.num_corrupt,
            "num_corrupt_test": test.num_corrupt,
        },
    }
    return file.write(result, table(result), headline=scores_in_percent(result, ACCURACIES))


def _features(task: ScorerTask) -> tuple[Features, Features, dict[str, Any], ResultFile]:
    """Features of training and test images, the record of how they were made, and the file of the result."""
    args, unrecorded = task.args, ("dump_features", "load_features")
    if args.load_features:
        train, test, record = load_features(Path(args.load_features))
        if args.slots:
            raise UserError("--slots chooses slots of a model, but --load_features has features: give one of the two")
        if args.exif not in (EXIF[0], record.get("view", {}).get("exif")):
            raise UserError(f"--exif {args.exif} with --load_features, whose images are upright: give one of the two")
        check_same_weights(record.get("model", {}).get("sha256"), args.pretrained_weights, args.load_features)
        args.data_path = record.get("images", {}).get("data_path") or args.data_path
        if not record:  # features of another program, of any length
            train, test, record = train.normalize_(), test.normalize_(), {"versions": versions()}
        return train.to(task.storage), test.to(task.storage), record, task.open_result("probe", record, unrecorded)
    model = task.scorer
    file = task.open_result("probe", unrecorded=unrecorded)
    images = {"data_path": args.data_path, "num_classes": task.num_classes}
    record = {**task.protocol(), "images": images}
    if args.dump_features:
        check_dump(args.dump_features, record, args.overwrite)
    train, test = (model.image_features(source, task.storage) for source in task.splits)
    if args.dump_features:
        save_features(Path(args.dump_features), train, test, record)
    return train, test, record, file


def table(result: dict[str, Any]) -> str:
    """The accuracies as a table to print."""
    head = f"{'top-1 %':>8}  {'top-5 %':>8}  {'per class %':>11}  {'weight decay':>12}"
    row = f"{result['top1']:>8.2f}  {result['top5']:>8.2f}  {result['mean_per_class_recall']:>11.2f}"
    return f"{head}\n{row}  {result['weight_decay']:>12.3g}"

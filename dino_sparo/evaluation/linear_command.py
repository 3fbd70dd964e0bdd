"""Checkpoint -> encoder -> linear probes, one per learning rate, trained and tested.

    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --lr 0.001 0.01 0.1
    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --fast

The encoder stays frozen and runs once for all learning rates. Prints a table and writes linear.json, the accuracies
with all that they depend on; linear.pth holds the probes, and the same command goes on from it. Options as in
facebookresearch/dino.
"""

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from dino_sparo.checkpoint import load_strictly
from dino_sparo.crops import FLIP_PROBABILITY, EvalTransform, normalized_tensor, sample_box
from dino_sparo.data import ImageSource
from dino_sparo.evaluation.features import Features, extract_split
from dino_sparo.evaluation.linear import MOMENTUM, REFERENCE_BATCH, Batches, LinearProbe, probe_accuracy
from dino_sparo.evaluation.linear_run import ProbeRun, cached_batches, check_same_record, live_batches, load_heads
from dino_sparo.evaluation.protocol import (
    EvaluatedEncoder,
    encoder_of_options,
    result_folder,
    result_name,
    splits_of_options,
    start_evaluation,
    view_record,
    write_result,
)
from dino_sparo.evaluation.slot_choice import with_slots
from dino_sparo.runtime.distributed import PRECISIONS, Distributed, all_reduce_sum
from dino_sparo.runtime.records import versions

logger = logging.getLogger(__name__)

SELECTION = "the best learning rate was chosen on the validation images themselves, so its accuracy is optimistic"
PROBE_SCALE = (0.08, 1.0)  # share of the image's area in a training crop


class ProbeAugmentation:
    """Image -> one view to train a probe on: a random box, resized (bilinear), flipped half of the time, normalised.

    Args:
        img_size: side of the view in pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
    """

    def __init__(self, img_size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.img_size, self.mean, self.std = img_size, mean, std

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> list[Float[Tensor, "C img_size img_size"]]:
        """The view, in a list, drawn with `rng`."""
        box = sample_box(rng, image.height, image.width, PROBE_SCALE)
        crop = TF.resized_crop(image, *box, [self.img_size, self.img_size], InterpolationMode.BILINEAR)
        if rng.random() < FLIP_PROBABILITY:
            crop = TF.hflip(crop)
        return [normalized_tensor(crop, self.mean, self.std)]


def probe_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Train and test, or only test, what the options say, write the result, print the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    process = start_evaluation(args)
    evaluated = with_slots(encoder_of_options(args), args.slots)
    subject = Subject(args, process, evaluated, *splits_of_options(args))
    folder = result_folder(args.output_dir, args.pretrained_weights)
    name = result_name("linear", evaluated.record)
    if args.evaluate:
        rows, counts = evaluate_saved(subject, folder / f"{name}.pth")
    else:
        rows, counts = train(subject, folder / f"{name}.pth")
    result = describe(subject, rows, counts)
    write_result(result, table(result), folder / f"{name}{'_evaluate' if args.evaluate else ''}.json")
    return result


class Subject:
    """What is probed, on which images: all that training and testing a probe have in common.

    Args:
        args: the options.
        process: this process among its peers.
        evaluated: the encoder.
        train_source: labelled images to train on.
        val_source: labelled images to test on, their classes numbered alike.

    Attributes:
        encode: images (B, C, H, W) -> the probe's features (B, F).
        feature_dim: F.
        num_classes: of the training images.
        batch_size: training images per process and step.
        global_batch_size: training images per step.
        identity: plain values that tell whether saved probes belong to these features.

    Raises:
        ValueError: `--num_labels` is not the number of classes.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        process: Distributed,
        evaluated: EvaluatedEncoder,
        train_source: ImageSource,
        val_source: ImageSource,
    ) -> None:
        self.args, self.device, self.evaluated = args, process.device, evaluated
        self.train_source, self.val_source = train_source, val_source
        # With fewer images than a batch holds, an epoch is one step on all of them.
        self.batch_size = max(min(args.batch_size_per_gpu, len(train_source) // process.world_size), 1)
        self.global_batch_size = self.batch_size * process.world_size
        self.num_classes = len(train_source.classes or [])
        if args.num_labels not in (None, self.num_classes):
            raise ValueError(
                f"--num_labels {args.num_labels}, but {train_source.name} has {self.num_classes} classes; leave the "
                f"option out"
            )
        self.encoder = evaluated.encoder.to(process.device)
        self.img_size = args.img_size or self.encoder.config.img_size
        self.encode: Callable[[Tensor], Tensor] = partial(
            self.encoder.probe_features,
            n_last_blocks=args.n_last_blocks,
            avgpool_patchtokens=args.avgpool_patchtokens,
        )
        blank = torch.zeros(1, self.encoder.config.in_chans, self.img_size, self.img_size, device=process.device)
        with torch.inference_mode():
            self.feature_dim = self.encode(blank).shape[1]
        self.transform = EvalTransform(self.img_size, evaluated.mean, evaluated.std, exact=not args.fast_views)
        self.identity = {
            "weights": evaluated.record["sha256"],
            "checkpoint_key": evaluated.record["checkpoint_key"],
            "encoder_seed": evaluated.record.get("seed"),
            "n_last_blocks": args.n_last_blocks,
            "avgpool_patchtokens": args.avgpool_patchtokens,
            "img_size": self.img_size,
            "fast_views": args.fast_views,
            "precision": args.precision,
            "num_classes": self.num_classes,
            # Of all slots nothing is said, so that probes which were saved before there was a choice go on.
            **({"slots": evaluated.record["slots"]["slots"]} if "slots" in evaluated.record else {}),
        }

    def features(self, source: ImageSource, gather: bool) -> Features:
        """Un-augmented features of a split: of all processes, or this process' share."""
        return extract_split(
            self.encoder,
            source,
            self.transform,
            self.device,
            batch_size=self.args.batch_size_per_gpu,
            num_workers=self.args.num_workers,
            encode=self.encode,
            dtype=PRECISIONS[self.args.precision],
            storage=self.device if self.args.use_cuda else torch.device("cpu"),
            gather=gather,
        )


def train(subject: Subject, path: Path) -> tuple[list[dict[str, float]], dict[str, int | None]]:
    """Train the probes, or go on with those saved at `path`.

    Returns:
        The table's rows, and how many images were used and left out.
    """
    args = subject.args
    record = {
        **subject.identity,
        "num_train": len(subject.train_source),
        "num_val": len(subject.val_source),
        "epochs": args.epochs,
        "lr": list(args.lr),
        "global_batch_size": subject.global_batch_size,
        "fast": args.fast,
        "val_freq": args.val_freq,
        "seed": args.seed,
    }
    probe = LinearProbe(subject.feature_dim, subject.num_classes, len(args.lr), args.seed).to(subject.device)
    run = ProbeRun(probe, args.lr, subject.global_batch_size, args.epochs, record, path)
    run.resume()
    if run.epoch < args.epochs:
        val = subject.features(subject.val_source, gather=False)
        num_val = all_reduce_sum(torch.tensor([len(val.features), val.num_corrupt], device=subject.device)).tolist()
        batches, num_train = training_batches(subject)
        run.counts = {**num_train, "num_val": num_val[0], "num_corrupt_val": num_val[1]}
        run.train(batches, val, args.val_freq, path.with_name(f"{path.stem}_log.txt"))
    return run.table(), run.counts


def training_batches(subject: Subject) -> tuple[Callable[[int], Batches], dict[str, int | None]]:
    """Batches of features for each epoch, cached with `--fast`, else of augmented images; and the number of images."""
    args = subject.args
    if args.fast:
        train = subject.features(subject.train_source, gather=True)
        batches = cached_batches(train, subject.device, batch_size=subject.batch_size, seed=args.seed)
        return batches, {"num_train": len(train.features), "num_corrupt_train": train.num_corrupt}
    batches = live_batches(
        subject.encoder,
        subject.encode,
        subject.train_source,
        ProbeAugmentation(subject.img_size, subject.evaluated.mean, subject.evaluated.std),
        subject.device,
        batch_size=subject.batch_size,
        num_workers=args.num_workers,
        dtype=PRECISIONS[args.precision],
        seed=args.seed,
    )
    # Unreadable images are replaced as they come up, so their number is not known beforehand.
    return batches, {"num_train": len(subject.train_source), "num_corrupt_train": None}


def evaluate_saved(subject: Subject, path: Path) -> tuple[list[dict[str, float]], dict[str, int | None]]:
    """Test the probes saved at `path` on the validation images."""
    state = load_heads(path)
    check_same_record(state["record"], subject.identity, path)
    rates = state["learning_rates"]
    probe = LinearProbe(subject.feature_dim, subject.num_classes, len(rates)).to(subject.device)
    load_strictly(probe, state["state_dict"], str(path))
    val = subject.features(subject.val_source, gather=False)
    num_val = all_reduce_sum(torch.tensor([len(val.features), val.num_corrupt], device=subject.device)).tolist()
    accuracies = probe_accuracy(probe, val.features, val.labels)
    rows = [{"lr": rate, **accuracy} for rate, accuracy in zip(rates, accuracies, strict=True)]
    return rows, {"num_val": num_val[0], "num_corrupt_val": num_val[1]}


def describe(subject: Subject, rows: list[dict[str, float]], counts: dict[str, int | None]) -> dict[str, Any]:
    """Accuracies and protocol, as linear.json holds them: the same for every run of the same command."""
    args = subject.args
    training = {
        "mode": "fast: cached features of un-augmented images" if args.fast else "random resized crops and flips",
        "epochs": args.epochs,
        "optimizer": f"SGD, momentum {MOMENTUM}, no weight decay, cosine to 0",
        "lr_scale": f"batch / {REFERENCE_BATCH}",
        "global_batch_size": subject.global_batch_size,
        "seed": args.seed,
    }
    return {
        "evaluation": "linear probe",
        "best": max(rows, key=lambda row: row["top1"]),
        "selection": SELECTION if len(rows) > 1 else "one learning rate: nothing was chosen",
        "results": rows,
        "training": {"mode": "none: saved probes"} if args.evaluate else training,
        "encoder": subject.evaluated.record,
        "feature": {
            "name": "class tokens of the last layers"
            if subject.encoder.is_vanilla
            else "class tokens, then the encoding",
            "n_last_blocks": args.n_last_blocks,
            "avgpool_patchtokens": args.avgpool_patchtokens,
            "dim": subject.feature_dim,
            "precision": args.precision,
        },
        "images": {"data_path": args.data_path, "num_classes": subject.num_classes, **counts},
        "view": view_record(subject.transform),
        "versions": versions(),
    }


def table(result: dict[str, Any]) -> str:
    """Accuracies for people."""
    rows = result["results"]
    head = f"{'lr':>8}  {'top-1 %':>8}  {'top-5 %':>8}  {'loss':>8}"
    has_peaks = "max_top1" in rows[0]
    lines = [head + ("  max top-1 % (epoch)" if has_peaks else "")]
    for row in rows:
        line = f"{row['lr']:>8g}  {row['top1']:>8.2f}  {row['top5']:>8.2f}  {row['loss']:>8.4f}"
        lines.append(line + (f"  {row['max_top1']:>10.2f} ({row['max_top1_epoch'] + 1})" if has_peaks else ""))
    best = result["best"]
    lines.append(f"best: lr {best['lr']:g}, top-1 {best['top1']:.2f} % ({result['selection']})")
    if "mode" in result["training"]:
        lines.append(f"training: {result['training']['mode']}")
    return "\n".join(lines)

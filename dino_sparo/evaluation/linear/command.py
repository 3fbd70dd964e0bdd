"""Encoder and labelled images -> linear probes, one per learning rate, or read-outs on the frozen tokens.

    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --lr 0.001 0.01 0.1
    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --fast
    python eval_linear.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet --probe linear sparo ep

The encoder runs once for all learning rates. Writes linear_WEIGHTS_DATA.json with the accuracies, and the probes as
.pth, from which the same command resumes. With --probe (`attentive.py`), writes probes_WEIGHTS_DATA.json and .pth, and
for each read-out an encoder, probe_NAME_WEIGHTS_DATA.pth. Options as in facebookresearch/dino.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
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

from dino_sparo.data.crops import FLIP_PROBABILITY, normalized_tensor, sample_box
from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.sources.image_source import fingerprint_of
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.features import Features, image_counts, require_memory
from dino_sparo.evaluation.linear import attentive, probe
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import world_size
from dino_sparo.weights.file import load_strictly
from dino_sparo.weights.released import release_of, released_file, take_released_weights
from dino_sparo.weights.results import Score

LAYERS = 4  # of a vision transformer that a linear probe reads by default
# Default epochs and learning rates; for read-outs those of efficient probing, whose search starts at 0.1.
LINEAR_TRAINING = (100, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
READOUT_TRAINING = (90, [0.1, 0.2, 0.5, 1.0])
WARMUP_SHARE = 1 / 9  # 10 of 90 epochs
SELECTION = "the best learning rate was chosen on the validation images themselves, so its accuracy is optimistic"
PROBE_SCALE = (0.08, 1.0)  # share of the image's area in a training crop
FEATURE_OPTIONS = ("n_last_blocks", "avgpool_patchtokens", "exif", "fast_views", "precision")

Counts = Mapping[str, int | None]  # numbers of images, None: unknown


class ProbeAugmentation:
    """Image -> one view to train a probe on: a random box, resized, flipped with probability 1/2, normalised."""

    def __init__(
        self,
        img_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    ) -> None:
        self.img_size, self.mean, self.std, self.interpolation = img_size, mean, std, interpolation

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> list[Float[Tensor, "C img_size img_size"]]:
        """A list of one view, drawn with `rng`."""
        box = sample_box(rng, image.height, image.width, PROBE_SCALE)
        crop = TF.resized_crop(image, *box, [self.img_size, self.img_size], self.interpolation)
        if rng.random() < FLIP_PROBABILITY:
            crop = TF.hflip(crop)
        return [normalized_tensor(crop, self.mean, self.std)]


def probe_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Train and test probes, with --evaluate only test them, write the result, print the table."""
    take_released_weights(args)
    task = EncoderTask.start(args)
    defaults = READOUT_TRAINING if args.probe else LINEAR_TRAINING
    args.epochs, args.lr = args.epochs or defaults[0], args.lr or defaults[1]
    probed = ProbeTask(task)
    name = "probes" if args.probe else "linear"
    stem = f"{name}_evaluate" if args.evaluate else name
    file = task.open_result(stem, global_batch_size=probed.global_batch_size)
    saved = file.path.with_name(file.path.name.replace(stem, name, 1)).with_suffix(".pth")
    rows, counts = evaluate_saved(probed, saved_probes(args, saved, name)) if args.evaluate else train(probed, saved)
    result = describe(probed, rows, counts)
    best = attentive.best_of_each(rows) if args.probe else {"": result["best"]}
    headline = [Score(f"{kind} top-{n}".strip(), row[f"top{n}"]) for kind, row in best.items() for n in (1, 5)]
    return file.write(result, table(result), headline=headline)


class ProbeTask:
    """The features of a probe on top of an evaluation's task: what training and testing have in common.

    Attributes:
        encode: images (B, C, H, W) -> the probe's features (B, F).
        feature_dim: F.
        global_batch_size: training images per step.
        configs: with --probe, kind of a probe -> the configuration of its read-out; else empty.
        identity: plain values that tell whether saved probes belong to these features.
    """

    def __init__(self, task: EncoderTask) -> None:
        self.task, args = task, task.args
        record = task.subject.record  # opened before the images: wrong weights are refused first
        if args.num_labels not in (None, task.num_classes):
            raise UserError(f"--num_labels {args.num_labels}, but the images have {task.num_classes} classes")
        self.global_batch_size = args.batch_size_per_gpu * world_size()
        self.configs = attentive.probe_configs(task.encoder, args) if args.probe else {}
        # As in the reference: several layers of a vision transformer, the last layer of any other network.
        args.n_last_blocks = args.n_last_blocks or (LAYERS if args.probe or task.encoder.backbone.has_layers else 1)
        self.encode: Callable[[Tensor], Tensor] = partial(
            task.encoder.probe_features, n_last_blocks=args.n_last_blocks, avgpool_patchtokens=args.avgpool_patchtokens
        )
        with torch.inference_mode():
            if args.probe:
                self.token_shape = task.encoder.backbone(task.blank).shape[1:]
                self.encode = lambda images: task.encoder.backbone(images).flatten(1)
            self.feature_dim = self.encode(task.blank).shape[1]
        self.identity = {
            "weights": record["sha256"],
            "checkpoint_key": record["checkpoint_key"],
            "encoder_seed": record.get("seed"),
            **{f"encoder {name}": value for name, value in asdict(task.encoder.config).items()},
            **{name: getattr(args, name) for name in FEATURE_OPTIONS},
            "img_size": task.transform.img_size,
            "num_classes": task.num_classes,
            # No entry means all slots, so that probes of version 0.1 can be resumed.
            **({"slots": record["slots"]["slots"]} if "slots" in record else {}),
            **{f"probe {kind}": asdict(config) for kind, config in self.configs.items()},
        }

    def new_probes(self, num_rates: int) -> probe.Probes:
        """Probes with initial weights, one per learning rate and kind."""
        task, sizes = self.task, (self.task.num_classes, num_rates, self.task.args.seed)
        if self.configs:
            return attentive.ReadoutProbes(task.encoder, self.configs, self.token_shape, *sizes).to(task.device)
        return probe.LinearProbe(self.feature_dim, *sizes).to(task.device)

    def val_features(self) -> tuple[Features, dict[str, int]]:
        """This process' share of the validation features, and the numbers of images."""
        val = self.task.features(self.task.splits[1], self.encode)
        return val, image_counts(self.task.device, val=val)


def train(probed: ProbeTask, path: Path) -> tuple[list[dict[str, Any]], Counts]:
    """Train the probes, or resume the training at `path`; rows of the table, and the numbers of images."""
    task, args = probed.task, probed.task.args
    train_source, val_source = task.splits
    record = {
        **probed.identity,
        # Names and fingerprints, since an equal number of other images gives other probes.
        "train_images": [train_source.name, fingerprint_of(train_source)],
        "val_images": [val_source.name, fingerprint_of(val_source)],
        "num_train": len(train_source),
        "num_val": len(val_source),
        "lr": list(args.lr),
        "global_batch_size": probed.global_batch_size,
        **{name: getattr(args, name) for name in ("epochs", "fast", "val_freq", "seed")},
        **({"warmup_epochs": warmup_epochs(args)} if args.probe else {}),
    }
    probes, scaled = probed.new_probes(len(args.lr)), probe.scaled_learning_rates(args.lr, probed.global_batch_size)
    optimizer: attentive.ProbeLARS | probe.ProbeSGD = probe.ProbeSGD(probes, scaled)
    if isinstance(probes, attentive.ReadoutProbes):
        optimizer = attentive.ProbeLARS(probes, probes.rates(scaled))
    run = probe.ProbeRun(probes, optimizer, [*args.lr] * max(len(probed.configs), 1), args.epochs, record, path)
    run.resume(args.overwrite)
    if run.epoch < args.epochs:
        val, num_val = probed.val_features()
        batches, num_train = training_batches(probed)
        run.counts = {**num_train, **num_val}
        if args.probe:
            num_steps = len(probe.ProbeSampler(int(num_train["num_train"] or 0), args.batch_size_per_gpu))
            run.factors = lambda epoch: attentive.warmup_cosine(epoch, args.epochs, warmup_epochs(args), num_steps)
        run.train(batches, val, args.val_freq)
    rows = run.table()
    if isinstance(probes, attentive.ReadoutProbes):
        attentive.save_readouts(probes, rows, task.subject, path)
    return rows, run.counts


def warmup_epochs(args: argparse.Namespace) -> float:
    """Epochs of warm-up of the read-outs, by default the share of efficient probing."""
    number = args.epochs * WARMUP_SHARE if args.warmup_epochs is None else args.warmup_epochs
    if number >= args.epochs:
        raise UserError(f"--warmup_epochs {number:g} leaves nothing of --epochs {args.epochs}; give a smaller number")
    return float(number)


def training_batches(probed: ProbeTask) -> tuple[Callable[[int], probe.Batches], Counts]:
    """Epoch -> batches of features, cached with --fast, else of augmented images; and the numbers of images."""
    task, args = probed.task, probed.task.args
    source = task.splits[0]
    if args.fast:
        require_memory(len(source), probed.feature_dim, task.storage)
        train = task.features(source, probed.encode, gather=True)
        batches = probe.cached_batches(train, task.device, batch_size=args.batch_size_per_gpu, seed=args.seed)
        return batches, {"num_train": len(train.features), "num_corrupt_train": train.num_corrupt}
    augmentation = ProbeAugmentation(task.transform.img_size, task.subject.mean, task.subject.std)
    dataset = ImageDataset(source, augmentation, seed=args.seed)  # crops depend on seed, epoch and image alone
    loader = task.loader(dataset, probe.ProbeSampler(len(source), args.batch_size_per_gpu, args.seed))
    batches = probe.live_batches(task.encoder, probed.encode, loader, task.device, task.dtype)
    # Unreadable images are replaced by their neighbours when they are read, so their number is unknown.
    return batches, {"num_train": len(source), "num_corrupt_train": None}


def saved_probes(args: argparse.Namespace, path: Path, name: str) -> Path:
    """The probes to test: those of the same data, else NAME.pth, such as the reference's, else the only ones.

    Without any, released weights have the linear head that DINO's authors released.
    """
    found = [*(p for p in (path, path.with_name(f"{name}.pth")) if p.is_file())] or [*path.parent.glob(f"{name}_*.pth")]
    release = release_of(args.pretrained_weights)
    if not found and release and release.has_classifier:
        return released_file(args.pretrained_weights, "linearweights")
    return found[0] if len(found) == 1 or path in found else path


def evaluate_saved(probed: ProbeTask, path: Path) -> tuple[list[dict[str, Any]], Counts]:
    """Test the probes at `path`, or the reference's linear head, on the validation images."""
    task, weights, rates = probed.task, None, [math.nan]
    if not probed.configs:
        weights = probe.reference_heads(path, task.args.avgpool_patchtokens)
    if weights is None:
        state = probe.load_heads(path)
        probe.check_same_record(state["record"], probed.identity, path)
        weights, rates = state["state_dict"], state["learning_rates"]
    probes = probed.new_probes(len(rates) // max(len(probed.configs), 1))
    load_strictly(probes, weights, str(path))
    val, counts = probed.val_features()
    accuracies = probe.probe_accuracy(probes, val.features, val.labels)
    pairs = enumerate(zip(rates, accuracies, strict=True))
    return [{**probes.describe(index), "lr": rate, **accuracy} for index, (rate, accuracy) in pairs], counts


def describe(probed: ProbeTask, rows: list[dict[str, Any]], counts: Counts) -> dict[str, Any]:
    """Accuracies and protocol, for the result."""
    task, args = probed.task, probed.task.args
    optimizer, schedule = ("LARS", "warm-up, cosine") if args.probe else ("SGD", "cosine")
    training = {
        "mode": "fast: cached features of un-augmented images" if args.fast else "random resized crops and flips",
        "epochs": args.epochs,
        "optimizer": f"{optimizer}, momentum {probe.MOMENTUM}, no weight decay, {schedule} to 0",
        **({"warmup_epochs": warmup_epochs(args)} if args.probe else {}),
        "lr_scale": f"batch / {probe.REFERENCE_BATCH}",
        "global_batch_size": probed.global_batch_size,
        "seed": args.seed,
    }
    if args.probe:
        sizes = ("readout", "num_slots", "slot_dim", "key_dim")
        readouts = {kind: {name: getattr(config, name) for name in sizes} for kind, config in probed.configs.items()}
        tokens = list(probed.token_shape)
        feature: dict[str, Any] = {"name": "tokens of the last layer", "tokens": tokens, "readouts": readouts}
    else:
        name = "class tokens of the last layers" if task.encoder.is_vanilla else "class tokens, then the encoding"
        layers = {"n_last_blocks": args.n_last_blocks, "avgpool_patchtokens": args.avgpool_patchtokens}
        feature = {"name": name, **layers, "dim": probed.feature_dim}
    return {
        "evaluation": "attentive probes" if args.probe else "linear probe",
        "best": max(rows, key=lambda row: row["top1"]),
        "selection": SELECTION if len(rows) > 1 else "one learning rate: nothing was chosen",
        "results": rows,
        "training": {"mode": "none: saved probes"} if args.evaluate else training,
        "feature": {**feature, "precision": args.precision},
        **task.images_record(**counts),
    }


def table(result: dict[str, Any]) -> str:
    """Accuracies for the terminal; of attentive probes the best of each kind, with the number of trained parameters."""
    best, training = result["best"], f"training: {result['training']['mode']}"
    if "probe" in best:
        rows = [("probe", "parameters", "of read-out", "lr", "top-1 %", "top-5 %")]
        for kind, row in attentive.best_of_each(result["results"]).items():
            numbers = f"{row['parameters']:,}", f"{row['readout_parameters']:,}", f"{row['lr']:g}"
            rows.append((kind, *numbers, f"{row['top1']:.2f}", f"{row['top5']:.2f}"))
        return "\n".join([text_table(rows, num_words=1), result["selection"], training])
    lines: list[tuple[str, ...]] = [("lr", "top-1 %", "top-5 %", "loss", "max top-1 % (epoch)")]
    for row in result["results"]:
        peak = f"{row['max_top1']:.2f} ({row['max_top1_epoch'] + 1})" if "max_top1" in row else "-"
        lines.append((f"{row['lr']:g}", f"{row['top1']:.2f}", f"{row['top5']:.2f}", f"{row['loss']:.4f}", peak))
    summary = f"best: lr {best['lr']:g}, top-1 {best['top1']:.2f} % ({result['selection']})"
    return "\n".join([text_table(lines), summary, training])

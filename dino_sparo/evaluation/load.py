"""Checkpoint -> the encoder to evaluate, its images' normalisation, and the record that a result file keeps of it.

`task.py` is where every evaluation starts; this file loads one encoder for it, trained or not.
"""

import argparse
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.runtime.choices import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.runtime.records import file_sha256
from dino_sparo.weights.checkpoint import activation_of, encoder_of, load_checkpoint, network_name, normalization_of

logger = logging.getLogger(__name__)

OTHER_SEED = 1_000_003  # far from the seeds of runs: an untrained encoder of a run's seed equals the run's start


@dataclass(frozen=True)
class Subject:
    """An encoder to evaluate, and what a result file says about it.

    Attributes:
        encoder: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: of these pixels.
        record: plain values: weights, hash, key, epoch, architecture.
    """

    encoder: Encoder
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]


def trained_encoder(
    pretrained_weights: str,
    checkpoint_key: str = "teacher",
    arch: str | None = None,
    patch_size: int | None = None,
    quick_gelu: bool = False,
) -> Subject:
    """The encoder of one of our checkpoints, or of the reference's; the last three options describe foreign weights."""
    if not pretrained_weights:
        raise ValueError(
            "--pretrained_weights is empty: there is nothing to evaluate; give the path of a checkpoint, or ask for a "
            "random encoder with --untrained"
        )
    checkpoint = load_checkpoint(pretrained_weights)
    encoder = encoder_of(checkpoint, str(pretrained_weights), checkpoint_key, arch, patch_size, quick_gelu)
    record = {
        "pretrained_weights": str(pretrained_weights),
        "sha256": file_sha256(Path(pretrained_weights)),
        "checkpoint_key": network_name(checkpoint, checkpoint_key),
        "epoch": checkpoint.get("epoch"),
        "untrained": False,
        **asdict(encoder.config),
    }
    return Subject(encoder, *normalization_of(checkpoint), record)


def untrained_encoder(
    config: EncoderConfig, seed: int, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> Subject:
    """A randomly initialised encoder: the baseline before any training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = encoder_from_config(config).eval()
    unknown = dict.fromkeys(("pretrained_weights", "sha256", "checkpoint_key", "epoch"))
    return Subject(encoder, mean, std, {**unknown, "untrained": True, "seed": seed, **asdict(config)})


def compared_encoder(path: str, args: argparse.Namespace) -> Subject:
    """The encoder of a second checkpoint; options of foreign weights apply if it does not describe itself."""
    is_foreign = path and activation_of(load_checkpoint(path)) is None
    overrides = (args.arch, args.patch_size, args.quick_gelu) if is_foreign else ()
    return trained_encoder(path, args.checkpoint_key, *overrides)


def encoder_of_options(args: argparse.Namespace) -> Subject:
    """The encoder that the options of a command name; options that a command lacks take `EncoderConfig`'s defaults.

    With --untrained a checkpoint only says how to build the encoder; without a checkpoint the options do.
    """
    given = vars(args)
    if args.pretrained_weights and (readout := given.get("readout")):
        raise ValueError(
            f"--readout {readout} beside --pretrained_weights: a checkpoint has a read-out of its own; leave out one"
        )
    seed = given.get("seed", 0)
    if args.untrained:
        logger.warning("the encoder is untrained: random weights from seed %d", seed)
    if args.pretrained_weights or not args.untrained:
        trained = trained_encoder(
            args.pretrained_weights, args.checkpoint_key, args.arch, args.patch_size, args.quick_gelu
        )
        if not args.untrained:
            return trained
        return untrained_encoder(trained.encoder.config, seed, trained.mean, trained.std)
    architecture = {name: given.get(name) for name in ("arch", "patch_size", "readout", "img_size")}
    config = EncoderConfig(**{name: value for name, value in architecture.items() if value is not None})
    return untrained_encoder(config, seed)


def view_record(transform: Any) -> dict[str, Any]:
    """Resizing, cropping and normalisation of an `EvalTransform`, sizes in pixels, for a result file."""
    return {
        "resize": transform.resize_size,
        "crop": transform.img_size,
        "exact": transform.exact,
        "interpolation": "bicubic",
        "mean": list(transform.mean),
        "std": list(transform.std),
    }

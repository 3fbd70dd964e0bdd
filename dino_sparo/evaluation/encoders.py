"""Options -> the encoder of an evaluation: trained, untrained, or a second encoder to compare with."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD, MAX_VALUE
from dino_sparo.data.views import PatchView
from dino_sparo.models.backbone import default_patch_size
from dino_sparo.models.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.checkpoint import load_checkpoint, weights_sha256
from dino_sparo.weights.encoder import encoder_of
from dino_sparo.weights.entries import activation_of, max_value_of, network_name, normalization_of
from dino_sparo.weights.options import foreign_options

logger = logging.getLogger(__name__)

OTHER_SEED = 1_000_003  # far from the seeds of runs, since an untrained encoder of a run's seed equals the run's start


@dataclass(frozen=True)
class EvaluatedEncoder:
    """The subject of an evaluation: an encoder, the mean and std of its images, and its entry in a result file.

    Attributes:
        encoder: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: of these pixels.
        record: the entry `encoder` of a result file, plain values: weights, hash, key, epoch, architecture.
        max_value: value of 16-bit images that was white in training.
    """

    encoder: Encoder
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]
    max_value: int = MAX_VALUE

    def patch_view(self, image_size: Sequence[int] | None, **options: Any) -> PatchView:
        """The view of an image for attention maps; `options` are those of `PatchView`.

        The default is twice the image size of the training: with four times the patches, maps show parts of objects.
        The reference shows 480 pixels to a model trained at 224, for the same reason.
        """
        config = self.encoder.config
        return PatchView(image_size or [2 * config.img_size], config.patch_size, self.mean, self.std, **options)


def trained_encoder(pretrained_weights: str, checkpoint_key: str = "teacher", **foreign: Any) -> EvaluatedEncoder:
    """The encoder of a checkpoint; `foreign` are options that describe foreign weights, see `foreign_options`."""
    if not pretrained_weights:
        raise UserError("--pretrained_weights is empty; give the path of a checkpoint, or --untrained")
    checkpoint = load_checkpoint(pretrained_weights)
    encoder = encoder_of(checkpoint, str(pretrained_weights), checkpoint_key, **foreign)
    record = {
        "pretrained_weights": str(pretrained_weights),
        "sha256": weights_sha256(pretrained_weights),
        "checkpoint_key": network_name(checkpoint, checkpoint_key),
        "epoch": checkpoint.get("epoch"),
        "untrained": False,
        **asdict(encoder.config),
    }
    return EvaluatedEncoder(encoder, *normalization_of(checkpoint), record, max_value_of(checkpoint))


def untrained_encoder(
    config: EncoderConfig, seed: int, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> EvaluatedEncoder:
    """A randomly initialised encoder, as a baseline."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = encoder_from_config(config).eval()
    unknown = dict.fromkeys(("pretrained_weights", "sha256", "checkpoint_key", "epoch"))
    return EvaluatedEncoder(encoder, mean, std, {**unknown, "untrained": True, "seed": seed, **asdict(config)})


def compared_encoder(path: str, args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder of a second checkpoint; if it is foreign, the options of foreign weights describe it."""
    is_foreign = path and activation_of(load_checkpoint(path)) is None
    return trained_encoder(path, args.checkpoint_key, **(foreign_options(args) if is_foreign else {}))


def encoder_of_options(args: argparse.Namespace) -> EvaluatedEncoder:
    """The encoder that the options of a command name.

    With --untrained, the checkpoint or else the options give only the architecture. If a command has no such option,
    the default of `EncoderConfig` applies.
    """
    given = vars(args)
    if args.pretrained_weights and (readout := given.get("readout")):
        raise UserError(f"--readout {readout} beside --pretrained_weights: a checkpoint has a read-out of its own")
    seed = given.get("seed", 0)
    if args.untrained:
        logger.warning("the encoder is untrained: random weights from seed %d", seed)
    if args.pretrained_weights or not args.untrained:
        trained = trained_encoder(args.pretrained_weights, args.checkpoint_key, **foreign_options(args))
        if not args.untrained:
            return trained
        untrained = untrained_encoder(trained.encoder.config, seed, trained.mean, trained.std)
        return replace(untrained, max_value=trained.max_value)
    architecture: dict[str, Any] = {name: given.get(name) for name in ("arch", "readout")}
    architecture["patch_size"] = args.patch_size or default_patch_size(args.arch or EncoderConfig.arch)
    if isinstance(given.get("img_size"), int):  # a list is the size of a picture
        architecture["img_size"] = given["img_size"]
    config = EncoderConfig(**{name: value for name, value in architecture.items() if value is not None})
    return untrained_encoder(config, seed)

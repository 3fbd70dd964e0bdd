"""Weights <-> files: atomic saving, strict loading, encoders rebuilt from what the checkpoint says.

Stage 5 of the map. A checkpoint is a dict of plain values and tensors, read without running any code in it:

    student, teacher    flat weights, `backbone.*`, `readout.*`, `head.*`
    encoder             how the encoder was built (`EncoderConfig`), and the mean and std of its images
    optimizer, dino_loss, fp16_scaler (fp16 only), epoch (finished epochs), step, args (options), best_knn, versions
    ranks               per process: its random numbers and its part of the running epoch's means

A `CheckpointFolder` holds the last few of them, each written whole or not at all, and finds the newest that is sound.

The names are the reference's where it has one, so its scripts read our `--readout cls` checkpoints, and `load_encoder`
reads the reference's: full checkpoints, and raw ViT weights. `export.py` writes an encoder as safetensors, which are
read wherever a checkpoint is; `initialize_encoder` starts an encoder from another's weights.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dino_sparo.backbone import ARCHITECTURES, Backbone
from dino_sparo.data import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.encoder import Encoder, EncoderConfig, encoder_from_config

logger = logging.getLogger(__name__)

NUM_NAMES_SHOWN = 8  # of the keys that do not match

# The reference's checkpoints hold their options as a Namespace, whose output_dir is a Path if they were trained through
# submitit, and numpy numbers in the optimizer. These types only hold values; everything else is refused.
_numpy_scalar = np.float64(0).__reduce__()[0]
PLAIN_TYPES = [
    argparse.Namespace,
    (pathlib.PosixPath, "pathlib.PosixPath"),
    (pathlib.PosixPath, "pathlib._local.PosixPath"),
    np.dtype,
    type(np.dtype(np.float64)),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: damaged, unsafe, or of another model."""


def save_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint so that `path` always holds a whole one, the old or the new.

    Written to a file beside it, flushed to the disk, then renamed over it.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    # One name, so that the remains of a killed save are overwritten by the next; only rank 0 writes.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(dict(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        kept = "the checkpoint before it is kept" if path.exists() else "there was none before it"
        raise CheckpointError(f"could not write {path} ({error}); {kept}; free some space and start again") from error


def copy_checkpoint(path: Path, copy: Path) -> None:
    """Keep a checkpoint under a second name as well, at no cost where the file system has hard links.

    Raises:
        CheckpointError: the copy cannot be written.
    """
    temporary = copy.with_name(f".{copy.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, copy)
    except OSError as error:
        raise CheckpointError(f"could not write {copy} ({error}); {path} is whole; free some space") from error


def _sync_folder(folder: Path) -> None:
    """Make a renaming survive a power cut, where folders can be flushed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class CheckpointFolder:
    """The checkpoints of a run: `checkpoint.pth`, the newest, and the ones before it, `checkpoint_previous1.pth`, ...

    Args:
        folder: an existing folder.
        keep: how many there are, the newest included.
        name: of the newest.
    """

    def __init__(self, folder: Path, keep: int = 3, name: str = "checkpoint") -> None:
        self.folder, self.keep, self.name = folder, keep, name
        self.newest = folder / f"{name}.pth"

    def previous(self, number: int) -> Path:
        """The path of the checkpoint `number` saves before the newest."""
        return self.folder / f"{self.name}_previous{number}.pth" if number else self.newest

    def save(self, checkpoint: Mapping[str, Any], copies: Iterable[str] = ()) -> None:
        """Write a checkpoint; the ones before it move one place back, and the oldest goes.

        Killed at any point, this leaves whole checkpoints only, `checkpoint.pth` among them if there was one.

        Args:
            checkpoint: what to write.
            copies: names of files that later saves do not overwrite.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; the old files are untouched.
        """
        if self.newest.is_file():
            for number in range(self.keep - 1, 1, -1):
                if self.previous(number - 1).is_file():
                    copy_checkpoint(self.previous(number - 1), self.previous(number))
            if self.keep > 1:
                copy_checkpoint(self.newest, self.previous(1))
        save_checkpoint(checkpoint, self.newest)
        for copy in copies:
            copy_checkpoint(self.newest, self.folder / copy)

    def find(self) -> Path | None:
        """The newest checkpoint whose bytes are those that were written; damaged ones are named and set aside.

        Raises:
            CheckpointError: there are checkpoints, but none of them is sound.
        """
        candidates = [path for number in range(max(self.keep, 1)) if (path := self.previous(number)).is_file()]
        candidates += sorted(set(self.folder.glob(f"{self.name}_previous*.pth")) - set(candidates))
        reasons = []
        for path in candidates:
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                reasons.append((path, str(error)))
                continue
            # Out of the way: the next save must not push a sound one out to keep a damaged one.
            for damaged, reason in reasons:
                os.replace(damaged, damaged.with_name(f"{damaged.name}.damaged"))
                logger.error("%s; it is %s.damaged now, and the run goes on from %s", reason, damaged.name, path)
            return path
        if reasons:
            told = "; ".join(reason for _, reason in reasons)
            raise CheckpointError(f"{told}; none is left to go on from. Choose another --output_dir")
        return None


def verify_checkpoint(path: Path) -> None:
    """Compare a .pth file's bytes with the checksums in it, a CRC-32 of every part; `unzip -t` does the same.

    Raises:
        CheckpointError: the file is truncated, or bytes of it have changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged archive raises whatever its bytes lead to
        raise CheckpointError(
            f"{path} is truncated or no checkpoint ({path.stat().st_size} bytes; {type(error).__name__} {error})"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of its part {damaged} is wrong")


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the random number generators that a process could use, as plain values and tensors."""
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [str(numpy_name), torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)), *numpy_rest],
        "python": [version, list(internal), gauss],
    }
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU without running code from it.

    Args:
        path: a .pth file, or a .safetensors file, whose weights then stand at the top of the dict, as raw weights do,
            beside what the .json file of the same name says (`encoder`, `epoch`, ...), if there is one.

    Raises:
        CheckpointError: no such file; a file that is truncated or no checkpoint; a pickle that asks for code to run.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; give the path of a .pth file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        with torch.serialization.safe_globals(PLAIN_TYPES):  # type: ignore[arg-type]
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        unsafe = _unsafe_name(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if unsafe is not None:
            raise CheckpointError(
                f"{path} was refused: reading it would run code ({unsafe}); only plain values and tensors are read"
            ) from error
        reason = (str(error).split("WeightsUnpickler error: ")[-1].splitlines() or [""])[0]
        raise CheckpointError(
            f"{path} is truncated or no checkpoint ({path.stat().st_size} bytes; {type(error).__name__} {reason})"
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} holds a {type(checkpoint).__name__}, not a dict of weights")
    return checkpoint


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Weights of a safetensors file, and what the JSON beside it says about them."""
    description = path.with_suffix(".json")
    try:
        said = json.loads(description.read_text(encoding="utf-8")) if description.is_file() else {}
        return {**said, **load_file(path)}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error})") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{description} does not describe the weights beside it ({error})") from error


def _unsafe_name(message: str) -> str | None:
    """The name torch refused to load or call, out of its long message; None if it complains about something else."""
    found = re.search(r"(?:GLOBAL |add_safe_globals`,? but got |unrecognized function )(<[^>]+>|[^\s,;]+)", message)
    return found and found[1]


def flat_weights(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights under our names, whoever saved them.

    Takes off DDP's `module.`, and puts a raw ViT's `blocks.*`, `cls_token`, ... below `backbone.`. Entries that are no
    tensors are dropped.
    """
    plain = {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, Tensor)}
    if any(name.startswith("backbone.") for name in plain):
        return plain
    return {name if name.startswith("head.") else f"backbone.{name}": value for name, value in plain.items()}


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights if every name and shape fits, else say what does not.

    Raises:
        CheckpointError: with the counts and the first names of missing, unexpected and differently shaped weights.
    """
    wanted = module.state_dict()
    missing, unexpected = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    misshapen = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & weights.keys())
        if weights[name].shape != wanted[name].shape
    ]
    problems = [
        f"{len(names)} {kind}: {_shortened(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"the weights of {source} do not fit the model; " + "; ".join(problems))
    module.load_state_dict(dict(weights))


def _shortened(names: list[str]) -> str:
    rest = len(names) - NUM_NAMES_SHOWN
    return ", ".join(names[:NUM_NAMES_SHOWN]) + (f", ... and {rest} more" if rest > 0 else "")


def encoder_description(
    config: EncoderConfig, mean: Iterable[float] = IMAGENET_MEAN, std: Iterable[float] = IMAGENET_STD
) -> dict[str, Any]:
    """What a checkpoint carries under `encoder`."""
    return {**asdict(config), "mean": list(mean), "std": list(std)}


def infer_config(
    weights: Mapping[str, Tensor], arch: str | None = None, patch_size: int | None = None
) -> EncoderConfig:
    """How an encoder was built, from the shapes of a foreign ViT's weights.

    Args:
        weights: under our names.
        arch: overrides the architecture found from width and number of blocks.
        patch_size: overrides the patch size found from the patch projection.

    Raises:
        CheckpointError: these are no ViT's weights, or of no known architecture.
    """
    embed_dim, in_chans, kernel, grid_size = _patch_sizes(weights)
    depth = _num_blocks(weights)
    found = [name for name, size in ARCHITECTURES.items() if (size.embed_dim, size.depth) == (embed_dim, depth)]
    if arch is None and not found:
        known = ", ".join(f"{name} ({size.embed_dim}, {size.depth})" for name, size in ARCHITECTURES.items())
        raise CheckpointError(
            f"no architecture has width {embed_dim} and {depth} blocks; known are {known}. If blocks are missing from "
            f"the file, name the architecture with --arch"
        )
    patch_size = patch_size or kernel
    return EncoderConfig(
        arch=arch or found[0],
        patch_size=patch_size,
        readout="cls",
        img_size=grid_size * patch_size,
        in_chans=in_chans,
        pre_norm="backbone.norm_pre.weight" in weights,
    )


def _patch_sizes(weights: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """Width, channels, patch side in pixels and grid side in patches of a ViT, from its weights."""
    projection, positions = weights.get("backbone.patch_embed.proj.weight"), weights.get("backbone.pos_embed")
    if projection is None or positions is None or projection.ndim != 4:
        raise CheckpointError(
            "these are not the weights of a vision transformer: patch_embed.proj.weight or pos_embed is missing among "
            + _shortened(sorted(weights))
        )
    embed_dim, in_chans, _, kernel = projection.shape
    return embed_dim, in_chans, kernel, math.isqrt(positions.shape[1] - 1)


def _num_blocks(weights: Iterable[str]) -> int:
    return 1 + max((_block(name) for name in weights), default=-1)


def _block(name: str) -> int:
    """The number of the block that a weight belongs to, -1 for those of none."""
    return int(name.split(".")[2]) if name.startswith("backbone.blocks.") else -1


def describe_encoder(
    checkpoint: Mapping[str, Any], weights: Mapping[str, Tensor], arch: str | None = None, patch_size: int | None = None
) -> dict[str, Any]:
    """How the encoder in a checkpoint was built: what it says itself, or what its weights tell.

    Returns:
        The fields of `EncoderConfig`, and `mean` and `std` of its images.
    """
    said = checkpoint.get("encoder")
    if said is None:
        return encoder_description(infer_config(weights, arch, patch_size))
    overrides = {key: value for key, value in (("arch", arch), ("patch_size", patch_size)) if value is not None}
    return {**said, **overrides}


def load_encoder(
    path: str | Path, which: str = "teacher", arch: str | None = None, patch_size: int | None = None
) -> Encoder:
    """The encoder of a checkpoint, built as the checkpoint says, in eval mode, on the CPU.

    Args:
        path: one of our checkpoints, or a full checkpoint or raw ViT weights of the reference.
        which: `teacher` or `student`; raw weights have neither and are taken as they are.
        arch: overrides the architecture, for foreign weights.
        patch_size: overrides the patch size, for foreign weights.

    Raises:
        CheckpointError: the file cannot be read, has no such key, or its weights do not fit.
    """
    return encoder_of(load_checkpoint(path), str(path), which, arch, patch_size)


def encoder_of(
    checkpoint: Mapping[str, Any], source: str, which: str, arch: str | None = None, patch_size: int | None = None
) -> Encoder:
    """`load_encoder` for a checkpoint that has been read from `source` already."""
    weights = encoder_weights(checkpoint, which, source)
    description = describe_encoder(checkpoint, weights, arch, patch_size)
    encoder = encoder_from_config(EncoderConfig.from_dict(description))
    load_strictly(encoder, weights, f"{source} ({which})")
    logger.info("%s of %s: %s", which, source, encoder.config)
    return encoder.eval()


def load_normalization(path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of the images a checkpoint was trained on; ImageNet's where it does not say."""
    return normalization_of(load_checkpoint(path))


def normalization_of(checkpoint: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`load_normalization` for a checkpoint that has been read already."""
    said = checkpoint.get("encoder", {})
    return tuple(said.get("mean", IMAGENET_MEAN)), tuple(said.get("std", IMAGENET_STD))


def encoder_weights(checkpoint: Mapping[str, Any], which: str, source: str) -> dict[str, Tensor]:
    """The encoder's weights, without the head's.

    Raises:
        CheckpointError: the checkpoint has networks, but not `which`.
    """
    weights = network_weights(checkpoint, which, source)
    return {name: value for name, value in weights.items() if not name.startswith("head.")}


def network_weights(checkpoint: Mapping[str, Any], which: str, source: str) -> dict[str, Tensor]:
    """One network's weights under our names, the head's included; a file of raw weights is one network.

    Raises:
        CheckpointError: the checkpoint has networks, but not `which`.
    """
    networks = [key for key in ("teacher", "student") if isinstance(checkpoint.get(key), Mapping)]
    if networks and which not in networks:
        raise CheckpointError(f"{source} has no {which!r}; it has {', '.join(networks)}")
    return flat_weights(checkpoint[which] if networks else checkpoint)


def check_same_model(checkpoint: Mapping[str, Any], config: EncoderConfig, source: str) -> None:
    """Refuse to resume a checkpoint of another encoder.

    Raises:
        CheckpointError: names each field that differs.
    """
    said = checkpoint.get("encoder")
    if said is None:
        raise CheckpointError(
            f"{source} does not say how its encoder was built, so it cannot be resumed; choose another --output_dir"
        )
    saved = EncoderConfig.from_dict(said)
    if saved != config:
        differing = [
            f"{name} {getattr(saved, name)!r} in the checkpoint, {value!r} asked for"
            for name, value in asdict(config).items()
            if getattr(saved, name) != value
        ]
        raise CheckpointError(
            f"{source} holds another model: {'; '.join(differing)}. Give the same options, or another --output_dir"
        )


@dataclass(frozen=True)
class InitReport:
    """What `initialize_encoder` did, by names of weights.

    Attributes:
        source: the file.
        taken: weights that come from it.
        dropped: weights of it that have no place in the encoder.
        new: weights of the encoder that keep their random values.
        grids: sides in patches of the source's and of the encoder's position grid.
    """

    source: str
    taken: tuple[str, ...]
    dropped: tuple[str, ...]
    new: tuple[str, ...]
    grids: tuple[int, int]

    def __str__(self) -> str:
        before, after = self.grids
        resampled = f"; position embedding resampled from {before}x{before} to {after}x{after} patches"
        return (
            f"weights of {self.source}: taken {_parts(self.taken)}; dropped {_parts(self.dropped)}; new "
            f"{_parts(self.new)}{resampled if before != after else ''}"
        )


def _parts(names: Iterable[str]) -> str:
    """What weights belong to: `pos_embed, blocks 0-10, head.*`."""
    blocks = sorted({_block(name) for name in names} - {-1})
    text = f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}" if blocks else ""
    paths = [name.removeprefix("backbone.").split(".") for name in names]
    parts = [text if first == "blocks" else f"{first}.*" if rest else first for first, *rest in paths]
    return ", ".join(dict.fromkeys(parts)) or "nothing"


def initialize_encoder(encoder: Encoder, path: str | Path, which: str = "teacher") -> InitReport:
    """Start an encoder from the weights of another, in place.

    Taken is what has the same place in both: the blocks that both have, and a read-out of the same sizes. A ViT's last
    block is dropped where `sparo` stands in its place. Positions of another grid are resampled as the backbone does it
    for images of another size.

    Args:
        encoder: what to start; it says width, patch size and channels.
        path: one of our checkpoints, or a DINO or timm ViT state dict (.pth, .safetensors).
        which: `teacher` or `student`, of a checkpoint that holds both.

    Returns:
        What was taken, what was dropped and what is new.

    Raises:
        CheckpointError: the file cannot be read, or holds no ViT, or one of another width, patch size or make.
    """
    config, own = encoder.config, encoder.state_dict()
    weights = network_weights(load_checkpoint(path), which, str(path))
    if "backbone.norm.weight" not in own:  # the read-out has the last LayerNorm, or there is none
        weights = {name.replace("backbone.norm.", "readout.norm."): value for name, value in weights.items()}
    _check_same_make(weights, own, str(path))
    grid_size = _patch_sizes(weights)[-1]
    # A backbone without blocks, of the source's grid: it knows how to resample its positions.
    source = Backbone(
        ARCHITECTURES[config.arch], config.patch_size, grid_size * config.patch_size, config.in_chans, depth=0
    )
    source.pos_embed = nn.Parameter(weights["backbone.pos_embed"].float())
    weights["backbone.pos_embed"] = source.position_embedding(config.img_size, config.img_size).detach()
    taken = [name for name in own if name in weights and weights[name].shape == own[name].shape]
    # A read-out is taken whole or not at all: its queries mean nothing to other keys.
    if not all(name in taken for name in own if name.startswith("readout.")):
        taken = [name for name in taken if not name.startswith("readout.")]
    encoder.load_state_dict({**own, **{name: weights[name] for name in taken}})
    return InitReport(
        str(path),
        tuple(taken),
        dropped=tuple(name for name in weights if name not in taken),
        new=tuple(name for name in own if name not in taken),
        grids=(grid_size, config.img_size // config.patch_size),
    )


def _check_same_make(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights that are not of the encoder's kind of ViT, up to its number of blocks and its grid."""
    sizes, own_sizes = _patch_sizes(weights), _patch_sizes(own)
    for what, found, wanted in zip(
        ("width", "number of channels", "patch size"), sizes[:3], own_sizes[:3], strict=True
    ):
        if found != wanted:
            raise CheckpointError(
                f"{source} has {what} {found}, the encoder {wanted}; choose other weights, or build the encoder alike "
                f"(--arch, --patch_size)"
            )
    positions = tuple(weights["backbone.pos_embed"].shape)
    if positions != (1, sizes[-1] ** 2 + 1, sizes[0]):
        raise CheckpointError(
            f"{source} has positions {positions}; a square grid and one class token are what an encoder starts from"
        )
    depth = min(_num_blocks(weights), _num_blocks(own))
    found_names, wanted_names = (
        {name for name in names if name.startswith("backbone.") and _block(name) < depth} for names in (weights, own)
    )
    misshapen = {
        name for name in (found_names & wanted_names) - {"backbone.pos_embed"} if weights[name].shape != own[name].shape
    }
    strange = sorted(misshapen | (found_names ^ wanted_names))
    if strange:
        raise CheckpointError(
            f"{source} holds a ViT of another make: {len(strange)} weights are missing, unexpected or of another "
            f"shape, {_shortened(strange)}"
        )

"""Files -> weights: verified reading, strict loading, encoders rebuilt from what the checkpoint says.

A checkpoint is a dict of plain values and tensors, read without running any code in it:

    student, teacher       weights of DINO: `backbone.*`, `readout.*`, `head.*`
    dino_loss              DINO's centre
    encoder                how DINO's encoder was built (`EncoderConfig`), and the mean and std of its images
    model, clip            CLIP instead: the weights of both towers, and how they were built
    optimizer              its state; with fp16 `fp16_scaler` holds the scale of the gradients
    epoch, step            finished epochs, finished steps
    num_corrupt            unreadable images in the running epoch; CLIP also `num_truncated`, captions cut off
    best_knn               the highest 20-NN accuracy; CLIP: `best_zero_shot`
    ranks                  per process: its random numbers, and its part of the running epoch's means
    num_images             size of the data; CLIP: `num_pairs`
    global_batch           images per step over all processes
    steps_per_epoch        what a step's number is counted in
    args, versions         the options; versions of the packages

`checkpoint_folder.py` writes them.

The names are the reference's where it has one, so its scripts read our `--readout cls` checkpoints, and `load_encoder`
reads the reference's: full checkpoints, and raw ViT weights. `export.py` writes an encoder as safetensors, which are
read wherever a checkpoint is; `initialize.py` starts an encoder from another's weights. From a checkpoint of CLIP,
ours, OpenCLIP's or sparo-clip's, they take the image tower.
"""

import argparse
import logging
import math
import pathlib
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dino_sparo.choices import (
    ARCHITECTURES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from dino_sparo.crops import EvalTransform
from dino_sparo.encoder import Encoder, EncoderConfig, encoder_from_config
from dino_sparo.open_clip_names import Renamed, from_open_clip_names, is_open_clip
from dino_sparo.readout_table import readout_kind
from dino_sparo.runtime.records import differences
from dino_sparo.sources.limits import parse_json

logger = logging.getLogger(__name__)

IMAGE_TEXT_KEYS = ("clip", "oc_clip")  # how an image-text model was built; `model` has its weights
NUM_NAMES_SHOWN = 8  # of the keys that do not match
CHECKSUM_KEY = "dino_sparo.crc32"  # in the metadata of our .safetensors files: `weights_checksum`

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


def verify_checkpoint(path: Path) -> None:
    """Compare a .pth file's bytes with the checksums in it, a CRC-32 of every part; `unzip -t` does the same.

    Raises:
        CheckpointError: the file is truncated, or bytes of it have changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _require_stored(archive, path)
            damaged = archive.testzip()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive may raise any error
        raise _unreadable(path, error) from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of its part {damaged} is wrong")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error).split("WeightsUnpickler error: ")[-1].splitlines() or [""])[0]
    return CheckpointError(
        f"{path} is truncated or no checkpoint ({path.stat().st_size} bytes; {type(error).__name__} {reason})"
    )


def _require_stored(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive whose parts are larger in memory than in the file, before any memory is taken for them."""
    parts = archive.infolist()
    packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
    if packed or sum(part.file_size for part in parts) > path.stat().st_size:
        raise CheckpointError(
            f"{path} is compressed ({packed[0] if packed else 'parts share their bytes'}), so what it holds may be a "
            f"thousand times its size; unpack it and zip it again without compression (zip -0)"
        )


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


def load_checkpoint(path: str | Path, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint to the CPU, compare it with its checksums, and run no code from it.

    Checked are a .pth file's own checksums, which torch does not look at, and the one that our exports carry.
    torch's files of before 2020 and safetensors of others have none.

    Args:
        path: a .pth file, or a .safetensors file, whose weights then stand at the top of the dict, as raw weights do,
            beside what the .json file of the same name says (`encoder`, `epoch`, ...), if there is one.
        verify: False if `verify_checkpoint` has read the file a moment ago.

    Raises:
        CheckpointError: no such file; a file that is damaged, compressed or no checkpoint; a pickle that asks for code
            to run.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; give the path of a .pth file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    checkpoint = read_torch_file(path, verify)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} holds a {type(checkpoint).__name__}, not a dict of weights")
    return checkpoint


def read_torch_file(path: Path, verify: bool = True, mmap: bool = False) -> Any:
    """What `torch.save` wrote, on the CPU, of any type, verified as in `load_checkpoint`.

    Args:
        path: the file.
        verify: its checksums, if it has some.
        mmap: leave tensors in the file until they are used, where its format allows that.

    Raises:
        CheckpointError: the file is damaged, compressed or not torch's, or reading it would run code.
    """
    if _is_torchscript(path):
        raise CheckpointError(
            f"{path} is a TorchScript archive, which holds code and is not read. OpenAI's CLIP comes so; take its "
            f'weights out once: python -c "import open_clip, torch; torch.save(open_clip.load_openai_model('
            f"'{path}', device='cpu').state_dict(), 'weights.pt')\", and give weights.pt with --quick_gelu true"
        )
    try:
        checksums = _checksums(path)
        map_location: Any = partial(_require_checksum, checksums, path) if verify and checksums else "cpu"
        with torch.serialization.safe_globals(PLAIN_TYPES):  # type: ignore[arg-type]
            is_mapped = mmap and zipfile.is_zipfile(path)
            return torch.load(path, map_location=map_location, weights_only=True, mmap=is_mapped)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any error
        unsafe = _unsafe_name(str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if unsafe is not None:
            raise CheckpointError(
                f"{path} was refused: reading it would run code ({unsafe}); only plain values and tensors are read"
            ) from error
        raise _unreadable(path, error) from error


def _checksums(path: Path) -> set[tuple[int, int]]:
    """Size in bytes and CRC-32 of the parts of a .pth file that hold tensors; the small other parts are verified here.

    Empty for torch's format of before 2020, which has no checksums.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # as torch tells its formats apart
            return set()
    with zipfile.ZipFile(path) as archive:
        _require_stored(archive, path)
        for part in archive.infolist():
            if "/data/" not in part.filename:
                archive.read(part)  # raises if the checksum is wrong
        return {(part.file_size, part.CRC) for part in archive.infolist()}


def _require_checksum(
    checksums: set[tuple[int, int]], path: Path, storage: torch.UntypedStorage, location: str
) -> torch.UntypedStorage:
    """Called by torch for the bytes of each tensor once they are in memory: so no byte is read twice."""
    data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    if (storage.nbytes(), zlib.crc32(data)) not in checksums:
        raise CheckpointError(
            f"{path} is damaged: a tensor of {storage.nbytes()} bytes is not what was saved; copy the file again, or "
            f"take the checkpoint before it"
        )
    return storage


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """CRC-32 of weights with their names, types and shapes, in the order of their names, as 8 hexadecimal digits."""
    checksum = 0
    for name, value in sorted(weights.items()):
        checksum = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), checksum)
        data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def _is_torchscript(path: Path) -> bool:
    """Whether a file is what `torch.jit.save` writes: an archive with the constants of its code."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Weights of a safetensors file, and what the JSON beside it says about them."""
    description = path.with_suffix(".json")
    try:
        with safe_open(path, framework="pt") as file:
            checksum = (file.metadata() or {}).get(CHECKSUM_KEY)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error})") from error
    if checksum not in (None, actual := weights_checksum(weights)):
        raise CheckpointError(
            f"{path} is damaged: its weights have the checksum {actual}, not {checksum}; copy it again"
        )
    try:
        entries = parse_json(description.read_bytes()) if description.is_file() else {}
        return {**entries, **weights}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{description} does not describe the weights beside it ({error})") from error


def _unsafe_name(message: str) -> str | None:
    """The name torch refused to load or call, out of its long message; None if it complains about something else."""
    match = re.search(r"(?:GLOBAL |add_safe_globals`,? but got |unrecognized function )(<[^>]+>|[^\s,;]+)", message)
    return match and match[1]


def flat_weights(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights under our names, whoever saved them.

    Takes off DDP's `module.`, and puts a raw ViT's `blocks.*`, `cls_token`, ... below `backbone.`. LayerScale is
    multiplied into the layer before it. Entries that are no tensors are dropped, and so is DINOv2's token for masked
    patches.
    """
    plain = {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, Tensor)}
    plain = _without_layer_scale(plain)
    if any(name.startswith("backbone.") for name in plain):
        return plain
    return {name if name.startswith("head.") else f"backbone.{name}": value for name, value in plain.items()}


def _without_layer_scale(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same ViT without LayerScale: gamma * (W x + b) = (gamma W) x + gamma b. DINOv2's have it."""
    layers = {"ls1.gamma": "attn.proj", "ls2.gamma": "mlp.fc2"}
    folded = {name: value for name, value in weights.items() if name.rpartition(".")[2] != "mask_token"}
    for ending, layer in layers.items():
        for name in [name for name in folded if name.endswith(f".{ending}")]:
            stem = f"{name.removesuffix(ending)}{layer}"
            if not {f"{stem}.weight", f"{stem}.bias"} <= folded.keys():
                continue
            gamma = folded.pop(name)
            folded[f"{stem}.weight"] = gamma[:, None] * folded[f"{stem}.weight"]
            folded[f"{stem}.bias"] = gamma * folded[f"{stem}.bias"]
    return folded


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
        f"{len(names)} {kind}: {shortened(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"the weights of {source} do not fit the model; " + "; ".join(problems))
    module.load_state_dict(dict(weights))


def shortened(names: list[str]) -> str:
    """The first names of a list, and how many more there are, for messages."""
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
    embed_dim, in_chans, kernel, grid_size = patch_sizes(weights)
    depth, queries = num_blocks(weights), weights.get("readout.queries")
    # SPARO replaces the last block. If no architecture has that depth, it follows the last block.
    depths = [depth] if queries is None else [depth + 1, depth]
    names = {(size.embed_dim, size.depth): name for name, size in ARCHITECTURES.items()}
    fitting = [names[embed_dim, depth] for depth in depths if (embed_dim, depth) in names]
    if arch is None and not fitting:
        known = ", ".join(f"{name} ({size.embed_dim}, {size.depth})" for name, size in ARCHITECTURES.items())
        raise CheckpointError(
            f"no architecture has width {embed_dim} and {depth} blocks; known are {known}. If blocks are missing from "
            f"the file, name the architecture with --arch"
        )
    patch_size, arch = patch_size or kernel, arch or fitting[0]
    slots: dict[str, Any] = {"readout": "cls"}
    if queries is not None:
        (num_slots, key_dim), num_keys = queries.shape, len(weights["readout.key_proj.bias"])
        slots = {
            "readout": "sparo",
            "num_slots": num_slots,
            "slot_dim": len(weights["readout.value_proj.bias"]),
            "key_dim": key_dim,
            "group_size": num_slots * key_dim // num_keys,
            "replace_block": arch in ARCHITECTURES and ARCHITECTURES[arch].depth > depth,
        }
    return EncoderConfig(
        arch=arch,
        patch_size=patch_size,
        **slots,
        img_size=grid_size * patch_size,
        in_chans=in_chans,
        pre_norm="backbone.norm_pre.weight" in weights,
    )


def patch_sizes(weights: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """Width, channels, patch side in pixels and grid side in patches of a ViT, from its weights."""
    projection, positions = weights.get("backbone.patch_embed.proj.weight"), weights.get("backbone.pos_embed")
    if projection is None or positions is None or projection.ndim != 4:
        raise CheckpointError(
            "these are not the weights of a vision transformer: patch_embed.proj.weight or pos_embed is missing among "
            + shortened(sorted(weights))
        )
    embed_dim, in_chans, _, kernel = projection.shape
    return embed_dim, in_chans, kernel, math.isqrt(positions.shape[1] - 1)


def num_blocks(weights: Iterable[str]) -> int:
    """Blocks of a ViT, from the names of its weights."""
    return 1 + max((block_of(name) for name in weights), default=-1)


def block_of(name: str) -> int:
    """The number of the block that a weight belongs to, -1 for those of none."""
    return int(name.split(".")[2]) if name.startswith("backbone.blocks.") else -1


def describe_encoder(
    checkpoint: Mapping[str, Any], weights: Mapping[str, Tensor], arch: str | None = None, patch_size: int | None = None
) -> dict[str, Any]:
    """How the encoder in a checkpoint was built: as its entry says, or as the shapes of its weights show.

    Returns:
        The fields of `EncoderConfig`, and `mean` and `std` of its images.
    """
    pair = image_text_entry(checkpoint)
    entry = encoder_entry(checkpoint) if pair is None else _image_tower(pair)
    if entry is None:
        return encoder_description(infer_config(weights, arch, patch_size), *normalization_of(checkpoint))
    overrides = {key: value for key, value in (("arch", arch), ("patch_size", patch_size)) if value is not None}
    return {**entry, **overrides}


def encoder_entry(checkpoint: Mapping[str, Any], source: str = "the checkpoint") -> dict[str, Any] | None:
    """What a checkpoint says about its encoder under `encoder`; None if it says nothing.

    Args:
        checkpoint: what was read.
        source: its file, for messages.

    Raises:
        CheckpointError: the entry is not what `encoder_description` gives.
    """
    entry = checkpoint.get("encoder")
    if entry is None:
        return None
    try:
        if not isinstance(entry, dict):
            raise ValueError(f"a {type(entry).__name__}, not a dict")
        EncoderConfig.from_dict(entry)
        for name in ("mean", "std"):
            values = entry.get(name, IMAGENET_MEAN)
            if not isinstance(values, (list, tuple)) or not all(isinstance(value, (int, float)) for value in values):
                raise ValueError(f"{name} is {values!r}, not one number per channel")
    except ValueError as error:
        raise CheckpointError(
            f"{source} does not say under `encoder` how its encoder was built ({error}); save it again with the "
            f"version that wrote it, or give a file of weights alone"
        ) from error
    return entry


def load_encoder(
    path: str | Path, which: str = "teacher", arch: str | None = None, patch_size: int | None = None
) -> Encoder:
    """The encoder of a checkpoint, built as the checkpoint says, in eval mode, on the CPU.

    Its `transform` turns one PIL image, or a list of them, into the batch (B, 3, H, W) that it takes, with the mean and
    standard deviation of the checkpoint.

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
    encoder_entry(checkpoint, source)
    weights = encoder_weights(checkpoint, which, source)
    description = describe_encoder(checkpoint, weights, arch, patch_size)
    encoder = encoder_from_config(EncoderConfig.from_dict(description))
    network = which if which in checkpoint else "encoder"  # a CLIP and raw weights have neither teacher nor student
    load_strictly(encoder, weights, f"{source} ({network})")
    encoder.transform = EvalTransform(encoder.config.img_size, *normalization_of(checkpoint)).batch
    logger.info("%s of %s: %s", network, source, encoder.summary)
    return encoder.eval()


def normalization_of(checkpoint: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of the images a checkpoint was trained on; ImageNet's where it does not say."""
    entry = image_text_entry(checkpoint) or encoder_entry(checkpoint) or {}
    is_foreign_clip = not entry and is_open_clip(_top_weights(checkpoint))
    mean, std = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if is_foreign_clip else (IMAGENET_MEAN, IMAGENET_STD)
    return tuple(entry.get("mean", mean)), tuple(entry.get("std", std))


def encoder_weights(checkpoint: Mapping[str, Any], which: str, source: str) -> dict[str, Tensor]:
    """The encoder's weights, without the head's.

    Raises:
        CheckpointError: the checkpoint has networks, but not `which`.
    """
    weights = network_weights(checkpoint, which, source)
    return {name: value for name, value in weights.items() if not name.startswith("head.")}


def network_weights(checkpoint: Mapping[str, Any], which: str, source: str) -> dict[str, Tensor]:
    """One network's weights under our names, the head's included; a file of raw weights is one network.

    Of a CLIP the image tower is the network, whatever `which` says, without the projection behind it.

    Raises:
        CheckpointError: the checkpoint has networks, but not `which`; a CLIP that is not known.
    """
    clip = clip_weights(checkpoint, source)
    if clip is not None:
        return {name.removeprefix("image."): value for name, value in clip.items() if name.startswith("image.")}
    networks = [key for key in ("teacher", "student") if isinstance(checkpoint.get(key), Mapping)]
    if networks and which not in networks:
        raise CheckpointError(f"{source} has no {which!r}; it has {', '.join(networks)}")
    return flat_weights(checkpoint[which] if networks else checkpoint)


def image_text_entry(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint says of its image-text model, under a key of `IMAGE_TEXT_KEYS`; None if it holds none."""
    return next((checkpoint[key] for key in IMAGE_TEXT_KEYS if key in checkpoint), None)


def clip_weights(checkpoint: Mapping[str, Any], source: str) -> dict[str, Tensor] | None:
    """All weights of a CLIP under our names, `image.*`, `text.*`, ..., whoever saved them; None if it is no CLIP.

    Raises:
        CheckpointError: it is OpenCLIP's, but has parts that are not known.
    """
    weights = _top_weights(checkpoint)
    if image_text_entry(checkpoint) is not None:
        return weights
    return check_known_clip(from_open_clip_names(weights), source).weights if is_open_clip(weights) else None


def check_known_clip(renamed: Renamed, source: str = "this one") -> Renamed:
    """Refuse a foreign CLIP with parts that are not known.

    Raises:
        CheckpointError: with the counts and the first names of what is unknown or missing.
    """
    unknown, missing = renamed.unknown, renamed.missing
    if unknown or missing:
        raise CheckpointError(
            f"only open_clip's plain CLIP with a vision transformer can be read, and sparo-clip's with SPARO or a "
            f"linear bottleneck: of the weights of {source} {len(unknown)} are unknown ({', '.join(unknown[:4])}) and "
            f"{len(missing)} missing ({', '.join(missing[:4])})"
        )
    return renamed


def _top_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """A single network's weights: under `model` (our CLIP), under `state_dict` (OpenCLIP's training), or on top."""
    parts = [part for part in (checkpoint.get("model"), checkpoint.get("state_dict")) if isinstance(part, Mapping)]
    weights = parts[0] if parts else checkpoint
    return {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, Tensor)}


def _image_tower(description: Mapping[str, Any]) -> dict[str, Any]:
    """How the image encoder of an image-text model was built, out of how the model was; mean and std of its images."""
    image = dict(description["image"])
    # Early checkpoints of CLIP say these of the whole model alone.
    image |= {name: description[name] for name in ("replace_block", "quick_gelu") if name in description}
    needs_codes = readout_kind(image["readout"]).needs_codes
    image["num_codes"] = description["num_codes"] if needs_codes else 0
    image["code_dim"] = description["embed_dim"] if needs_codes else 0
    return {**image, "mean": description["mean"], "std": description["std"]}


def check_same_model(checkpoint: Mapping[str, Any], config: EncoderConfig, source: str) -> None:
    """Refuse to resume a checkpoint of another encoder.

    Raises:
        CheckpointError: names each field that differs.
    """
    entry = encoder_entry(checkpoint, source)
    if entry is None:
        raise CheckpointError(
            f"{source} does not say how its encoder was built, so it cannot be resumed; choose another --output_dir"
        )
    check_same_description(asdict(EncoderConfig.from_dict(entry)), asdict(config), source)


def check_same_description(saved: Mapping[str, Any], asked: Mapping[str, Any], source: str) -> None:
    """Refuse to resume a checkpoint of another model.

    Args:
        saved: how the checkpoint's model is built, plain values.
        asked: how the options' model is built.
        source: the checkpoint's file, for messages.

    Raises:
        CheckpointError: names each value that differs.
    """
    if differing := differences(_flat(saved), _flat(asked), "in the checkpoint", "asked for"):
        raise CheckpointError(
            f"{source} holds another model: {'; '.join(differing)}. Give the same options, or another --output_dir"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat

"""Encoder + images -> features (images, F), labels and indices, of this process or of all processes; also on disk.

`task.py` opens the encoder; `knn.py` and `linear/` compute accuracies. Every image counts exactly once for any number
of processes. Unreadable images are skipped and counted. Files of features have the names of facebookresearch/dino.
"""

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.data.batch import Batch
from dino_sparo.data.defaults import EXIF
from dino_sparo.data.shares import readable_batches, share_loader
from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.runtime.collectives import all_gather_ragged, all_or_none, all_reduce_sum, on_rank_0
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences, plain, read_record, write_record
from dino_sparo.runtime.launch import is_main, rank, world_size
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.weights.checkpoint import weights_sha256
from dino_sparo.weights.file import read_torch_file

logger = logging.getLogger(__name__)

GATHER_ROWS = 16384  # features that all processes together exchange at a time, so that gathering takes little memory
CHECKED_ROWS = 1024  # features that are in float64 at a time
WARNINGS: list[str] = []  # about the features of the running evaluation, for its result
# Largest spread of nearly equal features, our choice. Untrained ViTs have 0.8 on scenes, 0.08 on smooth images.
NEARLY_EQUAL = 0.01
# The reference's names.
CACHE_FILES = {"train": ("trainfeat.pth", "trainlabels.pth"), "val": ("testfeat.pth", "testlabels.pth")}
CACHE_RECORD = "features.json"


@dataclass(frozen=True)
class Features:
    """Features of a collection of images, in its order.

    Attributes:
        features: (images, F), fp32.
        labels: (images,) int64, on the device of `features`.
        indices: (images,) int64, ascending, of each image in its source.
        num_corrupt: number of unreadable images.
    """

    features: Float[Tensor, "images F"]
    labels: Int[Tensor, " images"]
    indices: Int[Tensor, " images"]
    num_corrupt: int = 0

    def to(self, device: torch.device) -> "Features":
        """The features on another device."""
        return Features(self.features.to(device), self.labels.to(device), self.indices.to(device), self.num_corrupt)

    def share(self) -> "Features":
        """This process' share, as `ShardSampler` deals it; a copy, so that the rest can be freed."""
        if world_size() == 1:
            return self
        n = len(self.labels)
        rows = slice(n * rank() // world_size(), n * (rank() + 1) // world_size())
        features, labels, indices = (part[rows].clone() for part in (self.features, self.labels, self.indices))
        return Features(features, labels, indices, self.num_corrupt if is_main() else 0)

    def normalize_(self) -> "Features":
        """Scale every feature to length one, in place."""
        F.normalize(self.features, dim=1, out=self.features)
        return self


def check_features(features: Float[Tensor, "images F"], name: str, device: torch.device | None = None) -> list[str]:
    """Refuse features that are not finite; return and log a warning, also for the result, if all are nearly equal.

        spread^2 = 1 - |mean x|^2 / mean |x|^2,  0 if all features x are equal

    `name` names the features in messages. With a `device`, the features of all processes count.
    """
    parts = map(Tensor.double, features.split(CHECKED_ROWS))
    rows = (torch.cat((part, part.square().sum(1, keepdim=True), part.new_ones(len(part), 1)), 1) for part in parts)
    sums = torch.stack([part.sum(dim=0) for part in rows]).sum(dim=0)
    if device is not None and world_size() > 1:
        width = int(all_gather_ragged(torch.tensor([len(sums)], device=device)).max())
        sums = all_reduce_sum(F.pad(sums.to(device), (width - len(sums), 0)))
    squares, count = sums[-2:].tolist()
    if not math.isfinite(squares):
        raise UserError(f"{name}: features are not finite; the encoder is broken, or --precision is too narrow")
    if count < 2 or squares - float(sums[:-2].square().sum()) / count > NEARLY_EQUAL**2 * squares:
        return []
    WARNINGS.append(f"{name}: the features of all images are nearly equal, so results of them mean nothing")
    logger.warning("%s", WARNINGS[-1])
    return WARNINGS[-1:]


def extract_split(
    encoder: nn.Module,
    source: ImageSource,
    transform: Callable,
    device: torch.device,
    *,
    batch_size: int = 128,
    num_workers: int = 0,
    encode: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    storage: torch.device | None = None,
    gather: bool = True,
) -> Features:
    """Encode all images of a source; every process encodes its share.

    Incomplete batches are filled up with blank images, so that all matrix products have one size. So features are
    bit-identical for any number of processes, on one kind of processor with one batch size. Features of other batch
    sizes differ by rounding. (The libraries behave so, and do not promise it.)

    Args:
        encoder: on `device`; its train or eval mode is restored.
        source: the images.
        transform: (image, rng) -> [view].
        device: of the encoder.
        batch_size: per process.
        num_workers: that load images, per process.
        encode: images (B, C, H, W) -> features (B, F), a method of the encoder; None: the encoder itself.
        dtype: fp32, or bf16 or fp16 for autocast.
        storage: device that keeps the features; None: `device`.
        gather: return the features of all processes on every process, else this process' share.
    """
    loader = share_loader(source, transform, device, batch_size, num_workers)
    features = torch.empty(0, 0, device=storage or device)
    labels, indices = ([torch.empty(0, dtype=torch.int64)] for _ in range(2))
    count = num_corrupt = 0
    batches = encoded_batches(encoder, loader, device, batch_size, encode or encoder, dtype, source.name)
    for part, batch, kept in batches:
        if not features.numel():
            # Written batch by batch, which takes half the memory of a concatenation. Never an inference tensor, since
            # a probe's gradient may need these rows.
            with torch.inference_mode(False):
                features = features.new_empty(len(loader) * batch_size, part.shape[1])
        features[count : count + len(part)] = part.float()
        labels.append(batch.labels[kept])
        indices.append(batch.indices[kept])
        count += len(kept)
        num_corrupt += len(batch.indices) - len(kept)
    where = features.device
    check_features(features[:count], source.name, device)
    part_of_rank = Features(features[:count], torch.cat(labels).to(where), torch.cat(indices).to(where), num_corrupt)
    return gather_features(part_of_rank, device) if gather else part_of_rank


def encoded_batches(
    encoder: nn.Module,
    loader: Any,
    device: torch.device,
    batch_size: int,
    encode: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    desc: str,
) -> Iterator[tuple[Float[Tensor, "kept F"], Batch, Int[Tensor, " kept"]]]:
    """Features of each batch, the batch, and the rows of its readable images; arguments as in `extract_split`.

    The log names unreadable images at the end.
    """
    for batch, kept in readable_batches(loader, desc):
        images = batch.views[0].to(device, non_blocking=True)
        with inference(encoder, device, dtype):
            features = encode(F.pad(images, (0, 0) * 3 + (0, batch_size - len(images))))[: len(images)]
        # Indexing by rows synchronises with the GPU, and unreadable images are rare.
        yield features if len(kept) == len(batch.indices) else features[kept.to(device)], batch, kept


@contextlib.contextmanager
def inference(encoder: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Eval mode, no gradients, exact fp32 or autocast; restores the earlier mode.

    A module that is compiled for training runs uncompiled, since batches of other shapes would compile it again.
    """
    was_training = encoder.training
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    # Without these flags, cuDNN would compute the patch projection in TF32 and by a varying algorithm. For matrix
    # products see `runtime.precision.set_tf32`.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    # Importing the compiler takes seconds. Unless it is imported already, nothing is compiled.
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else contextlib.nullcontext()
    encoder.eval()
    try:
        with torch.inference_mode(), autocast, exact, eager:
            yield
    finally:
        encoder.train(was_training)


def gather_features(part: Features, device: torch.device, on_rank_0: bool = False) -> Features:
    """All processes' features on every process, in the order of their indices.

    Args:
        part: this process' features; may be empty.
        device: where the processes talk to each other.
        on_rank_0: only rank 0 gets the features, on the CPU; the others get their own part back.
    """
    if world_size() == 1:
        return part
    is_kept = is_main() or not on_rank_0
    storage = torch.device("cpu") if on_rank_0 else part.features.device
    sizes = torch.tensor([[len(part.features), part.features.shape[1], part.num_corrupt]], device=device)
    counts = all_gather_ragged(sizes).cpu()
    width = int(counts[:, 1].max())
    local = part.features if len(part.features) else part.features.new_empty(0, width)
    indices, order = all_gather_ragged(part.indices.to(device)).sort(stable=True)
    labels = all_gather_ragged(part.labels.to(device))[order]
    features = torch.empty(len(indices) if is_kept else 0, width, device=storage)
    # The index of an image gives its row, so each block is written to its final rows.
    num_rows = max(GATHER_ROWS // world_size(), 1)
    for start in range(0, int(counts[:, 0].max()), num_rows):
        block = all_gather_ragged(local[start : start + num_rows].to(device))
        rows = torch.searchsorted(indices, all_gather_ragged(part.indices[start : start + num_rows].to(device)))
        if is_kept:
            features[rows.to(storage)] = block.to(storage)
    if not is_kept:
        return part
    return Features(features, labels.to(storage), indices.to(storage), int(counts[:, 2].sum()))


def require_memory(num_images: int, width: int, device: torch.device) -> None:
    """End the evaluation now, not hours later, if the features of all images do not fit into memory."""
    with all_or_none("finding memory for all features"):
        torch.empty(num_images, width, device=device)


def image_counts(device: torch.device, **splits: Features) -> dict[str, int]:
    """num_SPLIT and num_corrupt_SPLIT of some splits: images with features and unreadable images of all processes."""
    counts = {f"num_{split}": len(part.features) for split, part in splits.items()}
    counts |= {f"num_corrupt_{split}": part.num_corrupt for split, part in splits.items()}
    return dict(zip(counts, all_reduce_sum(torch.tensor([*counts.values()], device=device)).tolist(), strict=True))


def disjoint_subsets(source: ImageSource, sizes: Sequence[int], seed: int = 0) -> list[ImageSource]:
    """Random subsets of one source that share no image; all are smaller in proportion if the source is small."""
    share = min(1.0, len(source) / sum(sizes))
    counts = [int(size * share) for size in sizes]
    if min(counts) < 1:
        raise UserError(f"{source.name} has {len(source)} images, too few to split them {':'.join(map(str, sizes))}")
    order = np.random.default_rng(seed).permutation(len(source))
    return [Subset(source, np.sort(part)) for part in np.split(order, np.cumsum(counts))[:-1]]


def effective_rank(encodings: Float[Tensor, "B F"]) -> float:
    """Number of directions that the encodings of a batch use, between 1 and B.

        exp(H(sigma / sum(sigma))),  sigma the singular values of the centered encodings

    Source: Roy and Vetterli, "The effective rank"; Garrido et al., "RankMe", uses it for self-supervised encodings.
    """
    centered = encodings.float() - encodings.float().mean(dim=0)
    singular_values = torch.linalg.svdvals(centered)
    shares = singular_values / singular_values.sum().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.special.entr(shares).sum().exp().item()


# Features of both splits <-> files.


def check_dump(folder: str, record: Mapping[str, Any], overwrite: bool) -> None:
    """Create the folder of --dump_features; refuse one with features of another record, unless `overwrite`."""
    create_output_dir(path := Path(folder), "--dump_features ")
    names = [name for split in CACHE_FILES.values() for name in split if (path / name).exists()]
    if names and not overwrite:
        saved = read_record(path / CACHE_RECORD, verify=False) if (path / CACHE_RECORD).is_file() else {}
        if differences(saved, plain(record), "in the folder", "now"):
            raise UserError(
                f"--dump_features {folder} holds {names[0]} of other weights, images or options; give another folder, "
                "or --overwrite"
            )


def save_features(folder: Path, train: Features, val: Features, record: dict[str, Any]) -> None:
    """Rank 0 writes both splits under the reference's file names, and their record.

    Older files are removed first, and the record is written last, so that a kill leaves no mix of old and new files.
    Features must have length one: the reference's script, which reads the folder too, does not normalise them.
    """
    on_rank_0(lambda: _write(folder, {"train": train, "val": val}, record), "writing the features")


def _write(folder: Path, splits: dict[str, Features], record: dict[str, Any]) -> None:
    create_output_dir(folder, "--dump_features ")
    try:
        names = [name for split in CACHE_FILES.values() for name in split]
        for name in (CACHE_RECORD, *names):
            (folder / name).unlink(missing_ok=True)
        for split, part in splits.items():
            for name, tensor in zip(CACHE_FILES[split], (part.features.cpu(), part.labels.cpu()), strict=True):
                # torch saves the whole storage of a view.
                is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
                torch.save(tensor if is_whole else tensor.clone(), folder / name)
        corrupt = {split: part.num_corrupt for split, part in splits.items()}
        write_record({**record, "corrupt": corrupt}, folder / CACHE_RECORD, names)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"could not write the features to {folder} ({error}); free some space or choose another folder"
        ) from error


def load_features(folder: Path) -> tuple[Features, Features, dict[str, Any]]:
    """Features of both splits, and the record of `save_features`, empty for the reference's folders."""
    path, splits = folder / CACHE_RECORD, []
    try:
        record = read_record(path) if path.is_file() else {}
        if record:
            record["view"] = with_exif(record.get("view", {}), path)
        record.pop("files", None)
        corrupt = record.pop("corrupt", {})
        for split, names in CACHE_FILES.items():
            features, labels = (_load_tensor(folder / name) for name in names)
            if features.ndim != 2 or labels.shape != features.shape[:1]:
                shapes = f"{tuple(features.shape)} and {names[1]} {tuple(labels.shape)}"
                raise UserError(f"{folder / names[0]} has shape {shapes}; expected (images, F) and (images,)")
            check_features(features, str(folder / names[0]))
            splits.append(Features(features.float(), labels.long(), torch.arange(len(labels)), corrupt.get(split, 0)))
    except ValueError as error:
        raise UserError(f"{error}; write the features again with --dump_features {folder}") from error
    return splits[0], splits[1], record


def with_exif(record: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """A record with the entry `exif`; version 0.1 wrote no such entry and used pixels as they are stored."""
    if "exif" not in record:
        logger.info("%s is of an older version, which took pixels as they are stored: --exif %s", source, EXIF[1])
    return {**record, "exif": record.get("exif", EXIF[1])}


def _load_tensor(path: Path) -> Tensor:
    if not path.is_file():
        raise UserError(f"no cached features at {path}")
    tensor = read_torch_file(path, mmap=True)  # each process copies only its share
    if not isinstance(tensor, Tensor):
        raise UserError(f"{path} holds a {type(tensor).__name__}, not a tensor")
    return tensor


def check_same_weights(sha256: str | None, pretrained_weights: str, folder: str) -> None:
    """Refuse features on disk that are not of the weights at a path; an empty path allows any weights."""
    if pretrained_weights and sha256 != weights_sha256(pretrained_weights):
        raise UserError(f"the features in {folder} were not made with {pretrained_weights}; leave out one of the two")

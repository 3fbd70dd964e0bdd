"""Recorded checkpoints, the command lines that wrote them, and how a test calls a command.

`reference/checkpoints/` holds three files: `dino` and `clip`, runs of an earlier commit within their second epoch, and
`evaluated`, the CLIP model that every evaluation was recorded with. All are of `SMALL_ARCH`, so each takes less than
200 kB. A gzipped file has the bytes of the checkpoint that was written.
"""

import functools
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dino_sparo.__main__ import run
from dino_sparo.models.encoder import Encoder, create_encoder
from dino_sparo.weights.entries import encoder_description
from dino_sparo.weights.folder import save_checkpoint
from studies import __main__ as studies

REFERENCE = Path(__file__).resolve().parents[1] / "reference"

# Smaller than any architecture of the package. Tests add it to the table under this name, which is in the checkpoints.
SMALL_ARCH, SMALL_SIZE = "vit_recorded", {"embed_dim": 12, "depth": 3, "num_heads": 2}

SHARED: dict[str, object] = {
    **{"arch": SMALL_ARCH, "patch_size": 8, "sparo_slots": 5, "sparo_slot_dim": 7, "sparo_key_dim": 3},
    **{"num_workers": 0, "device": "cpu", "precision": "fp32"},
}
TEXT = {"text_width": 10, "text_heads": 2, "text_layers": 2, "context_length": 40, "embed_dim": 35, "img_size": 32}
DINO_RUN = {
    **{**SHARED, "data_path": "scenes:64:32", "out_dim": 9, "head_hidden_dim": 6},
    **{"global_crops_size": 32, "local_crops_size": 16, "local_crops_number": 2},
    **{"batch_size_per_gpu": 8, "epochs": 4, "warmup_epochs": 1, "freeze_last_layer": 1, "lr": 0.01},
}
# DINO for tests of calls: a training of seconds.
TINY: dict[str, Any] = {
    **{"data_path": "scenes:48:32", "global_crops_size": 32, "local_crops_number": 1, "local_crops_size": 16},
    **{"arch": "vit_micro", "patch_size": 8, "sparo_slots": 5, "sparo_slot_dim": 3, "sparo_key_dim": 2},
    **{"out_dim": 32, "head_hidden_dim": 16, "batch_size_per_gpu": 16, "warmup_epochs": 0, "knn_freq": 0},
    **{"num_workers": 0, "device": "cpu"},
}
CLIP_RUN = {
    **{**SHARED, **TEXT, "data_path": "scenes:64:32"},
    **{"batch_size": 8, "epochs": 4, "warmup_steps": 4, "lr": 0.01},
}


# An encoder of seconds, its SPARO read-out, and the statistics of its images.
SMALL: dict[str, Any] = {"arch": "vit_micro", "patch_size": 8, "img_size": 24}
SPARO: dict[str, Any] = {"readout": "sparo", "num_slots": 6, "slot_dim": 7, "key_dim": 5, "group_size": 2}
MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


def build(seed: int = 0, **settings: Any) -> Encoder:
    """An untrained encoder of `SMALL` with other settings."""
    torch.manual_seed(seed)
    return create_encoder(**{**SMALL, **settings}).eval()


def save_encoder(folder: Path, encoder: Encoder) -> Path:
    """A checkpoint whose teacher is the encoder; the student's weights are higher by one. Both have a head."""
    teacher = {**encoder.state_dict(), "head.mlp.0.weight": torch.zeros(3, encoder.encoding_dim)}
    content = {
        "student": {name: value + 1 for name, value in teacher.items()},
        "teacher": teacher,
        "encoder": encoder_description(encoder.config, MEAN, STD),
        "epoch": 5,
        "step": 35,
    }
    save_checkpoint(content, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def command(name: str, *words: object) -> Any:
    """Run a command in this process. Nothing else in the tests of records knows how a command is called."""
    own = [str(word) for word in words]
    return studies.main([name, *own]) if name in studies.EXPERIMENTS else run(name, own)


def words_of(options: Mapping[str, object]) -> list[str]:
    """The words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def unpack(name: str, folder: Path) -> Path:
    """Write a recorded checkpoint to `checkpoint.pth` in a folder, which is created if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pth"
    path.write_bytes(gzip.decompress((REFERENCE / "checkpoints" / f"{name}.pth.gz").read_bytes()))
    return path


def record_of(folder: str, name: str) -> dict[str, Any]:
    """What was recorded."""
    return json.loads((REFERENCE / folder / f"{name}.json").read_text())


def written_once(write: Callable[..., Path]) -> Callable[..., Path]:
    """A function that writes a file. Calls with equal arguments copy the first file and leave the same random state."""
    kept: dict[Any, tuple[bytes, torch.Tensor]] = {}

    @functools.wraps(write)
    def write_or_copy(path: Path, *arguments: Any, **keywords: Any) -> Path:
        key = arguments, tuple(sorted(keywords.items()))
        if key not in kept:
            kept[key] = write(path, *arguments, **keywords).read_bytes(), torch.get_rng_state()
        content, random_state = kept[key]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        torch.set_rng_state(random_state)
        return path

    return write_or_copy


@written_once
def save_small_encoder(path: Path, readout: str = "sparo", seed: int = 0, **sizes: int) -> Path:
    """An untrained encoder in one of our checkpoints, with statistics of images that are not ImageNet's."""
    torch.manual_seed(seed)
    sizes = {"num_slots": 5, "slot_dim": 3, "key_dim": 2, "img_size": 16, **sizes}
    encoder = create_encoder("vit_micro", 8, readout, **sizes)
    weights = encoder.state_dict() | {"head.last_layer.weight_g": torch.ones(3)}
    description = encoder_description(encoder.config, (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"student": weights, "teacher": weights, "epoch": 7, "encoder": description}, path)
    return path

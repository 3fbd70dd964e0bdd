"""Weights, images and feature sets that the recorder and the tests draw alike, so that no weight has to be stored.

Every array is a pure function of its name: the stream of ``numpy.random.RandomState`` is frozen by numpy's own promise,
and its seed is the CRC-32 of the name. Scales are chosen so that attention is far from uniform and position embeddings
matter: weights of 0.02 would let a wrong softmax scale or a wrong interpolation pass.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

FOLDER = Path(__file__).resolve().parent

# The ten training steps: two epochs of five steps on tiny crops.
STEPS = {
    "epochs": 2,
    "steps_per_epoch": 5,
    "batch_size": 4,
    "out_dim": 64,
    "global_size": 32,
    "local_size": 16,
    "num_local": 3,
    "lr": 0.016,
    "min_lr": 1e-6,
    "warmup_epochs": 1,
    "weight_decay": 0.04,
    "weight_decay_end": 0.4,
    "momentum_teacher": 0.9,
    "warmup_teacher_temp": 0.04,
    "teacher_temp": 0.07,
    "warmup_teacher_temp_epochs": 2,
    "freeze_last_layer": 1,
}
# Run -> (clip_grad, norm_last_layer).
STEP_RUNS = {"clip0.3": (0.3, True), "clip3.0": (3.0, True), "clip3.0_free_norm": (3.0, False)}

# (base, final, epochs, steps per epoch, warm-up epochs, start of the warm-up).
SCHEDULES = [
    (0.0005, 1e-6, 10, 7, 3, 0.0),
    (0.04, 0.4, 5, 3, 0, 0.0),
    (0.996, 1.0, 4, 11, 0, 0.0),
    (2.0, 0.1, 3, 5, 1, 0.25),
    (1.0, 0.0, 2, 5, 2, 0.0),
]

# Heads: (use_bn, norm_last_layer, number of layers); in, out, hidden and bottleneck widths all differ.
HEAD_SIZES = {"in_dim": 13, "out_dim": 11, "hidden_dim": 17, "bottleneck_dim": 7}
HEAD_CASES = [(bn, norm, layers) for bn in (False, True) for norm in (False, True) for layers in (1, 2, 3)]

# Losses: number of student crops -> epochs of three calls in a row.
LOSS = {
    "out_dim": 13,
    "batch_size": 3,
    "warmup_teacher_temp": 0.04,
    "teacher_temp": 0.07,
    "warmup_epochs": 3,
    "epochs": 5,
}
LOSS_CALLS = {2: (0, 1, 4), 5: (0, 1, 4)}

# A ViT small enough to be recorded in full, on an 8 x 8 grid. 16 x 64 px has as many patches, in another shape; 30 x 37
# px is no whole number of them.
SMALL_VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3}
SMALL_SIZES = [(32, 32), (16, 16), (20, 36), (36, 20), (44, 44), (16, 64), (30, 37)]

# (arch, patch size, height, width); batch 2, trained at 224 px.
VIT_CASES = [
    ("vit_tiny", 16, 224, 224),
    ("vit_tiny", 16, 96, 96),
    ("vit_tiny", 16, 320, 480),
    ("vit_tiny", 16, 480, 320),
    ("vit_tiny", 8, 96, 96),
    ("vit_small", 16, 224, 224),
    ("vit_small", 16, 96, 96),
    ("vit_small", 16, 320, 480),
]

OPTIM_SHAPES = {"weight": (3, 5), "zero": (2, 7), "conv": (2, 3, 2, 2), "gain": (7,), "bias": (5,)}
OPTIM_STEPS = 5

KNN = {"num_train": 120, "num_test": 103, "dim": 16, "num_classes": 7, "temperature": 0.07, "ks": (1, 5, 20)}

# sparo-clip's models, with all sizes different; ViT-micro is ours, and its heads are 32 wide.
SPARO_CLIP = {
    "embed_dim": 35,
    "vision_cfg": {"layers": 4, "width": 128, "head_width": 32, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 9, "vocab_size": 53, "width": 24, "heads": 2, "layers": 3},
}
_SPARO = {"use_sparo": True, "L": 6, "V": 7, "sparo_attn_dim": 5, "reduce_depth": 1}
SPARO_CLIP_CASES: dict[str, dict] = {
    "sparo": _SPARO,
    "shared_keys": {**_SPARO, "sparo_heads": 3},
    "linear": {"bottleneck_dim": 11},
    "cls": {},
    "quick_gelu": {"quick_gelu": True},
}

# Modules of billpsomas/efficient-probing; the second compresses the encoding.
EP_CASES = {
    "ep": {"dim": 24, "num_queries": 6, "d_out": 1},
    "ep_narrow": {"dim": 24, "num_queries": 4, "d_out": 3},
}
AIM = {"dim": 24, "num_heads": 3}


def normal(name: str, shape: Sequence[int], std: float = 1.0) -> np.ndarray:
    """Gaussian float32 array, a pure function of its name and shape."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    return (std * stream.standard_normal(tuple(shape))).astype(np.float32)


def parameter(name: str, shape: Sequence[int], salt: str = "") -> np.ndarray:
    """One parameter by the reference's name: gains near 1, biases small, matrices scaled by their fan-in."""
    draw = normal(salt + name, shape)
    if name.endswith("weight_g") or (name.endswith("weight") and len(shape) == 1):
        return (1 + np.float32(0.1) * draw).astype(np.float32)
    if name.endswith("bias"):
        return np.float32(0.1) * draw
    if name.endswith(("cls_token", "pos_embed")):
        return np.float32(0.2) * draw
    return (draw / np.float32(math.sqrt(math.prod(shape[1:])))).astype(np.float32)


def state(shapes: Mapping[str, Sequence[int]], salt: str = "") -> dict[str, np.ndarray]:
    """A state dict's arrays from its names and shapes; running statistics of batch norm are left out."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return {name: parameter(name, shape, salt) for name, shape in shapes.items() if not name.endswith(statistics)}


def images(name: str, batch: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """Images (batch, channels, height, width), as if already normalised."""
    return normal(f"images/{name}/{height}x{width}", (batch, channels, height, width))


def ep_tokens() -> np.ndarray:
    """Tokens (5, 7, 24) for the modules of efficient probing."""
    return normal("ep/tokens", (5, 7, 24))


def sparo_clip_state(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Weights of one of sparo-clip's models; SPARO's values are its keys, which it writes twice."""
    names = {name: name.replace("sparo.v.", "sparo.k.") for name in shapes}
    return {name: np.asarray(parameter(names[name], shape, "sparo_clip/")) for name, shape in shapes.items()}


def sparo_clip_ids() -> np.ndarray:
    """Token ids (3, 9) of captions of three lengths; the end token is the vocabulary's last."""
    ids = np.random.RandomState(0).randint(1, 52, (3, 9))
    for caption, end in enumerate((4, 8, 2)):
        ids[caption, end:] = 0
        ids[caption, end] = 52
    return ids


def step_crops(step: int) -> list[np.ndarray]:
    """The crops of one of the ten training steps: two global ones, then the local ones."""
    sizes = [STEPS["global_size"]] * 2 + [STEPS["local_size"]] * STEPS["num_local"]
    return [images(f"step{step}/crop{i}", STEPS["batch_size"], size, size) for i, size in enumerate(sizes)]


def loss_logits(num_crops: int, call: int) -> tuple[np.ndarray, np.ndarray]:
    """Student (S*B, K) and teacher (2*B, K) logits of one recorded call."""
    batch, out_dim = LOSS["batch_size"], LOSS["out_dim"]
    student = normal(f"loss/student/{num_crops}/{call}", (num_crops * batch, out_dim), 0.5)
    return student, normal(f"loss/teacher/{num_crops}/{call}", (2 * batch, out_dim), 0.2)


def optim_start() -> dict[str, np.ndarray]:
    """Parameters before the recorded optimiser steps; one is all zero, which LARS must survive."""
    start = {name: normal(f"optim/{name}", shape) for name, shape in OPTIM_SHAPES.items()}
    start["zero"] = np.zeros_like(start["zero"])
    return start


def optim_gradients(step: int) -> dict[str, np.ndarray]:
    """Gradients of one recorded optimiser step; that of `conv` vanishes in the second step."""
    gradients = {name: normal(f"optim/{name}/grad{step}", shape, 0.3) for name, shape in OPTIM_SHAPES.items()}
    if step == 1:
        gradients["conv"] = np.zeros_like(gradients["conv"])
    return gradients


def optim_settings(step: int) -> tuple[float, float]:
    """Learning rate and weight decay of one recorded optimiser step."""
    return 0.1 / (1 + step), 0.05 * (1 + step)


def clip_gradients() -> dict[str, np.ndarray | None]:
    """Gradients of very different norms: far below, near and far above the limit, zero, and absent."""
    scales = {"tiny": 1e-6, "below": 0.05, "above": 2.0, "far_above": 300.0, "zero": 0.0}
    drawn: dict[str, np.ndarray | None] = {name: normal(f"clip/{name}", (3, 5), std) for name, std in scales.items()}
    drawn["absent"] = None
    return drawn


def summary(name: str, value: np.ndarray) -> np.ndarray:
    """Norm, sum and five values of a parameter after training.

    Of the qkv biases the key's third is left out: its gradient is zero but for rounding, which Adam turns into noise.
    """
    flat = value.astype(np.float64).ravel()
    if name.endswith("qkv.bias"):
        third = flat.size // 3
        flat = np.concatenate([flat[:third], flat[2 * third :]])
    some = flat[np.linspace(0, flat.size - 1, 5).astype(int)]
    return np.array([np.linalg.norm(flat), flat.sum(), *some], dtype=np.float32)


def knn_problem() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Normalised train features, train labels, test features, test labels: noisy clusters, unequal class sizes."""
    centers = normal("knn/centres", (KNN["num_classes"], KNN["dim"]))
    parts = []
    for split in ("train", "test"):
        number = KNN[f"num_{split}"]
        labels = np.floor(KNN["num_classes"] * np.linspace(0, 1, number, endpoint=False) ** 1.3).astype(np.int64)
        features = centers[labels] + normal(f"knn/{split}", (number, KNN["dim"]), 2.4)
        parts += [features / np.linalg.norm(features, axis=1, keepdims=True), labels]
    return parts[0], parts[1], parts[2], parts[3]


# CLIP+GAP and FDT of ankitkv/sparo-clip: all widths differ; captions end after 5, 9 (all of the context) and 3 tokens.
CLIP_EMBED_DIM, CLIP_NUM_CODES = 11, 17
CLIP_TEXT = {"context_length": 9, "vocab_size": 53, "width": 24, "heads": 2, "layers": 3}
CLIP_ENDS = (4, 8, 2)


def clip_state(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Weights of a CLIP; codes are long, so that Sparsemax, whose temperature is 1000, has something to choose."""
    drawn = state(shapes, "clip/")
    if "space_dict" in drawn:
        drawn["space_dict"] = np.float32(1000) * drawn["space_dict"]
    return drawn


def clip_captions() -> np.ndarray:
    """Token ids (3, 9) int64: words, the end token, zeros."""
    ends, length, vocab = CLIP_ENDS, CLIP_TEXT["context_length"], CLIP_TEXT["vocab_size"]
    ids = np.random.RandomState(zlib.crc32(b"clip/captions")).randint(1, vocab - 1, (len(ends), length))
    for row, end in zip(ids, ends, strict=True):
        row[end], row[end + 1 :] = vocab - 1, 0
    return ids.astype(np.int64)


class SkipInitialisation(TorchFunctionMode):
    """Leaves fresh parameters undrawn: drawing is most of the time of building a network that loads weights next."""

    DRAWS = (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.erfinv_)

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if function in self.DRAWS:
            return args[0]
        return function(*args, **(kwargs or {}))


def load(name: str) -> dict[str, np.ndarray]:
    """The recorded numbers of one part, e.g. "vit", without their header."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files if key != "header"}


def load_keys() -> dict:
    """The recorded names and shapes of state dicts, and the names in the optimiser's groups."""
    return json.loads((FOLDER / "keys.json").read_text())

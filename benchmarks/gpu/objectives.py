"""Options -> an objective as the trainer builds it, and batches of built-in scenes on its device."""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from dino_sparo.clip import options as clip_options
from dino_sparo.clip.train import CLIPObjective
from dino_sparo.data.loader import to_device
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.train import DINOObjective
from dino_sparo.oc_clip import options as oc_clip_options
from dino_sparo.oc_clip.train import OCCLIPObjective
from dino_sparo.runtime.cli import Parser
from dino_sparo.runtime.launch import Distributed
from dino_sparo.training.compile import compile_networks
from dino_sparo.training.objective import Objective

logger = logging.getLogger(__name__)

NUM_LOSSES = 5
# From torch's 65,536 fp16's gradients overflow at these sizes, and all of so few steps would be skipped.
FP16_SCALE = 256.0
# Name -> objective, its command's parser.
OBJECTIVES: dict[str, tuple[type[Objective[Any]], Callable[[], Parser]]] = {
    "DINO": (DINOObjective, dino_options.get_args_parser),
    "CLIP": (CLIPObjective, clip_options.get_args_parser),
    "OC-CLIP": (OCCLIPObjective, oc_clip_options.get_args_parser),
}
NUM_BATCHES = 2  # drawing a full one takes many seconds
# Full sizes: those of the recipes, on scenes. OC-CLIP's preset starts from weights that are not part of this project.
FULL: dict[str, dict[str, object]] = {
    "DINO": {"data_path": "scenes:128:256", "batch_size_per_gpu": 64, "warmup_epochs": 0},
    "CLIP": {"data_path": "scenes:256:224", "batch_size": 128, "warmup_steps": 2},
    "OC-CLIP": {"data_path": "scenes:128:224", "batch_size": 64, "warmup_steps": 2},
}
SMALL_ENCODER: dict[str, object] = {"arch": "vit_micro", "patch_size": 8}
SMALL_TOWERS: dict[str, object] = {
    **SMALL_ENCODER, "img_size": 32, "text_width": 24, "text_heads": 2, "text_layers": 2, "batch_size": 6,
    "warmup_steps": 2, "data_path": "scenes:48:32",
}  # fmt: skip
# Small sizes, on which a CPU's losses are a matter of seconds.
SMALL: dict[str, dict[str, object]] = {
    "DINO": {
        **SMALL_ENCODER, "data_path": "scenes:48:32", "batch_size_per_gpu": 6, "warmup_epochs": 0, "out_dim": 61,
        "head_hidden_dim": 32, "global_crops_size": 32, "local_crops_size": 16, "local_crops_number": 2,
        "sparo_slots": 3, "sparo_slot_dim": 5, "sparo_key_dim": 7,
    },
    "CLIP": {**SMALL_TOWERS, "embed_dim": 15, "sparo_slots": 3, "sparo_slot_dim": 5, "sparo_key_dim": 7},
    "OC-CLIP": {**SMALL_TOWERS, "bind_dim": 12, "bind_heads": 2, "bind_layers": 1, "rel_dim": 7},
}  # fmt: skip


class Built(NamedTuple):
    """An objective, and its batches on the device without end."""

    objective: Objective[Any]
    batches: Iterator[Any]

    def step(self) -> torch.Tensor:
        """Take one step; its loss, (), on the device."""
        micro_batches = [next(self.batches) for _ in range(self.objective.updater.accum_steps)]
        return self.objective.step(micro_batches, epoch=1, is_last=False).loss


def build(name: str, sizes: dict[str, object], device: str, compiles: bool = False) -> Built:
    """An objective of these options, on scenes.

    Args:
        name: a key of `OBJECTIVES`.
        sizes: options; True for a flag.
        device: cpu or cuda.
        compiles: whether to compile its networks; with `--compile regions` among the options, in regions.

    """
    objective_class, get_args_parser = OBJECTIVES[name]
    options = {"epochs": 4, "num_workers": 0, "device": device}
    options |= ({"drop_path_rate": 0, "cuda_graph": "off"} if name == "DINO" else {}) | sizes
    words = [word for key, value in options.items() for word in (f"--{key}", *([] if value is True else [str(value)]))]
    args = get_args_parser().parse_args(words)
    objective_class.check_options(args)
    objective_class.fill_in_defaults(args)
    torch_device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    objective = objective_class(args, Distributed(0, 1, torch_device))
    if compiles:
        compile_networks(objective, in_regions=args.compile == "regions")
    for network in objective.networks.values():
        network.train()
    objective.sampler.set_epoch(0)
    few = list(itertools.islice(to_device(objective.loader, torch_device), NUM_BATCHES))
    return Built(objective, itertools.cycle(few))


def first_losses(name: str, device: str, changes: dict[str, object], compiles: bool = False) -> torch.Tensor:
    """Losses of the first steps at small sizes, (NUM_LOSSES,) on the CPU; NaN after an error, which the log has."""
    try:
        built = build(name, {**SMALL[name], **changes}, device, compiles)
        updater = built.objective.updater
        if updater.scaler is not None:
            updater.scaler = torch.amp.GradScaler(updater.device.type, init_scale=FP16_SCALE)
        return torch.stack([built.step().double().cpu() for _ in range(NUM_LOSSES)])
    except RuntimeError:
        logger.exception("%s on %s, compiled: %s, %s", name, device, compiles, changes)
        return torch.full((NUM_LOSSES,), math.nan, dtype=torch.float64)


@contextlib.contextmanager
def wrapped_in_ddp() -> Iterator[None]:
    """Within this context `build` puts networks into DDP, as with several processes, though there is one."""
    from dino_sparo.runtime import launch

    wrap = launch.wrap_ddp

    def wrap_always(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(launch, "world_size", return_value=2):
            return wrap(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in ("dino_sparo.distillation.objective", "dino_sparo.image_text.objective"):
            stack.enter_context(mock.patch(f"{module}.wrap_ddp", wrap_always))
        yield

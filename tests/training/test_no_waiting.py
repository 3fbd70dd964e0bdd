"""A step never reads the device, and copies nothing to it in a way that waits; how that is seen: `host_traffic.py`."""

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from host_traffic import DEVICE, HostTraffic
from oc_clip_fakes import CONTEXT, IMG_SIZE, batch_of, some_graphs
from runs import options, small_options

from dino_sparo.clip import options as clip_options
from dino_sparo.clip import train as clip_train
from dino_sparo.clip.loss import clip_loss
from dino_sparo.data.augment import NUM_PARAMETERS, Distortions
from dino_sparo.data.batch import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino import train as dino_train
from dino_sparo.dino.step import train_step as dino_step
from dino_sparo.image_text.pairs.batches import PairBatch
from dino_sparo.image_text.step import train_step as contrastive_step
from dino_sparo.oc_clip import options as oc_options
from dino_sparo.oc_clip import train as oc_train
from dino_sparo.runtime.launch import Distributed
from dino_sparo.training.objective import StepReport

PROCESS = Distributed(0, 1, DEVICE)
Step = Callable[[], StepReport]


@pytest.fixture(autouse=True)
def _meta_is_a_device_to_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has no autocast on `meta`, not even one that is switched off, and takes it for a device without AdamW."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_, **__: None)
    real: Any = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == DEVICE.type else real(device_type, *args, **kwargs)

    monkeypatch.setattr(torch, "autocast", autocast)


def dino(tmp_path: Path, parts: int = 1, fp16: bool = False, **changes: object) -> Step:
    words = options(tmp_path, "train", batch_size_per_gpu=2, grad_accum_steps=parts, **changes)
    args = dino_options.get_args_parser().parse_args(words)
    dino_options.fill_in_defaults(args)
    training = dino_train.DINOObjective(args, PROCESS)
    if fp16:  # its scaler; `meta` has no autocast
        training.updater.scaler = torch.amp.GradScaler(DEVICE.type)
    training.distort = Distortions((0.5,) * 3, (0.2,) * 3).to(DEVICE)
    views = [torch.zeros(2, 3, side, side, dtype=torch.uint8) for side in (32, 32, 16)]
    batch = Batch(views, torch.zeros(2).long(), torch.arange(2), [], torch.zeros(3, 2, NUM_PARAMETERS)).to(DEVICE)
    return lambda: dino_step(training, [batch] * parts, 0, is_last=True)


def clip(tmp_path: Path, parts: int = 1, texts: int = 1, **changes: object) -> Step:
    words = options(tmp_path, "train-clip", grad_accum_steps=parts, **changes)
    args = clip_options.get_args_parser().parse_args(words)
    clip_options.check_options(args)
    training = clip_train.CLIPObjective(args, PROCESS)
    training.contrast = partial(clip_loss, products=args.logits, texts_per_image=texts)
    images, ids = torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.zeros(3 * texts, 20).long()
    batch = PairBatch(images, ids, torch.arange(3), [], 0).to(DEVICE)
    return lambda: contrastive_step(training, [batch] * parts)


def oc_clip(tmp_path: Path, parts: int = 1, **changes: object) -> Step:
    given = {"img_size": IMG_SIZE, "context_length": CONTEXT, "grad_accum_steps": parts, **changes}
    args = oc_options.get_args_parser().parse_args(small_options(tmp_path, "train-oc-clip", **given))
    oc_options.check_options(args)
    training = oc_train.OCCLIPObjective(args, PROCESS)
    batches = [batch_of(some_graphs(), range(6 * part, 6 * part + 6)).to(DEVICE) for part in range(parts)]
    return lambda: contrastive_step(training, batches)


def traffic_of(step: Step) -> HostTraffic:
    """Of a step after a first one, in which optimizers make their states and caches fill."""
    step()
    with HostTraffic() as traffic:
        report = step()
    assert report.loss.device == DEVICE
    assert report.nonfinite.device == DEVICE
    return traffic


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parts": 2, "grad_checkpointing": "", "loss_chunk": 8},
        {"readout": "cls", "clip_grad": 0},
        {"optimizer": "sgd"},
        {"optimizer": "lars"},
        {"optimizer": "lars", "fp16": True},
        {"fp16": True},
    ],
    ids=str,
)
def test_a_step_of_dino_never_waits_for_the_device(tmp_path: Path, changes: dict[str, Any]) -> None:
    traffic = traffic_of(dino(tmp_path, **changes))
    assert traffic.waits == []
    assert traffic.copies == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"parts": 2, "clip_grad": 1.0}, {"texts": 2}], ids=str)
def test_a_step_of_clip_never_waits_for_the_device(tmp_path: Path, changes: dict[str, Any]) -> None:
    traffic = traffic_of(clip(tmp_path, **changes))
    assert traffic.waits == []
    assert traffic.copies == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"parts": 2, "score_chunk_mb": 0.01}], ids=str)
def test_a_step_of_oc_clip_never_waits_for_the_device(tmp_path: Path, changes: dict[str, Any]) -> None:
    traffic = traffic_of(oc_clip(tmp_path, **changes))
    assert traffic.waits == []
    # The graphs lie on the host, where their sizes decide what is computed. However many chunks are scored, as many
    # tensors are copied.
    assert len(traffic.copies) == 8


@pytest.mark.parametrize(
    "wait",
    [
        lambda on_device: on_device.item(),
        lambda on_device: on_device.flatten().tolist(),
        lambda on_device: bool(on_device),
        lambda on_device: on_device.cpu(),
        lambda on_device: on_device.nonzero(),
        lambda on_device: on_device[on_device > 0],
        lambda on_device: torch.zeros(3).to(DEVICE),
        lambda on_device: torch.tensor([1.0, 2.0], device=DEVICE),
        lambda on_device: on_device.expand(3)[torch.tensor([1])],
        lambda on_device: torch.zeros(3, device=DEVICE).copy_(torch.ones(3)),
        lambda on_device: torch.zeros(3, device=DEVICE).index_put_((torch.ones(3, device=DEVICE) > 0,), torch.ones(3)),
    ],
)
def test_what_waits_is_seen(wait: Callable[[torch.Tensor], object]) -> None:
    with HostTraffic() as traffic:
        on_device = torch.ones((), device=DEVICE)
        traffic.waits.clear()
        with contextlib.suppress(NotImplementedError, RuntimeError):
            wait(on_device)
            assert traffic.waits


def test_what_does_not_wait_is_only_counted() -> None:
    with HostTraffic() as traffic:
        moved = torch.ones(3).to(DEVICE, non_blocking=True)
        torch.where(moved > 0, 2.0 * moved, moved.new_zeros(()))[None].expand(2, 3)
    assert traffic.waits == []
    assert len(traffic.copies) == 1
    assert traffic.launches == 5  # copy, compare, multiply, fill, choose; views launch nothing

"""Recorded steps: a stand-in for a CUDA graph that computes on the CPU, and writes in place as a graph does."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from objectives import no_data
from runs import options, small_options, train_small
from timm_models import FAMILIES
from torch import Tensor, nn
from two_ranks import ThreeRanks, TwoRanks

from dino_sparo.__main__ import run as run_command
from dino_sparo.data.batch import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.train import DINOObjective
from dino_sparo.distillation import objective as distillation
from dino_sparo.distillation.objective import DistillationObjective
from dino_sparo.distillation.step import exchange
from dino_sparo.runtime import launch
from dino_sparo.runtime.faults import explain_full_memory
from dino_sparo.runtime.launch import Distributed, rank, world_size
from dino_sparo.training import recording
from dino_sparo.training.recording import Outputs, Recorder
from dino_sparo.weights.checkpoint import load_checkpoint

Replay = Callable[[], None]
SLOW = pytest.mark.slow


class GraphOnCPU:
    """Records as CUDA does: recording computes nothing; a replay overwrites outputs and gradients in place."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.recordings, self.replays = parameters, 0, 0

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        self.recordings += 1
        state = torch.get_rng_state()
        outputs = function()
        torch.set_rng_state(state)
        static = [*outputs.values(), *(p.grad for p in self.parameters if p.grad is not None)]
        for value in static:
            value.fill_(float("nan"))

        def replay() -> None:
            self.replays += 1
            before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            new = [*function().values(), *(p.grad for p in self.parameters if p.grad is not None)]
            for old, value in zip(static, new, strict=True):
                old.copy_(value)
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

        return replay, outputs


def weights_of(value: Any) -> list[Tensor]:
    """All tensors of a checkpoint's entry."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in weights_of(part)]


RUNS: dict[str, dict[str, object]] = {
    "two phases": {  # the second has another temperature, and trains the backbone too
        **{"warmup_teacher_temp": 0.03, "warmup_teacher_temp_epochs": 1, "distort_on": "device"},
        **{"freeze_backbone_epochs": 1, "optimizer": "sgd", "init_from": "FIRST"},
    },
    "parts": {"grad_accum_steps": 2, "koleo_weight": 0.1},
    "checkpointing": {"grad_checkpointing": "true", "drop_path_rate": 0, "readout": "cls", "loss_chunk": 7},
    "timm": {"arch": FAMILIES["tiny_registers"].arch, "readout": "cls"},
    "simdino": {},
    "ibot": {},
    "ibot in parts": {"grad_accum_steps": 2, "centering": "sinkhorn_knopp", "readout": "cls"},
}


def command_of(name: str) -> str:
    """The command of a form of `RUNS`."""
    return {"simdino": "train-simdino", "ibot": "train-ibot"}.get(name.split()[0], "train")


def words_of(name: str, tmp_path: Path, folder: str, **changes: object) -> list[str]:
    """The options of a form of `RUNS`."""
    options_of: dict[str, object] = {"data_path": "scenes:12:32", "epochs": 2, "batch_size_per_gpu": 2, **RUNS[name]}
    if "init_from" in options_of:
        options_of["init_from"] = train_small("train", tmp_path / "first", max_steps=1) / "checkpoint.pth"
    return small_options(tmp_path / folder, command_of(name), **{**options_of, **changes})


def assert_equal_states(name: str, *runs: Path) -> None:
    """Two runs saved equal bits."""
    plain, recorded = (load_checkpoint(run / "checkpoint.pth") for run in runs)
    loss = {"train": "dino_loss", "train-simdino": "simdino_loss", "train-ibot": "ibot_loss"}[command_of(name)]
    for entry in ("student", "teacher", "optimizer", loss):
        pairs = list(zip(weights_of(plain[entry]), weights_of(recorded[entry]), strict=True))
        assert all(torch.equal(old, new) for old, new in pairs), entry
    assert plain["step"] == recorded["step"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("two phases", "ibot in parts") else SLOW) for name in RUNS]
)
def test_a_recorded_run_is_bit_identical_to_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command, words = command_of(name), words_of(name, tmp_path, "plain", cuda_graph="auto", max_steps=9)
    run_command(command, words)
    assert "not recorded, as the device is cpu" in caplog.text
    graphs: list[GraphOnCPU] = []

    class Recording(Recorder):
        def __init__(self, parameters: Sequence[nn.Parameter], record: Any = None) -> None:
            graphs.append(GraphOnCPU(parameters))
            super().__init__(parameters, graphs[-1])

    monkeypatch.setattr(distillation, "Recorder", Recording)
    monkeypatch.setattr(distillation, "cuda_recording", lambda device: None)
    monkeypatch.setattr(DistillationObjective, "decide_recording", lambda *_: True)
    words[words.index(str(tmp_path / "plain"))] = str(tmp_path / "recorded")
    monkeypatch.setattr(recording, "WARM_UP_CALLS", 1)
    run_command(command, [*words, "--max_steps", "2"])  # within the first epoch, of 6 steps or 3
    run_command(command, [*words, "--cuda_graph", "on"])
    assert "--cuda_graph was" not in caplog.text, "a recording changes no number, so no warning"
    assert graphs[0].replays > 0
    assert graphs[1].recordings == 2, "the look at the encoder after the first epoch drops the recording"
    assert_equal_states(name, tmp_path / "plain", tmp_path / "recorded")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", RUNS)
def test_on_a_gpu_a_recorded_run_is_bit_identical_to_another(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_exact = name != "timm"  # timm resamples positions; the backward pass of that is not deterministic on a GPU
    torch.use_deterministic_algorithms(is_exact)
    try:
        for cuda_graph in ("off", "on"):
            words = words_of(name, tmp_path, cuda_graph, cuda_graph=cuda_graph, device="cuda", compile="off")
            run_command(command_of(name), words)
    finally:
        torch.use_deterministic_algorithms(False)
    assert caplog.text.count("recorded as one CUDA graph") >= 1
    losses = [
        [json.loads(line)["train_loss"] for line in (tmp_path / run / "log.txt").read_text().splitlines()]
        for run in ("off", "on")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    if is_exact:
        assert_equal_states(name, tmp_path / "off", tmp_path / "on")


def test_a_recording_is_of_one_key_and_shape_and_what_it_returned_survives_the_next_step() -> None:
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    graph = GraphOnCPU([weight, unused])
    recorder = Recorder([weight, unused], graph)

    def compute(inputs: Sequence[Tensor]) -> Outputs:
        loss = (inputs[0] * weight).sum()
        loss.backward()
        return {"loss": loss.detach(), "rows": 2 * inputs[0]}

    losses = list[Tensor]()
    for number in range(1, 6):  # three steps as before, then the recording's
        weight.grad = None
        outputs = recorder(compute, [torch.full((2, 3), float(number))], "key")
        losses.append(outputs["loss"])
        assert weight.grad is not None
        assert weight.grad.tolist() == [2 * number] * 3
        assert unused.grad is None
        assert outputs["rows"].tolist() == [[2 * number] * 3] * 2
    assert torch.stack(losses).tolist() == [6, 12, 18, 24, 30]
    assert (graph.recordings, graph.replays) == (1, 2)
    for other, key in ((torch.ones(5, 3), "key"), (torch.ones(5, 3).double(), "key"), (torch.ones(2, 3), "other")):
        for _ in range(4):
            weight.grad = None
            recorder(compute, [other], key)
    assert (graph.recordings, graph.replays) == (4, 5)
    recorder.drop()
    assert weight.grad is None, "it lies in the recording's memory"


def test_a_change_of_the_teachers_temperature_is_a_new_key() -> None:
    dino, keys = objective_on(0, 1, is_recorded=False), []
    dino.loss.teacher_temp_schedule = np.array([0.03, 0.04, 0.04])

    def record(compute: Any, inputs: Sequence[Tensor], key: Any, is_only_part: bool) -> Outputs:
        keys.append(key)
        outputs: Outputs = compute(inputs)
        return outputs

    dino.recorder = record  # type: ignore[assignment]
    batch = Batch([torch.randn(6, 3, side, side) for side in (32, 32, 16)], *torch.zeros(2, 6).long(), [])
    for epoch in range(3):
        dino.step([batch], epoch, is_last=False)
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("operation not permitted", r"cannot be recorded; give --cuda_graph off \(CUDA error: operation not permitted"),
        ("out of memory" + 300 * "!", "memory is full.*halve.*give --cuda_graph off"),
        ("uncorrectable ECC error encountered", "^CUDA error: uncorrectable ECC error encountered$"),
    ],
)
def test_what_fails_in_a_recording_is_named_with_the_remedy_and_hardware_is_not_blamed_on_the_recording(
    reason: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Outputs:
        raise RuntimeError(f"CUDA error: {reason}")

    for name in ("CUDAGraph", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    with pytest.raises(RuntimeError, match=message), explain_full_memory({"grad_accum_steps": 1}):
        recording.record_on_cuda(fails)


def objective_on(rank: int, size: int, is_recorded: bool) -> DINOObjective:
    words = options(Path("unused"), batch_size_per_gpu=6 // size, precision="fp32", drop_path_rate=0, optimizer="sgd")
    args = dino_options.get_args_parser().parse_args(words)
    dino_options.fill_in_defaults(args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "open_crops", lambda *_: no_data(10, 6))
        patch.setattr(DistillationObjective, "decide_recording", lambda *_: is_recorded)
        patch.setattr(distillation, "cuda_recording", lambda device: None)  # `compute` is called directly
        return DINOObjective(args, Distributed(rank, size, torch.device("cpu")))


def whole_step(is_recorded: bool) -> tuple[list[Tensor], Tensor]:
    """Gradients and center after one step on this rank's share of six images."""
    dino = objective_on(rank(), world_size(), is_recorded)
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(6, 3, side, side, generator=generator) for side in (32, 32, 16)]
    own = slice(6 * rank() // world_size(), 6 * (rank() + 1) // world_size())
    number = 6 // world_size()
    batch = Batch([view[own] for view in views], torch.zeros(number).long(), torch.arange(number), [])
    dino.clip_grad = 0.0
    gradients: list[Tensor] = []
    finish = dino.updater.finish_gradients

    def look(loss: Tensor) -> Tensor:
        norms = finish(loss)
        gradients.extend(p.grad.clone() for p in dino.updater.parameters if p.grad is not None)
        return norms

    dino.updater.finish_gradients = look  # type: ignore[method-assign]
    dino.step([batch], 0, True)
    return gradients, dino.loss.center.clone()


def test_the_flat_exchange_and_ddp_give_the_gradients_and_the_center_of_one_process(two_ranks: TwoRanks) -> None:
    whole = whole_step(is_recorded=False)
    flat, ddp = (two_ranks(whole_step, is_recorded) for is_recorded in (True, False))
    for (gradients, center), (ddp_gradients, ddp_center) in zip(flat, ddp, strict=True):
        assert torch.equal(center, ddp_center)
        torch.testing.assert_close(center, whole[1], rtol=1e-5, atol=1e-7)
        for own, other, expected in zip(gradients, ddp_gradients, whole[0], strict=True):
            assert torch.equal(own, other)
            torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-6)


def whole_step_in_double(is_recorded: bool) -> tuple[list[Tensor], Tensor]:
    torch.set_default_dtype(torch.float64)
    try:
        return whole_step(is_recorded)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_flat_exchange_and_ddp_of_three_ranks_give_the_gradients_and_the_center_of_one_process() -> None:
    whole, three_ranks = whole_step_in_double(is_recorded=False), ThreeRanks()
    try:
        flat, ddp = (three_ranks(whole_step_in_double, is_recorded) for is_recorded in (True, False))
    finally:
        three_ranks.end()
    for gradients, center in (*flat, *ddp):
        assert gradients[0].dtype == torch.float64
        torch.testing.assert_close(gradients, whole[0], rtol=0, atol=5e-10)
        torch.testing.assert_close(center, whole[1], rtol=1e-6, atol=0)  # sums of logits are fp32


def test_a_process_alone_exchanges_nothing() -> None:
    total = torch.ones(3)
    exchange(objective_on(0, 1, is_recorded=True), [total])
    assert total.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "nodes", "has_batch_norm", "reason"),
    [
        ({}, 1, False, None),
        ({"cuda_graph": "auto"}, 2, False, "there are several nodes"),
        ({}, 2, False, None),
        ({"koleo_weight": 0.1}, 1, False, "its loss exchanges tensors"),
        ({}, 1, True, "its batch norm is synchronised"),
    ],
)
def test_rules_for_several_ranks(
    changes: dict[str, object],
    nodes: int,
    has_batch_norm: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dino = objective_on(0, 1, is_recorded=False)
    words = options(Path("unused"), **{"cuda_graph": "on", **changes})
    dino.args = dino_options.get_args_parser().parse_args(words)
    monkeypatch.setattr(distillation, "world_size", lambda: 2)
    monkeypatch.setattr(distillation, "num_nodes", lambda: nodes)
    monkeypatch.setattr(distillation, "has_batch_norm", lambda _: has_batch_norm)
    caplog.set_level("INFO")
    assert dino.decide_recording(torch.device("cuda")) == (reason is None)
    assert (reason or "") in caplog.text


@pytest.mark.parametrize(("processes", "here"), [(10, "8"), (10, "2"), (2, "1")])
def test_nodes_with_different_numbers_of_processes_count_the_same_nodes(
    processes: int, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: of nodes with 8 and 2 processes only the first recorded, and the ranks waited for each other."""
    monkeypatch.setattr(launch, "world_size", lambda: processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launch.num_nodes() == 2


def _weights_after_synchronize() -> list[float]:
    dino = objective_on(rank(), world_size(), is_recorded=True)
    dino.recorder.record = lambda function: pytest.fail("recorded")
    for network in dino.networks.values():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.fill_(1 + rank())
    dino.synchronize()
    states = [value.flatten() for network in dino.networks.values() for value in network.state_dict().values()]
    return torch.cat(states).unique().tolist()


def test_ranks_that_record_begin_with_the_weights_and_buffers_of_rank_0(two_ranks: TwoRanks) -> None:
    assert two_ranks(_weights_after_synchronize) == [[1.0], [1.0]]


STRIDE_32 = {"patch_size": 32, "global_crops_size": 64, "local_crops_size": 32}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grad_checkpointing": "true"}, "repeats random numbers"),
        ({"grad_checkpointing": "true", "arch": "timm/vit_tiny_patch16_224", "patch_size": 16}, "repeats random"),
        ({"arch": "timm/edgenext_xx_small", "readout": "gap", **STRIDE_32}, "timm copies tensors from the host"),
        ({"arch": FAMILIES["tiny_dinov3"].arch, "readout": "cls"}, None),
        ({"arch": FAMILIES["tiny_registers"].arch, "readout": "cls"}, None),
        ({"cuda_graph": "off"}, ""),
        ({"cuda_graph": "auto"}, None),
        ({"cuda_graph": "on", "grad_checkpointing": "true", "drop_path_rate": 0}, None),
    ],
)
def test_rules_decide_before_the_run_what_is_recorded(
    changes: dict[str, object], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`None`: it is recorded; an empty reason: it is not, without a line."""
    dino = objective_on(0, 1, is_recorded=False)
    words = options(Path("unused"), **{"cuda_graph": "on", **changes})
    dino.args = dino_options.get_args_parser().parse_args(words)
    caplog.set_level("INFO")
    caplog.clear()
    assert dino.decide_recording(torch.device("cuda")) == (reason is None)
    assert (reason or "") in caplog.text
    assert bool(caplog.text) == bool(reason)

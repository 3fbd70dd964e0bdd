"""training/rehearsal.py: what is compiled, and how."""

import importlib
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jaxtyping
import pytest
import torch
from runs import PATIENCE, Ranks, assert_same_run, options
from torch import nn

from benchmarks.gpu import objectives
from dino_sparo.data.augment import NUM_PARAMETERS, Distortions
from dino_sparo.data.dataset import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.step import DINOTraining
from dino_sparo.dino.train import build_training
from dino_sparo.models.backbone import Backbone
from dino_sparo.runtime.choices import ViTSize
from dino_sparo.runtime.distributed import Distributed
from dino_sparo.training import compile as rehearsal
from dino_sparo.training import run
from dino_sparo.training.compile import compile_networks

CPU = torch.device("cpu")


def small_training(folder: Path, **changes: object) -> tuple[DINOTraining, Batch]:
    """DINO on crops of two sizes that are distorted within the step, and a batch."""
    args = dino_options.get_args_parser().parse_args(options(folder, batch_size_per_gpu=2, **changes))
    dino_options.defaults_of(args)
    training = build_training(args, Distributed(0, 1, 0, CPU), 10)
    training.distort = Distortions((0.5,) * 3, (0.2,) * 3)
    views = [torch.randint(256, (2, 3, side, side), dtype=torch.uint8) for side in (32, 32, 16)]
    return training, Batch(views, torch.zeros(2).long(), torch.arange(2), [], torch.zeros(3, 2, NUM_PARAMETERS))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_a_compiled_step_neither_makes_a_tensor_on_the_host_nor_copies_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the matrices that resample positions were made on the host and copied, in every step."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compile_module(self, backend=record, **given))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of shapes are no part of a graph
    torch._dynamo.reset()
    training, batch = small_training(tmp_path)
    assert compile_networks(training, batch)
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    nodes = [node for node in nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    assert len(nodes) > 100
    assert len(graphs) >= 4  # student, teacher, distortions of two sizes
    made = [node for node in nodes if not node.all_input_nodes and "device" not in node.kwargs]
    moved = [node for node in nodes if any(isinstance(value, torch.device) for value in node.args)]
    assert made == []
    assert moved == []


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        ([("here", {0, 1, 2, 3, 4, 5, 6})], 7),
        ([("here", {0, 1, 2, 3, 4, 5, 6})] * 3, 2),
        ([("here", {0, 1, 2, 3, 4, 5, 6})] * 8, 1),
        ([("here", {0, 1, 2, 3, 4, 5, 6}), ("there", {0, 1, 2, 3, 4, 5, 6})], 7),
        ([("here", {0, 1, 2, 3, 4, 5, 6}), ("here", {7, 8})], 7),  # Slurm gives every task cores of its own
        ([("here", set(range(100)))], 32),
    ],
)
def test_ranks_that_share_cores_share_them_when_they_compile(
    monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[str, set[int]]], workers: int
) -> None:
    """The bug: eight ranks started 32 processes each."""
    config = importlib.import_module("torch._inductor.config")
    monkeypatch.setattr(rehearsal.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(rehearsal.os, "sched_getaffinity", lambda _: ranks[0][1], raising=False)
    monkeypatch.setattr(rehearsal, "all_gather_object", lambda _: ranks)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "to be restored")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    with config.patch(compile_threads=99):
        rehearsal.share_compile_workers()
        assert config.compile_threads == workers
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == str(workers)  # for the thread of the backward pass


def test_the_environment_says_how_many_processes_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    config = importlib.import_module("torch._inductor.config")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    with config.patch(compile_threads=99):
        rehearsal.share_compile_workers()
        assert config.compile_threads == 99


def _trace_without_generating_code(rank: int) -> None:
    """Graphs and recompiles are those of any backend; they are written when the run has compiled and at its end."""
    compile_function, train_epochs = torch.compile, run.train_epochs

    def report(when: str) -> None:
        counters = torch._dynamo.utils.counters
        print(f"{when}: {counters['stats']['unique_graphs']} graphs, breaks {dict(counters['graph_break'])}")

    def counted(*args: Any) -> Any:
        report("before")
        stop = train_epochs(*args)
        report("after")
        return stop

    torch.compile = lambda function, **given: compile_function(function, **{**given, "backend": "eager"})
    run.train_epochs = counted


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"grad_accum_steps": 2}, {"grad_checkpointing": ""}], ids=str)
def test_two_ranks_compile_once_and_train_to_the_same_bits(tmp_path: Path, changes: dict[str, object]) -> None:
    """The last layer is frozen in the first epoch, branches are dropped, and k-NN evaluates between the epochs."""
    given = {"batch_size_per_gpu": 3, "epochs": 2, "freeze_last_layer": 1, "drop_path_rate": 0.3, "knn_freq": 1}
    given |= {"saveckp_minutes": 30, **changes}
    for name, compiles in (("plain", "off"), ("compiled", "on")):
        folder = tmp_path / name
        folder.mkdir()
        words = options(folder, compile=compiles, **given)
        with Ranks(folder, words, spoil=_trace_without_generating_code) as ranks:
            assert ranks.wait(3 * PATIENCE) == [0, 0], ranks.log()
            log = ranks.log()
    assert "compiled in" in log
    before, after = re.findall(r"^(?:before|after): (.*)$", log, flags=re.MULTILINE)
    assert before == after
    assert re.fullmatch(r"[1-9]\d* graphs, breaks {}", before)
    if "grad_checkpointing" not in changes:  # in its backward pass the backend "eager" draws other branches to drop
        assert_same_run(tmp_path / "plain", tmp_path / "compiled")


def _no_backward_pass_on_rank_1(rank: int) -> None:
    """Compiled backward passes fail on rank 1, at the time at which torch compiles them: when they are needed."""
    backends = importlib.import_module("torch._dynamo.backends.common")
    make_boxed = importlib.import_module("functorch.compile").make_boxed_func
    compile_function = torch.compile

    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no compiler for backward passes here")

        return make_boxed(fail if rank == 1 else graph.forward)

    backend = backends.aot_autograd(fw_compiler=lambda graph, _: make_boxed(graph.forward), bw_compiler=broken)
    torch.compile = lambda function, **given: compile_function(function, **{**given, "backend": backend})


@pytest.mark.slow
def test_where_one_rank_cannot_compile_the_backward_pass_both_go_on_uncompiled(tmp_path: Path) -> None:
    """The bug: DDP's static graph stood in the middle of a reduction, and both ranks hung until the time-out."""
    for name, compiles in (("plain", "off"), ("compiled", "on")):
        (tmp_path / name).mkdir()
        words = options(tmp_path / name, compile=compiles, epochs=1, warmup_epochs=0, dist_timeout_min=1)
        with Ranks(tmp_path / name, words, spoil=_no_backward_pass_on_rank_1) as ranks:
            assert ranks.wait(3 * PATIENCE) == [0, 0], ranks.log(0) + ranks.log(1)
            logs = ranks.log(0), ranks.log(1)
    reason = "RuntimeError: no compiler for backward passes here"
    assert f"the networks run uncompiled (on 1 of 2 processes, rank 1: {reason}" in logs[0]
    assert f"torch.compile does not work here: {reason}" in logs[1]
    assert_same_run(tmp_path / "plain", tmp_path / "compiled")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize("name", ["CLIP", "OC-CLIP"])
def test_micro_batches_compile_nothing_within_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: the pass that computes all features without gradients was compiled within step 1."""
    pytest.importorskip("open_clip")
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compiler(function, **given | {"backend": "eager"}))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    built = objectives.build(name, {**objectives.SMALL[name], "grad_accum_steps": 2}, "cpu", compiles=True)
    before = dict(torch._dynamo.utils.counters["stats"])
    built.step()
    assert before["unique_graphs"] > 0
    assert dict(torch._dynamo.utils.counters["stats"]) == before


def test_batch_norm_that_talks_to_other_gpus_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one process could not compile, the others would wait for it until the time-out."""
    training, batch = small_training(tmp_path, use_bn_in_head="true")
    training.teacher = nn.SyncBatchNorm.convert_sync_batchnorm(training.teacher)
    monkeypatch.setattr(DINOTraining, "compile", lambda *_: pytest.fail("compiled"))
    assert not compile_networks(training, batch)
    assert "run uncompiled: batch norm" in caplog.text


def test_an_error_of_the_gpu_is_not_taken_for_one_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training, batch = small_training(tmp_path)
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    monkeypatch.setattr(rehearsal, "rehearse", mock.Mock(side_effect=error))
    monkeypatch.setattr(DINOTraining, "compile", lambda *_: None)
    with pytest.raises(RuntimeError, match="uncorrectable ECC"):
        compile_networks(training, batch)
    assert "torch.compile does not work" not in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_checkpoints_drop_the_same_branches_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    images, gradients = torch.randn(6, 3, 32, 32), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backbone = Backbone(ViTSize(24, 4, 3), patch_size=8, img_size=32, drop_path_rate=0.5)
        backbone.set_grad_checkpointing(checkpointing)
        if checkpointing:
            torch._dynamo.reset()
            backbone.compile(dynamic=False, backend="aot_eager")
        torch.manual_seed(1)
        (backbone(images) * torch.arange(24.0)).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in backbone.parameters()]))
    assert torch.equal(*gradients)

"""training/rehearsal.py: what is compiled, and how."""

import importlib
import re
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from runs import PATIENCE, Ranks, assert_same_run, options
from torch import nn

from dino_sparo.backbone import Backbone
from dino_sparo.choices import ViTSize
from dino_sparo.data import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.step import DINOTraining
from dino_sparo.dino.train import build_training
from dino_sparo.distort import NUM_PARAMETERS, Distortions
from dino_sparo.runtime.distributed import Distributed
from dino_sparo.training import rehearsal, run
from dino_sparo.training.rehearsal import compile_networks

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
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with config.patch(compile_threads=99):
        rehearsal.share_compile_workers()
        assert config.compile_threads == workers


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

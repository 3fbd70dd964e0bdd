"""training/compile.py and memory.py: what the first step compiles, how a failure ends the run, memory by part."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from runs import FAULT, PATIENCE, Ranks, assert_same_run, epochs_of, options
from torch import nn

from benchmarks.gpu import objectives
from dino_sparo.commands import COMMANDS
from dino_sparo.data.augment import NUM_PARAMETERS
from dino_sparo.data.batch import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.step import train_step
from dino_sparo.dino.train import DINOObjective
from dino_sparo.distillation.network import EncoderWithHead
from dino_sparo.models.architectures import ViTSize
from dino_sparo.models.backbone import Backbone
from dino_sparo.runtime.launch import Distributed
from dino_sparo.training import run
from dino_sparo.training.compile import (
    CompileError,
    compile_failures_named,
    compile_networks,
    is_compiled,
    scale_in_groups,
)
from dino_sparo.training.optim import scale_

CPU = torch.device("cpu")


def small_training(folder: Path, **changes: object) -> tuple[DINOObjective, Batch]:
    """DINO on crops of two sizes that are distorted within the step, and a batch."""
    words = options(folder, batch_size_per_gpu=2, distort_on="device", **changes)
    args = dino_options.get_args_parser().parse_args(words)
    dino_options.fill_in_defaults(args)
    training = DINOObjective(args, Distributed(0, 1, CPU))
    for network in training.networks.values():
        network.train()
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
    compile_networks(training)
    train_step(training, [batch], epoch=0)
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    nodes = [node for node in nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    assert len(nodes) > 100
    assert len(graphs) >= 4  # student, teacher, distortions of two sizes
    made = [node for node in nodes if not node.all_input_nodes and "device" not in node.kwargs]
    moved = [node for node in nodes if any(isinstance(value, torch.device) for value in node.args)]
    assert made == []
    assert moved == []


def _trace_without_generating_code(rank: int) -> None:
    """Graphs and recompiles are those of any backend; they are written after the first epoch and at the end."""
    compile_function, finish_epoch = torch.compile, run.finish_epoch

    def counted(*args: Any) -> Any:
        counters = torch._dynamo.utils.counters
        print(f"epoch: {counters['stats']['unique_graphs']} graphs, breaks {dict(counters['graph_break'])}")
        return finish_epoch(*args)

    torch.compile = lambda function, **given: compile_function(function, **{**given, "backend": "eager"})
    run.finish_epoch = counted


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"grad_accum_steps": 2}, {"grad_checkpointing": ""}, {"compile": "regions", "drop_path_rate": 0}],
    ids=str,
)
def test_two_ranks_compile_once_and_train_alike(tmp_path: Path, changes: dict[str, object]) -> None:
    """The last layer is frozen in the first epoch, branches are dropped, and k-NN evaluates between the epochs."""
    given = {"batch_size_per_gpu": 3, "epochs": 2, "freeze_last_layer": 1, "drop_path_rate": 0.3, "knn_freq": 1}
    given |= {"saveckp_minutes": 30, **changes}
    for name, compiles in (("plain", False), ("compiled", True)):
        folder = tmp_path / name
        folder.mkdir()
        words = options(folder, **{**given, "compile": given.get("compile", "on") if compiles else "off"})
        with Ranks(folder, words, spoil=_trace_without_generating_code) as ranks:
            assert ranks.wait(3 * PATIENCE) == [0, 0], ranks.log()
            log = ranks.log()
    assert "the first step compiles the networks" in log
    before, after = re.findall(r"^epoch: (.*)$", log, flags=re.MULTILINE)
    assert before == after
    assert re.fullmatch(r"[1-9]\d* graphs, breaks {}", before)
    if "compile" in changes:  # products of packed crops sum in another order
        losses = [[epoch["train_loss"] for epoch in epochs_of(tmp_path / name)] for name in ("plain", "compiled")]
        assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    elif "grad_checkpointing" not in changes:  # in its backward pass the backend "eager" draws other branches to drop
        assert_same_run(tmp_path / "plain", tmp_path / "compiled")


def _no_compiler_on_rank_1(rank: int) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    if rank == 1:
        importlib.import_module("torch._inductor.compile_fx").compile_fx = broken


@pytest.mark.slow
def test_where_one_rank_cannot_compile_the_run_ends_with_the_reason_and_the_remedy(tmp_path: Path) -> None:
    words = options(tmp_path, compile="on", dist_timeout_min=3)
    with Ranks(tmp_path, words, spoil=_no_compiler_on_rank_1) as ranks:
        assert ranks.wait(3 * PATIENCE) == [FAULT, 1], ranks.log(0) + ranks.log(1)
        logs = ranks.log(0), ranks.log(1)
    assert re.search(
        r"torch.compile does not work here \(BackendCompilerFailed: .*no compiler here.*give --compile off", logs[1]
    )
    assert "another process died" in logs[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize("name", ["CLIP", "OC-CLIP"])
def test_micro_batches_compile_nothing_after_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("open_clip")
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compiler(function, **given | {"backend": "eager"}))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    built = objectives.build(name, {**objectives.SMALL[name], "grad_accum_steps": 2}, "cpu", compiles=True)
    built.step()
    before = dict(torch._dynamo.utils.counters["stats"])
    built.step()
    assert before["unique_graphs"] > 0
    assert dict(torch._dynamo.utils.counters["stats"]) == before


@pytest.mark.parametrize("command", ["train", "train-simdino", "train-clip", "train-oc-clip"])
@pytest.mark.parametrize(
    ("choice", "device", "compiles"),
    [
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("on", "cpu", True),
        ("on", "cuda", True),
        ("regions", "cpu", True),
        ("off", "cuda", False),
        (None, "cuda", True),
        (None, "cpu", False),
    ],
)
def test_every_training_compiles_by_default_on_a_gpu_alone(
    command: str, choice: str | None, device: str, compiles: bool
) -> None:
    parser = COMMANDS[command].parser
    assert parser is not None
    args = parser().parse_args([] if choice is None else ["--compile", choice])
    assert is_compiled(args.compile, torch.device(device)) == compiles


def test_gradients_are_scaled_in_groups_of_which_all_blocks_share_one() -> None:
    backbone = Backbone(ViTSize(24, 6, 3), patch_size=8, img_size=32)
    gradients = [torch.randn_like(weight) for weight in backbone.parameters()]
    factors = torch.rand(len(gradients)).unbind()
    expected = [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)]
    shapes = list[tuple[torch.Size, ...]]()

    def scale(group: Sequence[torch.Tensor], by: Sequence[torch.Tensor]) -> None:
        shapes.append(tuple(gradient.shape for gradient in group))
        scale_(group, by)

    scale_in_groups(scale, gradients, factors)
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(gradients, expected, strict=True))
    assert len(shapes) == 7  # the first has the embeddings too, the last what they pushed out
    assert len(set(shapes)) == 3


def test_batch_norm_that_talks_to_other_gpus_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training, _ = small_training(tmp_path, use_bn_in_head="true")
    training.teacher = nn.SyncBatchNorm.convert_sync_batchnorm(training.teacher)
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: pytest.fail("compiled"))
    compile_networks(training)
    assert "run uncompiled: batch norm" in caplog.text


@pytest.mark.parametrize("have_regions", [True, False])
def test_networks_without_regions_are_compiled_whole_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, have_regions: bool
) -> None:
    training, _ = small_training(tmp_path)
    whole = list[nn.Module]()
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: whole.append(self))
    monkeypatch.setattr(EncoderWithHead, "compile_regions", lambda _: have_regions)
    compile_networks(training, in_regions=True)
    assert (training.network in whole) is not have_regions
    assert (training.teacher in whole) is not have_regions
    assert training.distort in whole
    assert ("--compile regions: compiled whole" in caplog.text) is not have_regions


def test_only_an_error_of_the_compiler_is_named_as_one() -> None:
    failed = torch._dynamo.exc.Unsupported("a call that\nit cannot trace\n\nSet TORCHDYNAMO_VERBOSE=1")
    with (
        pytest.raises(CompileError, match=r"\(Unsupported: a call .* trace\); give --compile off"),
        compile_failures_named(),
    ):
        raise failed
    for text in ("CUDA error: uncorrectable ECC error encountered", "CUDA out of memory."):
        with pytest.raises(RuntimeError, match=text) as caught, compile_failures_named():
            raise RuntimeError(text)
        assert not isinstance(caught.value, CompileError)


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

"""training/rehearsal.py: what is compiled, and how."""

from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from runs import options
from torch import nn

from dino_sparo.data import Batch
from dino_sparo.dino import options as dino_options
from dino_sparo.dino.step import DINOTraining
from dino_sparo.dino.train import build_training
from dino_sparo.distort import NUM_PARAMETERS, Distortions
from dino_sparo.runtime.distributed import Distributed
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

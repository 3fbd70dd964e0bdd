"""models/regions.py: a network compiled in regions computes what it computes uncompiled; blocks share a function."""

import jaxtyping
import pytest
import torch
from small_models import build
from torch import Tensor

from dino_sparo.distillation.head import DINOHead
from dino_sparo.distillation.network import EncoderWithHead
from dino_sparo.ibot.head import IBOTNetwork
from dino_sparo.models import architectures
from dino_sparo.models.architectures import ViTSize
from dino_sparo.models.backbone import Backbone

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
SLOTS = {"num_slots": 3, "slot_dim": 5, "key_dim": 7}


@pytest.fixture(autouse=True)
def _graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and guards are those of any backend, so no code is generated."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compiler(function, **given, backend="eager"))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks of shapes are no part of a graph
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def network(readout: str = "sparo", **settings: object) -> EncoderWithHead:
    encoder = build(readout=readout, img_size=32, **SLOTS, **settings)
    return EncoderWithHead(encoder, DINOHead(encoder.encoding_dim, 11, hidden_dim=8, bottleneck_dim=6)).double().train()


def crops(batch: int = 2) -> list[Tensor]:
    sides = (32, 32, 16, 16, 16)
    return [torch.randn(batch, 3, side, side, dtype=torch.float64, generator=torch.Generator()) for side in sides]


def outputs_and_gradients(student: EncoderWithHead, images: list[Tensor]) -> list[Tensor]:
    student.zero_grad()
    rows, encodings = student(images, with_encodings=True)
    (rows.square().sum() + encodings.sin().sum()).backward()
    return [rows, encodings, *(weight.grad for weight in student.parameters() if weight.grad is not None)]


@pytest.mark.parametrize(("readout", "checkpointing"), [("sparo", False), ("cls", True), ("gap", False)])
def test_outputs_and_gradients_are_those_of_the_network(readout: str, checkpointing: bool) -> None:
    student, images = network(readout), crops()
    plain = outputs_and_gradients(student, images)
    teacher_rows = student(images[:2])
    student.backbone.set_grad_checkpointing(checkpointing)
    assert student.compile_regions()
    compiled = outputs_and_gradients(student, images)
    assert len(compiled) == len(plain)
    for ours, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(student(images[:2]), teacher_rows, rtol=0, atol=1e-12)


def test_deeper_networks_compile_no_further_function(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    for depth in (5, 9):
        monkeypatch.setitem(architectures.ARCHITECTURES, "vit_micro", ViTSize(24, depth, 3))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        student = network("cls", drop_path_rate=0.3)  # others build a class whose checks, in tests, break the graph
        student.compile_regions()
        for _ in range(2):
            outputs_and_gradients(student, crops())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert not torch._dynamo.utils.counters["graph_break"]
    assert graphs == [3, 3]


def test_later_blocks_lose_more_branches_and_the_others_are_scaled_up() -> None:
    student = network(drop_path_rate=0.6)
    student.compile_regions()
    assert student.regions is not None
    torch.manual_seed(0)
    factors = student.regions._draw_factors([(4000, 3), (2000, 2)])
    for rate, factor in zip((0.0, 0.2, 0.4), factors, strict=True):  # the read-out replaced the last block
        assert factor is not None
        assert factor.shape == (2, 4000 * 3 + 2000 * 2, 1)
        assert factor.unique().tolist() == pytest.approx([1.0] if rate == 0 else [0.0, 1 / (1 - rate)])
        for images in (factor[:, :12000].view(2, 4000, 3), factor[:, 12000:].view(2, 2000, 2)):
            assert (images == images[:, :, :1]).all()
            assert (images[:, :, 0] == 0).float().mean(dim=1).tolist() == pytest.approx([rate] * 2, abs=0.03)


def test_dropped_branches_depend_on_the_seed_and_none_is_dropped_in_evaluation() -> None:
    student, images = network(drop_path_rate=0.9), crops(8)
    evaluated = student.eval()(images)
    student.compile_regions()
    torch.testing.assert_close(student(images), evaluated, rtol=0, atol=1e-12)
    student.train()
    rows = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        rows.append(student(images))
    assert torch.equal(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2])
    assert not torch.allclose(rows[0], evaluated)


def test_networks_without_regions_are_compiled_whole() -> None:
    timm = build(arch="timm/resnet18", patch_size=32, readout="sparo", img_size=32, **SLOTS)
    encoder = build(readout="cls", img_size=32)
    head = DINOHead(encoder.encoding_dim, 11, hidden_dim=8, bottleneck_dim=6)
    assert isinstance(encoder.backbone, Backbone)
    assert not EncoderWithHead(timm, DINOHead(timm.encoding_dim, 11)).compile_regions()
    assert not IBOTNetwork(encoder, head, None).compile_regions()

"""Code and numbers of README and other pages: the Python runs as it stands; numbers are those of the code."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_cli import CHANGED
from torch import nn

from dino_sparo.data.sources import ImageLimits, open_source
from dino_sparo.dino.options import get_args_parser
from dino_sparo.dino.train import DINOObjective
from dino_sparo.runtime import preemption
from dino_sparo.runtime.preemption import Agreement, StopSignals

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
COSTS = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_prints_what_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    text = README.read_text(encoding="utf-8")
    ((block, output),) = re.findall(r"^```python\n(.*?)^```\n\n((?:    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    Image.new("RGB", (300, 250), (9, 80, 200)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        exec(block, {})
    assert capsys.readouterr().out == textwrap.dedent(output)


def test_the_docs_name_the_defaults_that_differ_from_the_references() -> None:
    text = (ROOT / "docs" / "from_dino.md").read_text(encoding="utf-8")
    sentence = re.search(r"Defaults that differ:\s(.*?)\.\s", text, re.DOTALL)
    assert sentence
    assert set(re.findall(r"`--(\w+)`", sentence[1])) == CHANGED.keys()


def trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def test_the_numbers_of_parameters_and_bytes_of_a_step_are_those_of_the_default_model() -> None:
    network = DINOObjective.build_network(get_args_parser().parse_args([]), drop_path_rate=0.0)
    costs = " ".join(COSTS.split())
    assert f"has {trained(network) / 1e6:.1f} million trained parameters; " in costs
    assert f"; {trained(network.head) / 1e6:.1f} million of them are in the head" in costs
    assert f"| {4 * trained(network) / 1e6:.0f} MB | 4 x {trained(network) / 1e6:.1f} million |" in COSTS
    assert f"| {4 * len(network.head.last_layer.weight_v) / 1e6:.2f} MB | 4 x 65,536 |" in COSTS


@pytest.mark.parametrize("arch", ["vit_small", "vit_base", "vit_large"])
def test_the_exchange_of_gradients_takes_as_long_as_the_page_on_large_models_computes(arch: str) -> None:
    args = get_args_parser().parse_args(["--arch", arch])
    with torch.device("meta"):
        number = trained(DINOObjective.build_network(args, drop_path_rate=0.0))
    times = [f"{1000 * 2 * 4 * number / rate:.1f} ms" for rate in (200e9, 25e9)]
    row = f"| `{arch}` | {number / 1e6:.1f} million | {4 * number / 1e6:,.0f} MB | {' | '.join(times)} |"
    assert row in (ROOT / "docs" / "large_models.md").read_text(encoding="utf-8")


def test_the_ranks_agree_by_as_many_bytes_as_the_benchmarks_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(preemption, "all_reduce_sum", lambda tensor: sent.append(tensor) or tensor)
    counts = {"nonfinite": 0.0, **dict.fromkeys(DINOObjective.counters, 0.0)}
    Agreement(StopSignals(), 30.0, torch.device("cpu")).decide(counts)
    (tensor,) = sent
    assert f"| {tensor.nbytes} bytes | {tensor.numel()} numbers of {tensor.element_size()} bytes |" in COSTS


class FewPhotographs:
    """In place of torchvision's CIFAR10: 3 or 2 photographs more than the folders take, of two classes."""

    classes = ("airplane", "frog")

    def __init__(self, root: str, train: bool, download: bool) -> None:
        assert download
        self.number = 2 * (2503 if train else 502)

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        return ((Image.new("RGB", (2, 2), (number % 256, 0, 0)), number % 2) for number in range(self.number))


@pytest.mark.slow
def test_the_script_for_small_photographs_writes_class_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "small_photographs.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr("torchvision.datasets.CIFAR10", FewPhotographs)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    folders = {str(path.relative_to(tmp_path)): len(list(path.iterdir())) for path in tmp_path.glob("cifar10/*/*")}
    of_class = {f"cifar10/train/{name}": 2500 for name in FewPhotographs.classes}
    assert folders == of_class | {f"cifar10/val/{name}": 500 for name in FewPhotographs.classes}
    with Image.open(tmp_path / "cifar10" / "train" / "frog" / "0001.png") as photograph:
        assert photograph.getpixel((0, 0)) == (3, 0, 0)


def test_the_script_for_toy_x_rays_writes_12_bit_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "medical_images.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    images = open_source("toy_xrays", "train", limits=ImageLimits(max_value=4095, in_chans=1))
    assert (len(images), images.classes) == (240, ["texture16", "texture32", "texture4", "texture8"])
    with Image.open("toy_xrays/val/texture4/240.png") as image:
        assert 2048 < image.getextrema()[1] <= 4095

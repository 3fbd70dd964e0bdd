"""Our checkpoints under LAION's CLIP benchmark: its loader's interface, features, registration."""

import importlib.util
import json
import pickle
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

pytest.importorskip("open_clip")

from clip_fakes import dot_product_scorer, small_checkpoint

from dino_sparo.clip import load, load_clip, normalize_slots, tokenize
from dino_sparo.data.sources import open_source
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot

SLOTS, WIDTH = 5, 7


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "checkpoint.pth")


def test_what_is_loaded_serves_a_loop_like_clip_benchmarks(weights):
    """Its classifier: features of captions and images, each normalised as a whole, and their dot products."""
    model, transform, tokenizer = load.load_for_benchmark(
        model_name="normalized", pretrained=str(weights), cache_dir=None, device="cpu"
    )
    assert not model.training
    captions = ["a red ring", "a star", "very " * 90]
    texts = tokenizer(captions).to("cpu")
    assert texts.shape == (3, 77)
    assert torch.equal(tokenizer("a star"), texts[1:2])
    image = Image.effect_noise((50, 40), 80)  # not RGB
    images = torch.stack([pickle.loads(pickle.dumps(transform))(image)] * 2).to("cpu")
    assert images.shape == (2, 3, 32, 32)
    with torch.no_grad():
        scores = F.normalize(model.encode_image(images), dim=-1) @ F.normalize(model.encode_text(texts), dim=-1).t()
        ours = load_clip(weights).model
        expected = ours.encode_image(images) @ ours.encode_text(tokenize(captions).ids).t()
    torch.testing.assert_close(scores, expected)


def test_some_slots_alone(weights, tmp_path):
    (tmp_path / "slots.json").write_text('{"slots": [4, 2]}')
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = load.load_for_benchmark(f"normalized:{tmp_path}/slots.json", str(weights))[0].encode_image(images)
        whole = load_clip(weights).model.image_output(images).slots
    assert torch.equal(features, normalize_slots(whole[:, [4, 2]]))


def test_names_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="model 'ViT-B-32-quickgelu' is unknown; give --model normalized"):
        load.load_for_benchmark("ViT-B-32-quickgelu", str(weights))


def test_clip_benchmarks_command_knows_our_checkpoints(monkeypatch):
    """With a stand-in for the package: two modules, of which the command's copies the list of types on import."""
    calls = []
    package, models, cli = (
        ModuleType(name) for name in ("clip_benchmark", "clip_benchmark.models", "clip_benchmark.cli")
    )
    models.TYPE2FUNC = {"open_clip": print}
    models.MODEL_TYPES = list(models.TYPE2FUNC)
    package.models, package.cli = models, cli
    cli.main = lambda: calls.append(list(models.MODEL_TYPES))
    for module in (package, models, cli, ModuleType("requests")):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    load.run_clip_benchmark()
    load.run_clip_benchmark()
    assert calls == [["open_clip", "dino_sparo"]] * 2
    assert models.TYPE2FUNC["dino_sparo"] is load.load_for_benchmark


def test_clip_benchmarks_own_command_gives_our_zero_shot_accuracy(weights, tmp_path, monkeypatch):
    """The real package, on class folders that it knows by the name of a set."""
    for package in ("clip_benchmark", "requests", "sklearn"):
        pytest.importorskip(package, reason="pip install clip-benchmark requests")
    benchmark = Path(importlib.util.find_spec("clip_benchmark").origin).parent / "datasets"
    names, templates = (
        json.loads((benchmark / f"en_{kind}.json").read_text())["fer2013"]
        for kind in ("classnames", "zeroshot_classification_templates")
    )
    generator = np.random.default_rng(0)
    for number in range(28):
        path = tmp_path / "fer2013" / "test" / str(number % len(names)) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).resize((8, 9)).save(path)
    from clip_benchmark.metrics import zeroshot_classification

    def shares(scores, labels, topk):  # its own turns arrays of one number into numbers, which numpy 2.4 refuses
        best = scores.topk(max(topk), dim=1).indices
        return [(best[:, :k] == labels[:, None]).any(dim=1).float().mean().item() for k in topk]

    monkeypatch.setattr(zeroshot_classification, "accuracy", shares)
    result = tmp_path / "result.json"
    command = ["adapter", "eval", "--model_type", "dino_sparo", "--model", "normalized", "--pretrained", str(weights)]
    command += ["--dataset", "fer2013", "--dataset_root", str(tmp_path / "fer2013"), "--no_amp", "--num_workers", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--batch_size", "5", "--output", str(result)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own
        load.run_clip_benchmark()
    metrics = json.loads(result.read_text())["metrics"]
    loaded = load_clip(weights)
    encoder = dot_product_scorer(loaded, batch_size=5)
    sentences = tuple(template.replace("{c}", "{}") for template in templates)
    expected = evaluate_zero_shot(encoder, open_source(str(tmp_path / "fer2013" / "test")), names, sentences)
    assert metrics["acc1"] == pytest.approx(expected["top1"] / 100)
    assert metrics["acc5"] == pytest.approx(expected["top5"] / 100)
    assert 0 < metrics["acc5"] < 1

"""A model of timm with timm's weights in place of a checkpoint; its weights come from a seed, not from the hub."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hub import Hub
from safetensors.torch import save
from torch import Tensor

import dino_sparo
from dino_sparo.__main__ import run
from dino_sparo.evaluation.embed.store import load_embeddings
from dino_sparo.models import foreign_backbone
from dino_sparo.runtime.launch import shutdown
from dino_sparo.weights.checkpoint import weights_sha256
from dino_sparo.weights.initialize import initialize_pretrained

ROOT = Path(__file__).resolve().parents[2]
CREATE = timm.create_model
# With a class token; with a map alone. timm's images of both have 160 pixels, and a mean and a deviation of 0.5.
MODELS = ("test_vit", "test_resnet")
every_model = pytest.mark.parametrize("name", MODELS)
SCENES = {"data_path": "scenes:12:32", "num_workers": "0"}


def published(name: str) -> Any:
    """The model of timm with the weights that stand for the published ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return CREATE(name, num_classes=0).eval()


@pytest.fixture(autouse=True)
def _weights_from_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def create(name: str, pretrained: bool = False, **settings: Any) -> Any:
        return published(name) if pretrained else CREATE(name, **settings)

    monkeypatch.setattr(foreign_backbone.timm, "create_model", create)
    monkeypatch.chdir(tmp_path)  # where results lie without --output_dir
    yield
    shutdown()


def evaluate(command: str, name: str = "", **options: Any) -> Any:
    given = {"pretrained_weights": f"timm/{name}", "device": "cpu", **options}
    return run(command, [word for key, value in given.items() if value for word in (f"--{key}", *str(value).split())])


@every_model
@torch.no_grad()
def test_the_encoding_is_the_class_token_or_the_mean_of_the_map_of_images_as_timm_prepares_them(name: str) -> None:
    encoder, white = dino_sparo.load_encoder(f"timm/{name}"), np.full((64, 96, 3), 255, np.uint8)
    images = encoder.transform(white)
    torch.testing.assert_close(images, torch.ones(1, 3, 160, 160))
    features: Tensor = published(name).forward_features(images)
    expected = features[:, 0] if features.ndim == 3 else features.mean(dim=(2, 3))
    torch.testing.assert_close(encoder(images), expected)


@pytest.mark.slow
@every_model
def test_knn_probes_and_embeddings_take_the_name_and_write_no_folder_of_that_name(name: str, tmp_path: Path) -> None:
    result = evaluate("knn", name, nb_knn=3, **SCENES)
    assert (result["view"]["crop"], result["view"]["mean"]) == (160, [0.5, 0.5, 0.5])
    assert result["encoder"]["pretrained_weights"] == f"timm/{name}"
    fast = {"fast": "true", "epochs": 1, "lr": 0.1, **SCENES}
    evaluate("linear", name, n_last_blocks=2, **fast)
    sizes = {"sparo_slots": 3, "sparo_slot_dim": 5, "sparo_key_dim": 7, "ep_queries": 2, "attention_heads": 2}
    evaluate("linear", name, probe="linear sparo ep attention", **sizes, **fast)
    evaluate("embed", name, what="encoding patches", output_dir="embeddings", **SCENES)
    patches = load_embeddings("embeddings").arrays["patches"]
    assert patches.shape[1:] == ({"test_vit": 100, "test_resnet": 25}[name], published(name).num_features)
    assert not (tmp_path / "timm").exists()
    assert {f"{kind}_{name}_scenes-12-32.json" for kind in ("knn", "linear", "probes")} <= {
        path.name for path in tmp_path.iterdir()
    }
    probe = dino_sparo.load_encoder(next(tmp_path.glob("probe_sparo_*.pth")))
    assert (probe.config.arch, probe.encoding_dim) == (f"timm/{name}", 15)
    torch.testing.assert_close(
        probe.backbone.state_dict(), dino_sparo.load_encoder(f"timm/{name}").backbone.state_dict()
    )


def test_the_hash_tells_weights_apart_and_is_the_same_in_every_run() -> None:
    hashes = [weights_sha256(f"timm/{name}") for name in (*MODELS, *MODELS)]
    assert hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]
    assert all(len(value) == 64 for value in hashes)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["arch", "pretrained_weights"])
def test_an_untrained_timm_model_is_a_control(by: str) -> None:
    name = "timm/test_resnet"
    own = {"readout": "gap"} if by == "arch" else {}  # a checkpoint has a read-out of its own
    options = {"pretrained_weights": "", by: name, "untrained": "true", "nb_knn": 3, **own, **SCENES}
    encoder = evaluate("knn", **options)["encoder"]
    assert encoder["untrained"]
    assert (encoder["arch"], encoder["patch_size"], encoder["readout"]) == (name, 32, "gap")


def test_an_untrained_encoder_takes_pictures_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: --img_size of a picture, a list, became the size of the encoder."""
    monkeypatch.setattr("dino_sparo.evaluation.attention.command.draw", lambda *_: [])
    run("attention", ["--untrained", "--arch", "vit_micro", "--patch_size", "8", "--img_size", "64", "--device", "cpu"])
    assert np.load("attention.npy").shape[2:] == (8, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_vitt", r"unknown arch 'timm/test_vitt'; the nearest are .*timm/test_vit"),
        ("test_vit.nobody", r"timm has no weights 'timm/test_vit.nobody'; choose one of timm/test_vit.r160_in1k"),
        ("missing.pth", r"no checkpoint at timm/missing.pth; give the path of a \.pth file"),
    ],
)
def test_a_name_that_stands_for_no_weights_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dino_sparo.load_encoder(f"timm/{name}")


def test_weights_that_cannot_be_had_name_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, pretrained: bool = False, **settings: Any) -> Any:
        if pretrained:
            raise ConnectionError("no network")
        return CREATE(name, **settings)

    monkeypatch.setattr(foreign_backbone.timm, "create_model", offline)
    reason, started = r"no weights of timm/test_vit \(no network\)", dino_sparo.create_encoder("timm/test_vit")
    with pytest.raises(ValueError, match=rf"{reason}.* give --pretrained_weights FILE --arch timm/test_vit$"):
        dino_sparo.load_encoder("timm/test_vit")
    with pytest.raises(ValueError, match=rf"{reason}; with HF_HUB_OFFLINE=1 .*--init_from FILE"):
        initialize_pretrained(started)
    assert not logging.getLogger("huggingface_hub").handlers  # the log has its lines, once


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_then_read_without_a_network(tmp_path: Path) -> None:
    program = (
        "import sys, torch, dino_sparo\n"
        "encoder = dino_sparo.load_encoder('timm/test_vit')\n"
        "assert torch.equal(encoder.backbone.model.cls_token, torch.load('token.pth'))\n"
    )
    model = CREATE("test_vit")  # with the classifier, as published
    torch.save(model.cls_token.detach(), tmp_path / "token.pth")
    own = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    with Hub() as hub:
        hub.repositories["timm/test_vit.r160_in1k"] = {"model.safetensors": save(model.state_dict())}
        for more in ({"HF_ENDPOINT": hub.url}, {"HF_HUB_OFFLINE": "1"}):
            environment = {**os.environ, **own, **more}
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr

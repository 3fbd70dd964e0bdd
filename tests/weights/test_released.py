"""Weights that DINO's authors released: files of the same form, served on 127.0.0.1."""

import argparse
import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from reference import weights as reference
from torchvision.models.resnet import Bottleneck, ResNet

import hubconf
from dino_sparo import load_encoder
from dino_sparo.models.architectures import ViTSize
from dino_sparo.models.backbone import Backbone
from dino_sparo.weights import released
from dino_sparo.weights.checkpoint import CheckpointError
from dino_sparo.weights.hub import released_model

ROOT = Path(__file__).resolve().parents[2]


class Server(http.server.ThreadingHTTPServer):
    """Files of a folder; `asked` holds the paths that were asked for, `cut` ends answers early."""

    asked: list[str]
    cut = False


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile) -> None:
        outputfile.write(source.read()[: 100 if self.server.cut else None])

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the reference's files, and an empty hub folder."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(released, "ADDRESS", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    yield server
    server.shutdown()
    server.server_close()


def serve(tmp_path: Path, name: str, weights: object) -> None:
    stem = f"dino_{released.RELEASES[name].stem}"
    folder = tmp_path / "served" / f"{stem}_pretrain"
    folder.mkdir()
    torch.save(weights, folder / f"{stem}_pretrain.pth")


def small_vit(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Weights of a vit_micro, released as those of dino_vits16."""
    monkeypatch.setitem(released.RELEASES, "dino_vits16", released.Release("vit_micro", 16, "deitsmall16"))
    torch.manual_seed(0)
    return Backbone(ViTSize(128, 4, 4), 16, 32).state_dict()


def test_a_name_is_downloaded_once_and_read_wherever_weights_are(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = small_vit(monkeypatch)
    serve(tmp_path, "dino_vits16", weights)
    encoder = load_encoder("dino_vits16")
    assert server.asked == ["/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth"]
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(load_encoder("dino_vits16")(images), encoder(images))
    assert len(server.asked) == 1
    assert [*(tmp_path / "home" / "hub" / "checkpoints").iterdir()] == [released.released_file("dino_vits16")]
    model = released_model("dino_vits16", img_size=[32]).eval()
    torch.testing.assert_close(model(images), encoder(images))
    assert [tokens.shape for tokens in model.get_intermediate_layers(images, 2)] == [(2, 5, 128)] * 2
    assert model.get_last_selfattention(images).shape == (2, 4, 5, 5)
    assert model.state_dict().keys() == weights.keys()


def test_what_does_not_arrive_whole_is_not_kept_and_one_line_says_where_to_put_the_file(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"dino_vitbase8_pretrain\.pth could not be .*404.*put it"):
        load_encoder("dino_vitb8")
    serve(tmp_path, "dino_vits16", small_vit(monkeypatch))
    server.cut = True
    with pytest.raises(ValueError, match=r"100 of \d+ bytes arrived"):
        load_encoder("dino_vits16")
    assert [*(tmp_path / "home" / "hub" / "checkpoints").iterdir()] == []
    server.cut = False
    load_encoder("dino_vits16")


def release_resnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weights: object) -> None:
    """A smaller ResNet of timm, released as dino_resnet50."""
    monkeypatch.setitem(released.RELEASES, "dino_resnet50", released.Release(f"timm/{name}", 32, "resnet50"))
    serve(tmp_path, "dino_resnet50", weights)


def test_a_file_with_other_weights_is_refused(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    release_resnet(tmp_path, monkeypatch, "test_resnet", {"conv1.weight": torch.zeros(64, 3, 7, 7)})
    with pytest.raises(CheckpointError, match="does not hold the weights of timm/test_resnet"):
        load_encoder("dino_resnet50")


def test_a_resnet_gives_torchvisions_features(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-26 has the blocks of ResNet-50."""
    torch.manual_seed(0)
    reference = ResNet(Bottleneck, [2, 2, 2, 2]).eval()
    reference.fc = torch.nn.Identity()
    release_resnet(tmp_path, monkeypatch, "resnet26", reference.state_dict())
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        wanted = reference(images)
        for model in (load_encoder("dino_resnet50"), released_model("dino_resnet50").eval()):
            torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)


def test_xcit_gives_the_class_token_of_the_official_code(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class attention stays for `cls`, and its weights have other names than timm's."""
    recorded = reference.load("xcit")
    drawn = reference.state(json.loads(str(recorded["shapes"])), "xcit/")
    statistics = timm.create_model("xcit_nano_12_p16_224").state_dict()  # of batch norm, as they start
    statistics = {name: value for name, value in statistics.items() if "running" in name or "num_batches" in name}
    weights = {**statistics, **{name: torch.from_numpy(value) for name, value in drawn.items()}}
    release = released.Release("timm/xcit_nano_12_p16_224", 16, "xcit_small_12_p16")
    monkeypatch.setitem(released.RELEASES, "dino_xcit_small_12_p16", release)
    serve(tmp_path, "dino_xcit_small_12_p16", weights)
    encoder, model = load_encoder("dino_xcit_small_12_p16"), released_model("dino_xcit_small_12_p16").eval()
    assert encoder.config.readout == "cls"
    for size in ((64, 96), (48, 48)):
        images = torch.from_numpy(reference.images("xcit", 2, *size))
        wanted = torch.from_numpy(recorded[f"features/{size[0]}x{size[1]}"])
        with torch.no_grad():
            torch.testing.assert_close(encoder(images), wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="give --n_last_blocks 1"):
        encoder.probe_features(images)


@pytest.mark.parametrize(
    ("arch", "patch_size", "preferred", "name"),
    [
        (None, None, "", "dino_vits16"),
        ("vit_small", 8, "", "dino_vits8"),
        ("vit_small", 8, released.LONGER, "dino_vits8_300ep"),
        ("vit_small", 16, released.LONGER, "dino_vits16"),
        ("vit_base", 16, released.LANDMARKS, "dino_vitb16"),
        (None, None, released.LANDMARKS, "dino_vits16_landmarks"),
        ("timm/resnet50", None, "", "dino_resnet50"),
        ("timm/xcit_medium_24_p8_224", None, "", "dino_xcit_medium_24_p8"),
    ],
)
def test_without_weights_the_references_are_taken(
    arch: str | None, patch_size: int | None, preferred: str, name: str
) -> None:
    args = argparse.Namespace(pretrained_weights="", untrained=False, arch=arch, patch_size=patch_size)
    released.take_released_weights(args, preferred)
    assert args.pretrained_weights == name


def test_where_nothing_was_released_the_message_says_for_what_there_are_weights() -> None:
    args = argparse.Namespace(pretrained_weights="", untrained=False, arch="vit_large", patch_size=None)
    with pytest.raises(ValueError, match=r"no weights of vit_large/16, only of .*vit_small/8.*give the path"):
        released.take_released_weights(args)


def test_torch_hub_lists_the_references_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name in released.RELEASES if not name.endswith((released.LANDMARKS, released.LONGER))}
    assert names < {name for name, value in vars(hubconf).items() if callable(value)}
    small_vit(monkeypatch)
    model = torch.hub.load(str(ROOT), "dino_vits16", source="local", pretrained=False, img_size=[32], verbose=False)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 128)

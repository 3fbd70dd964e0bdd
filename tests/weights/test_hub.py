"""`dino-sparo push` and loading by a repository's name, against a stand-in for the hub on this machine."""

import json
import socket
import time
from pathlib import Path

import pytest
import torch
from hub import Hub
from refusals import refused
from small_models import save_small_encoder

from dino_sparo import load_encoder
from dino_sparo.__main__ import main


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint; the hub's client has an empty cache and uploads by HTTP."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return save_small_encoder(tmp_path / "checkpoint.pth")


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client, which reads an address from the environment when it is imported, use this one."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")  # by huggingface_hub 2.4
def test_a_pushed_encoder_is_loaded_by_its_name_and_what_the_hub_refuses_is_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Hub() as hub:
        use_hub(hub.url, monkeypatch)
        main(["push", str(checkpoint), "somebody/slots", "--private"])
        assert f"{hub.url}/somebody/slots/commit/" in capsys.readouterr().out
        with refused("no repository of that name on the Hugging Face hub"):
            main(["knn", "--pretrained_weights", "nobody/nothing"])
        with refused("could not upload to a/b--c"):
            main(["push", str(checkpoint), "a/b--c"])
        ours, theirs = load_encoder(checkpoint), load_encoder("somebody/slots")
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(ours(images), theirs(images))
    assert hub.private == {"somebody/slots"}
    files = hub.repositories["somebody/slots"]
    assert sorted(files) == ["README.md", "config.json", "model.safetensors", "modeling_sparo.py"]
    assert "AutoModel.from_pretrained('somebody/slots', trust_remote_code=True)" in files["README.md"].decode()
    assert json.loads(files["config.json"])["encoder"]["num_slots"] == 5


@pytest.mark.parametrize("name", ["noslash", "a/b/c", "a/", "/b", ""])
def test_a_push_to_no_name_of_a_repository_is_refused_before_the_checkpoint_is_read(name: str) -> None:
    with refused("is not the name of a repository; give USER/NAME"):
        main(["push", "none.pth", name])


@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_is_away_or_silent_ends_a_push_in_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """The bug: a traceback, or a process that waited for an answer without end."""
    monkeypatch.setattr("dino_sparo.weights.export.HUB_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        if not answers:
            silent.close()
        begin = time.monotonic()
        with pytest.raises(SystemExit, match="1"):
            main(["push", str(checkpoint), "somebody/slots"])
    assert "could not upload to somebody/slots: " in caplog.text
    assert "is there a network" in caplog.text
    assert time.monotonic() - begin < 30

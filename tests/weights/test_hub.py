"""`dino-sparo push` and loading by a repository's name, against a stand-in for the hub on this machine."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hub import Hub
from refusals import refused
from small_models import save_small_encoder

from dino_sparo.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


# One process for all: what it imports takes seconds. Each command's words end with a line that holds its status.
PROGRAM = """
import json, sys, torch, dino_sparo
from dino_sparo.__main__ import main

def end(status):
    for stream in (sys.stdout, sys.stderr):
        print(f"status {status}", file=stream, flush=True)

checkpoint, *commands = json.loads(sys.argv[1])
for words in commands:
    try:
        main(words)
    except SystemExit as stopped:
        end(stopped.code)
    else:
        end(0)
ours, theirs = (dino_sparo.load_encoder(path) for path in (checkpoint, "somebody/slots"))
images = torch.randn(3, 3, 16, 16)
assert torch.equal(ours(images), theirs(images))
"""


class Said(NamedTuple):
    """Exit status and words of a command."""

    status: str
    out: str
    err: str


def run(hub: Hub, folder: Path, checkpoint: Path, *commands: Sequence[str]) -> list[Said]:
    """Run commands where the hub is the stand-in; huggingface_hub reads its address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": "hf_token",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    program = [sys.executable, "-c", PROGRAM, json.dumps([str(checkpoint), *commands])]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    outs, errs = (re.split(r"^status (\w+)\n", text, flags=re.MULTILINE) for text in (done.stdout, done.stderr))
    return [Said(*each) for each in zip(outs[1::2], outs[::2], errs[::2], strict=False)]


@pytest.mark.slow
def test_a_pushed_encoder_is_loaded_by_its_name_and_what_the_hub_refuses_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face's package is not installed")
    checkpoint = save_small_encoder(tmp_path / "checkpoint.pth")
    with Hub() as hub:
        pushed, unknown, denied = run(
            hub,
            tmp_path,
            checkpoint,
            ["push", str(checkpoint), "somebody/slots", "--private"],
            ["knn", "--pretrained_weights", "nobody/nothing"],
            ["push", str(checkpoint), "a/b--c"],
        )
    assert pushed.status == "0", pushed.err
    assert f"{hub.url}/somebody/slots/commit/" in pushed.out
    assert hub.private == {"somebody/slots"}
    files = hub.repositories["somebody/slots"]
    names = ["README.md", "config.json", "model.safetensors", "modeling_sparo.py"]
    assert sorted(files) == names
    assert "AutoModel.from_pretrained('somebody/slots', trust_remote_code=True)" in files["README.md"].decode()
    assert json.loads(files["config.json"])["encoder"]["num_slots"] == 5
    for said, message in (
        (unknown, "no repository of that name on the Hugging Face hub"),
        (denied, "could not upload to a/b--c"),
    ):
        assert said.status == "1"
        assert message in said.err
        assert "Traceback" not in said.err


@pytest.mark.parametrize("name", ["noslash", "a/b/c", "a/", "/b", ""])
def test_a_push_to_no_name_of_a_repository_is_refused_before_the_checkpoint_is_read(name: str) -> None:
    with refused("is not the name of a repository; give USER/NAME"):
        main(["push", "none.pth", name])


@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_is_away_or_silent_ends_a_push_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """The bug: a traceback, or a process that waited for an answer without end."""
    pytest.importorskip("transformers", reason="Hugging Face's package is not installed")
    monkeypatch.setattr("dino_sparo.weights.export.HUB_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not answers:
            silent.close()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        begin = time.monotonic()
        with pytest.raises(SystemExit, match="1"):
            main(["push", str(save_small_encoder(tmp_path / "checkpoint.pth")), "somebody/slots"])
    assert "could not upload to somebody/slots: " in caplog.text
    assert "is there a network" in caplog.text
    assert time.monotonic() - begin < 30

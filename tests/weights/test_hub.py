"""`dino-sparo push` and loading by a repository's name, against a stand-in for the hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub import Hub

from dino_sparo.models.encoder import create_encoder
from dino_sparo.weights.checkpoint import encoder_description
from dino_sparo.weights.folder import save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def run(hub: Hub, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the hub is the stand-in; huggingface_hub reads its address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_token",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, cwd=tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    encoder = create_encoder("vit_micro", 8, "sparo", num_slots=5, slot_dim=3, key_dim=2, img_size=16)
    description = encoder_description(encoder.config, (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    path = tmp_path / "checkpoint.pth"
    save_checkpoint({"teacher": encoder.state_dict(), "encoder": description, "epoch": 3}, path)
    return path


def test_a_pushed_encoder_is_loaded_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face's package is not installed")
    script = (
        "import sys, torch, dino_sparo\n"
        "ours, theirs = (dino_sparo.load_encoder(path) for path in sys.argv[1:])\n"
        "images = torch.randn(3, 3, 16, 16)\n"
        "assert torch.equal(ours(images), theirs(images))\n"
    )
    with Hub() as hub:
        pushed = run(hub, tmp_path, "-m", "dino_sparo", "push", str(checkpoint), "somebody/slots", "--private")
        assert pushed.returncode == 0, pushed.stderr
        assert f"{hub.url}/somebody/slots/commit/" in pushed.stdout
        assert hub.private == {"somebody/slots"}
        files = hub.repositories["somebody/slots"]
        names = ["README.md", "config.json", "model.safetensors", "modeling_sparo.py", "preprocessor_config.json"]
        assert sorted(files) == names
        assert 'AutoModel.from_pretrained("somebody/slots", trust_remote_code=True)' in files["README.md"].decode()
        assert json.loads(files["config.json"])["encoder"]["num_slots"] == 5
        loaded = run(hub, tmp_path, "-c", script, str(checkpoint), "somebody/slots")
        assert loaded.returncode == 0, loaded.stderr


def test_what_the_hub_refuses_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face's package is not installed")
    with Hub() as hub:
        loaded = run(hub, tmp_path, "-m", "dino_sparo", "knn", "--pretrained_weights", "nobody/nothing")
        assert loaded.returncode == 1
        assert "no repository of that name on the Hugging Face hub" in loaded.stderr
        assert "Traceback" not in loaded.stderr
        pushed = run(hub, tmp_path, "-m", "dino_sparo", "push", str(checkpoint), "a/b/c")
        assert pushed.returncode == 1
        assert "could not upload to a/b/c" in pushed.stderr
        assert "Traceback" not in pushed.stderr

"""The README's Python: its block runs as it stands, and gives the shapes that its comments name."""

import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from dino_sparo import create_encoder
from dino_sparo.checkpoint import encoder_description, save_checkpoint

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_python_of_the_readme_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    encoder = create_encoder("vit_micro")
    description = encoder_description(encoder.config, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    path = tmp_path / "runs" / "vits16" / "checkpoint.pth"
    path.parent.mkdir(parents=True)
    save_checkpoint({"teacher": encoder.state_dict(), "encoder": description}, path)
    Image.new("RGB", (300, 250), (9, 80, 200)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    with torch.no_grad():
        exec(blocks[0], names)
    assert names["images"].shape == (1, 3, 224, 224)
    assert names["encoding"].shape == (1, 4096)
    assert names["output"].slots.shape == (1, 64, 64)
    assert names["output"].attention.shape == (1, 64, 197)

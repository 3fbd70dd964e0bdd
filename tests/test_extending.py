"""docs/extending.md: every code block in it runs and does what the text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, assert_same_state, epochs_of

from dino_sparo import load_checkpoint, load_encoder

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), flags=re.DOTALL)
TINY = {
    "data_path": "scenes:26:32",
    "arch": "vit_micro",
    "patch_size": "8",
    "global_crops_size": "16",
    "local_crops_number": "0",
    "sparo_slots": "3",
    "sparo_slot_dim": "5",
    "sparo_key_dim": "7",
    "head_hidden_dim": "37",
    "out_dim": "13",
    "batch_size_per_gpu": "6",
    "epochs": "3",
    "warmup_epochs": "1",
    "num_workers": "0",
    "device": "cpu",
    "precision": "fp32",
}


def block_with(word: str) -> str:
    (block,) = (block for block in BLOCKS if word in block)
    return block


@pytest.mark.slow
def test_the_new_loss_trains_resumes_to_the_bit_and_leaves_an_encoder(tmp_path: Path) -> None:
    script = tmp_path / "vicreg.py"
    script.write_text(block_with("vicreg_loss"))

    flags = [word for name, value in TINY.items() for word in (f"--{name}", value)]

    def train(name: str, *more: str) -> dict:
        command = [sys.executable, str(script), *flags, "--output_dir", str(tmp_path / name), *more]
        done = subprocess.run(
            command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return load_checkpoint(tmp_path / name / "checkpoint.pth")

    whole = train("whole")
    train("parts", "--max_steps", "6")
    parts = train("parts")
    assert_same_state(whole["student"], parts["student"], "student")
    losses = [epoch["train_loss"] for epoch in epochs_of(tmp_path / "whole")]
    assert losses[-1] < losses[0]
    assert load_encoder(tmp_path / "whole" / "checkpoint.pth", which="student").encoding_dim == 3 * 5

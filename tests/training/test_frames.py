"""CONTRIBUTING's list of the calls from `main_dino.py` to the optimizer, against those of a run."""

import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from runs import options

import main_dino

ROOT = Path(__file__).parents[2]


class _StopError(BaseException):
    """Ends the run in the optimizer's first step."""


def test_contributing_lists_the_few_calls_from_main_dino_to_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Path]] = []

    def step(self: torch.optim.Optimizer) -> None:
        frame = sys._getframe(1)
        while Path(frame.f_code.co_filename).name != "main_dino.py":
            calls.insert(0, (frame.f_code.co_name, Path(frame.f_code.co_filename)))
            frame = frame.f_back
        assert not gc.isenabled(), "the garbage collector rests during an epoch"
        raise _StopError

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(_StopError):
        main_dino.main(options(tmp_path, max_steps=1))
    assert gc.isenabled()
    package = ROOT / "dino_sparo"
    own = [(name, path.relative_to(package).as_posix()) for name, path in calls if path.is_relative_to(package)]
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where a batch goes")[1].split("\n## ")[0]
    listed = re.findall(r"^    *(?:\w+\.)?(\w+)\(.*?\) +(\S+\.py) ", text, flags=re.MULTILINE)
    assert [("main", "main_dino.py"), *own] == listed
    assert len(own) <= 7

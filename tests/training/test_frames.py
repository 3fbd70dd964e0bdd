"""The way from `main_dino.py` to the work is short, and CONTRIBUTING lists it as it is."""

import gc
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from runs import options

import main_dino

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dino_sparo"


class _StopError(BaseException):
    """Ends the run in the function to which the way is measured."""


def way_to(
    target: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, is_collecting: bool = True
) -> list[tuple[str, Path]]:
    """Name and file of each call of ours between `main_dino.main` and a function, which is not called."""
    calls: list[tuple[str, Path]] = []

    def stop(*args: Any, **options: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_code is not main_dino.main.__code__:
            calls.insert(0, (frame.f_code.co_name, Path(frame.f_code.co_filename)))
            frame = frame.f_back
        assert gc.isenabled() == is_collecting
        raise _StopError

    monkeypatch.setattr(target, stop)
    with pytest.raises(_StopError):
        main_dino.main(arguments)
    assert gc.isenabled()
    return [(name, path) for name, path in calls if path.is_relative_to(PACKAGE) or path.parent == ROOT]


def test_contributing_lists_the_few_calls_from_main_dino_to_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = options(tmp_path, max_steps=1)
    calls = way_to("torch.optim.AdamW.step", arguments, monkeypatch, is_collecting=False)  # it rests during an epoch
    own = [(name, path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).as_posix()) for name, path in calls]
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where a batch goes")[1].split("\n## ")[0]
    listed = re.findall(r"^    *(?:\w+\.)?(\w+)\(.*?\) +(\S+\.py) ", text, flags=re.MULTILINE)
    assert [("main", "main_dino.py"), *own] == listed
    assert len([path for _, path in calls if PACKAGE in path.parents]) <= 5


@pytest.mark.parametrize(
    ("option", "target"),
    [("data_path", "dino_sparo.data.sources.open_folder"), ("sparo_slots", "dino_sparo.models.readouts.Sparo")],
)
def test_an_option_reaches_its_reader_in_seven_calls(
    option: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    changes = {"data_path": str(tmp_path)} if option == "data_path" else {}
    assert len(way_to(target, options(tmp_path / "run", **changes), monkeypatch)) < 7, "the target is the seventh"

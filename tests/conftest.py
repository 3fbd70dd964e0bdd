"""What holds for every test: one thread per process.

The tests' tensors are small. A second thread gains nothing on them, and costs milliseconds in every operation where it
has to wait for a core that another process keeps busy.
"""

import gc
import logging
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import shape_checks
import torch
from two_ranks import TwoRanks

jaxtyping.jaxtyped = shape_checks.jaxtyped  # what the hook of `--jaxtyping-packages` decorates the package with
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Lists of shards and folders are cached; tests leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DINO_SPARO_CACHE", str(tmp_path_factory.mktemp("the_cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _looks_after_an_epoch_are_small() -> Generator[None, None, None]:
    """The rank of 64 images' encodings and large pictures would cost as much as the steps of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dino_sparo.data.examples.NUM_MEASURED", 8)
        patch.setattr("dino_sparo.draw.pixels.GRID_HEIGHT", 32)
        yield


@pytest.fixture(autouse=True)
def _log_files_end_with_their_test() -> Generator[None, None, None]:
    """No test writes to the log of another, whose folder is removed, or to its closed stream."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if getattr(getattr(each, "stream", None), "closed", False)]:
        root.removeHandler(handler)
    yield
    for handler in [handler for handler in root.handlers if isinstance(handler, logging.FileHandler)]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def _stand_ins_for_spacy_end_with_their_test() -> Generator[None, None, None]:
    """A process loads spaCy's model once; that of one test must not serve another."""
    yield
    if text := sys.modules.get("dino_sparo.image_text.towers"):
        text._pipeline.cache_clear()


@pytest.fixture(scope="session")
def two_ranks() -> Generator[TwoRanks, None, None]:
    """Two ranks of one process group, for all tests; see `support/two_ranks.py`."""
    ranks = TwoRanks()
    yield ranks
    ranks.end()


@pytest.fixture
def no_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sheets of pairs are empty files: to draw one takes longer than all else that the command does."""
    monkeypatch.setattr("dino_sparo.image_text.picture_pairs.save_sheet", lambda _, path: path.touch())


@pytest.fixture
def stopped(first_steps: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may resume; `first_steps` is the stopped run of the test's file."""
    return Path(shutil.copytree(first_steps, tmp_path / "stopped"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, which every epoch of a training makes in full."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Escape what is no UTF-8 in captured lines: xdist's processes end on it."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report

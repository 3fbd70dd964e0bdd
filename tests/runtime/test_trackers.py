"""Trackers: what Weights & Biases and Trackio get, by the packages themselves and without network; their failures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dino_sparo.commands import parse_keywords
from dino_sparo.runtime import trackers
from dino_sparo.runtime.faults import MissingPackageError
from dino_sparo.runtime.trackers import TrackedRun, Trackers
from dino_sparo.training.options import check_run

PICTURE = np.zeros((3, 5, 3), dtype=np.uint8)


class Recorder:
    """A tracker that keeps what it gets, and may fail in one of its methods."""

    fails_in: ClassVar[str] = ""

    def __init__(self, run: TrackedRun) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.note("__init__")

    def note(self, name: str, *arguments: Any) -> None:
        if name == self.fails_in:
            raise ConnectionError("no route to host")
        self.calls.append((name, *arguments))

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.note("scalars", values, step)

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        self.note("image", name, step)

    def close(self) -> None:
        self.note("close")


@pytest.mark.parametrize("method", ["__init__", "scalars", "image", "close"])
def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: a file server that was away for a moment ended a run for good, before it had saved."""
    broken = type("Broken", (Recorder,), {"fails_in": method})
    monkeypatch.setitem(trackers.TRACKERS, "broken", broken)
    monkeypatch.setitem(trackers.TRACKERS, "working", Recorder)
    several = Trackers(["broken", "working"], TrackedRun(tmp_path))
    working = several.open["working"]
    for step in (1, 2):
        several.each(lambda tracker, step=step: tracker.scalars({"loss": 1.0}, step))
        several.each(lambda tracker, step=step: tracker.image("slots", PICTURE, step))
    several.each(lambda tracker: tracker.close())
    assert isinstance(working, Recorder)
    assert [name for name, *_ in working.calls] == ["__init__", *["scalars", "image"] * 2, "close"]
    assert list(several.open) == ["working"]
    assert caplog.text.count("--report_to broken failed, so training continues without broken") == 1
    assert "no route to host" in caplog.text


def test_a_worker_that_dies_meanwhile_is_no_failure_of_a_tracker(tmp_path: Path) -> None:
    """The bug: torch raises its death in the main process wherever this is, and the tracker was left out for it."""

    def die(tracker: object) -> None:
        raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed.")

    several = Trackers(["tensorboard"], TrackedRun(tmp_path))
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        several.each(die)
    assert list(several.open) == ["tensorboard"]
    several.each(lambda tracker: tracker.close())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_ends_a_training_before_its_first_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the run trained on, and nothing tracked it."""
    args = parse_keywords("train", {"data_path": "scenes", "output_dir": tmp_path, "report_to": [name]})
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingPackageError, match=rf"package {name}; install it with: pip install 'dino_sparo\[{name}"):
        check_run(args)


def test_a_resumed_run_keeps_its_id_and_one_that_starts_over_gets_another(tmp_path: Path) -> None:
    """The bug: every tracker of a run that starts drew an id, and the file kept the last."""
    first = TrackedRun(tmp_path, step=0)
    ids = [first.run_id, first.run_id, *(TrackedRun(tmp_path, step=step).run_id for step in (4, None))]
    assert len(set(ids)) == 1
    assert TrackedRun(tmp_path, step=0).run_id != first.run_id


TRACK = """
import sys
from pathlib import Path
import numpy as np
from dino_sparo.runtime import trackers
from dino_sparo.runtime.trackers import TrackedRun, Trackers

trackers.START_S = 5.0
name, folder, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
options = {"lr": 0.5, "data_path": "caf\\udce9.tar", "crops": [1, 2], "max_steps": None}
run = TrackedRun(folder, "my run", step, options, ["epoch/loss"])
several = Trackers([name], run)
for number in (step + 1, step + 2):
    several.each(lambda tracker: tracker.scalars({"train/loss": 1.0 / number}, number))
several.each(lambda tracker: tracker.image("slots", np.zeros((3, 5, 3), np.uint8), step + 2))
several.each(lambda tracker: tracker.close())
assert list(several.open) == [name], several.open
"""


def track(name: str, folder: Path, step: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """A part of a run, in a process of its own: these packages keep threads and global state."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-c", TRACK, name, str(folder), str(step)]
    return subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=True
    )


@pytest.mark.slow
def test_trackio_continues_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="pip install trackio")
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "tests", "HF_HUB_OFFLINE": "1"}
    for step in (0, 1):  # the run was saved after step 1, so step 2 is taken again
        track("trackio", tmp_path / "run", step, **environment)
    read = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("tests")
print(json.dumps({"runs": runs, "logs": [SQLiteStorage.get_logs("tests", run) for run in runs],
                  "config": SQLiteStorage.get_run_config("tests", runs[0])}))
"""
    words = [sys.executable, "-c", read]
    answer = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    found = json.loads(answer.stdout)
    run_id = json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    assert found["runs"] == [f"my run-{run_id}"]
    losses = [(entry["step"], entry["train/loss"]) for entry in found["logs"][0] if "train/loss" in entry]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [entry["step"] for entry in found["logs"][0] if "slots" in entry] == [2, 3]
    assert (found["config"]["lr"], found["config"]["data_path"]) == (0.5, r"caf\udce9.tar")
    assert list((tmp_path / "trackio").rglob("*.png"))


@pytest.mark.slow
def test_wandb_continues_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    for step in (0, 1):
        track("wandb", tmp_path / "run", step, WANDB_MODE="offline", WANDB_PROJECT="tests")
    run_id = json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert {part.name.rsplit("-", 1)[1] for part in parts} == {run_id}
    losses = []
    for part in parts:
        (file,) = part.glob("*.wandb")
        records = list(records_of(file))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (run.display_name, run.project, config["lr"]) == ("my run", "tests", 0.5)
        assert config["data_path"] == r"caf\udce9.tar"
        for record in records:
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if "train/loss" in items:
                losses.append((items["step"], items["train/loss"]))
        assert list(part.rglob("*.png"))
    assert losses == [(1, 1.0), (2, 0.5), (2, 0.5), (3, pytest.approx(1 / 3))]


def records_of(file: Path) -> Any:
    """The records of an offline run: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, position, message = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        message += content[position + 7 : position + 7 + size]
        position += 7 + size
        if (left := -position % 32768) < 7:  # no header fits into the rest of a block
            position += left
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


@pytest.mark.slow
def test_wandb_without_network_or_key_costs_its_page_alone(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    folder = tmp_path / "run"
    environment = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "HOME": str(tmp_path)}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        track("wandb", folder, 0, **environment)
    assert "AssertionError: {}" in caught.value.stderr  # the tracker was left out; nothing was raised

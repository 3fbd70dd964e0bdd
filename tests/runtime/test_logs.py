"""What a run says: means, log.txt, TensorBoard's events, log lines and progress."""

import io
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from dino_sparo.runtime import logs
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import write_text
from dino_sparo.runtime.logs import HAS_LINES, EpochClock, Meters, RunLog, peak_memory, progress, setup_logging
from dino_sparo.runtime.trackers import TrackedRun

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


# Meters.


def test_each_number_is_divided_by_how_often_it_was_observed() -> None:
    meters = Meters()
    for step in range(6):
        meters.update(loss=torch.tensor(float(step)))
        if step % 3 == 0:
            meters.update(entropy=float(step))
    assert meters.means() == {"loss": 2.5, "entropy": 1.5}
    assert Meters().means() == {}


def test_many_small_numbers_are_summed_in_double_precision() -> None:
    meters = Meters()
    meters.update(loss=torch.tensor(1e8))
    for _ in range(1000):
        meters.update(loss=torch.tensor(1.0))
    assert meters.means()["loss"] == (1e8 + 1000) / 1001


def test_meters_keep_no_graph_and_do_not_follow_tensors_that_change() -> None:
    meters, loss = Meters(), torch.tensor(2.0, requires_grad=True)
    meters.update(loss=loss * 1.0)
    running = torch.tensor(3.0, dtype=torch.float64)
    meters.update(loss=running)
    running.fill_(99.0)
    total, _ = meters.totals["loss"]
    assert isinstance(total, torch.Tensor)
    assert not total.requires_grad
    assert meters.means() == {"loss": 2.5}


# The files of a run.


def events(folder: Path) -> EventAccumulator:
    """What TensorBoard would show."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_log_txt_gets_one_json_line_per_epoch_and_is_never_overwritten(tmp_path: Path) -> None:
    written = [{"epoch": epoch, "train_loss": 11.25 - epoch, "train_lr": 1e-6} for epoch in range(3)]
    for part in (written[:2], written[2:]):  # two runs, the second resumes the first
        log = RunLog(TrackedRun(tmp_path))
        for values in part:
            log.write_epoch(values)
            assert json.loads((tmp_path / "log.txt").read_text().splitlines()[-1]) == values, "on the disk at once"
        log.close()
    assert [json.loads(line) for line in (tmp_path / "log.txt").read_text().splitlines()] == written


def test_a_resumed_log_drops_the_epochs_that_are_taken_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(TrackedRun(tmp_path))
    for epoch in range(3):
        log.write_epoch({"epoch": epoch, "step": 4 * (epoch + 1)})
    log.close()
    whole = (tmp_path / "log.txt").read_text() + '{"epoch": 3, "st'  # killed while writing
    (tmp_path / "log.txt").write_text(whole)
    RunLog(TrackedRun(tmp_path, step=8), epoch=2).close()
    assert [json.loads(line)["step"] for line in (tmp_path / "log.txt").read_text().splitlines()] == [4, 8]
    assert (tmp_path / "log.txt.old").read_text() == whole
    assert "removed 2 lines about epoch 2 and later" in caplog.text


def test_scalars_and_pictures_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    log = RunLog(TrackedRun(tmp_path))
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for step in (1, 2, 5):
        log.scalars({"train/loss": 10.0 / step, "train/lr": 1e-4 * step}, step)
    log.image("slots", picture, 5)
    log.close()
    found = events(tmp_path)
    assert set(found.Tags()["scalars"]) == {"train/loss", "train/lr"}
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 10.0), (2, 5.0), (5, 2.0)]
    (image,) = found.Images("slots")
    assert (image.step, image.width, image.height) == (5, 7, 5)


def test_the_options_of_a_run_are_tensorboards_hparams_whatever_the_names_of_files(tmp_path: Path) -> None:
    """A name that is no UTF-8 cannot be written as it is."""
    folder = tmp_path
    options = {"lr": 0.5, "data_path": "caf\udce9.tar", "crops": [1, 2], "max_steps": None}
    log = RunLog(TrackedRun(folder, options=options, metrics=["epoch/train_loss"]))
    log.close()
    assert [path.name for path in (folder / "tensorboard").iterdir() if path.is_dir()] == []  # no run of its own
    accumulator = EventAccumulator(str(folder / "tensorboard")).Reload()
    content = accumulator.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert start["lr"].number_value == 0.5
    assert start["data_path"].string_value == r"caf\udce9.tar"
    assert start["crops"].string_value == "[1, 2]"
    assert "max_steps" not in start


def test_a_folder_whose_name_tensorboard_cannot_write_gets_log_txt_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a name ended the run with a UnicodeEncodeError."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    log = RunLog(TrackedRun(folder, options={"lr": 0.5}))
    log.write_epoch({"epoch": 0})
    log.close()
    assert [path.name for path in folder.iterdir()] == ["log.txt"]
    assert "TensorBoard cannot write" in caplog.text


def test_numbers_that_json_does_not_have_are_null_in_log_txt(tmp_path: Path) -> None:
    """fp16 gradients overflow now and then, and their norm is infinite."""
    log = RunLog(TrackedRun(tmp_path))
    log.write_epoch({"train_grad_norm": float("inf"), "epoch": 0})
    log.close()
    assert json.loads((tmp_path / "log.txt").read_text(), parse_constant=pytest.fail) == {
        "train_grad_norm": None,
        "epoch": 0,
    }


def test_names_that_are_no_utf8_get_into_run_log_escaped(tmp_path: Path) -> None:
    setup_logging(tmp_path)
    logging.getLogger("dino_sparo").warning("left out %s", "caf\udce9.jpg")
    setup_logging()
    assert r"left out caf\udce9.jpg" in (tmp_path / "run.log").read_text()


def test_no_file_name_can_forge_a_line_of_the_log_or_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug: names reached the terminal and run.log as they were."""
    name = "a\n12:00:00 I saved\x1b[2J\r.jpg"
    setup_logging(tmp_path)
    logging.getLogger("dino_sparo").warning("cannot read %s", name)
    logging.getLogger("dino_sparo").error("%s", f"two lines:\n{name}", extra={HAS_LINES: True})
    setup_logging()
    for text in ((tmp_path / "run.log").read_text(), capsys.readouterr().err):
        lines = text.splitlines()
        assert lines[0].endswith(r" W cannot read a\n12:00:00 I saved\x1b[2J\r.jpg")
        assert lines[1].endswith(" E two lines:")
        assert lines[2:] == ["    a", r"    12:00:00 I saved\x1b[2J\r.jpg"]
    say(name)
    assert capsys.readouterr().out == "a\n12:00:00 I saved\\x1b[2J\\r.jpg\n"


def test_a_full_disk_is_named_with_the_file_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: "[Errno 28] No space left on device", without a file."""
    log = RunLog(TrackedRun(tmp_path))
    (tmp_path / "page.html").write_text("old")

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "write_text", full)
    for name, write in (
        ("log.txt", lambda: log.write_epoch({"epoch": 0})),
        ("page.html", lambda: write_text("new", tmp_path / "page.html")),
    ):
        with pytest.raises(UserError, match=rf"{name} cannot be written \(No space left on device\); free some space"):
            write()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"
    log.close()


class FullDisk(io.StringIO):
    def write(self, _: str) -> NoReturn:
        raise OSError(28, "No space left on device")


def test_a_full_disk_costs_lines_of_run_log_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path)
    handler = next(each for each in logging.getLogger().handlers if isinstance(each, logs.RunLogHandler))
    handler.stream.close()
    handler.stream = FullDisk()
    logging.getLogger("dino_sparo").warning("one line")
    written = capsys.readouterr().err
    assert written.endswith("W one line\n")
    assert written.count("\n") == 1


def test_a_resumed_log_keeps_the_steps_that_were_saved_and_drops_those_that_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunLog(TrackedRun(tmp_path))
    for step in range(1, 7):
        first.scalars({"train/loss": float(step)}, step)
    first.close()
    later = time.time() + 2  # files are ordered by the second in which they began
    monkeypatch.setattr(time, "time", lambda: later)
    # The checkpoint was written after step 4, so steps 5 and 6 never happened, and are done again.
    second = RunLog(TrackedRun(tmp_path, step=4))
    for step in (5, 6, 7):
        second.scalars({"train/loss": 100.0 + step}, step)
    second.close()
    found = [(event.step, event.value) for event in events(tmp_path).Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 105.0), (6, 106.0), (7, 107.0)]


def test_a_run_that_starts_over_drops_what_a_run_without_checkpoint_had_logged(tmp_path: Path) -> None:
    first = RunLog(TrackedRun(tmp_path))
    for step in (1, 2, 3):
        first.scalars({"train/loss": float(step)}, step)
    first.close()
    second = RunLog(TrackedRun(tmp_path, step=0))
    second.scalars({"train/loss": 101.0}, 1)
    second.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("train/loss")] == [(1, 101.0)]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "is_main", lambda: False)
    log = RunLog(TrackedRun(tmp_path))
    log.write_epoch({"epoch": 0})
    log.scalars({"loss": 1.0}, 1)
    log.image("slots", np.zeros((2, 3, 3), dtype=np.uint8), 1)
    log.close()
    assert list(tmp_path.iterdir()) == []


# Log lines.


def test_setting_up_again_appends_every_line_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        setup_logging(tmp_path)
        logging.getLogger("dino_sparo.somewhere").info("run %d", number)
    for lines in (capsys.readouterr().err.splitlines(), (tmp_path / "run.log").read_text().splitlines()):
        assert [line[-5:] for line in lines] == ["run 0", "run 1", "run 2"]


def test_setting_up_again_moves_the_log_to_the_new_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        setup_logging(tmp_path / name)
        logging.getLogger("dino_sparo.somewhere").info("line of %s", name)
    setup_logging()
    logging.getLogger("dino_sparo.somewhere").info("line of no folder")
    for name in ("first", "second"):
        (line,) = (tmp_path / name / "run.log").read_text().splitlines()
        assert line.endswith(f"line of {name}")


def test_the_handlers_of_others_stay(tmp_path: Path) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    others = logging.StreamHandler(stream)
    root.addHandler(others)
    setup_logging(tmp_path)
    assert others in root.handlers
    logging.getLogger("dino_sparo.somewhere").info("heard")
    assert stream.getvalue() == "heard\n"


def test_other_ranks_are_heard_only_when_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "is_main", lambda: False)
    monkeypatch.setattr(logs, "rank", lambda: 3)
    setup_logging(tmp_path)
    logging.getLogger("dino_sparo.somewhere").info("all is well")
    logging.getLogger("dino_sparo.somewhere").warning("loss is odd")
    written = capsys.readouterr().err
    assert "all is well" not in written
    assert "W [rank 3] loss is odd" in written
    assert list(tmp_path.iterdir()) == []


# Progress.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still but for the seconds it is told."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.mark.parametrize("on_terminal", [True, False])
@pytest.mark.parametrize("is_main", [True, False])
def test_progress_yields_everything_in_order(
    is_main: bool, on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "is_main", lambda: is_main)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal, raising=False)
    assert list(progress(range(7), desc="features")) == list(range(7))
    assert list(progress((str(i) for i in range(5)), total=5)) == list("01234")
    assert list(progress([])) == []
    written = capsys.readouterr()
    assert written.out == ""
    assert ("features" in written.err) == (is_main and on_terminal)


def test_piped_progress_writes_sparse_lines(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with caplog.at_level(logging.INFO):
        for _ in progress(range(100), desc="features of val"):
            clock(1.0)
    assert 2 <= len(caplog.messages) <= 4  # 100 seconds, a line every 30
    assert caplog.messages[0].startswith("features of val: 31 of 100, 31 s")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in progress(iter(range(40)), desc="drawing"):
            clock(1.0)
    assert caplog.messages[0].startswith("drawing: 31 of ?")


def test_the_clock_tells_images_per_second_and_the_share_spent_waiting(clock: Callable[[float], None]) -> None:
    def slow() -> Iterator[int]:
        for item in range(10):
            clock(1.0)
            yield item

    epoch, loader = EpochClock(3, 9, CPU), slow()
    for step in range(1, 4):
        assert epoch.fetch(loader, 2) == [2 * step - 2, 2 * step - 1]
        clock(6.0)
        epoch.tick(step, 0, 16, torch.tensor(1.0))
    assert epoch.speed() == {"images_per_s": pytest.approx(48 / 24), "data_wait": pytest.approx(6 / 24)}
    epoch.fetch(loader, 2)
    assert epoch.fetch(loader, 5) == [8, 9]


def test_on_a_gpu_only_the_time_in_which_it_had_nothing_to_do_counts_as_waiting(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: a wait for data counted even while the GPU was busy with the step before."""
    queue = {"done": 0.0}  # when the device will have computed all that it was given

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.time = max(time.monotonic(), queue["done"])

        def query(self) -> bool:
            return time.monotonic() >= self.time

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(logs, "peak_memory", lambda device: 0)

    def loader() -> Iterator[int]:
        for seconds in (4.0, 1.0, 5.0, 3.0):
            clock(seconds)
            yield 0

    epoch, batches = EpochClock(4, 4, torch.device("cuda")), loader()
    caplog.set_level(logging.INFO)
    for step, computes in enumerate((3.0, 3.0, 3.0, 20.0), start=1):
        epoch.fetch(batches, 1)
        queue["done"] = max(time.monotonic(), queue["done"]) + computes
        epoch.tick(step, 0, 2, torch.tensor(1.0))
    # 4 s before the first step; none at the second, which came early; then 5 s less the 2 + 3 s that were left to
    # compute; 3 s less 3 s.
    assert epoch.speed()["data_wait"] == pytest.approx(4 / 13)
    assert "data wait 40 % (give more cores and --num_workers, or smaller files)  ETA" in caplog.messages[-1]


def test_the_progress_line_of_training_is_sparse_and_counts_within_the_epoch(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    epoch = EpochClock(50, 200, CPU)
    with caplog.at_level(logging.INFO):
        for step in range(51, 82):  # the second epoch, one step a second
            clock(1.0)
            epoch.tick(step, 1, 32, torch.tensor(2.5))
    assert len(caplog.messages) == 3
    assert caplog.messages[0].startswith("epoch 1  step 10/50  loss 2.5000  32 images/s  data wait 0 %  ETA 0:02:20")
    assert caplog.messages[2].startswith("epoch 1  step 30/50")


def test_less_than_one_image_per_second_is_not_logged_as_zero(
    clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    epoch = EpochClock(50, 200, CPU)
    clock(40.0)
    with caplog.at_level(logging.INFO):
        epoch.tick(1, 0, 17, torch.tensor(2.5))
    assert "  0.42 images/s  " in caplog.messages[0]


# Memory.


def test_the_peak_memory_is_at_least_what_this_process_holds_now() -> None:
    before = peak_memory(torch.device("cpu"))
    assert before > 10 * 2**20  # torch alone
    held = np.ones(4 * 2**20)  # 32 MiB
    after = peak_memory(torch.device("cpu"))
    assert before <= after < 2**40
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        assert after >= 0.9 * pages * resource.getpagesize()
    assert held.sum() == 4 * 2**20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_memory_is_the_gpus() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.ones(2**20, device=device)
    assert peak_memory(device) >= held.numel() * 4

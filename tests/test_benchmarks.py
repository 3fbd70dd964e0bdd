"""The benchmarks run, show equal results, and time what they say; how fast anything is, no test asks."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import binding, report, timing, train_step
from benchmarks.reference import MODULES, Reference
from benchmarks.report import Bar, Check, Section
from benchmarks.timing import Spread, Timings, interleave, peak_memory

# In-process and tiny; the option keeps `scaling` from starting processes.
SCRIPTS = {
    "readout": [],
    "backbone": [],
    "train_step": ["--rounds", "1"],
    "clip_step": [],
    "binding": [],
    "input_pipeline": [],
    "knn": [],
    "linear": [],
    "scaling": ["--ranks", "1"],
}
LONG = ("readout", "train_step", "scaling", "clip_step", "binding", "input_pipeline", "backbone", "knn")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SCRIPTS]
)
def test_a_script_runs_and_its_results_are_equal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    section = importlib.import_module(f"benchmarks.{name}").main(["--quick", "--json", str(path), *SCRIPTS[name]])
    assert section.is_equal
    assert section.checks or name == "scaling"  # which compares several processes
    assert all(rows for rows in section.tables.values())
    assert all(len({tuple(row) for row in rows}) == 1 for rows in section.tables.values())
    assert {bar.verdict for bar in section.bars} <= {"not measured"}  # quick runs have no speeds to quote
    printed = capsys.readouterr().out
    assert printed.strip() == path.with_suffix(".md").read_text().strip()
    assert f"## {section.title}" in printed
    assert "Not measured on GPU." in printed
    found = json.loads(path.read_text())
    assert [part["equal"] for part in found["sections"]] == [True]
    assert found["versions"]["torch"] == torch.__version__
    assert found["reference"] is None


@pytest.mark.slow
def test_a_start_is_measured_and_the_second_one_finds_the_index() -> None:
    """The bug: its processes failed, and it waited for them for ever."""
    report = importlib.import_module("benchmarks.start").main(["--shards", "3", "--pairs_per_shard", "50"])
    assert report["pairs"] == 150
    assert report["second_start_s"] > 0


@pytest.mark.slow
def test_processes_give_the_losses_of_one() -> None:
    section = importlib.import_module("benchmarks.scaling").main(["--quick", "--ranks", "1", "2"])
    assert [check.claim for check in section.checks] == ["losses of 3 steps, 2 processes against 1"]
    assert section.is_equal


def test_a_batch_that_would_not_fit_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "peak_memory", lambda build, form, *_, **__: 4e9 if "16" in form else 1e6)
    monkeypatch.setattr(binding, "free_memory", lambda device: 8e9)
    section = binding.main(["--quick", "--device", "cpu"])
    timed, grown = (rows[1] for rows in section.tables.values())
    assert grown[binding.FULL] == "skipped: needs about 9.0 GB, 8.0 GB are free"
    assert timed[f"{binding.FULL}, ms"] == "skipped"
    assert timed[f"times {binding.FULL}"] is None
    assert grown[binding.OURS] == 1.0


# The reference.


def fake_checkout(folder: Path) -> Path:
    """Files with the reference's names that import each other as its do."""
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    (folder / "main_dino.py").write_text("import utils\nfrom vision_transformer import NAME\nOTHER = utils.NAME\n")
    return folder


def test_a_checkouts_modules_import_each_other_and_leave_no_trace(tmp_path: Path) -> None:
    import sys

    import main_dino as ours

    reference = Reference(fake_checkout(tmp_path))
    assert (reference.main_dino.NAME, reference.main_dino.OTHER) == ("vision_transformer", "utils")
    assert reference.main_dino.__file__ == str(tmp_path / "main_dino.py")
    assert sys.modules["main_dino"] is ours
    assert "vision_transformer" not in sys.modules
    assert reference.commit == "unknown" or len(reference.commit) == 40
    with pytest.raises(AttributeError, match="nothing"):
        _ = reference.nothing


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake_checkout(tmp_path) / "eval_knn.py").unlink()
    message = r"not a checkout of facebookresearch/dino: eval_knn\.py missing; git clone"
    with pytest.raises(ValueError, match=message):
        Reference(tmp_path)
    with pytest.raises(SystemExit):
        importlib.import_module("benchmarks.knn").main(["--quick", "--reference", str(tmp_path)])
    assert "eval_knn.py missing" in capsys.readouterr().err


# Timing.


def test_variants_take_turns_and_a_ratio_is_that_of_a_round() -> None:
    order: list[str] = []
    timings = interleave({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, min_seconds=0.0)
    assert "".join(order[3:]) == "abcabcabc"  # each is called once before
    assert {len(seconds) for seconds in timings.seconds.values()} == {3}
    busy = Timings({"slow": [2.0, 20.0, 6.0], "fast": [1.0, 10.0, 2.0]})
    assert busy.ratio("slow", "fast") == Spread(median=2.0, lower=2.0, upper=2.5)
    assert busy.time("slow") == Spread(median=6.0, lower=4.0, upper=13.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(1.0, 0.5, 2.0).scaled(1e3) == Spread(1000.0, 500.0, 2000.0)


def allocation(megabytes: int) -> object:
    """A call that needs so much memory for a moment, for another process to import."""
    kept = torch.ones(20, 1_000_000)  # is there before
    return lambda: torch.ones(megabytes, 250_000).sum() + kept[0, 0]


@pytest.mark.slow
def test_peak_memory_is_what_a_call_adds() -> None:
    assert 70e6 <= peak_memory(allocation, 70) <= 90e6
    assert peak_memory(allocation, 70, fresh=False) >= 0  # this process may have memory to use again


def test_scripts_compute_in_exact_fp32_whatever_the_environment_allows() -> None:
    """The bug: NVIDIA's containers allow TF32, so that rows of fp32 were none."""
    before, found = torch.get_float32_matmul_precision(), []

    def measure(*_: object) -> Section:
        found.append(torch.get_float32_matmul_precision())
        return Section("t", "s")

    try:
        torch.set_float32_matmul_precision("high")
        report.run(measure, report.options("d"), ["--device", "cpu"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["highest"]


# The step's own mistakes of before: they favoured one side.


def test_on_a_gpu_ours_begins_with_8_bit_crops_and_distorts_them_within_the_step() -> None:
    torch.manual_seed(0)
    batch = train_step.deferred_batch(train_step.QUICK, 1)
    assert {view.dtype for view in batch.views} == {torch.uint8}
    stepper = train_step.ours(train_step.our_training(train_step.QUICK, "cls", "fp32", "cpu", 0.0), batch)
    assert stepper.step().isfinite()
    assert next(iter(stepper.parts)) == "crops", "copying and distorting are a part of their own"


def test_both_halves_of_a_step_are_the_whole_step() -> None:
    losses = []
    for in_halves in (False, True):
        training = train_step.our_training(train_step.QUICK, "sparo", "fp32", "cpu", 0.0)
        stepper = train_step.ours(training, train_step.noise_batch(train_step.QUICK, 1))
        for call in stepper.halves.values() if in_halves else [stepper.step]:
            call()
        losses.append(stepper.step())
    assert torch.equal(*losses)


def test_only_the_others_code_runs_with_cudnns_search() -> None:
    during: list[bool] = []
    before = torch.backends.cudnn.benchmark
    timing.with_cudnn_benchmark(lambda: during.append(torch.backends.cudnn.benchmark))()
    assert during == [True]
    assert torch.backends.cudnn.benchmark == before


def test_a_batch_lies_in_page_locked_memory_where_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of pageable memory the copies took longer than the step, on both sides."""
    batch = train_step.noise_batch(train_step.QUICK, 1)
    assert timing.on_host(batch, "cpu") is batch
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    timing.on_host(batch, "cuda")
    assert len(pinned) == len(list(batch.tensors()))


# The report.


def test_a_check_fails_beyond_its_limit_and_for_nan() -> None:
    assert Check("equal", 1e-9, 1e-9).passed
    assert not Check("apart", 2e-9, 1e-9).passed
    assert not Check("broken", math.nan, 1e-9).passed
    section = Section("title", "setting")
    section.check("shifted", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.4)
    assert section.checks == [Check("shifted", 0.5, 0.4)]
    assert not section.is_equal


@pytest.mark.parametrize(
    ("found", "at_most", "verdict"),
    [
        (3.0, False, "met"),
        (2.0, False, "met"),
        (1.0, False, "missed"),
        (3.0, True, "missed"),
        (2.0, True, "met"),
        (1.0, True, "met"),
        (None, False, "not measured"),
        (math.nan, True, "missed"),
        (math.nan, False, "missed"),
    ],
)
def test_bars_are_met_from_above_or_from_below(found: float | None, at_most: bool, verdict: str) -> None:
    assert Bar("claim", 2.0, found, at_most).verdict == verdict


def test_results_that_are_not_equal_end_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(args: object, reference: object) -> Section:
        return Section("broken", "never", checks=[Check("one is two", 1.0, 0.0)])

    with pytest.raises(SystemExit, match="not equal: one is two"):
        report.run(measure, report.options("a script"), ["--json", str(tmp_path / "report.json")])
    assert "**NO**" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["sections"][0]["equal"] is False


def test_tables_show_three_digits_and_the_spread() -> None:
    rows = [{"form": "ours", "ms": Spread(12.345, 12.0, 1234.5), "MB": None, "bytes": 12345}]
    assert report.table(rows).splitlines()[2] == "| ours | 12.3 (12-1,234) | - | 12,345 |"


@pytest.mark.slow
def test_embeddings_are_timed_beside_decoding_and_encoding_alone() -> None:
    words = ["--num_images", "5", "--rounds", "1", "--batch_size", "2", "--num_workers", "0"]
    found = importlib.import_module("benchmarks.embed_speed").main(words)
    assert found["num_images"] == 5
    assert found["images_per_s"].keys() == {"ours", "ours, fast_views", "alone"}
    assert math.isfinite(found["overhead_percent"])

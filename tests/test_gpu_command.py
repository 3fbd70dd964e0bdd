"""`make gpu`: its parts run on a CPU at tiny sizes, it refuses without a GPU, and its page says what a bar missed."""

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks import timing, train_step
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import objectives, page, runs, steps
from benchmarks.gpu.profile import kind_of
from benchmarks.report import Section
from benchmarks.train_step import process_group

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "torch sees no GPU here.*--device cpu --short"),
        (["--device", "cpu"], "takes hours at full size; add --short"),
    ],
)
def test_without_a_gpu_it_refuses_clearly(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        gpu.main(words)


def report(passed: bool = True, **more: Any) -> dict[str, Any]:
    check = {"claim": "losses are equal", "difference": 0.5, "limit": 1.0 if passed else 0.1, "passed": passed}
    bar = {"claim": "times the reference", "wanted": 2.5, "found": 1.7, "at_most": False, "verdict": "missed"}
    tables = {"cls: its parts, ms": [{"form": "ours", "backward": 9.5}], "memory": [{"MB": 3}]}
    section = {"title": "t", "checks": [check], "bars": [bar], "tables": tables}
    return {"hardware": {"gpu": "H100"}, "versions": {"torch": "2"}, "reference": "abc", "sections": [section], **more}


class FakeProcess:
    """A part that writes a report, or does not."""

    answers: list[tuple[int, dict[str, Any] | None]]
    commands: list[list[str]]
    pid = 0

    def __init__(self, command: list[str], **options: Any) -> None:
        FakeProcess.commands.append(command)
        self.status, found = FakeProcess.answers.pop(0)
        if found is not None:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(found))

    def wait(self, limit: float | None = None) -> int:
        return self.status


def run_parts(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    answers: list[tuple[int, dict[str, Any] | None]],
    *words: str,
    parts: str = "--device cpu --short --part losses search",
) -> list[str]:
    """Run parts with these answers; the names of the parts that were started."""
    FakeProcess.answers, FakeProcess.commands = list(answers), []
    monkeypatch.setattr(gpu.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(gpu, "git_hash", lambda: "f00d")
    gpu.main(["--output_dir", str(folder), *parts.split(), *words])
    return [Path(command[command.index("--json") + 1]).stem for command in FakeProcess.commands]


def test_parts_that_are_done_are_skipped_and_the_others_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"search \(failed, status 3, no report\)"):
        run_parts(monkeypatch, tmp_path, [(0, report()), (3, None)])
    with pytest.raises(SystemExit, match=r"search \(checks failed\)"):
        run_parts(monkeypatch, tmp_path, [(1, report(passed=False))])
    assert run_parts(monkeypatch, tmp_path, [(0, report())]) == ["search"]
    assert run_parts(monkeypatch, tmp_path, []) == []
    assert run_parts(monkeypatch, tmp_path, [(0, report())] * 2, "--again") == ["losses", "search"]


def test_what_a_cpu_did_does_not_count_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_parts(monkeypatch, tmp_path, [(0, report())] * 2)
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"cpu short"', '"cuda"'))
    assert run_parts(monkeypatch, tmp_path, [(0, report())] * 2) == ["losses", "search"]


def test_a_part_that_takes_too_long_is_ended_with_all_its_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: number == signal.SIGKILL and killed.append(group))

    def wait(self: FakeProcess, limit: float | None = None) -> int:
        if limit is not None:
            raise gpu.subprocess.TimeoutExpired("part", limit)
        return -9

    monkeypatch.setattr(FakeProcess, "wait", wait)
    with pytest.raises(SystemExit, match=r"losses \(ended after 600 s\), search"):
        run_parts(monkeypatch, tmp_path, [(0, None)] * 2)
    assert killed == [0, 0]


def test_a_part_that_waits_for_its_turn_does_not_start_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "losses.json").write_text(json.dumps(report(result="checks failed")))
    (tmp_path / gpu.INTERRUPTED).touch()
    monkeypatch.setattr(gpu.subprocess, "Popen", mock.Mock(side_effect=AssertionError("started")))
    args = gpu.get_args_parser().parse_args(["--device", "cpu", "--short", "--output_dir", str(tmp_path)])
    assert gpu.run_part("losses", args, turns=tmp_path)["result"] == "checks failed"
    assert (tmp_path / "losses.json").exists()


def test_parts_that_do_not_fit_into_the_minutes_are_left_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    limits: list[float] = []

    def wait(self: FakeProcess, limit: float | None = None) -> int:
        limits.append(limit or 0)
        now[0] += 120  # seconds that the part takes
        return 0

    now = [0.0]
    monkeypatch.setattr(FakeProcess, "wait", wait)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "put_between_marks", lambda texts, path: None)
    parts = "--minutes 5 --part losses one_process search"  # of 3, 4 and 1 minutes
    for expected in (["losses", "search"], ["one_process"]):
        assert run_parts(monkeypatch, tmp_path, [(0, report())] * 2, parts=parts) == expected
    assert limits == [300, 180, 300]
    assert "no time for one_process; the same command continues with them" in caplog.text


def test_every_claim_about_the_recorded_step_is_measured_or_not_run() -> None:
    section = Section("t", "s")
    train_step._add_bars(section, {}, Namespace(device="cuda", quick=False, batch=None))
    named = {claim.name for claim in page.CLAIMS if claim.part == "train_step"}
    assert named <= {bar.claim for bar in section.bars}
    assert page.claims({}).count("not run") == len(page.CLAIMS)
    rate = {"claim": "sparo, recorded, images/s at batch 64", "found": 1893.0}
    found = report(result="done", seconds=7, commit="f00dfeed")
    found["sections"][0]["bars"] = [rate]
    assert "| at least 1,850 | 1,893 | H100 | f00dfee | " in page.claims({"train_step": found})


def test_the_page_names_device_versions_commits_failed_checks_and_tables() -> None:
    done = {"result": "checks failed", "seconds": 71, "commit": "f00d"}
    reports = {"train_step": report(passed=False, **done)}
    text, tables = page.page(reports), page.tables(reports, ["train_step", "search"])
    for words in ("gpu: H100; torch: 2", "this project: f00d; reference: facebookresearch/dino abc"):
        assert words in text
    assert "| train_step | checks failed | 0 of 1 passed | 71 | H100 | f00d |" in tables
    assert "| search | not run | - | - | - | - |" in tables
    assert "| train_step | losses are equal | 0.5 | 0.1 |" in text
    assert "| train_step | times the reference | >= 2.5 | 1.7 | missed |" in tables
    assert "train_step, cls: its parts, ms\n\n| form | backward |" in tables
    assert "train_step, memory\n\n| MB |" in tables


def test_a_run_replaces_all_that_the_page_says_of_runs(tmp_path: Path) -> None:
    """The bugs: "has not run on a GPU yet" stayed at the top; without a missed bar the page had no step times."""
    met = report(result="done", seconds=71, commit="f00d")
    for bar in met["sections"][0]["bars"]:
        bar["verdict"] = "met"
    reports = {"train_step": met, "search": report(passed=False, result="checks failed", seconds=7)}
    assert "its parts, ms\n\n| form | backward |" in page.tables({"train_step": met}, ["train_step"])
    assert "ran on a GPU (H100): 1 of 2 parts passed" in page.status(reports)
    assert page.not_shown(reports, ["train_step", "search", "clip"]).startswith(
        "- These parts did not pass or did not run: `search`, `clip`."
    )
    assert page.not_shown(reports, ["train_step"]) == ""
    path, old = tmp_path / "gpu.md", "It has not run. Any speed. Not run yet."
    docs = "\n\n".join(
        f"{page.BEGIN.format(mark)}\n\n{old}\n\n{page.END}\n" for mark in ("status", "not shown", "measured")
    )
    path.write_text(docs)
    for _ in range(2):
        page.put_between_marks({"status": "Ran.", "not shown": "- search", "measured": "new"}, path)
    text = path.read_text()
    assert len(text) < len(docs)
    for mark, new in (("status", "Ran."), ("not shown", "- search"), ("measured", "new")):
        assert f"{page.BEGIN.format(mark)}\n\n{new}\n\n{page.END}\n" in text
    assert old not in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="to write between"):
        page.put_between_marks({"status": "new"}, path)


def test_kernels_are_sorted_by_their_names() -> None:
    kinds = {
        "sm90_xmma_gemm_bf16bf16_bf16f32": "matrix products",
        "pytorch_flash::flash_fwd_kernel<64>": "attention",
        "triton_poi_fused_add_0": "fused by the compiler",
        "void multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer and average",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel": "other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_the_page_in_the_docs_has_its_marks_and_names_every_part() -> None:
    text, tables = ((ROOT / name).read_text() for name in ("docs/gpu.md", "benchmarks/gpu/README.md"))
    assert text.count(page.END) == text.count("<!-- make gpu: ") == 4
    assert tables.count(page.END) == tables.count(page.BEGIN.format("tables")) == 1
    assert set(gpu.PARTS) <= set(re.findall(r"`(\w+)`", text))


def test_parts_of_less_than_ten_minutes_make_an_hour() -> None:
    assert all(60 * part.minutes < gpu.LIMIT_S for part in gpu.PARTS.values())
    assert sum(part.minutes for part in gpu.PARTS.values()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_a_group_of_one_process_really_wraps_the_network_in_ddp(name: str) -> None:
    sizes = objectives.SMALL[name]
    with process_group("cpu"):
        with objectives.wrapped_in_ddp():
            wrapped = objectives.build(name, sizes, "cpu").objective
        plain = objectives.build(name, sizes, "cpu").objective
    found = [
        any(isinstance(value, DistributedDataParallel) for value in vars(training).values())
        for training in (wrapped, plain)
    ]
    assert found == [True, False]


def test_an_objective_that_fails_gives_no_numbers_instead_of_ending_the_part(caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(objectives, "build", side_effect=RuntimeError("CUDA error")):
        assert objectives.first_losses("DINO", "cpu", {}).isnan().all()
    assert "CUDA error" in caplog.text


def test_recompilations_count_only_after_the_first_steps_which_compile_for_every_size_of_crop() -> None:
    """The bug: the part `recipe` always failed, since the first step itself compiles two functions a second time."""
    first = "Recompiling function forward in distort.py:1\nRecompiling function forward in network.py:1\n"
    late = "Recompiling function forward in backbone.py:1\n"
    assert runs.late_recompilations(f"{first}epoch 0\n") == 0
    assert runs.late_recompilations(f"{first}epoch 0\n{late}") == 1
    assert math.isnan(runs.late_recompilations(first))  # it took no step


@pytest.mark.slow
@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_no_step_in_fp16_is_skipped_for_a_scale_that_is_too_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: torch's first scale overflows at these sizes; DINO skipped all of its steps."""

    def choose(precision: str, *_: object) -> torch.dtype:  # the real one refuses fp16 on a CPU
        return torch.float16 if precision == "fp16" else torch.float32

    for module in ("dino_sparo.distillation.objective", "dino_sparo.image_text.objective"):
        monkeypatch.setattr(f"{module}.choose_precision", choose)
    exact, half = (objectives.first_losses(name, "cpu", {"precision": which}) for which in ("fp32", "fp16"))
    assert not torch.equal(half, half[:1].expand(len(half)))
    assert (half - exact).abs().max() < (steps.CLIP_FP16 if name == "CLIP" else steps.FP16)


@pytest.mark.parametrize(
    ("text", "number", "reason"),
    [
        ("called a synchronizing CUDA operation", 1.0, "called a synchronizing CUDA operation"),
        ("CUDA out of memory.", math.nan, "error: CUDA out of memory."),
    ],
)
def test_only_a_synchronisation_counts_as_waiting(text: str, number: float, reason: str, tmp_path: Path) -> None:
    """The bug: full memory, or a network that could not be compiled, was reported as a step that waits."""
    with mock.patch.object(steps, "build", side_effect=RuntimeError(text)), pytest.raises(SystemExit):
        steps.main(["waiting", "--quick", "--device", "cpu", "--json", str(tmp_path / "part.json")])
    (section,) = json.loads((tmp_path / "part.json").read_text())["sections"]
    assert section["tables"]["Steps"][0]["waits"] == reason
    assert [check["difference"] for check in section["checks"]] == pytest.approx([number] * 7, nan_ok=True)


def test_a_part_that_is_ended_leaves_the_checks_that_it_made(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    answers = [(0.0, "never"), (0.0, "never"), KeyboardInterrupt]
    with mock.patch.object(steps, "waits", side_effect=answers), pytest.raises(KeyboardInterrupt):
        steps.main(["waiting", "--quick", "--device", "cpu", "--json", str(path)])
    assert len(json.loads(path.read_text())["sections"][0]["checks"]) == 2


def test_a_resumed_run_has_the_steps_of_the_whole_one_and_about_its_losses() -> None:
    """The bug: 0.01 was allowed, but a GPU's attention adds in no fixed order."""
    whole = [{"epoch": number, "step": 7 * number + 7, "train_loss": 5.0} for number in range(3)]
    near = [{**line, "train_loss": 5.05} for line in whole]
    assert [check.passed for check in runs.resumed_checks("SIGTERM", whole, near)] == [True, True]
    for other in (whole[:2], [{**line, "step": 1} for line in whole], []):
        assert [check.passed for check in runs.resumed_checks("SIGTERM", whole, other)] == [False, False]


def test_whole_runs_write_beside_their_report_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: gigabytes of checkpoints went to /tmp."""
    folders: list[Path] = []
    monkeypatch.setitem(runs.MEASURES, "resume", lambda section, args, folder: folders.append(folder))
    runs.main(["resume", "--device", "cpu", "--json", str(tmp_path / "resume.json")])
    assert folders == [tmp_path / "resume.tmp"]
    assert not folders[0].exists()


def test_gpu_tests_run_with_cublas_workspace_that_deterministic_algorithms_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = mock.Mock(stdout="1 passed", stderr="", returncode=0)
    with mock.patch.object(runs.subprocess, "run", return_value=done) as started:
        runs.main(["tests", "--device", "cpu", "--json", str(tmp_path / "tests.json")])
    assert started.call_args.kwargs["env"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


OWN = [words for words in (part.words.split() for part in gpu.PARTS.values()) if words[0].startswith("benchmarks.gpu")]


@pytest.mark.slow
@pytest.mark.parametrize("words", OWN, ids=lambda words: words[-1].rpartition(".")[2])
def test_a_part_runs_on_a_cpu_at_tiny_sizes(words: list[str], tmp_path: Path) -> None:
    """The other parts are benchmarks, which have a test of their own."""
    module = importlib.import_module(words[0])
    section = module.main([*words[1:], "--quick", "--device", "cpu", "--json", str(tmp_path / "part.json")])
    assert section.is_equal
    assert section.checks or section.tables
    claimed = {
        re.sub(r"\d+ steps", "6 steps", claim.name)
        for claim in page.CLAIMS
        if claim.part == words[-1].rpartition(".")[2]
    }
    assert claimed <= {check.claim for check in section.checks} | {bar.claim for bar in section.bars}
    assert {bar.verdict for bar in section.bars} <= {"not measured"}
    json.loads((tmp_path / "part.json").read_text())


def test_whoever_is_timed_stops_the_other_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counter = (
        "import pathlib, sys, time\n"
        "while True: pathlib.Path(sys.argv[1]).write_text(str(time.time())); time.sleep(0.01)"
    )
    ticks = tmp_path / "ticks.txt"
    other = subprocess.Popen([sys.executable, "-c", counter, str(ticks)], start_new_session=True)
    (tmp_path / str(other.pid)).touch()
    (tmp_path / str(2**22 + 1)).touch()  # a part that has just ended
    monkeypatch.setenv(timing.TURNS, str(tmp_path))

    def moves() -> bool:
        before = ticks.read_text() if ticks.is_file() else ""
        time.sleep(0.3)
        return bool(ticks.is_file() and ticks.read_text() != before)

    def wait_until_it_moves() -> None:
        begin = time.monotonic()
        while not moves():
            assert other.poll() is None
            assert time.monotonic() < begin + 60

    try:
        wait_until_it_moves()
        with timing.alone():
            assert not moves()
            with timing.alone():  # does not wait for itself
                pass
            assert not moves()
        wait_until_it_moves()
        os.killpg(other.pid, signal.SIGSTOP)
        assert not moves()
        FakeProcess.answers, FakeProcess.commands = [(-9, None)], []  # it is ended while it is timed
        monkeypatch.setattr(gpu.subprocess, "Popen", FakeProcess)
        monkeypatch.setattr(gpu, "git_hash", lambda: "f00d")
        args = gpu.get_args_parser().parse_args(["--device", "cpu", "--short", "--output_dir", str(tmp_path)])
        gpu.run_part("losses", args, turns=tmp_path)
        wait_until_it_moves()
    finally:
        other.kill()
        other.wait()

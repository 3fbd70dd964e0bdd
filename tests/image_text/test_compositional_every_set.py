"""All compositional sets in one command: killed and resumed, progress, and memory."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("open_clip")
pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")

from clip_fakes import small_checkpoint
from compositional_files import write_json
from hugging_face import save_hugging_face
from PIL import Image
from published_layouts import every_set
from runs import environment

from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS

pytestmark = pytest.mark.slow

MAX_GROWTH_MB = 60  # with 600 more images, which would take 470 MB if all were kept


class Ended(NamedTuple):
    """A process that ended: its log, and its exit status (negative: a signal)."""

    log: str
    status: int

    def parts(self, model: int) -> list[int]:
        """Questions of each part that a model was asked."""
        own = self.log.split(f"model {model} of ")[1].split("model ")[0] if f"model {model} of " in self.log else ""
        return [int(count) for count in re.findall(r"part \d+ of \d+: (\d+) questions", own)]


def compositional(*options: Any, stop: signal.Signals | None = None, at: Sequence[str] = ()) -> Ended:
    """Run the command; send a signal when the log has had all words `at`, in their order."""
    words = [sys.executable, "-m", "dino_sparo", "compositional", "--device", "cpu", "--num_workers", 0, *options]
    process = subprocess.Popen(
        [*map(str, words)], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines, awaited = [], list(at)
    for line in process.stderr:
        lines.append(line)
        if awaited and awaited[0] in line and not awaited[1:] and stop is not None:
            process.send_signal(stop)
        awaited = awaited[awaited[:1] != [] and awaited[0] in line :]
    process.stderr.close()
    return Ended("".join(lines), process.wait())


def answered(folder: Path, model: str) -> list[int]:
    """Numbers of the questions in a model's journal."""
    (journal,) = folder.glob(f"*{model}*.answers.jsonl")
    lines = journal.read_text().split("\n")[1:-1]
    return [number for line in lines for number in json.loads(line)[0]]


def test_all_sets_are_scored_with_two_models_and_kills_ask_no_answered_question_again(tmp_path):
    """SIGTERM in the first model, SIGKILL in the second; every file is that of the run that nobody stopped."""
    data, whole_dir, out = every_set(tmp_path / "data"), tmp_path / "whole", tmp_path / "out"
    models = small_checkpoint(tmp_path / "ours" / "checkpoint.pth"), save_hugging_face(tmp_path / "hf", "clip")
    options = ("--data_root", data, "--model", *models, "--chunk_images", 20, "--batch_size_per_gpu", 20, "--blind")
    options = (*options, "--short", "markdown", "latex", "csv", "plot", "--output_dir")
    whole = compositional(*options, whole_dir)
    assert whole.status == 0, whole.log
    results = [json.loads(path.read_text()) for path in sorted(whole_dir.glob("*.json"))]
    assert [{each["benchmark"] for each in result["benchmarks"].values()} for result in results] == [{*BENCHMARKS}] * 2
    total = 2 * sum(each["num_questions"] for each in results[0]["benchmarks"].values())  # the second time shuffled
    assert [sum(whole.parts(model)) for model in (1, 2)] == [total, total]
    assert "ETA 0:00:0" in whole.log

    first = compositional(*options, out, stop=signal.SIGTERM, at=("model 1 of 2", "part 12 of"))
    assert first.status == -signal.SIGTERM
    done = answered(out, "ours")
    assert len(done) == len(set(done)) in (sum(first.parts(1)), sum(first.parts(1)[:-1]))
    second = compositional(*options, out, stop=signal.SIGKILL, at=("model 2 of 2", "part 6 of"))
    assert second.status == -signal.SIGKILL
    assert f"{len(done)} questions are answered; resuming" in second.log
    assert len(done) + sum(second.parts(1)) == total
    assert sorted(answered(out, "ours")) == list(range(total))
    done = answered(out, "hf")
    assert len(done) == len(set(done)) in (sum(second.parts(2)), sum(second.parts(2)[:-1]))
    third = compositional(*options, out)
    assert third.status == 0, third.log
    assert third.parts(1) == []
    assert len(done) + sum(third.parts(2)) == total
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (whole_dir, out)]
    assert files[0] == files[1]
    assert len(files[0]) == 6


PEAKS = """
import resource, sys
from dino_sparo.__main__ import run
for root in sys.argv[2:]:
    options = ("--chunk_images", "50", "--num_workers", "0", "--device", "cpu", "--overwrite")
    run("compositional", ["--model", sys.argv[1], "--data_root", root, *options])
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_images(tmp_path):
    """Each file is a link to one picture, so that drawing takes no time; each is decoded by itself."""
    Image.new("RGB", (512, 512), "red").save(tmp_path / "picture.png")
    roots = tmp_path / "few", tmp_path / "many"
    for root, count in zip(roots, (200, 800), strict=True):
        names = [f"{number}.png" for number in range(count)]
        entries = [{"filename": name, "caption": f"red {name}", "negative_caption": f"blue {name}"} for name in names]
        write_json(root / "swap_obj.json", entries)
        (root / "images").mkdir()
        for name in names:
            (root / "images" / name).symlink_to(tmp_path / "picture.png")
    words = [sys.executable, "-c", PEAKS, small_checkpoint(tmp_path / "checkpoint.pth"), *roots]
    ended = subprocess.run([*map(str, words)], env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "part 16 of 16: 50 questions" in ended.stderr
    few, many = (int(kb) / 1024 for kb in re.findall(r"^peak (\d+)$", ended.stdout, re.MULTILINE))
    assert many < few + MAX_GROWTH_MB

"""A command whose package is missing ends with one line that says what to install, and without a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Runs a module as a command while some packages cannot be found.
WITHOUT = """
import importlib.abc, runpy, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == HIDDEN else find_spec(name, package)
HIDDEN, *sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Hide())
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def ends_in_one_line(package: str, *command: str) -> str:
    """What the command says, if that is one line without a traceback and its status is a failure."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert done.returncode == 1, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "command", "remedy"),
    [
        ("open_clip", "dino_sparo train-clip --data_path scenes --output_dir {}", r"dino_sparo[clip]"),
        ("open_clip", "dino_sparo zero-shot --pretrained_weights {}/w --data_path scenes", "dino_sparo[clip]"),
        (
            "webdataset",
            "dino_sparo train-clip --data_path {}/a.tar --shards streamed --epoch_pairs 256 --output_dir {}",
            "dino_sparo[clip]",
        ),
        ("entmax", "dino_sparo train-clip --output_dir {} --readout fdt --data_path scenes:8:32", "dino_sparo[clip]"),
        ("matplotlib", "studies sweep {}/zero_shot.json", "dino_sparo[plots]"),
        ("matplotlib", "dino_sparo attention --pretrained_weights {}/w", "dino_sparo[plots]"),
        ("spacy", "dino_sparo parse --parser spacy --captions scenes --output {}/g", "python -m spacy download"),
        ("nltk", "dino_sparo order-captions --captions {}/x.json --output {}/o.json", "nltk.downloader punkt_tab"),
        (
            "openai",
            "dino_sparo parse --parser llm --model m --server http://localhost:1 --captions scenes --output {}/g",
            "dino_sparo[parse-llm]",
        ),
        ("clip_benchmark", "dino_sparo clip-benchmark eval", "pip install clip-benchmark"),
    ],
)
def test_a_missing_package_ends_the_command_in_one_line(
    tmp_path: Path, package: str, command: str, remedy: str
) -> None:
    small = "--batch_size 4 --arch vit_micro --patch_size 8 --img_size 16 --num_workers 0 --device cpu --num_codes 7"
    small += " --warmup_steps 0 --epochs 1"
    for name in ("w", "a.tar", "x.json"):
        (tmp_path / name).touch()
    words = [word.format(tmp_path) for word in command.split()]
    said = ends_in_one_line(package, *words, *(small.split() if package == "entmax" else ()))
    assert f"package {package}; install it with: " in said
    assert remedy in said

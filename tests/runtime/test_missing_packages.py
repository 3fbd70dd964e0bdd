"""A command whose package is missing ends with one line that says what to install, and without a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Runs modules as commands while one package cannot be found, each in a fork of a process that has imported torch.
WITHOUT = """
import importlib.abc, importlib.util, json, os, runpy, sys
import dino_sparo.dino.train

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == hidden else find_spec(name, package)
sys.meta_path.insert(0, Hide())
for number, (hidden, words) in enumerate(json.load(sys.stdin)):
    assert hidden not in sys.modules
    if not (child := os.fork()):
        said = os.open(f"{sys.argv[1]}/{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
SMALL = (
    "--batch_size 4 --arch vit_micro --patch_size 8 --img_size 16 --num_workers 0 --device cpu --num_codes 7 "
    "--warmup_steps 0 --epochs 1"
)
# Package, command, words of the remedy.
COMMANDS = [
    ("open_clip", "dino_sparo train-clip --data_path scenes --output_dir {}", r"dino_sparo[clip]"),
    ("open_clip", "dino_sparo zero-shot --pretrained_weights {}/w --data_path scenes", "dino_sparo[clip]"),
    (
        "webdataset",
        "dino_sparo train-clip --data_path {}/a.tar --shards streamed --epoch_pairs 256 --output_dir {}",
        "dino_sparo[clip]",
    ),
    (
        "entmax",
        "dino_sparo train-clip --output_dir {} --readout fdt --data_path scenes:8:32 " + SMALL,
        "dino_sparo[clip]",
    ),
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
]


@pytest.mark.slow
def test_a_missing_package_ends_the_command_in_one_line(tmp_path: Path) -> None:
    for name in ("w", "a.tar", "x.json"):
        (tmp_path / name).touch()
    commands = [(package, command.format(*[tmp_path] * 2).split()) for package, command, _ in COMMANDS]
    program = [sys.executable, "-c", WITHOUT, tmp_path]
    done = subprocess.run(program, cwd=ROOT, input=json.dumps(commands), capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1"] * len(COMMANDS), done.stderr
    for number, (package, _, remedy) in enumerate(COMMANDS):
        said = (tmp_path / f"{number}.txt").read_text()
        assert "Traceback" not in said, said
        assert f"package {package}; install it with: " in said
        assert remedy in said

"""The commands of README and docs, typed one after another by a newcomer with a folder of small images.

A page is run here, or `NEEDS` says what its commands need that a test has not. All commands of all pages are parsed by
`test_documentation.py`.
"""

import re
from pathlib import Path

import pytest
import torch
from test_documentation import DOCUMENTS, MAP, parsed_commands

from dino_sparo.__main__ import main
from dino_sparo.data.scenes.images import Scenes

ROOT = Path(__file__).resolve().parents[1]
RUN = ("README.md", "first_encoder.md", "embeddings.md", "evaluate.md")
NEEDS = {
    "backbones.md": "released weights",
    "clip.md": "pairs of images and captions by the million; `make demo-clip` runs in make demo-short",
    "compositional.md": "the benchmarks' images",
    "CONTRIBUTING.md": "make",
    "continue.md": "released weights",
    "data.md": "no commands that end",
    "extending.md": "run by test_extending.py",
    "finetune.md": "minutes; run by tests/finetune",
    "configuration.md": "run by tests/runtime/test_cli.py",
    "from_dino.md": "run by test_from_dino.py",
    "gpu.md": "a GPU",
    "large_models.md": "several nodes",
    "channels.md": "stacks of five channels; run by tests/evaluation/test_channels_run.py",
    "medical_images.md": "X-rays",
    "methods.md": "nothing is typed",
    "oc_clip.md": "COCO; `make demo-oc-clip` runs in make demo-short",
    "oc_clip_splits.md": "hours",
    "probe.md": "released weights; run by test_attentive.py, test_few_labels.py and test_table_probe.py",
    "result_files.md": "run by tests/evaluation/test_report.py",
    "results.md": "hours",
    "scene_graphs.md": "COCO; a server with a language model",
    "shards.md": "shards of Conceptual Captions",
    "segment.md": "masks; run by tests/evaluation/test_segment.py",
    "slot_score.md": "VOC and COCO",
    "slots.md": "nothing is typed",
    "slurm.md": "a cluster; run by the tests with the marker slurm",
    "small_photographs.md": "CIFAR-10",
    "train_sizes.md": "a GPU for hours",
    "troubleshooting.md": "nothing is typed",
    "video.md": "a video; run by tests/evaluation/test_video.py",
    "weights.md": "the hub; run by tests/weights",
}
# Commands that need more than a folder of images: what they begin with, as README has them in its table.
SKIPPED = ("train", "submit", "compositional", "push", "export", "zero-shot", "retrieval")
TINY_TRAINING = ["--epochs", "1", "--max_steps", "2", "--batch_size_per_gpu", "4", "--num_workers", "0"]


def test_every_page_is_run_or_says_what_it_needs() -> None:
    pages = [path for path in DOCUMENTS if path != MAP]
    with_commands = {path.name for path in pages if list(parsed_commands(path.read_text(encoding="utf-8")))}
    assert with_commands <= set(RUN) | set(NEEDS)


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the pages' commands name."""
    for folder, split, number in (
        ("photos", "train", 24),
        ("new_photos", "val", 6),
        ("IMAGES/train", "train", 24),
        ("IMAGES/val", "val", 12),
        ("NEW", "val", 6),
    ):
        scenes = Scenes(number, 64, split)
        for index in range(number):
            path = tmp_path / folder / ("cats", "dogs", "birds")[index % 3] / f"IMG_{index:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            scenes.read(index).save(path)
    scenes.read(0).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_run(newcomer: Path, name: str) -> None:
    path = next(path for path in DOCUMENTS if path.name == name)
    done = 0
    for command, words in parsed_commands(path.read_text(encoding="utf-8")):
        if name == "first_encoder.md" and command == "train":
            words = [*words, *TINY_TRAINING]
        elif command.split()[0] in SKIPPED or not any(word.startswith("--") or word.islower() for word in words):
            continue
        words = ["demo" if word in ("W", "runs/own/checkpoint.pth") else word for word in words]
        if "runs/clip/checkpoint.pth" in words:  # captions: tests/image_text/ embeds some
            continue
        if "NEW_E" in words:
            main(["embed", "--pretrained_weights", "demo", "--data_path", "NEW", "--output_dir", "NEW_E"])
        main([command, *words])
        done += 1
    assert done >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["python.md"])
def test_the_python_of_a_page_runs(newcomer: Path, name: str) -> None:
    text = next(path for path in DOCUMENTS if path.name == name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})

"""The evaluations of CLIP find in one small model what they found at commit 8435ef2, file for file.

`reference/evaluations/` holds what each command wrote then; `reference/record_evaluations.py` trained the model and
recorded them. A change of how evaluations are built changes nothing here but `small_models.command`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("open_clip")

from small_models import SMALL_ARCH, SMALL_SIZE, command, record_of, unpack

from dino_sparo.models.architectures import ARCHITECTURES, ViTSize

# Of floats that depend on features, such as a learned mask: another CPU adds up a float32 product in another order.
# Accuracies and counts stay equal there: the recorder found the same ones with noise of 1e-4 on every feature.
RELATIVE, ABSOLUTE = 1e-5, 1e-6
# What names files and versions, and hashes of files.
UNCOMPARED = {"versions", "sha256", "path", "pretrained_weights"}
ON_CPU = ("--device", "cpu", "--num_workers", "0", "--batch_size_per_gpu", "16")
MODEL = ("--pretrained_weights", "checkpoint.pth", *ON_CPU)
PAIRS = (*MODEL, "--data_root", "pairs", "--images", "pairs/images")

# Result file without its ending -> command and options.
EVALUATIONS: dict[str, tuple[object, ...]] = {
    "zero_shot": ("zero-shot", *MODEL, "--data_path", "scenes:60:32"),
    "retrieval": ("retrieval", *MODEL, "--data_path", "scenes:40:32"),
    "probe": ("clip-probe", *MODEL, "--data_path", "scenes:60:32", "--epochs", 2, "--probe_batch_size", 12),
    "slots": ("slots select", *MODEL, "--data_path", "scenes:44:32", "--keep", 2),
    "mask": ("slots mask", *PAIRS, "--epochs", 3, "--mask_batch_size", 12, "--evaluate", "scenes:40:32"),
    "zero_shot_slots": ("zero-shot", *MODEL, "--data_path", "scenes:60:32", "--slots", "slots.json"),
    "sweep": ("sweep", "zero_shot.json"),
}

# Recorded by commands of their own, which are gone -> options of `compositional`, and the benchmark's title.
BENCHMARKS: dict[str, tuple[str, tuple[object, ...]]] = {
    "sugarcrepe": ("scene-pairs", PAIRS),
    "sugarcrepe_mask": ("scene-pairs", (*PAIRS, "--slots", "mask.json")),
    "winoground": ("Winoground", (*MODEL, "--data_root", "winoground", "--images", "pairs/images")),
}

INPUTS = ("zero_shot", "slots", "mask")  # results that other evaluations take


def evaluate(name: str, folder: Path) -> dict[str, Any]:
    """What a command writes; `folder` is the current one."""
    evaluation, *words = EVALUATIONS[name]
    command(str(evaluation), *words, "--output_dir", name)
    (file,) = (folder / name).glob("*.json")
    result = json.loads(file.read_text())
    for added in ("options", "headline"):
        result.pop(added, None)
    return result


def write_data(folder: Path) -> None:
    """True and false captions as SugarCrepe's, and two scenes with their captions as an example of Winoground's."""
    command("scene-pairs", "--output_dir", folder / "pairs", "--num_pairs", 30, "--img_size", 32)
    entries = list(json.loads((folder / "pairs" / "swap_obj.json").read_text()).values())
    lines = []
    for number, (first, second) in enumerate(zip(entries[::2], entries[1::2], strict=True)):
        images = {"image_0": first["filename"], "image_1": second["filename"]}
        captions = {"caption_0": first["caption"], "caption_1": second["caption"]}
        lines.append(json.dumps({"id": number, **images, **captions, "collapsed_tag": ("Object", "Both")[number % 2]}))
    (folder / "winoground").mkdir()
    (folder / "winoground" / "examples.jsonl").write_text("\n".join(lines) + "\n")


def assert_same(found: Any, recorded: Any, where: str) -> None:
    """Equal, floats up to rounding, but for what names files and versions."""
    if isinstance(recorded, dict):
        assert found.keys() == recorded.keys(), where
        for key in recorded.keys() - UNCOMPARED:
            assert_same(found[key], recorded[key], f"{where}.{key}")
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), where
        for index, pair in enumerate(zip(found, recorded, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(recorded, float):
        assert found == pytest.approx(recorded, rel=RELATIVE, abs=ABSOLUTE), where
    else:
        assert found == recorded, where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the model and the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, SMALL_ARCH, ViTSize(**SMALL_SIZE))
        folder = tmp_path_factory.mktemp("evaluations")
        patch.chdir(folder)
        unpack("evaluated", folder)
        write_data(folder)
        for name in INPUTS:
            (folder / f"{name}.json").write_text(json.dumps(record_of("evaluations", name)["result"]))
        yield folder


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_writes_what_it_wrote_when_it_was_recorded(name: str, folder: Path) -> None:
    assert_same(evaluate(name, folder), record_of("evaluations", name)["result"], name)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_the_accuracies_that_were_recorded(name: str, folder: Path) -> None:
    title, options = BENCHMARKS[name]
    command("compositional", *options, "--output_dir", name)
    (file,) = (folder / name).glob("*.json")
    result, recorded = json.loads(file.read_text()), record_of("evaluations", name)["result"]
    found = result["benchmarks"][title]
    accuracies = {split: entry["accuracy"] for split, entry in found["splits"].items()}
    if title == "Winoground":
        assert_same(accuracies, {split: recorded[split] for split in accuracies}, name)
        assert found["num_questions"] == recorded["num_examples"]
    else:
        assert_same(accuracies, {split: entry["accuracy"] for split, entry in recorded["splits"].items()}, name)
        ties = {split: entry["num_ties"] for split, entry in found["splits"].items()}
        assert ties == {split: entry["num_ties"] for split, entry in recorded["splits"].items()}
        means = {mean: found["means"][mean]["accuracy"] for mean in ("macro", "micro")}
        assert_same(means, {"macro": recorded["macro_splits"], "micro": recorded["micro"]}, name)
    for entry in ("model", "slots", "feature", "view"):
        assert_same(result[entry], recorded[entry], f"{name}.{entry}")

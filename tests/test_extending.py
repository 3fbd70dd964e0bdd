"""docs/extending.md: every code block in it runs and does what the text says."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import small_models
import torch
from runs import ROOT, assert_same_state, epochs_of
from small_models import words_of

from dino_sparo import load_checkpoint, load_encoder
from dino_sparo.__main__ import main
from dino_sparo.data.sources import OPENERS
from dino_sparo.evaluation.features import Features
from dino_sparo.image_text.evaluation.compositional.sets import BENCHMARKS
from dino_sparo.image_text.evaluation.published import OPENERS as MODEL_OPENERS
from dino_sparo.models.readouts import READOUTS

PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = re.findall(r"^    ((?:python|dino-sparo) .*)$", PAGE, flags=re.MULTILINE)
TINY = {
    **{name: str(value) for name, value in small_models.TINY.items() if name not in ("local_crops_size", "knn_freq")},
    **{"data_path": "scenes:26:32", "global_crops_size": "16", "local_crops_number": "0", "precision": "fp32"},
    **{"sparo_slots": "3", "sparo_slot_dim": "5", "batch_size_per_gpu": "6", "epochs": "3", "warmup_epochs": "1"},
}


def block_with(word: str) -> str:
    (block,) = (block for block in BLOCKS if word in block)
    return block


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict]]:
    """Runs `python FILE.py COMMAND ...` in this process; the tables are afterwards what they were."""
    before = {**READOUTS}, {**OPENERS}, {**BENCHMARKS}, {**MODEL_OPENERS}

    def run(script: Path, *words: object) -> dict:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
        return runpy.run_path(str(script), run_name="__main__")

    yield run
    for table, entries in zip((READOUTS, OPENERS, BENCHMARKS, MODEL_OPENERS), before, strict=True):
        table.clear()
        table.update(entries)


def result_of(name: str) -> dict:
    """The only result whose file begins with this name."""
    (path,) = Path().glob(f"{name}_*.json")
    return json.loads(path.read_text())


def small(words: list[str]) -> list[str]:
    """A command of the page with tiny images and, for a training, a tiny model."""
    is_training = "--output_dir" in words
    options = {**TINY, "epochs": 1, "warmup_epochs": 0} if is_training else {"device": "cpu", "num_workers": 0}
    given = {name: value for name, value in options.items() if f"--{name}" not in words}
    return [re.sub(r"^scenes.*", TINY["data_path"], word) for word in words] + words_of(given)


@pytest.mark.filterwarnings("ignore:Overwriting vit_flat")  # this process runs the file more than once
@pytest.mark.slow
def test_every_command_of_the_page_runs_with_its_result_and_what_others_could_not_load_is_not_exported(
    tmp_path: Path, python: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("open_clip")
    from clip_fakes import paint, small_checkpoint

    monkeypatch.chdir(tmp_path)
    words = {"my_readout": "TopKReadout", "my_backbone": "vit_flat", "my_source": "class Frames"}
    words |= {
        "my_benchmark": "colours.json",
        "my_model": "class Letters",
        "nearest_mean": "nearest_mean",
        "vicreg": "vicreg_loss",
    }
    for name, word in words.items():
        Path(f"{name}.py").write_text(block_with(word))
    frames = np.random.default_rng(0).integers(0, 256, (50, 24, 20, 3), dtype=np.uint8)
    np.savez("video.npz", frames=frames, labels=np.arange(50) // 25)
    paint(tmp_path / "data" / "images" / "1.png", "red")
    Path("data/colours.json").write_text('[{"image": "1.png", "right": "a red cup", "wrong": "a blue cup"}]')
    small_checkpoint(tmp_path / "runs" / "clip" / "checkpoint.pth")
    assert len(COMMANDS) == 10
    for command in COMMANDS:
        program, *rest = shlex.split(command)
        if program == "python":
            python(tmp_path / rest[0], *small(rest[1:]))
        else:
            main(small(rest))
    assert result_of("runs/topk/knn")["feature"]["dim"] == 3 * 5
    backbone = load_encoder(Path("runs/flat/checkpoint.pth")).backbone
    assert (backbone.embed_dim, len(backbone.model.blocks)) == (192, 5)
    assert load_checkpoint(Path("runs/video/checkpoint.pth"))["num_images"] == 40
    images = result_of("runs/video/knn")["images"]
    assert (images["num_train"], images["num_val"]) == (40, 10)
    (benchmark,) = result_of("runs/clip/compositional")["benchmarks"].values()
    assert benchmark["splits"]["colours"]["num_questions"] == 1
    Path("data/colours.json").write_text('[{"image": "1.png", "right": 3, "wrong": "a blue cup"}]')
    (evaluation,) = (command for command in COMMANDS if "my_benchmark.py" in command)
    with pytest.raises(SystemExit, match="1"):
        python(tmp_path / "my_benchmark.py", *small(shlex.split(evaluation)[2:]))
    for script, run, part in (
        ("my_readout", "topk", "--readout topk"),
        ("my_backbone", "flat", "--arch timm/vit_flat"),
    ):
        with pytest.raises(SystemExit, match="1"):
            python(tmp_path / f"{script}.py", "export", f"runs/{run}/checkpoint.pth", run, "--format", "huggingface")
        assert f"{part} is code of your own" in caplog.messages[-1]
        assert not Path(run).exists()


def test_the_new_evaluation_has_a_result_with_its_whole_protocol(tmp_path: Path, python: Callable[..., dict]) -> None:
    script = tmp_path / "nearest_mean.py"
    script.write_text(block_with("nearest_mean"))
    options = ["--data_path", "scenes:26:32", "--output_dir", tmp_path, "--device", "cpu", "--num_workers", 0]
    random = ["--untrained", "--arch", "vit_micro", "--patch_size", 8, "--img_size", 16]
    evaluation = python(script, *random, *options)
    (path,) = tmp_path.glob("nearest_mean_*_untrained.json")
    result = json.loads(path.read_text())
    names = {"evaluation", "top1", "headline", "images", "encoder", "view", "versions", "options", "warnings"}
    assert result.keys() | {"warnings"} == names
    assert result["images"]["num_train"] + result["images"]["num_val"] == 2 * 26
    before = path.read_bytes()
    python(script, *random, *options)  # the same result again
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="holds another result: img_size 16 in the file, 24 now"):
        python(script, *random[:-1], 24, *options)
    features = Features(torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 1]), torch.arange(4))
    judged = Features(torch.eye(3), torch.tensor([0, 1, 0]), torch.arange(3))
    assert evaluation["nearest_mean"](features, judged, 2) == pytest.approx(200 / 3)


@pytest.mark.slow
def test_the_new_read_out_is_drawn_exported_and_loaded(tmp_path: Path, python: Callable[..., dict]) -> None:
    script, folder = tmp_path / "my_readout.py", tmp_path / "topk"
    script.write_text(block_with("TopKReadout"))
    python(script, "train", *words_of({**TINY, "readout": "topk", "epochs": 2}), "--output_dir", folder)
    given = ["--pretrained_weights", folder / "checkpoint.pth", "--output_dir", folder]
    computed = ["--device", "cpu"]
    python(script, "attention", *given, *computed)
    python(script, "attention", *given, *computed, "--overwrite", "--atlas", "scenes:26:32", "--num_workers", 0)
    assert np.load(folder / "attention.npy").shape[1] == 3
    assert len(json.loads((folder / "atlas.json").read_text())["slots"]) == 3
    assert {path.name for path in folder.glob("*.png")} >= {"atlas.png"}
    python(script, "export", folder / "checkpoint.pth", folder / "exported")
    encoder = load_encoder(folder / "checkpoint.pth")
    assert (encoder.encoding_dim, len(encoder.backbone.blocks)) == (3 * 5, 3)
    images = torch.rand(2, 3, 16, 16)
    assert encoder.readout_output(images).attention.gt(0).sum(dim=-1).eq(4).all()
    assert torch.equal(load_encoder(folder / "exported.safetensors")(images), encoder(images))

    pytest.importorskip("open_clip")
    own = {name: TINY[name] for name in ("data_path", "arch", "patch_size", "sparo_slots", "sparo_slot_dim", "device")}
    text = {"text_width": 24, "text_heads": 2, "text_layers": 3, "context_length": 16}
    clip = {**own, **text, "img_size": 16, "batch_size": 8, "epochs": 1, "num_workers": 0, "readout": "topk"}
    python(script, "train-clip", *words_of(clip), "--output_dir", tmp_path / "clip")
    assert load_encoder(tmp_path / "clip" / "checkpoint.pth").encoding_dim == 3 * 5

    del READOUTS["topk"]
    with pytest.raises(ValueError, match=r"unknown readout 'topk'.*python YOUR_FILE.py COMMAND"):
        load_encoder(folder / "checkpoint.pth")


def test_the_new_model_is_scored_beside_a_checkpoint(tmp_path: Path, python: Callable[..., dict]) -> None:
    pytest.importorskip("open_clip")
    from clip_fakes import paint, small_checkpoint

    script, data = tmp_path / "my_model.py", tmp_path / "data"
    script.write_text(block_with("class Letters"))
    entries = {}
    for number, (colour, other) in enumerate((("red", "blue"), ("green", "red"), ("blue", "green"))):
        paint(data / "images" / f"{number}.png", colour)
        entry = {"filename": f"{number}.png", "caption": colour[0], "negative_caption": other[0]}
        entries[str(number)] = entry
    (data / "swap_obj.json").write_text(json.dumps(entries))
    models = ("letters:first", small_checkpoint(tmp_path / "checkpoint.pth"))
    words = ("--data_root", data, "--output_dir", tmp_path, "--device", "cpu", "--num_workers", 0)
    python(script, "compositional", "--model", *models, *words)
    (result,) = json.loads((tmp_path / "compositional_letters-first_data.json").read_text())["benchmarks"].values()
    assert result["splits"]["swap_obj"]["accuracy"] == 100


@pytest.mark.slow
def test_the_new_loss_trains_resumes_to_the_bit_and_leaves_an_encoder(
    tmp_path: Path, python: Callable[..., dict]
) -> None:
    script = tmp_path / "vicreg.py"
    script.write_text(block_with("vicreg_loss"))

    # As on GPUs: the loader gives 8-bit crops and the numbers of their distortions.
    changes = {"distort_on": "device", "knn_freq": 3, "lr": 0.05}

    def train(name: str, *more: object) -> dict:
        python(script, *words_of({**TINY, **changes}), "--output_dir", tmp_path / name, *more)
        return load_checkpoint(tmp_path / name / "checkpoint.pth")

    whole = train("whole")
    train("parts", "--max_steps", 6)
    parts = train("parts")
    assert_same_state(whole["student"], parts["student"], "student")
    losses = [epoch["train_loss"] for epoch in epochs_of(tmp_path / "whole")]
    assert losses[-1] < losses[0]
    assert whole["best_knn"] == epochs_of(tmp_path / "whole")[-1]["knn_20"]
    assert load_encoder(tmp_path / "whole" / "checkpoint.pth", which="student").encoding_dim == 3 * 5

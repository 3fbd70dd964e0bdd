"""Sweeps over L and V: parameters without weights, results that can be compared, and the command."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("open_clip")

from clip_fakes import evaluate, paint, small_checkpoint
from figures import assert_readable, drawn_words

from dino_sparo.clip import create_clip, load_clip
from dino_sparo.clip.model import clip_from_config
from studies import __main__ as studies
from studies.sweep import SweepPoint, check_comparable, collect, draw_sweep, point_of, read_result


def run(*options: object) -> dict:
    """The command without its catching of errors."""
    return collect(studies.parser_of("sweep").parse_args([*map(str, options)]))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "images"
    for colour in ("red", "green", "blue"):
        paint(folder / colour / "0.png", colour)
    return folder


@pytest.fixture(scope="module")
def results(images: Path) -> list[Path]:
    """Results of a model with slots and of one without."""
    found = []
    for readout in ("sparo", "gap"):
        weights = small_checkpoint(images.parent / readout / "checkpoint.pth", readout)
        options = ["--pretrained_weights", weights, "--data_path", images, "--templates", "plain"]
        evaluate("zero-shot", *options)
        found.append(next(weights.parent.glob("zero_shot_*.json")))
    return found


# --- points


@pytest.mark.parametrize("readout", ["sparo", "gap", "fdt", "attpool"])
def test_parameters_are_counted_as_the_models_are(readout):
    sizes = {"num_slots": 5, "slot_dim": 7, "key_dim": 3, "img_size": 32, "embed_dim": 11, "num_codes": 13}
    model = create_clip("vit_micro", 8, readout, text_width=24, text_heads=2, text_layers=3, **sizes)
    point = point_of("one", partial(clip_from_config, model.config), 0.0)
    assert point.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    slots = (5, 7, 35) if readout in ("sparo", "attpool") else (None, None, 11)
    assert (point.num_slots, point.slot_dim, point.encoding_dim) == slots


# --- results


def test_results_are_read_with_how_their_models_are_built(results, tmp_path):
    found = run(*results, "--output_dir", tmp_path)
    gap, sparo = found["points"]
    assert (gap["readout"], gap["num_slots"], gap["encoding_dim"]) == ("gap", None, 11)
    assert (sparo["readout"], sparo["num_slots"], sparo["slot_dim"], sparo["encoding_dim"]) == ("sparo", 5, 7, 35)
    for path, point in zip(results, (sparo, gap), strict=True):
        model = load_clip(path.with_name("checkpoint.pth")).model
        assert point["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert point["accuracy"] == json.loads(path.read_text())["top1"]


@pytest.mark.parametrize(
    ("part", "name", "value"), [("images", "data_path", "elsewhere"), ("prompts", "templates", ["a {}"])]
)
def test_results_of_different_protocols_are_refused(part, name, value, results):
    one, two = map(read_result, results)
    two["prompts"]["num_truncated"] = 7  # each model's own matter
    check_comparable({"one": one, "two": two})
    two[part][name] = value
    with pytest.raises(ValueError, match=f"one and two cannot be compared: {part} {name} .* in one"):
        check_comparable({"one": one, "two": two})


def test_files_that_are_no_results_are_refused(results, tmp_path):
    path = tmp_path / "result.json"
    for text in (None, "nothing", "[]", '{"evaluation": "retrieval"}', '{"evaluation": "zero-shot classification"}'):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=r"result.json is not a result of dino-sparo zero-shot"):
            read_result(path)
    path.write_text(json.dumps({**read_result(results[0]), "slots": {"kind": "selection"}}))
    with pytest.raises(ValueError, match="a choice among a model's slots; give results of whole models"):
        read_result(path)


# --- the command


def test_a_mistake_ends_in_one_line(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as stopped:
        studies.main(["sweep"])
    assert stopped.value.code == 1
    assert "give results of dino-sparo zero-shot" in caplog.text


def test_all_words_of_a_plot_with_many_models_can_be_read(tmp_path):
    """Numbers under the axes lay over one another."""
    sizes = [(slots, width) for slots in range(8, 136, 8) for width in (16, 24, 32, 48, 64, 96, 128)]
    points = [SweepPoint("a", "sparo", *size, size[0] * size[1], 10**8, float(sum(size)) / 3) for size in sizes]
    with drawn_words() as figures:
        draw_sweep(points, "mean_per_class_recall", tmp_path / "sweep.png")
    assert_readable(figures)

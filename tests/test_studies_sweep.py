"""Sweeps over L and V: parameters without weights, results that can be compared, and the command."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")

from clip_fakes import evaluate, paint, small_checkpoint
from figures import assert_readable, drawn_words

from dino_sparo.clip import create_clip, load_clip
from dino_sparo.clip.model import clip_from_config
from studies import __main__ as studies
from studies.sweep import SweepPoint, check_comparable, collect, draw_sweep, get_args_parser, point_of, read_result


def run(*options: object) -> dict:
    """The command without its catching of errors."""
    return collect(get_args_parser().parse_args([*map(str, options)]))


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


def count_of(**sizes):
    """Parameters of the model of these sizes, which is not trained."""
    return point_of("one", partial(create_clip, **sizes), 0.0).num_parameters


def test_a_slot_costs_a_query_and_a_key_and_its_width_a_row_of_values():
    small = {"arch": "vit_micro", "patch_size": 8, "key_dim": 3, "img_size": 32}
    small |= {"text_width": 24, "text_heads": 2, "text_layers": 3}
    count = {(slots, dim): count_of(**small, num_slots=slots, slot_dim=dim) for slots in (2, 7) for dim in (5, 11)}
    widths = (create_clip("vit_micro", 8).image.backbone.embed_dim, 24)
    for slot_dim in (5, 11):
        slot = sum(3 + 3 * width + 3 for width in widths)  # q (A), K (A, D) and its bias (A), in both towers
        assert count[7, slot_dim] - count[2, slot_dim] == 5 * slot
    for num_slots in (2, 7):
        assert count[num_slots, 11] - count[num_slots, 5] == 2 * 6 * (3 + 1)  # W (V, A) and its bias
    for readout in ("cls", "gap"):
        narrow, wide = (count_of(**small, readout=readout, embed_dim=width) for width in (13, 17))
        assert wide - narrow == 4 * sum(widths)
    assert not torch.empty(1).is_meta  # counting leaves no default device behind


@pytest.mark.parametrize("readout", ["cls", "gap", "sparo"])
def test_the_papers_models_have_the_papers_number_of_parameters(readout):
    assert round(count_of(readout=readout, num_slots=128, slot_dim=64) / 1e6) == 151


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


@pytest.mark.slow
def test_the_same_command_writes_the_same_files(results, tmp_path, capsys):
    written = []
    for _ in range(2):
        run(*results, "--metric", "mean_per_class_recall", "--output_dir", tmp_path / "out")
        written.append([(tmp_path / "out" / f"sweep.{ending}").read_bytes() for ending in ("json", "png")])
    assert written[0] == written[1]
    assert "mean_per_class_recall %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "name", "value"), [("images", "data_path", "elsewhere"), ("prompts", "templates", ["a {}"])]
)
def test_results_of_different_protocols_are_refused(part, name, value, results):
    said = [read_result(path) for path in results]
    check_comparable({"one": said[0], "two": said[1]})
    said[1][part][name] = value
    with pytest.raises(ValueError, match=f"one and two cannot be compared: {part} {name} .* in one"):
        check_comparable({"one": said[0], "two": said[1]})


def test_results_computed_otherwise_are_refused(results):
    said = [read_result(path) for path in results]
    said[1]["similarity"] = "another"
    with pytest.raises(ValueError, match="similarity 'cosine, fp32' in one, 'another' in two"):
        check_comparable({"one": said[0], "two": said[1]})


def test_how_many_prompts_a_model_cut_off_is_its_own_matter(results):
    said = [read_result(path) for path in results]
    said[1]["prompts"]["num_truncated"] = 7
    check_comparable({"one": said[0], "two": said[1]})


def test_the_sweep_lies_in_the_folder_that_holds_its_inputs(results, tmp_path, monkeypatch):
    for number, path in enumerate(results[:2]):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "zero_shot.json").write_text(path.read_text())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(*(f"../runs/{number}/zero_shot.json" for number in range(2)))
    assert (tmp_path / "runs" / "sweep.json").is_file()
    assert (tmp_path / "runs" / "sweep.png").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_files_that_are_no_results_are_refused(results, tmp_path):
    path = tmp_path / "result.json"
    for text in ("nothing", "[]", '{"evaluation": "retrieval"}', '{"evaluation": "zero-shot classification"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"result.json is not a result of dino-sparo zero-shot"):
            read_result(path)
    path.write_text(json.dumps({**read_result(results[0]), "slots": {"kind": "selection"}}))
    with pytest.raises(ValueError, match="a choice among a model's slots; give those of whole models"):
        read_result(path)


# --- the command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give results of dino-sparo zero-shot"),
        (["nowhere.json"], "nowhere.json is not a result of dino-sparo zero-shot"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(*options, "--output_dir", tmp_path)


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

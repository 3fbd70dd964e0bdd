"""Pictures of slots: the pairs to look at, the sheet, the page and the command."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from clip_fakes import call
from PIL import Image

from dino_sparo.__main__ import run as run_command

pytest.importorskip("open_clip")

from clip_fakes import paint, small_checkpoint
from figures import assert_readable, drawn_words
from pages import Page, needs_browser, title_after
from refusals import refused

from dino_sparo.clip import load_clip, tokenize
from dino_sparo.clip.slots.concepts import PairAttention, caption_words
from dino_sparo.clip.slots.pictures import level_of, slots_figure
from dino_sparo.draw.figure import Figure
from dino_sparo.draw.html import save_page
from dino_sparo.draw.sheet import save_sheet
from dino_sparo.evaluation.slots.choice import SlotMask, SlotSelection
from dino_sparo.image_text.pairs.sources import open_pairs


def run(*options: object) -> dict:
    return call("pictures", [*options, "--device", "cpu"])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("pictures") / "checkpoint.pth")


# --- pairs to look at


def test_a_folder_of_pairs_may_hold_names_of_splits_and_folders_of_splits(tmp_path):
    """The bug: the caption beside test.png was read as the list of the split."""
    for name in ("test", "val/c", "train/d", "train/e"):
        paint(tmp_path / f"{name}.png", "red")
        (tmp_path / f"{name}.txt").write_text(f"caption of {name}")
    looked_at = open_pairs(str(tmp_path), default_split="val")
    assert [looked_at.captions_of(i) for i in range(len(looked_at))] == [["caption of test"]]
    assert open_pairs(str(tmp_path), split="val").captions_of(0) == ["caption of val/c"]
    assert len(open_pairs(str(tmp_path), split="train")) == 2


@pytest.mark.usefixtures("no_sheets")
def test_pairs_that_cannot_be_read_are_left_out_and_named_and_captions_cut_off_are_counted(weights, tmp_path, caplog):
    captions = {"a": "blue " * 99, "b": "A red <b>wall</b>\n", "c": "  ", "e": "a broken file"}
    for name, colour in zip("abcde", ("blue", "red", "green", "cyan", "broken"), strict=True):
        paint(tmp_path / "pairs" / f"{name}.png", colour)
        if name in captions:
            (tmp_path / "pairs" / f"{name}.txt").write_text(captions[name])
    found = run("--pretrained_weights", weights, "--data_path", tmp_path / "pairs", "--output_dir", tmp_path / "out")
    assert [Path(pair["image"]).name for pair in found["slots"][0]["pairs"]] == ["a.png", "b.png"]
    for words in ("c.png", "e.png", "left out 2 pairs", "1 captions are longer than the context and cut off"):
        assert words in caplog.text


def test_no_readable_pair_is_an_error(weights, tmp_path):
    paint(tmp_path / "a.png", "broken")
    (tmp_path / "a.txt").write_text("a broken file")
    with pytest.raises(ValueError, match="none of 1 pairs can be read"):
        run("--pretrained_weights", weights, "--data_path", tmp_path, "--output_dir", tmp_path)


# --- sheet and page


@pytest.fixture(scope="module")
def pairs() -> list[PairAttention]:
    rng = np.random.default_rng(0)
    found = []
    for caption in ("A red star under <b>&</b> above a ring, twice", "sand"):
        words = caption_words(caption, tokenize([caption]).ids[0])
        shares = rng.dirichlet(np.full(len(words) + 2, 0.3), size=3)
        text = shares[:, 2:], shares[:, 0], shares[:, 1]
        maps = rng.dirichlet(np.full(12, 0.2), size=3).reshape(3, 3, 4)
        found.append(PairAttention(0, "photos/a&b.png", caption, words, maps, *text, rng.random(3)))
    return found


def figure_of(pairs: list[PairAttention], about: str = "a <model>  ·  2 of 7 pairs") -> Figure:
    rng = np.random.default_rng(0)
    shown = [rng.integers(0, 255, (90, 120, 3), dtype=np.uint8) for _ in pairs]
    return slots_figure(about, "Slots & rules.", [2, 0], pairs, shown)


def test_the_sheet_shows_maps_and_marks(pairs, tmp_path):
    save_sheet(figure_of(pairs), tmp_path / "sheet.png")
    pixels = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    assert (pixels[:3] == 255).all()
    assert (pixels[-3:] == 255).all()
    strongest = max(pairs[0].word_shares[2])
    mixed = 255 + level_of(strongest) * (np.array([252, 176, 78]) - 255)
    assert (abs(pixels - mixed.round()) <= 1).all(axis=-1).sum() > 100


@pytest.mark.parametrize("columns", [1, 5])
def test_all_words_of_the_sheet_can_be_read(columns, pairs, tmp_path):
    about = "pairs of " + "a_long_name_" * 20 + ".csv in words " * 20
    with drawn_words() as figures:
        save_sheet(figure_of([pairs[i % 2] for i in range(columns)], about), tmp_path / "sheet.png")
    assert_readable(figures)


def test_marks_grow_with_the_share():
    levels = [level_of(share) for share in (0.0, 0.1, 0.5, 1.0)]
    assert levels == sorted(levels)
    assert (levels[0], levels[-1]) == (0.0, 1.0)


def test_the_page_is_whole_and_asks_for_nothing(pairs, tmp_path):
    save_page(figure_of(pairs), tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert len(page.references) == 1 + 2 + 2 * 2 * 2
    assert "a &lt;model&gt;" in page.text
    assert "prefers-color-scheme: dark" in page.text
    words = [word for pair in pairs for word in pair.words]
    marks = [(title, word) for title, word in page.marks if title]
    assert [word for _, word in marks] == 2 * [word.text for word in words]
    shares = [f"{100 * share:.0f}%" for pair in pairs for share in pair.word_shares[2]]
    assert [title for title, _ in marks[: len(words)]] == shares


ACTIONS = """
const found = [];
const shots = [...document.querySelectorAll(".shot")];
const state = () => shots.map((shot) => shot.getAttribute("aria-pressed")[0]).join("");
found.push(state());
shots[1].click();
found.push(state());
document.querySelector("#maps").click();
found.push(state(), getComputedStyle(document.body).backgroundColor);
document.title = found.join("|");
"""


@pytest.mark.slow
@needs_browser
def test_the_page_switches_maps_in_a_browser(pairs, tmp_path):
    save_page(figure_of(pairs), tmp_path / "page.html")
    for is_dark, colour in ((False, "rgb(250, 250, 252)"), (True, "rgb(18, 18, 23)")):
        assert title_after(ACTIONS, tmp_path / "page.html", is_dark) == ["tttt", "tftt", "ffff", colour]


# --- the command


def test_the_command_draws_chosen_slots(weights, tmp_path, capsys, caplog):
    options = ["--pretrained_weights", weights, "--data_path", "scenes:40:48", "--max_pairs", 11]
    found = run(*options, "--max_slots", 2, "--max_columns", 3, "--output_dir", tmp_path / "out")
    assert capsys.readouterr().out.split()[-3:] == [
        str(tmp_path / "out" / f"pictures.{e}") for e in ("png", "html", "json")
    ]
    assert json.loads((tmp_path / "out" / "pictures.json").read_text()) == found
    assert [len(slot["pairs"]) for slot in found["slots"]] == [3, 3]
    assert "of 2 do, the other slots come nearest" in caplog.text  # an untrained model's
    for pair in found["slots"][0]["pairs"]:
        shares = [word["share"] for word in pair["words"]]
        assert sum(shares) + pair["start"] + pair["end"] == pytest.approx(1, abs=1e-4)
        assert pair["meets_criteria"] == (pair["cosine"] > 0.75 and max(shares) >= 0.5)


@pytest.mark.usefixtures("no_sheets")
def test_slots_can_be_asked_for_by_number_or_by_file(weights, tmp_path):
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        paint(tmp_path / "a.png", "red")
        csv.writer(file).writerows([["image", "caption"], ["a.png", "a red, even wall"]])
    options = ["--pretrained_weights", weights, "--output_dir", tmp_path]
    table = ["--data_path", tmp_path / "pairs.csv", "--image_key", "image"]
    found = run(*options, *table, "--slots", 3, 1)
    assert [slot["slot"] for slot in found["slots"]] == [3, 1]
    assert "The slots were given" in found["rule"]
    selection = SlotSelection((4, 2), 5, load_clip(weights).record["sha256"])
    (tmp_path / "slots.json").write_text(json.dumps(selection.to_dict()))
    found = run(*options, *table, "--slots", tmp_path / "slots.json", "--img_size", 64, "--overwrite")
    assert [slot["slot"] for slot in found["slots"]] == [4, 2]
    assert found["image_size"] == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", 5], "slot 5, which does not exist: the model has num_slots=5"),
        (["--slots", "one"], "slots='one' does not exist; give a file of dino-sparo slots, or numbers"),
        (["--img_size", 5], "smaller than one patch"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, weights, tmp_path):
    with pytest.raises(ValueError, match=message):
        run("--pretrained_weights", weights, "--data_path", "scenes:3:48", "--output_dir", tmp_path, *options)


def test_a_mask_names_no_slots_to_show(weights, tmp_path):
    (tmp_path / "mask.json").write_text(json.dumps(SlotMask((0.5,) * 5).to_dict()))
    with pytest.raises(ValueError, match="is a mask; give a file of dino-sparo slots select"):
        run("--pretrained_weights", weights, "--slots", tmp_path / "mask.json")


def test_mistakes_end_in_one_line(tmp_path):
    weights = small_checkpoint(tmp_path / "checkpoint.pth", "gap")
    with refused("readout 'gap' has no slots to show"):
        run_command("pictures", ["--pretrained_weights", str(weights), "--device", "cpu"])
    with refused("no checkpoint at"):
        run_command("pictures", ["--device", "cpu"])


@pytest.mark.parametrize("name", ["pictures", "oc-pictures"])
def test_only_one_process_draws(name, monkeypatch):
    for variable, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(variable, value)
    assert run_command(name, []) == {}

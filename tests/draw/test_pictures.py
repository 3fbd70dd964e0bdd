"""Figures of maps: whatever the pictures' shape, all words can be read."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from figures import assert_readable, drawn_words

from dino_sparo.draw.figure import Figure, Tile, Word, file_names, map_painter, run_names, short_name
from dino_sparo.draw.pixels import save_picture
from dino_sparo.draw.sheet import flow, save_sheet, shorten, wrap
from dino_sparo.evaluation.attention.atlas import atlas_figure
from dino_sparo.evaluation.attention.figures import MapSet, maps_figure

SHAPES = {"portrait": (60, 25), "panorama": (9, 90), "sliver": (90, 9), "square": (40, 40)}
RUN = "runs/a_run/checkpoint.pth"
LONG = "a_photograph_of_a_bird_on_a_branch_in_the_evening_light_of_a_long_day_" * 3 + "$x$.jpg"


def slow(*case: object) -> object:
    """A case for the slow tests alone."""
    return pytest.param(*case, marks=pytest.mark.slow)


def maps_of(
    num_maps: int, num_images: int = 1, kind: str = "slot", alike: int = 0, shape: str = "square", run: str = RUN
) -> MapSet:
    """Random maps, the first `alike` of which look alike; numbers of three digits, so that labels are long."""
    maps = np.random.default_rng(0).dirichlet(np.full(15 * 16, 0.9), size=(num_images, num_maps))
    maps = maps.reshape(num_images, num_maps, 15, 16).astype(np.float32)
    maps[:, :alike] = maps[:, :1]
    about = "vit_micro/8  ·  sparo  ·  epoch 100"
    return MapSet(run, about, kind, 8, maps, [LONG] * num_images, [picture(shape)] * num_images)


def picture(shape: str) -> np.ndarray:
    return np.full((*SHAPES[shape], 3), 99, dtype=np.uint8)


def several(*sides: MapSet, max_maps: int | None = None) -> Figure:
    """Maps of several images by one encoder or by two."""
    return maps_figure(sides, range(len(sides[0].names)), max_maps)


@pytest.mark.parametrize("shape", ["portrait", "panorama", slow("sliver"), slow("square")])
@pytest.mark.parametrize("num_maps", [3, slow(1), slow(16)])
def test_all_words_of_a_grid_can_be_read(shape: str, num_maps: int, tmp_path: Path) -> None:
    """A portrait with three columns lost the end of its explanation."""
    maps = maps_of(num_maps, alike=2, shape=shape)
    with drawn_words() as figures:
        save_sheet(maps_figure([maps], [0]), tmp_path / "grid.png")
        save_sheet(maps_figure([maps], [0], threshold=0.6), tmp_path / "masks.png")
    assert_readable(figures)


@pytest.mark.parametrize(
    ("shape", "num_maps"),
    [("portrait", 5), ("panorama", 5), slow("sliver", 5), slow("square", 5), slow("portrait", 1)],
)
def test_all_words_of_several_images_can_be_read(shape: str, num_maps: int, tmp_path: Path) -> None:
    with drawn_words() as figures:
        save_sheet(several(maps_of(num_maps, 3, alike=2, shape=shape)), tmp_path / "matrix.png")
    assert_readable(figures)


@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [("portrait", 1, 3), ("panorama", 1, 3), slow("sliver", 1, 3), slow("square", 1, 3), slow("portrait", 4, 16)],
)
def test_all_words_of_a_comparison_can_be_read_and_name_the_runs(
    shape: str, ours: int, theirs: int, tmp_path: Path
) -> None:
    """Labels of portraits lay over one another, and both runs were called checkpoint.pth."""
    names = run_names(["runs/sparo/checkpoint.pth", "runs/cls/checkpoint.pth"])
    sides = maps_of(ours, 2, "slot", 3, shape, names[0]), maps_of(theirs, 2, "head", 2, shape, names[1])
    with drawn_words() as figures:
        save_sheet(several(*sides), tmp_path / "compare.png")
    assert_readable(figures)
    assert {"sparo/checkpoint.pth", "cls/checkpoint.pth"} <= {words.words for words in figures[0]}


@pytest.mark.parametrize(
    ("shape", "num_slots", "num_images"),
    [("portrait", 1, 1), ("panorama", 1, 1), slow("sliver", 1, 1), slow("square", 1, 1), slow("portrait", 17, 2)],
)
def test_all_words_of_an_atlas_can_be_read_and_patches_are_explained(
    shape: str, num_slots: int, num_images: int, tmp_path: Path
) -> None:
    tiles = [[Tile(picture(shape), LONG, map_painter(np.eye(3)))] * num_images] * num_slots
    numbers = {"group": 0, "letter": "AB", "patches": 121.4, "class_token_share": 0.1}
    slots = [{"number": 100 + i, "rank": i, **numbers} for i in range(num_slots)]
    atlas = {"model": "run/checkpoint.pth", "kind": "slot", "source": f"folder /data/{LONG}", "num_images": 2000}
    atlas |= {"grid": (14, 15), "slots": slots}
    with drawn_words() as figures:
        save_sheet(atlas_figure(atlas, tiles), tmp_path / "atlas.png")
    assert_readable(figures)
    text = " ".join(words.words for words in figures[0])
    assert "“121 patches”: the attention of slot 100" in text
    assert "14 x 15 = 210 patches" in text
    assert "even share of attention or less" in text  # the colour bar


@pytest.mark.slow
def test_all_words_can_be_read_where_there_are_many_maps(tmp_path: Path) -> None:
    maps = maps_of(64, 2, alike=3, shape="portrait")
    with drawn_words() as figures:
        save_sheet(maps_figure([maps], [0]), tmp_path / "grid.png")
        save_sheet(several(maps, max_maps=64), tmp_path / "matrix.png")
    assert_readable(figures)


def test_an_order_that_several_images_share_is_not_called_that_of_one() -> None:
    """Every grid said "from the most peaked", though the order was by the mean over all images."""
    for num_images, expected in ((1, "From the most peaked slot"), (3, "most peaked on average over 3 images")):
        assert expected in maps_figure([maps_of(5, num_images)], [0]).summary[0]


def test_runs_get_as_many_folders_as_tell_them_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_names(["/a/seed0/checkpoint.pth", "/b/seed0/checkpoint.pth"]) == [
        "a/seed0/checkpoint.pth",
        "b/seed0/checkpoint.pth",
    ]
    assert run_names(["/a/checkpoint.pth"] * 2) == ["a/checkpoint.pth"] * 2
    assert run_names(["demo"]) == ["demo"]  # the shipped encoder
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert run_names(["checkpoint.pth"]) == ["run/checkpoint.pth"]


def test_files_are_named_after_their_photographs() -> None:
    """They were numbered, so that nobody knew which was which."""
    locations = ["a/cat.jpg", "b/Cat.png", "x.tar/some dir/a $5 (copy).jpeg", "caf\udce9.jpg", "..", "f" * 300 + ".jpg"]
    assert file_names(locations) == ["cat", "Cat-2", "a_5_copy", "caf", "image", "f" * 80]


def test_names_are_the_last_two_parts_of_a_path_and_escaped() -> None:
    assert short_name("data/imagenet/val/n01/7.jpg") == "n01/7.jpg"
    assert short_name("scenes[17]") == "scenes[17]"
    assert short_name("photos/caf\udce9\n.jpg") == r"photos/caf\udce9\n.jpg"


def test_words_that_are_too_long_lose_their_middle_and_lines_break_at_spaces() -> None:
    assert shorten("abcdefghij" * 300, 12) == "abcdef…fghij"
    assert shorten("abcdef", 6) == "abcdef"
    assert wrap(f"one two {LONG} three", 12) == ["one two", "a_phot…$.jpg", "three"]


def test_lines_break_at_spaces_and_within_words_without_spaces() -> None:
    texts = [("aa", False), ("bbb", True), ("cc", True), (",", False), ("dddddd", True), ("eeee", False)]
    words = [Word(text, has_space=has_space) for text, has_space in texts]
    lines = [[word.text for word in line] for line in flow(words, 8)]
    assert lines == [["aa", "bbb"], ["cc", ","], ["dddddd"], ["eeee"]]


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_sheets_leave_as_png_pdf_or_svg_with_the_same_bytes_each_time(ending: str, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        save_sheet(maps_figure([maps_of(1)], [0]), tmp_path / f"{name}.{ending}")
        contents.append((tmp_path / f"{name}.{ending}").read_bytes())
    assert contents[0] == contents[1]
    assert contents[0].startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending])


@pytest.mark.parametrize("killed", [False, True])
def test_a_kill_while_a_picture_is_written_leaves_the_older_one(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: an empty PNG."""
    path = tmp_path / "sheet.png"
    path.write_bytes(b"older")

    def stop(source: object, target: object) -> None:
        raise KeyboardInterrupt

    if killed:
        monkeypatch.setattr("os.replace", stop)
    for write in (
        lambda: save_sheet(maps_figure([maps_of(1)], [0]), path),
        lambda: save_picture(picture("square"), path),
    ):
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
            write()
        assert path.read_bytes().startswith(b"older" if killed else b"\x89PNG")
        assert [each.name for each in tmp_path.iterdir()] == ["sheet.png"]

"""The slot atlas: which images light a slot up, the sheet, and the page in a browser."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import Page, needs_browser, title_after
from PIL import Image

from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.sources import open_source
from dino_sparo.data.views import PatchView
from dino_sparo.draw.figure import Tile
from dino_sparo.draw.html import save_page
from dino_sparo.draw.sheet import save_sheet
from dino_sparo.evaluation.attention import atlas as atlas_module
from dino_sparo.evaluation.attention.atlas import Atlas, atlas_figure, build_atlas, score_images
from dino_sparo.evaluation.attention.maps import attention_maps
from dino_sparo.models.encoder import Encoder, create_encoder
from dino_sparo.runtime.files import write_json

Built = tuple[Atlas, list[list[Tile]]]
PATCH = 8
VIEW = PatchView([24], PATCH, IMAGENET_MEAN, IMAGENET_STD)


def colour_encoder(readout: str = "sparo") -> Encoder:
    """An encoder whose blocks do nothing; slots 0, 1, 2 look at red, green and blue patches, slot 3 as slot 0."""
    torch.manual_seed(0)
    encoder = create_encoder("vit_micro", PATCH, readout, num_slots=4, slot_dim=5, key_dim=3, img_size=24).eval()
    if readout != "sparo":
        return encoder
    with torch.no_grad():
        for block in encoder.backbone.blocks:
            block.attn.proj.weight.zero_()
            block.mlp.fc2.weight.zero_()
        backbone, sparo = encoder.backbone, encoder.readout
        backbone.pos_embed.zero_()
        backbone.cls_token.zero_()
        backbone.patch_embed.proj.weight.zero_()
        backbone.patch_embed.proj.bias.zero_()
        sparo.key_proj.weight.zero_()
        for channel in range(3):
            backbone.patch_embed.proj.weight[channel, channel] = 1 / PATCH**2
        for slot, channel in enumerate((0, 1, 2, 0)):
            sparo.key_proj.weight[slot * 3 : slot * 3 + 3, :3] = torch.eye(3)
            sparo.queries[slot] = 4 * (2 * torch.eye(3)[channel] - 1)
    return encoder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey images with one patch in red, green or blue, and plain grey ones."""
    folder = tmp_path_factory.mktemp("photos")
    for index in range(9):
        pixels = np.full((24, 24, 3), 110, dtype=np.uint8)
        if index < 6:
            row, column = divmod(index, 3)
            pixels[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = [0, 0, 0]
            pixels[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8, index % 3] = 255
        name = f"{index}-{['red', 'green', 'blue'][index % 3] if index < 6 else 'grey'}.png"
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def built(photos: Path) -> Built:
    found, tiles = build_atlas(colour_encoder(), source := open_source(str(photos)), VIEW, images_per_slot=2)
    return {**found, "model": "a <model>", "source": source.name}, tiles


@pytest.fixture(scope="module")
def atlas(built: Built) -> Atlas:
    return built[0]


# ---- scores


def test_scores_follow_the_equation() -> None:
    rng = np.random.default_rng(0)
    patches, prefix = 1 + 14 * rng.random((5, 3)), rng.random((5, 3))
    slots = rng.normal(size=(5, 3, 7))
    scores, without_slots = score_images(patches, prefix, 15, slots), score_images(patches, prefix, 15)
    for slot in range(3):
        departures = [math.dist(slots[i, slot], slots[:, slot].mean(axis=0)) for i in range(5)]
        for i in range(5):
            definite = (1 - prefix[i, slot]) * (1 - math.log(patches[i, slot]) / math.log(15))
            expected = definite * departures[i] / (sum(departures) / 5)
            assert (scores[i, slot], without_slots[i, slot]) == pytest.approx((expected, definite))


def test_a_slot_that_looks_nowhere_or_always_says_the_same_is_lit_up_by_nothing() -> None:
    patches, prefix = np.array([[15.0, 2.0], [15.0, 3.0]]), np.zeros((2, 2))
    slots = np.stack([np.random.default_rng(0).normal(size=(2, 7)), np.ones((2, 7))], axis=1)
    np.testing.assert_allclose(score_images(patches, prefix, 15, slots), 0, atol=1e-12)


def test_slots_find_the_readable_images_with_their_colour_once(atlas: Atlas) -> None:
    assert atlas["num_images"] == 9
    for slot in atlas["slots"]:
        colour = ["red", "green", "blue", "red"][slot["number"]]
        names = [image["name"] for image in slot["images"]]
        assert [colour in name for name in names] == [True, True]
        assert names[0] != names[1]
        assert slot["images"][0]["score"] >= slot["images"][1]["score"] > 0


def test_maps_lie_where_the_colour_is(built: Built) -> None:
    atlas, tiles = built
    images = next(images for slot, images in zip(atlas["slots"], tiles, strict=True) if slot["number"] == 1)
    tile = next(tile for tile in images if "4-green" in tile.name)  # row 1, column 1
    assert tile.paint.keywords["levels"].argmax() == 4


def test_near_duplicates_share_group_and_letter(atlas: Atlas) -> None:
    slots = {slot["number"]: slot for slot in atlas["slots"]}
    assert slots[0]["group"] == slots[3]["group"]
    assert (slots[0]["letter"], slots[3]["letter"], slots[1]["letter"]) == ("A", "A", "")
    assert [slot["rank"] for slot in atlas["slots"]] == [0, 1, 2, 3]
    patches = [slot["patches"] for slot in atlas["slots"]]
    assert patches == sorted(patches)


def test_patches_class_token_share_and_groups_are_of_all_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas_module, "GROUPING_IMAGES", 2)
    encoder, source = colour_encoder(), open_source(str(photos))
    found, _ = build_atlas(encoder, source, VIEW, images_per_slot=50)
    assert {len(slot["images"]) for slot in found["slots"]} == {9}  # there are no more
    readable = [index for index in range(len(source)) if "broken" not in source.location(index)]
    maps = np.concatenate([attention_maps(encoder, VIEW(source.read(index))[0][None]) for index in readable])
    for slot in found["slots"]:
        masses = maps[:, slot["number"]].reshape(9, 9).astype(float)
        entropies = [-sum(p * math.log(p) for p in mass / mass.sum() if p > 0) for mass in masses]
        assert slot["patches"] == pytest.approx(math.exp(sum(entropies) / 9), rel=1e-5)
        assert slot["class_token_share"] == pytest.approx(1 - masses.sum() / 9, abs=1e-6)
    assert len({slot["class_token_share"] for slot in found["slots"]}) > 1
    groups = list(dict.fromkeys(slot["group"] for slot in found["slots"]))
    assert groups == list(range(len(groups)))  # numbered by their most peaked member on all images, not on two


def test_heads_have_an_atlas_and_the_average_has_none(photos: Path) -> None:
    source = open_source(str(photos))
    heads, _ = build_atlas(colour_encoder("cls"), source, VIEW, images_per_slot=3)
    assert (heads["kind"], len(heads["slots"]), len(heads["slots"][0]["images"])) == ("head", 4, 3)
    with pytest.raises(ValueError, match="readout='gap' averages all tokens and has neither"):
        build_atlas(colour_encoder("gap"), source, VIEW)


# ---- the sheet and the page


def test_the_page_holds_all_it_shows_and_says_it_in_words(built: Built, atlas: Atlas, tmp_path: Path) -> None:
    save_page(atlas_figure(*built), tmp_path / "atlas.html")
    page = Page(tmp_path / "atlas.html")
    assert len(page.alts) == 2 * sum(len(slot["images"]) for slot in atlas["slots"])
    assert all(page.alts)
    assert any(alt.startswith("Map of slot 3 on ") for alt in page.alts)
    assert "prefers-color-scheme: dark" in page.text


def test_names_are_escaped_and_may_be_no_utf8(built: Built, tmp_path: Path) -> None:
    """The whole page was lost to a UnicodeEncodeError."""
    tile = replace(built[1][0][0], name='"><script>alert(1)</script>/caf\udce9.jpg')
    slot = {**built[0]["slots"][0], "images": [{"name": tile.name}]}
    named = {**built[0], "source": "<folder> caf\udce9", "slots": [slot]}
    save_page(atlas_figure(named, [[tile]]), tmp_path / "atlas.html")
    save_sheet(atlas_figure(named, [[tile]]), tmp_path / "atlas.png")
    write_json(named, tmp_path / "atlas.json")
    page = (tmp_path / "atlas.html").read_text(encoding="utf-8")
    assert r"script&gt;/caf\udce9.jpg" in page
    assert "<script>alert" not in page
    assert "a &lt;model&gt;" in page
    assert "&lt;folder&gt;" in page
    assert "has an effective number of" in page
    assert "linear-gradient" in page  # the colour bar
    assert json.loads((tmp_path / "atlas.json").read_text())["slots"][0]["images"][0]["name"] == tile.name


# Acts on the page as a reader would, and writes what it finds into the title.
ACTIONS = """
const order = () => [...document.querySelectorAll("section:not([hidden])")].map((s) => s.dataset.number).join("");
const press = (query) => document.querySelector(query).click();
const found = [order()];
press("input[value=number]"); found.push(order());
press("input[value=group]"); found.push(order());
press("#distinct"); found.push(order());
const shot = document.querySelector("section:not([hidden]) .shot");
const seen = () => [...shot.querySelectorAll("img")].map((i) => getComputedStyle(i).visibility[0]).join("");
found.push(seen()); shot.click(); found.push(seen());
found.push([...document.images].every((i) => i.complete && i.naturalWidth > 100));
found.push(matchMedia("(prefers-color-scheme: dark)").matches + getComputedStyle(document.body).backgroundColor);
document.title = found.join("|");
"""


@needs_browser
@pytest.mark.parametrize("is_dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_sorts_filters_and_toggles_in_a_browser(
    is_dark: bool, built: Built, atlas: Atlas, tmp_path: Path
) -> None:
    path = tmp_path / "atlas.html"
    save_page(atlas_figure(*built), path)
    by_rank = "".join(str(slot["number"]) for slot in atlas["slots"])
    by_group = "".join(str(s["number"]) for s in sorted(atlas["slots"], key=lambda s: (s["group"], s["rank"])))
    distinct = by_group.replace("3" if by_rank.index("0") < by_rank.index("3") else "0", "")
    expected = [by_rank, "0123", by_group, distinct, "hv", "vh", "true"]
    assert title_after(ACTIONS, path, is_dark) == [
        *expected,
        "truergb(18, 18, 23)" if is_dark else "falsergb(250, 250, 252)",
    ]

"""Pictures of entities: the numbers are the module's, and sheet, page and command show them."""

import csv
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_fakes import call, paint
from PIL import ImageColor

pytest.importorskip("open_clip")

from figures import assert_readable, drawn_words
from oc_clip_fakes import IMG_SIZE, bind_all, small_checkpoint
from pages import Page

from dino_sparo.data.views import PatchView
from dino_sparo.draw.figure import Figure
from dino_sparo.draw.html import save_page
from dino_sparo.draw.pixels import add_frame
from dino_sparo.draw.sheet import save_sheet
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.picture_pairs import ViewedPair, view_pairs
from dino_sparo.oc_clip.batches import batch_graphs, mask_of, tokenize_phrases
from dino_sparo.oc_clip.explain import PairMaps, tiles_of
from dino_sparo.oc_clip.graphs.files import open_graphs
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
from dino_sparo.oc_clip.load import load_oc_clip
from dino_sparo.oc_clip.pictures import choose_pairs, pairs_figure

NUM_DEFAULT = 3
CPU = torch.device("cpu")
CAPTION = "a red striped star left of a blue plain ring on sand"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("oc_pictures") / "checkpoint.pth")


def run(*options: object) -> dict:
    return call("oc-pictures", [*options, "--device", "cpu"])


def test_the_written_numbers_are_those_of_binding_and_scoring(weights, tmp_path):
    found = run(
        "--pretrained_weights", weights, "--data_path", "scenes:9:48", "--pairs", 4, 8, "--output_dir", tmp_path
    )
    assert [pair["index"] for pair in found["pairs"]] == [4, 8]
    loaded = load_oc_clip(weights)
    model = loaded.model
    source = open_pairs("scenes:9:48", default_split="val")
    view = PatchView([IMG_SIZE], 8, loaded.mean, loaded.std)
    for pair, viewed in zip(found["pairs"], view_pairs(source, [4, 8], view), strict=True):
        graph = open_graphs("templates")(viewed.caption)
        batch = batch_graphs([graph])
        assert [entity["entity"] for entity in pair["entities"]] == list(graph.entities)
        with torch.no_grad():
            keys, values, phrases, predicates = model(viewed.image[None], tokenize_phrases(batch.phrases, 20).ids)
            entities, relations = phrases[batch.entities], predicates[batch.predicates]
            slots = bind_all(model.binding, entities, mask_of(batch.entity_counts), keys, values)
            shares, defaults = model.binding.attention(entities[0], keys[0])
            fits = model.scoring.relation_scores(relations, *batch.ends[0], slots)[0, 0]
            turned = model.scoring.relation_scores(relations, *batch.ends[0].flip(0), slots)[0, 0]
            score = loaded.similarity([source.read(viewed.index)], [viewed.caption], "templates")
        for entity, embedding, slot, share in zip(pair["entities"], entities[0], slots[0, 0], shares, strict=True):
            cosine = embedding @ slot / embedding.norm() / slot.norm()
            assert entity["cosine"] == pytest.approx(float(cosine), abs=1e-5)
            assert entity["mean_share"] == pytest.approx(float(share.mean()), abs=1e-6)
            assert entity["largest_share"] == pytest.approx(float(share.max()), abs=1e-6)
        winners = np.concatenate([shares, defaults]).argmax(axis=0)
        assert [entity["patches_won"] for entity in pair["entities"]] == [
            (winners == number).sum() for number in range(len(shares))
        ]
        for token, share in zip(pair["default_tokens"], defaults, strict=True):
            assert token["mean_share"] == pytest.approx(float(share.mean()), abs=1e-6)
        assert [r["score"] for r in pair["relationships"]] == pytest.approx(fits.tolist(), abs=1e-5)
        assert [r["turned_round"] for r in pair["relationships"]] == pytest.approx(turned.tolist(), abs=1e-5)
        parts = [*pair["entities"], *pair["default_tokens"]]
        assert sum(part["mean_share"] for part in parts) == pytest.approx(1, abs=1e-5)
        # The evaluations resize by another filter: `PatchView` and `ClipView` differ by less than this.
        assert pair["score"] == pytest.approx(float(score), abs=0.05)


def look(entities: int = 2, competition: str = "queries", caption: str = "a <red> star & more") -> PairMaps:
    rng = np.random.default_rng(0)
    phrases = tuple(f"phrase {number} of some length" for number in range(entities))
    relations = (Relation(0, "left of", 1),) if entities > 1 else ()
    number = entities + NUM_DEFAULT * (competition == "queries")
    maps = rng.dirichlet(np.full(number, 0.3), size=12).T.reshape(number, 3, 4)
    if competition == "keys":
        maps = maps / maps.sum(axis=(1, 2), keepdims=True)
    pair = ViewedPair(0, "photos/a&b.png", caption, torch.zeros(3, 24, 32))
    scores = rng.random(len(relations))
    return PairMaps(
        pair, SceneGraph(phrases, relations), 0.5, rng.random(entities), scores, -scores, maps[:entities],
        maps[entities:], competition,
    )  # fmt: skip


def test_a_row_has_one_scale_from_an_even_share_to_the_largest_of_an_entity():
    shown = look()
    even = 1 / (2 + NUM_DEFAULT)
    assert shown.levels.shape == (2 + NUM_DEFAULT, 3, 4)
    assert (shown.levels[shown.maps <= even] == 0).all()
    assert shown.levels[:2].max() == 1
    assert shown.levels[:2].argmax() == shown.shares.argmax()
    # A default token that takes nearly everything leaves the entities' colours as they are.
    shares = np.full((2, 3, 4), 0.01)
    shares[0, 0, 0] = 0.9
    greedy = (1 - shares.sum(axis=0, keepdims=True)) * np.array([1, 0, 0])[:, None, None]
    assert replace(shown, shares=shares, default_shares=greedy).levels[0, 0, 0] == 1
    flat = replace(shown, shares=np.full((2, 3, 4), 0.2), default_shares=np.full((3, 3, 4), 0.2))
    assert np.allclose(flat.levels, 0)
    alone = replace(look(1), shares=np.ones((1, 3, 4)), default_shares=np.zeros((0, 3, 4)))
    assert (alone.levels == 0).all()


def two_by_two() -> PairMaps:
    """Entity 0 wins the first patch, entity 1 the second, default tokens the lower two."""
    shares = np.array([[[0.7, 0.2], [0.1, 0.0]], [[0.1, 0.6], [0.2, 0.0]]])
    rest = 1 - shares.sum(axis=0)
    return replace(look(), shares=shares, default_shares=np.stack([rest, 0 * rest, 0 * rest]))


def test_the_first_panel_paints_each_patch_in_the_colour_of_the_entity_that_wins_it():
    picture = np.full((40, 40, 3), 200, dtype=np.uint8)
    shown = two_by_two()
    assert shown.winners.tolist() == [[0, 1], [-1, -1]]
    winner, first, second, rest = tiles_of(shown, picture)
    assert [tile.is_soft for tile in (winner, first, second, rest)] == [False, False, False, True]
    assert winner.notes == ("", "2 of 4 patches won")
    painted = winner.paint(picture)[[0, 0, -1, -1], [0, -1, 0, -1]].astype(int)
    for pixel, tile in zip(painted, (first, second), strict=False):
        colour = np.array(ImageColor.getrgb(tile.frame))
        assert (np.abs(pixel - (0.38 * 170 + 0.62 * colour)) <= 1).all()
        shown_map = tile.paint(picture)
        assert (add_frame(shown_map, tile.frame)[0] == colour).all()
        assert (add_frame(shown_map, tile.frame)[5, 5] == shown_map[5, 5]).all()
    assert (painted[2:] == 170).all()  # grey, not painted
    # The patches of a map are seen as they are: one value each.
    assert len(np.unique(first.paint(picture).reshape(-1, 3), axis=0)) <= 4
    assert rest.notes == ("", "share 52 %")
    assert (
        np.abs(rest.paint(picture)[-1, -1].astype(int) - ImageColor.getrgb("#ece8f6")).max() <= 1
    )  # all of this patch


def test_default_tokens_have_maps_only_where_they_are_asked_for():
    picture = np.zeros((90, 90, 3), dtype=np.uint8)
    assert [tile.title for tile in tiles_of(look(), picture)][3:] == ["default tokens"]
    titles = [tile.title for tile in tiles_of(look(), picture, default_tokens=True)]
    assert titles[4:] == ["default token 1", "default token 2", "default token 3"]
    assert [tile.frame for tile in tiles_of(look(2, "keys"), picture)] == ["#0072b2", "#e69f00"]


def test_letters_that_the_font_lacks_are_boxes_and_never_warned_of(tmp_path):
    shown = look(2, caption="日本語 plane\n🐶")
    shown = replace(shown, graph=SceneGraph(("日本語 plane", "🐶"), (Relation(0, "語", 1),)))
    picture = np.zeros((90, 90, 3), dtype=np.uint8)
    with drawn_words() as figures, warnings.catch_warnings():
        warnings.simplefilter("error")
        save_sheet(pairs_figure("m", "w", [shown], [picture]), tmp_path / "sheet.png")
    assert "▯▯▯ plane ▯" in [words.words for words in figures[0]]


@pytest.fixture(params=["queries", "keys"])
def pairs(request: pytest.FixtureRequest) -> list[PairMaps]:
    if request.param == "keys":
        return [look(2, "keys")]
    return [look(), look(1, caption="sand"), look(11, caption="many words " * 30)]


def figure_of(pairs: list[PairMaps]) -> Figure:
    pictures = [np.random.default_rng(1).integers(0, 255, (90, 90, 3), dtype=np.uint8) for _ in pairs]
    return pairs_figure("a <model> · 3 of 7 pairs of " + "a_long_name_" * 20, "How a score is made.", pairs, pictures)


def test_all_words_of_the_sheet_can_be_read(pairs, tmp_path):
    with drawn_words() as figures:
        save_sheet(figure_of(pairs), tmp_path / "sheet.png")
    assert_readable(figures)


def test_the_page_shows_every_map_without_javascript_and_asks_for_nothing(pairs, tmp_path):
    figure = figure_of(pairs)
    save_page(figure, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    num_maps = sum(len(section.bands[0].tiles) - 1 for section in figure.sections)
    # The style shows the maps of these, with and without script.
    assert re.findall(r'class="shot"[^>]*aria-pressed="(\w+)"', page.text) == ["true"] * num_maps
    assert len(page.references) == 1 + 2 * num_maps + len(pairs)
    assert "a &lt;red&gt; star &amp; more" in page.text
    for cosine in pairs[0].cosines:
        assert f"<span>cosine {cosine:.2f}</span>" in page.text
    assert f": {pairs[0].relation_scores[0]:.2f}, turned round " in page.text
    assert (" add up to 100 % over all maps" in page.text) == (pairs[0].competition == "queries")


@pytest.mark.usefixtures("no_sheets")
def test_own_photographs_are_drawn_with_graphs_of_a_file(weights, tmp_path, capsys, caplog):
    rows = []
    for name, caption in (("a", CAPTION), ("b", "a wall"), ("c", "a broken file")):
        paint(tmp_path / f"{name}.png", {"a": "red", "b": "blue"}.get(name, "broken"))
        graph = {"entities": ["wall"], "relationships": []} if name == "b" else {}
        rows.append({"image": f"{name}.png", "caption": caption, **(graph or {"entities": ["x"], "relationships": []})})
    (tmp_path / "graphs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "caption"], *([row["image"], row["caption"]] for row in rows)])
    options = ["--pretrained_weights", weights, "--output_dir", tmp_path / "out"]
    found = run(*options, "--data_path", tmp_path / "photos.csv")
    assert [pair["caption"] for pair in found["pairs"]] == [CAPTION, "a wall"]
    assert [entity["entity"] for entity in found["pairs"][0]["entities"]] == [
        "red striped star", "blue plain ring", "sand",
    ]  # fmt: skip
    assert "left out 1 pairs" in caplog.text
    paths = [tmp_path / "out" / f"oc_pictures.{ending}" for ending in ("png", "html", "json")]
    assert capsys.readouterr().out.split()[-3:] == [str(path) for path in paths]
    assert json.loads(paths[2].read_text()) == found
    table = tmp_path / "graphs.jsonl"
    found = run(*options, "--data_path", table, "--graphs", table, "--pairs", 1, 1, "--overwrite")
    assert [pair["entities"][0]["entity"] for pair in found["pairs"]] == ["wall"]
    assert found["graphs"]["counts"]["captions"] == 1


@pytest.mark.usefixtures("no_sheets")
def test_captions_without_a_graph_and_phrases_that_are_cut_off_are_named(weights, tmp_path, caplog):
    paint(tmp_path / "pairs" / "a.png", "red")
    (tmp_path / "pairs" / "a.txt").write_text("word " * 99)
    (tmp_path / "graphs.jsonl").write_text('{"caption": "another", "entities": ["x"], "relationships": []}\n')
    options = ["--graphs", tmp_path / "graphs.jsonl", "--output_dir", tmp_path]
    found = run("--pretrained_weights", weights, "--data_path", tmp_path / "pairs", *options)
    assert found["graphs"]["counts"]["missing"] == 1
    assert "1 phrases are longer than the context and cut off" in caplog.text
    assert "1 captions, 1 missing, 1 as one entity" in caplog.text


def test_pairs_with_relations_are_chosen_whatever_they_score():
    source, graphs = open_pairs("scenes:40:48", default_split="val"), open_graphs("templates")
    chosen = choose_pairs(source, graphs, 40, 5)
    assert len(chosen) == 5
    assert chosen == sorted(chosen)
    assert all(len(graphs(source.captions_of(index)[0]).relations) >= 2 for index in chosen)
    assert choose_pairs(source, graphs, 40, 30) == [i * 40 // 30 for i in range(30)]  # each caption has one relation


@pytest.mark.usefixtures("no_sheets")
def test_without_competition_maps_of_entities_stand_alone(tmp_path):
    weights = small_checkpoint(tmp_path / "checkpoint.pth", competition="keys", num_default=0)
    found = run("--pretrained_weights", weights, "--data_path", "scenes:3:48", "--output_dir", tmp_path)
    assert found["competition"] == "keys"
    assert [pair["default_tokens"] for pair in found["pairs"]] == [[]] * 3
    shares = [entity["mean_share"] for pair in found["pairs"] for entity in pair["entities"]]
    assert shares == pytest.approx([1 / 9] * len(shares))


def test_a_pair_that_does_not_exist_is_refused(weights, tmp_path):
    with pytest.raises(ValueError, match=r"--pairs 3: .* has 3 pairs, numbered from 0 to 2"):
        run("--pretrained_weights", weights, "--data_path", "scenes:3:48", "--output_dir", tmp_path, "--pairs", 3)

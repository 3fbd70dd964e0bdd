"""Pairs of image and caption -> the share of the image that each entity of the caption takes, and all scores.

    dino-sparo attention --pretrained_weights output/checkpoint.pth --output_dir pictures
    dino-sparo attention --pretrained_weights output/checkpoint.pth --data_path photos.csv --pairs 0 3 4
    dino-sparo attention --pretrained_weights output/checkpoint.pth --data_path graphs.jsonl --graphs graphs.jsonl

Writes oc_pictures.png, one sheet, oc_pictures.html, a page that opens from disk, and oc_pictures.json, the numbers.
Source: OC-CLIP, figure 8.
"""

import argparse
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from dino_sparo.data.sources import CorruptImageError
from dino_sparo.data.sources.image_source import spread_out
from dino_sparo.data.views import PatchView
from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, plain_words
from dino_sparo.draw.pixels import Picture
from dino_sparo.image_text.pairs.batches import PairSource
from dino_sparo.image_text.picture_pairs import PicturesTask, view_pairs, view_pictures
from dino_sparo.oc_clip.explain import ENDS, EXPLANATIONS, RELATIONS_LEGEND, SUMMARIES, PairMaps, explain_pair, tiles_of
from dino_sparo.oc_clip.graphs.files import CaptionGraphs, open_graphs
from dino_sparo.oc_clip.graphs.graph import LookupCounts
from dino_sparo.oc_clip.load import DEFAULT_GRAPHS, load_oc_clip
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import on_first_process

logger = logging.getLogger(__name__)

TITLE = "What the entities of a caption look at"
TILE, TILES_PER_LINE = 176, 9  # pixels on the sheet; the image and its maps
SCORES_EXPLANATION = (
    "The cosine compares an entity's embedding and its slot. The slot is the mean of the patches' values, weighted by "
    "the entity's map (divided by its sum: an entity with small shares has a slot too). The score of a relation is f, "
    "the cosine of the relation's embedding and its projection with the slots of subject and object."
)


@on_first_process
def draw_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """Draw the pictures of the options; returns the content of oc_pictures.json."""
    task = PicturesTask.start_alone(args, load_oc_clip)
    graphs = open_graphs(args.graphs or DEFAULT_GRAPHS)
    loaded = task.loaded
    file = task.open_figures("oc_pictures", ("figure_format",))
    config, scoring = loaded.model.config, loaded.model.scoring
    source = task.pairs
    chosen = check_pairs(args.pairs, source) or choose_pairs(source, graphs, args.max_pairs, args.max_rows)
    view = PatchView([config.image.img_size], config.image.patch_size, loaded.mean, loaded.std)
    model = loaded.model.to(task.device)
    pairs, changes = [], []
    for pair in view_pairs(source, chosen, view):
        graph, counts = graphs.lookup(pair.caption)
        pairs.append(explain_pair(model, pair, graph, task.device))
        changes.append(counts)
    total = LookupCounts.total(changes)
    if total.whole_caption or total.nodes or total.relations:
        logger.warning("%s: %s", source.name, total)
    pictures = view_pictures(source, [maps.pair.index for maps in pairs], view)
    model_words = [f"{config.binding.num_default} default tokens"]
    about, source_words = task.about(model_words, len(pairs), len(source))
    ent_coef, rel_coef = float(scoring.ent_coef.detach()), float(scoring.rel_coef.detach())
    weights = (
        "The score of a pair is the weighted mean of the cosines of its entities and the scores of its relations; an "
        f"entity weighs {ent_coef / rel_coef:.2f} times as much as a relation."
    )
    figure = pairs_figure(about, weights, pairs, pictures, args.default_tokens)
    numbers = {
        "graphs": {**graphs.record, "counts": total._asdict()},
        "source": source_words,
        "competition": model.binding.competition,
        "ent_coef": ent_coef,
        "rel_coef": rel_coef,
        "pairs": [maps.to_json() for maps in pairs],
    }
    return task.write(file, figure, numbers)


def pairs_figure(
    about: str, weights: str, pairs: Sequence[PairMaps], pictures: Sequence[Picture], default_tokens: bool = False
) -> Figure:
    """A section per pair: the caption, the scores, the image and its maps."""
    sections = []
    for maps, picture in zip(pairs, pictures, strict=True):
        tiles = [Tile(picture, maps.pair.name, title="image"), *tiles_of(maps, picture, default_tokens)]
        lines = [f"score {maps.score:.2f}", *maps.sentences]
        sections.append(Section([Band(plain_words(maps.pair.caption), lines=lines, tiles=tiles)]))
    competition = pairs[0].competition
    legend = [RELATIONS_LEGEND] if any(maps.sentences for maps in pairs) else []
    explanation = " ".join([EXPLANATIONS[competition], SCORES_EXPLANATION, RELATIONS_LEGEND, weights])
    layout = Layout((TILE, TILE), TILES_PER_LINE)
    summary = [SUMMARIES[competition], *legend, weights]
    return Figure(TITLE, about, sections, layout, summary, explanation, ENDS[competition])


def check_pairs(pairs: Sequence[int] | None, source: PairSource) -> list[int]:
    """The pairs that `--pairs` names, each once; none without this option.

    Raises:
        ValueError: there is no such pair.
    """
    chosen = list(dict.fromkeys(pairs or ()))
    if missing := [index for index in chosen if not 0 <= index < len(source)]:
        raise UserError(
            f"--pairs {' '.join(map(str, missing))}: {source.name} has {len(source):,} pairs, numbered from 0 to "
            f"{len(source) - 1}"
        )
    return chosen


def choose_pairs(source: PairSource, graphs: CaptionGraphs, max_pairs: int, max_rows: int) -> list[int]:
    """Pairs to show, evenly spread; pairs with two relations come first, then pairs with one relation, then all others.

    Scores have no part in the choice. At most `max_rows` of `max_pairs`, whose captions are read, are chosen.
    """
    considered = spread_out(source, max_pairs)
    counts: dict[int, int] = {}
    for index in considered:
        with contextlib.suppress(CorruptImageError):  # drawing names it, if it is shown
            counts[index] = len(graphs(source.captions_of(index)[0]).relations)
    related = ([index for index in counts if counts[index] >= least] for least in (2, 1))
    eligible = next((some for some in related if len(some) >= max_rows), considered)
    return [eligible[index] for index in spread_out(eligible, max_rows)]

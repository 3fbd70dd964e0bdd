"""Pairs of image and caption -> what the entities of each caption take of its image, and all scores.

    dino-sparo oc-pictures --pretrained_weights output/checkpoint.pth --output_dir pictures
    dino-sparo oc-pictures --pretrained_weights output/checkpoint.pth --data_path photos.csv --pairs 0 3 4
    dino-sparo oc-pictures --pretrained_weights output/checkpoint.pth --data_path graphs.jsonl --graphs graphs.jsonl

Writes oc_pictures.png, one sheet, oc_pictures.html, a page that opens from disk, and oc_pictures.json, the numbers.
Source: OC-CLIP, figure 8.
"""

import argparse
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from dino_sparo.data.dataset import CorruptImageError
from dino_sparo.data.sources.image_source import spread_out
from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.labels import describe_model, run_names
from dino_sparo.image_text.pairs.batches import PairSource
from dino_sparo.image_text.picture_pairs import (
    PICTURE_HEIGHT,
    begin_pictures,
    open_picture_pairs,
    view_pairs,
    write_pictures,
)
from dino_sparo.oc_clip.graphs.files import CaptionGraphs, open_graphs
from dino_sparo.oc_clip.load import DEFAULT_GRAPHS, LoadedOCCLIP, load_oc_clip
from dino_sparo.oc_clip.pictures.explain import look_at
from dino_sparo.oc_clip.pictures.page import write_page
from dino_sparo.oc_clip.pictures.sheet import Gallery, draw_sheet
from dino_sparo.runtime.cli import printable
from dino_sparo.runtime.distributed import is_only_a_peer

logger = logging.getLogger(__name__)


def draw_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """Draw what the options ask for; returns what oc_pictures.json holds.

    Raises:
        ValueError: options, weights, graphs or pairs that do not fit; the message says what would.
        ImportError: matplotlib or open_clip is not installed.
    """
    if is_only_a_peer():
        return {}
    device = begin_pictures(args, ("max_pairs", "max_rows"))
    graphs = open_graphs(args.graphs or DEFAULT_GRAPHS)
    loaded = load_oc_clip(args.pretrained_weights)
    config = loaded.model.config
    source = open_picture_pairs(args.data_path, args.image_key, args.caption_key, args.image_folder)
    chosen = check_pairs(args.pairs, source) or choose_pairs(source, graphs, args.max_pairs, args.max_rows)
    view = PatchView([config.image.img_size], config.image.patch_size, loaded.mean, loaded.std)
    model = loaded.model.to(device)
    looks = [look_at(model, pair, graphs(pair.caption), device) for pair in view_pairs(source, chosen, view)]
    if graphs.counts.whole_caption or graphs.counts.nodes or graphs.counts.relations:
        logger.warning("%s: %s", source.name, graphs.counts)
    images = [source.read(look.pair.index) for look in looks]
    (run,) = run_names([args.pretrained_weights])
    gallery = Gallery(
        describe_model(loaded.record, config.image, run, f"{config.binding.num_default} default tokens"),
        f"{len(looks)} of {len(source):,} pairs of {printable(source.name)}",
        weights_in_words(loaded),
        looks,
        [view_pixels(image, view.view(image), PICTURE_HEIGHT) for image in images],
        args.default_tokens,
    )
    return write_pictures(args, "oc_pictures", gallery, draw_sheet, write_page, numbers_of(gallery, graphs, loaded))


def check_pairs(pairs: Sequence[int] | None, source: PairSource) -> list[int]:
    """The pairs that `--pairs` names, each once; none where it is not given.

    Raises:
        ValueError: there is no such pair.
    """
    asked = list(dict.fromkeys(pairs or ()))
    if missing := [index for index in asked if not 0 <= index < len(source)]:
        raise ValueError(
            f"--pairs {' '.join(map(str, missing))}: {source.name} has {len(source):,} pairs, numbered from 0 to "
            f"{len(source) - 1}"
        )
    return asked


def choose_pairs(source: PairSource, graphs: CaptionGraphs, max_pairs: int, max_rows: int) -> list[int]:
    """Pairs to show, evenly spread over those whose caption has two relations; where they are too few, one, or none.

    Scores have no part in the choice.

    Args:
        source: the pairs.
        graphs: of their captions.
        max_pairs: look at the captions of so many, evenly spread.
        max_rows: pairs to show, at most.
    """
    considered = spread_out(source, max_pairs)
    counts: dict[int, int] = {}
    for index in considered:
        with contextlib.suppress(CorruptImageError):  # drawing names it, if it is shown
            counts[index] = len(graphs.lookup(source.captions_of(index)[0])[0].relations)
    related = ([index for index in counts if counts[index] >= least] for least in (2, 1))
    eligible = next((some for some in related if len(some) >= max_rows), considered)
    count = min(max_rows, len(eligible))
    return [eligible[i * len(eligible) // count] for i in range(count)]


def weights_in_words(loaded: LoadedOCCLIP) -> str:
    """How a score is put together."""
    scoring = loaded.model.scoring
    ratio = float(scoring.ent_coef.detach() / scoring.rel_coef.detach())
    return (
        "The score of a pair is the weighted mean of the cosines of its entities and the scores of its relations; an "
        f"entity weighs {ratio:.2f} times as much as a relation."
    )


def numbers_of(gallery: Gallery, graphs: CaptionGraphs, loaded: LoadedOCCLIP) -> dict[str, Any]:
    """What oc_pictures.json holds."""
    scoring = loaded.model.scoring
    return {
        "model": loaded.record,
        "graphs": {**graphs.record, "counts": graphs.counts._asdict()},
        "source": gallery.source,
        "competition": loaded.model.binding.competition,
        "ent_coef": float(scoring.ent_coef.detach()),
        "rel_coef": float(scoring.rel_coef.detach()),
        "pairs": [look.to_json() for look in gallery.looks],
    }

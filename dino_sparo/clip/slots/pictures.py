"""Pairs of image and caption -> what chosen slots attend to in both: image maps and words, one row per slot.

    dino-sparo attention --pretrained_weights output/checkpoint.pth --output_dir pictures
    dino-sparo attention --pretrained_weights output/checkpoint.pth --data_path photos.csv --slots 3 17 40
    dino-sparo attention --pretrained_weights output/checkpoint.pth --data_path captions_val2017.json \
        --image_folder data/coco/val2017 --max_pairs 2000

Without --slots, slots are chosen as in the paper: with sharp attention to words, to different words, and with similar
slots of image and caption. Of all pairs that are searched, the pairs that show this best are drawn. Writes
pictures.png, one grid, pictures.html, a page that opens from disk, and pictures.json, the numbers. Source: SPARO,
section 5.5 and figure 4.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from dino_sparo.clip.model import LoadedClip, load_clip
from dino_sparo.clip.slots.concepts import Choice, Criteria, PairAttention, choose, choose_pairs, fits, see_pairs
from dino_sparo.clip.slots.subsets import check_normalized_per_slot
from dino_sparo.data.views import PatchView
from dino_sparo.draw.figure import Band, Figure, Layout, Section, Tile, Word, map_painter
from dino_sparo.draw.pixels import Picture, heat
from dino_sparo.evaluation.attention.maps import class_token_share, effective_patches
from dino_sparo.evaluation.slots.choice import open_selection
from dino_sparo.image_text.picture_pairs import PicturesTask, view_pictures
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import on_first_process

logger = logging.getLogger(__name__)

TITLE = "Where slots attend, in images and in captions"
TILE, SIDE, GAP = 280, 150, 24  # pixels on the sheet: largest side of a picture, names of slots, between pictures
# Rising quickly, as the maps' colours do: weak attention is to be seen too.
LEVEL_POWER = 0.6
LEGEND = (
    *(Word(f" {100 * share:.0f}% ", share**LEVEL_POWER) for share in (0.1, 0.25, 0.5, 1.0)),
    Word("of the attention to a word"),
)
EXPLANATION = (
    "Each row is one slot with the same pairs of an image and a caption. The image is bright where the slot attends, "
    "and grey where the slot gives no more than an even share of its attention. In the caption, a stronger mark of a "
    "word means a larger share of the slot's attention; the shares of start and end token are below. The cosine "
    "compares the slot read out of the image and the same slot read out of the caption. “Patches”: the effective "
    "number of patches, exp(entropy) of the slot's attention, as the geometric mean over the pairs."
)


@on_first_process
def draw_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """Draw the pictures of the options; returns the content of pictures.json."""
    task = PicturesTask.start_alone(args, load_clip)
    criteria = Criteria(args.min_cosine, args.min_sharpness)
    loaded = task.loaded
    file = task.open_figures("pictures", ("figure_format",))
    config = loaded.model.config
    if not config.image.kind.has_slots:
        raise UserError(f"readout {config.readout!r} has no slots to show; sparo has")
    slots = slots_of_option(args.slots, loaded)
    image_size = args.img_size or config.image.img_size
    view = PatchView([image_size], config.image.patch_size, loaded.mean, loaded.std)
    source = task.pairs
    pairs = see_pairs(loaded.model.to(task.device), source, view, task.device, args.max_pairs)
    if slots is None:
        choice = choose(pairs, args.max_slots, args.max_columns, criteria)
    else:
        everything = np.ones(len(pairs), dtype=bool)
        choice = Choice(slots, choose_pairs(pairs, slots, args.max_columns, everything), 0, 0)
    shown = [pairs[index] for index in choice.pairs]
    pictures = view_pictures(source, [pair.index for pair in shown], view)
    model_words = (config.readout, f"{config.image.num_slots} slots")
    about, source_words = task.about(model_words, len(shown), len(pairs))
    rule = rule_in_words(choice, slots is not None, criteria)
    if slots is None and choice.num_fitting < len(choice.slots):
        logger.warning("%s", rule)
    figure = slots_figure(about, rule, choice.slots, shown, pictures)
    numbers = {
        "source": source_words,
        "image_size": image_size,
        "rule": rule,
        "criteria": criteria._asdict(),
        "num_fitting_slots": choice.num_fitting,
        "num_common_pairs": choice.num_common,
        "slots": [{"slot": slot, "pairs": pairs_to_json(slot, shown, criteria)} for slot in choice.slots],
    }
    return task.write(file, figure, numbers)


def slots_figure(
    about: str, rule: str, slots: Sequence[int], pairs: Sequence[PairAttention], pictures: Sequence[Picture]
) -> Figure:
    """A section per slot, a tile per pair: the slot's map on the image, and its attention to the caption's words.

    `about` is a line on model and pairs, `rule` a sentence on their choice. The pictures have one size.
    """
    images = [Tile(picture, pair.name) for pair, picture in zip(pairs, pictures, strict=True)]
    sections = [Section([Band(tiles=images)], "image")]
    for slot in slots:
        cosine = float(np.mean([pair.cosines[slot] for pair in pairs]))
        patches = float(np.exp(np.mean([np.log(effective_patches(pair.maps[slot])) for pair in pairs])))
        tiles = [_tile(pair, picture, slot) for pair, picture in zip(pairs, pictures, strict=True)]
        facts = (f"mean cosine {cosine:.2f}", f"{patches:.1f} patches")
        sections.append(Section([Band(tiles=tiles)], f"slot {slot}", facts))
    layout = Layout((TILE, TILE), len(pairs), SIDE, GAP)
    return Figure(TITLE, about, sections, layout, explanation=f"{EXPLANATION} {rule}", legend=LEGEND)


def _tile(pair: PairAttention, picture: Picture, slot: int) -> Tile:
    """One pair as a slot sees it."""
    caption = [
        Word(word.text, level_of(share), note=f"{100 * share:.0f}%", has_space=word.has_space)
        for word, share in pair.shares(slot)
    ]
    ends = f"start {100 * pair.start[slot]:.0f}%  ·  end {100 * pair.end[slot]:.0f}%"
    notes = (f"cosine {pair.cosines[slot]:.2f}", ends)
    return Tile(picture, pair.name, map_painter(heat(pair.maps[slot])), caption=caption, notes=notes)


def level_of(share: float) -> float:
    """Strength of the mark behind a word that gets a share of the attention, both in [0, 1]."""
    return float(np.clip(share, 0, 1) ** LEVEL_POWER)


def slots_of_option(slots: Sequence[str] | None, loaded: LoadedClip) -> list[int] | None:
    """The slots that `--slots` names; None if they are to be chosen."""
    if slots is None:
        return None
    config = loaded.model.config
    check_normalized_per_slot(config)
    selection, _ = open_selection(",".join(slots), loaded.record["sha256"], config.image.num_slots)
    return list(selection.indices)


def rule_in_words(choice: Choice, is_given: bool, criteria: Criteria) -> str:
    """How slots and pairs were chosen."""
    if is_given:
        return "The slots were given; in the pairs shown, their cosines and their sharpness are highest."
    wanted = (
        f"give at least {100 * criteria.min_sharpness:g}% of their attention to one word, attend to different words "
        f"and have a cosine above {criteria.min_cosine:g}"
    )
    if choice.num_fitting == len(choice.slots):
        return f"The slots were chosen because in {choice.num_common:,} pairs they {wanted}."
    return f"Slots should {wanted}; {choice.num_fitting} of {len(choice.slots)} do, the other slots come nearest."


def pairs_to_json(slot: int, pairs: Sequence[PairAttention], criteria: Criteria) -> list[dict[str, Any]]:
    """One slot on each pair, for pictures.json."""
    return [
        {
            "image": pair.name,
            "caption": pair.caption,
            "cosine": float(pair.cosines[slot]),
            "meets_criteria": bool(meets[slot]),
            "words": [{"word": word.text, "share": share} for word, share in pair.shares(slot)],
            "start": float(pair.start[slot]),
            "end": float(pair.end[slot]),
            "effective_patches": float(effective_patches(pair.maps[slot])),
            "class_token_share": float(class_token_share(pair.maps[slot])),
        }
        for pair, meets in zip(pairs, fits(pairs, criteria), strict=True)
    ]

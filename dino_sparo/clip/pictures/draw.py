"""Pairs of image and caption -> what chosen slots attend to in both: image maps and words, one row per slot.

    dino-sparo pictures --pretrained_weights output/checkpoint.pth --output_dir pictures
    dino-sparo pictures --pretrained_weights output/checkpoint.pth --data_path photos.csv --slots 3 17 40
    dino-sparo pictures --pretrained_weights output/checkpoint.pth --data_path captions_val2017.json \
        --image_folder data/coco/val2017 --max_pairs 2000

Without --slots the slots are chosen as the paper does: sharp attention to words, no word for two of them, image and
caption slot alike; and with them, of all pairs looked at, those in which this is seen best. Writes pictures.png, one
grid, pictures.html, a page that opens from disk, and pictures.json, the numbers. Source: SPARO, section 5.5 and figure
4.
"""

import argparse
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool

from dino_sparo.clip.model import LoadedClip, load_clip
from dino_sparo.clip.pictures.concepts import Choice, Criteria, PairLook, choose, choose_pairs, fits, look_at_pairs
from dino_sparo.clip.pictures.page import write_page
from dino_sparo.clip.pictures.sheet import Gallery, draw_sheet
from dino_sparo.clip.slots.subsets import check_fits, read_slots
from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.labels import describe_model, run_names
from dino_sparo.evaluation.attention.maps import check_share, class_token_share, effective_patches
from dino_sparo.evaluation.slots.choice import SlotSelection
from dino_sparo.image_text.picture_pairs import (
    PICTURE_HEIGHT,
    begin_pictures,
    open_picture_pairs,
    write_pictures,
)
from dino_sparo.image_text.text import tokenize
from dino_sparo.runtime.cli import printable
from dino_sparo.runtime.distributed import is_only_a_peer

logger = logging.getLogger(__name__)


def draw_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """Draw what the options ask for; returns what pictures.json holds.

    Raises:
        ValueError: options, weights or pairs that do not fit; the message says what would.
        ImportError: matplotlib is not installed.
    """
    if is_only_a_peer():
        return {}
    device = begin_pictures(args, ("max_pairs", "max_slots", "max_columns"))
    criteria = Criteria(args.min_cosine, args.min_sharpness)
    for name, value in criteria._asdict().items():
        check_share(name, value)
    loaded = load_clip(args.pretrained_weights)
    config = loaded.model.config
    if not config.image.kind.has_slots:
        raise ValueError(f"readout {config.readout!r} has no slots to show; sparo has")
    asked = asked_slots(args.slots, loaded)
    image_size = args.image_size or config.image.img_size
    view = PatchView([image_size], config.image.patch_size, loaded.mean, loaded.std)
    source = open_picture_pairs(args.data_path, args.image_key, args.caption_key, args.image_folder)
    tokens = partial(tokenize, context_length=config.text.context_length)
    looks = look_at_pairs(loaded.model.to(device), source, view, tokens, device, args.max_pairs)
    if asked is None:
        choice = choose(looks, args.max_slots, args.max_columns, criteria)
        warn_of_poor_fit(choice, len(looks), criteria)
    else:
        everything = np.ones(len(looks), dtype=bool)
        choice = Choice(asked, choose_pairs(looks, asked, args.max_columns, everything), 0, 0)
    shown = [looks[index] for index in choice.pairs]
    images = [source.read(look.index) for look in shown]
    (run,) = run_names([args.pretrained_weights])
    gallery = Gallery(
        describe_model(loaded.record, config.image, run, config.readout, f"{config.image.num_slots} slots"),
        f"{len(shown)} of {len(looks):,} pairs of {printable(source.name)}",
        rule_in_words(choice, asked is not None, criteria),
        criteria,
        choice.slots,
        shown,
        [view_pixels(image, view.view(image), PICTURE_HEIGHT) for image in images],
    )
    numbers = numbers_of(gallery, choice, fits(shown, criteria), loaded, image_size)
    return write_pictures(args, "pictures", gallery, draw_sheet, write_page, numbers)


def asked_slots(slots: Sequence[str] | None, loaded: LoadedClip) -> list[int] | None:
    """The slots that `--slots` names; None if they are to be chosen.

    Raises:
        ValueError: a slot that the model does not have, or a file that does not fit it.
    """
    if slots is None:
        return None
    config = loaded.model.config
    if len(slots) == 1 and not slots[0].isdecimal():
        selection = read_slots(slots[0])
        if not isinstance(selection, SlotSelection):
            raise ValueError(f"{slots[0]} is a mask; give the selection of dino-sparo select, or numbers of slots")
        check_fits(selection, config, loaded.record["sha256"])
        return list(selection.indices)
    if not all(word.isdecimal() for word in slots):
        raise ValueError(f"slots={' '.join(slots)}; give numbers of slots, or one .json file of dino-sparo select")
    return list(SlotSelection(tuple(map(int, slots)), config.image.num_slots).indices)


def warn_of_poor_fit(choice: Choice, num_pairs: int, criteria: Criteria) -> None:
    """Say so where the rows are not what the criteria ask for."""
    if choice.num_fitting < len(choice.slots):
        logger.warning(
            "%d of %d slots shown meet the criteria (cosine > %g, one word with %g%% of the attention, no word for two "
            "slots) in enough of %d pairs at once; the others come nearest",
            choice.num_fitting, len(choice.slots), criteria.min_cosine, 100 * criteria.min_sharpness, num_pairs,
        )  # fmt: skip


def rule_in_words(choice: Choice, is_asked: bool, criteria: Criteria) -> str:
    """How slots and pairs were chosen."""
    if is_asked:
        return "The slots were asked for; of the pairs those are shown in which they are sharpest and most alike."
    wanted = (
        f"give at least {100 * criteria.min_sharpness:g}% of their attention to one word, attend to different words "
        f"and have a cosine above {criteria.min_cosine:g}"
    )
    if choice.num_fitting == len(choice.slots):
        return f"The slots were chosen because in {choice.num_common:,} pairs they {wanted}."
    return f"Slots were wanted that {wanted}; {choice.num_fitting} of {len(choice.slots)} do, the others come nearest."


def numbers_of(
    gallery: Gallery, choice: Choice, meets: Bool[np.ndarray, "pairs L"], loaded: LoadedClip, image_size: int
) -> dict[str, Any]:
    """What pictures.json holds."""
    return {
        "model": loaded.record,
        "source": gallery.source,
        "image_size": image_size,
        "rule": gallery.rule,
        "criteria": gallery.criteria._asdict(),
        "num_fitting_slots": choice.num_fitting,
        "num_common_pairs": choice.num_common,
        "slots": [
            {
                "slot": slot,
                "pairs": [_numbers(look, slot, fit[slot]) for look, fit in zip(gallery.looks, meets, strict=True)],
            }
            for slot in gallery.slots
        ],
    }


def _numbers(look: PairLook, slot: int, meets: np.bool_) -> dict[str, Any]:
    """What is known about a slot on a pair."""
    return {
        "image": look.name,
        "caption": look.caption,
        "cosine": float(look.cosines[slot]),
        "meets_criteria": bool(meets),
        "words": [
            {"word": word.text, "share": share}
            for word, share in zip(look.words, look.text.words[slot].tolist(), strict=True)
        ],
        "start": float(look.text.start[slot]),
        "end": float(look.text.end[slot]),
        "effective_patches": float(effective_patches(look.maps[slot])),
        "class_token_share": float(class_token_share(look.maps[slot])),
    }

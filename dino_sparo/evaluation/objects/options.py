"""The options of `dino-sparo slots score`; no torch here."""

from dino_sparo.evaluation.options import EVALUATION_LIMITS, OUTPUT, map_parser
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, share_above_0

MASKED_IMAGES: Group = {
    "data_path": Option(
        "scenes",
        "scenes; a folder in VOC's layout; a folder with images/ and masks/; or a folder of images, with --masks.",
    ),
    "masks": Option(
        None,
        "For a folder of images: a folder of PNG masks with the images' stems (0: background, every other "
        "value: an object), or COCO's annotations (.json).",
    ),
    "num_images": Option(500, "Number of images: a random subset, the same in every run.", positive_int),
    **EVALUATION_LIMITS,
    "img_size": Option(
        None, "Side of the central square in pixels; by default twice the training size, for finer maps.", positive_int
    ),
}
MEASURES: Group = {
    "share": Option(0.6, "Share of a map's mass that is kept for the Jaccard index, as in DINO.", share_above_0),
    "maps": Option(
        None,
        "Number of maps to score, as a mean over 5 random subsets per image; by default all maps. To compare "
        "encoders with different numbers of maps, give the smallest number for all of them.",
        positive_int,
    ),
    "match": Option(
        "", "Another checkpoint, for example with another seed, whose slots are matched to the slots of this one."
    ),
    "seed": Option(0, "Random seed of controls, subsets and intervals."),
    **OUTPUT,
}


def slot_score_parser() -> Parser:
    """The options of `objects/command.py`."""
    return map_parser({"images and masks": MASKED_IMAGES, "measures": MEASURES})

"""What'sUp: position of an object in the image, or relative to another object.

    controlled_images_dataset.json  A: on, under, left of, right of a table or chair
    controlled_clevr_dataset.json   B: in front of, behind, left of, right of
        [{"image_path": ".../mug_left_of_table.jpeg", "caption_options": [true, false, false, false]}]
    coco_qa_one_obj.json, coco_qa_two_obj.json   COCO-spatial, [[COCO id, true, false]], images in val2017/
    vg_qa_one_obj.json, vg_qa_two_obj.json       GQA-spatial, [[image id, true, false]], images in vg_images/

Controlled images come in sets: four pictures of the same two objects, which are two pairs of opposites. A pair or set
counts as right only if all its questions are right. Source: Kamath et al., "What's 'up' with vision-language models?";
their dataset_zoo/aro_datasets.py.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, json_reader, list_of
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import COCO_FOLDERS, COCO_IMAGES
from dino_sparo.image_text.evaluation.protocol import file_of
from dino_sparo.runtime.faults import UserError

PAIRS = (("left", "right"), ("on", "under"), ("in-front", "behind"))
REPOSITORY = "https://github.com/amitakamath/whatsup_vlms"


def controlled_question(_: str, entry: Any) -> Question:
    """A question about a controlled image; its split is the preposition."""
    path = str(entry["image_path"])
    return Question(set_and_preposition(path)[1], (path,), tuple(list_of(entry["caption_options"], 4)))


def set_and_preposition(path: str) -> tuple[tuple[str, str], str]:
    """Both objects and the preposition in an image's name such as `mug_left_of_table.jpeg`."""
    words = Path(path).stem.split("_")
    if len(words) < 3 or words[1] not in {word for pair in PAIRS for word in pair}:
        raise UserError(f"{path!r} names no preposition")
    return (words[0], words[-1]), words[1]


def pairs_and_sets(questions: Sequence[Question], worth: Sequence[float]) -> dict[str, float]:
    """Share of pairs, and of sets, whose questions are all answered correctly, in percent; if they are complete.

    Args:
        questions: of controlled images.
        worth: value of each answer, 0 to 1. A tie below 1 is taken as independent of other ties.
    """
    sets: dict[tuple[str, str], dict[str, float]] = {}
    for question, value in zip(questions, worth, strict=True):
        key, preposition = set_and_preposition(file_of(question.images[0]))
        sets.setdefault(key, {})[preposition] = value
    pairs = [each[a] * each[b] for each in sets.values() for a, b in PAIRS if a in each and b in each]
    values = {"pairs": pairs, "sets": [math.prod(each.values()) for each in sets.values() if len(each) == 4]}
    return {name: 100 * sum(each) / len(each) for name, each in values.items() if each}


def spatial_question(padding: int, split: str, entry: Any) -> Question:
    """A question about one object or two; `padding` is the number of digits in the name of an image file."""
    number, true, false = list_of(entry, 3)
    return Question(split, (f"{number!s:0>{padding}}.jpg",), (true, false))


def controlled(letter: str, file: str, folder: str, total: int) -> Benchmark:
    """What'sUp A or B."""
    expected = "image_path, OBJECT_PREPOSITION_..._OBJECT, and caption_options, four"
    return Benchmark(
        f"whatsup-{letter.lower()}",
        f"What'sUp {letter}",
        (file,),
        json_reader({"": file}, controlled_question, expected),
        (folder, "."),
        REPOSITORY,
        chance=25.0,
        total=total,
        tie_credit=1.0,
        more=pairs_and_sets,
        blind_group=lambda question: "",  # all: within a preposition every image shows the answer
    )


def spatial(name: str, file: str, padding: int, folders: tuple[str, ...], source: str, *counts: int) -> Benchmark:
    """COCO-spatial or GQA-spatial."""
    files = {f"{number} object{'s' * (number == 'two')}": f"{file}_qa_{number}_obj.json" for number in ("one", "two")}
    return Benchmark(
        f"{name.lower()}-spatial",
        f"{name}-spatial",
        tuple(files.values()),
        json_reader(files, partial(spatial_question, padding), "[image id, true, false]"),
        folders,
        source,
        counts=dict(zip(files, counts, strict=True)),
        tie_credit=1.0,
    )


BENCHMARKS = (
    controlled("A", "controlled_images_dataset.json", "controlled_images", 412),
    controlled("B", "controlled_clevr_dataset.json", "controlled_clevr", 408),
    spatial("COCO", "coco", 12, COCO_FOLDERS, f"{REPOSITORY}, {COCO_IMAGES}", 2247, 440),
    spatial("GQA", "vg", 0, ("vg_images", "images", "gqa/images"), REPOSITORY, 1160, 291),
)

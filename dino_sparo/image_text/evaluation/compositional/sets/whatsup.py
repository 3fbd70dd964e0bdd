"""What'sUp: where one object lies, alone or seen from another one.

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
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import caption_options, read_entries, read_splits
from dino_sparo.image_text.evaluation.questions import Question
from dino_sparo.image_text.scoring.image_files import file_of

CONTROLLED_A, CONTROLLED_B = "controlled_images_dataset.json", "controlled_clevr_dataset.json"
COCO = {"one object": "coco_qa_one_obj.json", "two objects": "coco_qa_two_obj.json"}
GQA = {"one object": "vg_qa_one_obj.json", "two objects": "vg_qa_two_obj.json"}
PAIRS = (("left", "right"), ("on", "under"), ("in-front", "behind"))


def read_controlled(file: str, folder: Path) -> Iterable[Question]:
    """Questions by preposition.

    Args:
        file: of A or B.
        folder: where it lies.
    """

    def question(entry: Any) -> Question:
        path = entry["image_path"]
        return Question(set_and_preposition(path)[1], (path,), caption_options(entry, 4))

    return read_entries(folder / file, question, "image_path, OBJECT_PREPOSITION_..._OBJECT, and caption_options, four")


def set_and_preposition(path: str) -> tuple[tuple[str, str], str]:
    """Both objects, and where the first is, of an image's name such as `mug_left_of_table.jpeg`.

    Raises:
        ValueError: the name has another form.
    """
    words = Path(path).stem.split("_")
    if len(words) < 3 or words[1] not in {word for pair in PAIRS for word in pair}:
        raise ValueError(f"{path} names no preposition")
    return (words[0], words[-1]), words[1]


def pairs_and_sets(questions: Sequence[Question], worth: Sequence[float]) -> dict[str, float]:
    """Share of pairs, and of sets, whose questions are all right, in percent; those without all questions do not count.

    Args:
        questions: of controlled images.
        worth: of each answer, 0 to 1. For a tie that is worth less than 1 this assumes independent ties.
    """
    sets: dict[tuple[str, str], dict[str, float]] = {}
    for question, value in zip(questions, worth, strict=True):
        key, preposition = set_and_preposition(file_of(question.images[0]))
        sets.setdefault(key, {})[preposition] = value
    pairs = [own[a] * own[b] for own in sets.values() for a, b in PAIRS if a in own and b in own]
    values = {"pairs": pairs, "sets": [math.prod(own.values()) for own in sets.values() if len(own) == 4]}
    return {name: 100 * sum(each) / len(each) for name, each in values.items() if each}


def read_spatial(files: dict[str, str], name: str, folder: Path) -> Iterator[Question]:
    """Questions about one object and about two.

    Args:
        files: split -> file.
        name: of an image, with {} for its id.
        folder: where the files lie.
    """
    return read_splits(folder, files, partial(_spatial, name), "[image id, true, false]")


def _spatial(name: str, split: str, entry: Any) -> Question:
    number, true, false = entry
    # COCO's numbers are padded with zeros; those of GQA may have letters.
    return Question(split, (name.format(int(number) if ":" in name else number),), (true, false))

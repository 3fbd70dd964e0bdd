"""ARO: relations and attributes of Visual Genome, and the order of words in captions of COCO and Flickr30k.

    visual_genome_relation.json     [{"image_path", "bbox_x", "bbox_y", "bbox_w", "bbox_h", "true_caption",
                                      "false_caption", "relation_name"}], images cut to the box
    visual_genome_attribution.json  the same with "attributes": [first, second]
    coco_order.json, flickr_order.json  [{"image", "caption_options": [true caption, four shuffled ones]}]

The authors shuffle words anew in every run, without a seed, so the last two are files that `word_order.py` wrote once.
Source: Yuksekgonul et al., "When and why vision-language models behave like
bags-of-words, and what to do about it?"; their dataset_zoo/aro_datasets.py and the notebook beside it.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Weights, caption_options, equal_means, read_entries
from dino_sparo.image_text.evaluation.questions import Question
from dino_sparo.image_text.scoring.image_files import Crop

RELATIONS, ATTRIBUTES = "visual_genome_relation.json", "visual_genome_attribution.json"
MIN_CASES = 25  # pairs of attributes with fewer do not count in the authors' mean
NUM_ORDERS = 5

# Relations that do not count in the mean of the authors' notebook, which calls them symmetric: a part of the metric.
UNCOUNTED = frozenset(
    """adjusting|attached to|between|bigger than|biting|boarding|brushing|chewing|cleaning|climbing|close to
coming from|coming out of|contain|crossing|dragging|draped over|drinking|drinking from|driving|driving down|driving on
eating from|eating in|enclosing|exiting|facing|filled with|floating in|floating on|flying|flying above|flying in
flying over|flying through|full of|going down|going into|going through|grazing in|growing in|growing on|guiding
hanging from|hanging in|hanging off|hanging over|higher than|holding onto|hugging|in between|jumping off|jumping on
jumping over|kept in|larger than|leading|leaning over|leaving|licking|longer than|looking in|looking into|looking out
looking over|looking through|lying next to|lying on top of|making|mixed with|mounted on|moving|on the back of
on the edge of|on the front of|on the other side of|opening|painted on|parked at|parked beside|parked by|parked in
parked in front of|parked near|parked next to|perched on|petting|piled on|playing|playing in|playing on|playing with
pouring|reaching for|reading|reflected on|riding on|running in|running on|running through|seen through|sitting behind
sitting beside|sitting by|sitting in front of|sitting near|sitting next to|sitting under|skiing down|skiing on
sleeping in|sleeping on|smiling at|sniffing|splashing|sprinkled on|stacked on|standing against|standing around
standing behind|standing beside|standing in front of|standing near|standing next to|staring at|stuck in|surrounding
swimming in|swinging|talking to|topped with|touching|traveling down|traveling on|tying|typing on|underneath|wading in
waiting for|walking across|walking by|walking down|walking next to|walking through|working in|working on|worn on
wrapped around|wrapped in|by|of|near|next to|with|beside|on the side of|around""".replace("\n", "|").split("|")
)


def relation_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """The authors' macro average: all relations but those of `UNCOUNTED` count the same."""
    return equal_means([relation for relation in counts if relation not in UNCOUNTED])


def attribute_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """The authors' macro average: all pairs of attributes with at least `MIN_CASES` questions count the same."""
    return equal_means([pair for pair, count in counts.items() if count >= MIN_CASES])


def read_relations(folder: Path) -> Iterable[Question]:
    """Of each relation its questions."""
    return read_entries(folder / RELATIONS, partial(_cropped, _relation), f"{_EXPECTED} and relation_name")


def read_attributes(folder: Path) -> Iterable[Question]:
    """Of each pair of attributes, in their order, its questions."""
    return read_entries(folder / ATTRIBUTES, partial(_cropped, _attributes), f"{_EXPECTED} and two attributes")


_EXPECTED = "image_path, bbox_x, bbox_y, bbox_w, bbox_h, true_caption, false_caption"


def _relation(entry: Any) -> str:
    return entry["relation_name"]


def _attributes(entry: Any) -> str:
    first, second = entry["attributes"][:2]
    return f"{first}_{second}"


def _cropped(split_of: Any, entry: Any) -> Question:
    left, top, width, height = (float(entry[f"bbox_{side}"]) for side in "xywh")
    image = Crop(entry["image_path"], (left, top, left + width, top + height))
    return Question(split_of(entry), (image,), (entry["true_caption"], entry["false_caption"]))


def read_order(file: str, folder: Path) -> Iterable[Question]:
    """A caption and its shuffled words.

    Args:
        file: name of the frozen file.
        folder: where it lies.
    """

    def question(entry: Any) -> Question:
        return Question("order", (str(entry["image"]),), caption_options(entry, NUM_ORDERS))

    return read_entries(folder / file, question, f"image and caption_options, {NUM_ORDERS} texts")

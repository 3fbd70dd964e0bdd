"""VALSE: a caption and a foil, for six linguistic phenomena in eleven files.

    data/existence.json and ten more   {"...": {"image_file", "caption", "foil", "mturk": {"caption": 3}}}

Only foils that at least two of three annotators rejected are asked, as the authors advise. The number is their pairwise
accuracy (acc_r). Images are those of Visual7W, COCO, SWiG and VisDial, in the folders of the authors' config.py.
Source: Parcalabescu et al., "VALSE: a task-independent benchmark for vision and language models centered on linguistic
phenomena"; lxmert_valse_eval.py of their repository.
"""

from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, first_keys, json_reader
from dino_sparo.image_text.evaluation.protocol import file_of

# File -> valid foils, and folder of the images.
PARTS = {
    "existence": (505, "visual7w/images"),
    "plurals": (851, "plurals/test_images"),
    "counting-hard": (868, "visual7w/images"),
    "counting-small-quant": (900, "visual7w/images"),
    "counting-adversarial": (691, "visual7w/images"),
    "relations": (535, "relations/test_images"),
    "action-replacement": (648, "actions/images_512"),
    "actant-swap": (949, "actions/images_512"),
    "coreference-standard": (708, "coref/release_too_many_is_this_in_color/images"),
    "coreference-hard": (104, "coref/release_v18/test_images"),
    "foil-it": (943, "COCO/val2014"),
}
FILES = {split: f"{split}.json" for split in PARTS}
MIN_VOTES = 2  # annotators who chose the caption, but not the foil


def question(split: str, entry: Any) -> Question | None:
    """Caption and foil; None for a foil that is not valid."""
    if entry["mturk"]["caption"] < MIN_VOTES:
        return None
    return Question(split, (f"{PARTS[split][1]}/{entry['image_file']}",), (entry["caption"], entry["foil"]))


BENCHMARKS = (
    Benchmark(
        "valse",
        "VALSE",
        tuple(FILES.values()),
        json_reader(FILES, question, "image_file, caption, foil and mturk", keyed=True),
        (".", "images"),
        "https://github.com/Heidelberg-NLP/VALSE (data/); images of Visual7W, COCO, SWiG and VisDial, in the folders "
        "of config.py",
        licence="MIT; images: of each source",
        size="6 MB, images several GB",
        counts={split: count for split, (count, _) in PARTS.items()},
        part_of=lambda question: file_of(question.images[0]).rpartition("/")[0],
        accepts=lambda folder: any({"foil", "mturk"} <= first_keys(folder / file) for file in FILES.values()),
    ),
)

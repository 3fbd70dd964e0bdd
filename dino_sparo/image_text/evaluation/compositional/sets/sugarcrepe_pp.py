"""SugarCrepe++: two true captions of different words, and a false caption that is close to the first.

    replace_att.json and four more   [{"filename", "caption", "caption2", "negative_caption"}], images of COCO val2017

A question is right if both true captions score above the false one. The authors' text-only task, which compares
captions without the image, is left out. Source: Dumpala et al., "SugarCrepe++ dataset: vision-language model
sensitivity to semantic and lexical alterations"; VLMs/test_Variants_CLIP.py of their repository.
"""

from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, first_keys, json_reader
from dino_sparo.image_text.evaluation.compositional.sets.sugarcrepe import COCO_FOLDERS, COCO_IMAGES

COUNTS = {"replace_obj": 1652, "replace_att": 788, "replace_rel": 1406, "swap_obj": 245, "swap_att": 666}
FILES = {split: f"{split}.json" for split in COUNTS}


def question(split: str, entry: Any) -> Question:
    """The image twice, once with each true caption."""
    captions = entry["caption"], entry["caption2"], entry["negative_caption"]
    return Question(split, (entry["filename"],) * 2, captions, (0, 1))


BENCHMARKS = (
    Benchmark(
        "sugarcrepe++",
        "SugarCrepe++",
        tuple(FILES.values()),
        json_reader(FILES, question, "filename, caption, caption2 and negative_caption"),
        COCO_FOLDERS,
        f"https://github.com/Sri-Harsha/scpp (data/), {COCO_IMAGES}",
        licence="CC BY 4.0; images: COCO's terms",
        size="1.3 MB, images 0.8 GB",
        chance=100 / 3,
        counts=COUNTS,
        accepts=lambda folder: any("caption2" in first_keys(folder / file) for file in FILES.values()),
    ),
)

"""COLA, multi-object setting: two photographs of the same objects whose attributes are exchanged.

    COLA_multiobjects_matching_benchmark.json   [[URL of image 1, caption 1, URL of image 2, caption 2]]

A question is right if each caption prefers its image: Winoground's image score. The text and group scores are reported
too. The single-object setting, a mean average precision over 320 classes, is left out. Source: Ray et al., "COLA: a
benchmark for compositional text-to-image retrieval"; scripts/eval.py of their repository.
"""

from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, json_reader, list_of
from dino_sparo.image_text.evaluation.compositional.sets.winoground import PAIR_RULES

FILE = "COLA_multiobjects_matching_benchmark.json"


def question(_: str, entry: Any) -> Question:
    """Image 1 with caption 1, image 2 with caption 2; an image is named as the last part of its URL."""
    first, caption, second, other = list_of(entry, 4)
    return Question("", (first.rpartition("/")[2], second.rpartition("/")[2]), (caption, other), (0, 1))


BENCHMARKS = (
    Benchmark(
        "cola",
        "COLA",
        (FILE,),
        json_reader({"": FILE}, question, "[image, caption, image, caption]"),
        ("images", "vg_gqa_images", "vg/VG_100K", "vg_images"),
        "https://github.com/arijitray1993/COLA (data/); images of Visual Genome, by the URLs in the file",
        licence="MIT; images: CC BY 4.0",
        size="57 KB, images 40 MB",
        total=210,
        **{**PAIR_RULES, "headline": "image"},
    ),
)

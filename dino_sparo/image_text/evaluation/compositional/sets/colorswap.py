"""ColorSwap: two generated images and two captions of the same words, whose colours are exchanged.

    test.json   [{"caption_1", "caption_2", "image_1": "images/img_0_1.png", "image_2"}], images in `images`

The scores are Winoground's. The training split is not read. Source: Burapacheep et al., "ColorSwap: a color and word
order dataset for multimodal evaluation", section 4.
"""

from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, first_keys, json_reader
from dino_sparo.image_text.evaluation.compositional.sets.winoground import PAIR_RULES

FILE = "test.json"


def question(_: str, entry: Any) -> Question:
    """Image 1 with caption 1, image 2 with caption 2."""
    images, captions = ((entry[f"{kind}_1"], entry[f"{kind}_2"]) for kind in ("image", "caption"))
    return Question("", images, captions, (0, 1))


BENCHMARKS = (
    Benchmark(
        "colorswap",
        "ColorSwap",
        (FILE,),
        json_reader({"": FILE}, question, "caption_1, caption_2, image_1 and image_2"),
        (".", "images"),
        "the link in https://github.com/Top34051/colorswap; unpack images.zip",
        licence="MIT",
        size="2.8 GB",
        total=300,
        accepts=lambda folder: {"caption_1", "image_1"} <= first_keys(folder / FILE),
        **PAIR_RULES,
    ),
)

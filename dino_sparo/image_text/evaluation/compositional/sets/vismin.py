"""VisMin: two images that differ in one object, attribute, count or spatial relation, with a caption each.

    data-00000-of-00003.arrow and two more   image_0, image_1, text_0, text_1, category

The scores are Winoground's, per category, and their means over the categories. Source: Awal et al., "VisMin: visual
minimal-change understanding"; evals/metrics/itm.py of their repository.
"""

from collections.abc import Mapping, Sequence

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome, Weights
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question
from dino_sparo.image_text.evaluation.compositional.sets.bivlc import pair_questions
from dino_sparo.image_text.evaluation.compositional.sets.winoground import CHANCE, three_scores
from dino_sparo.image_text.evaluation.embedded import columns_of

FILES = tuple(f"data-{number:05}-of-00003.arrow" for number in range(3))
CATEGORIES = ("object", "attribute", "counting", "relation")


def outcomes(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Outcome]:
    """Text, image and group score of every example; their splits begin with the category."""
    pairs = enumerate(zip(questions, answers, strict=True))
    return [outcome for number, (item, answer) in pairs for outcome in three_scores(f"{item.split} ", number, answer)]


def means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """Each score as a mean over the categories."""
    splits = {score: [split for split in counts if split.endswith(f" {score}")] for score in CHANCE}
    return {score: dict.fromkeys(names, 1 / len(names)) for score, names in splits.items() if names}


BENCHMARKS = (
    Benchmark(
        "vismin",
        "VisMin",
        FILES,
        lambda folder: pair_questions(
            folder, FILES, ("text_0", "text_1", "category"), ("image_0", "image_1"), "category"
        ),
        (".",),
        "https://huggingface.co/datasets/mair-lab/vismin-bench (data/test/)",
        licence="CC BY 4.0; images: COCO's terms",
        size="1.5 GB",
        headline="group",
        chance={f"{category} {score}": chance for category in CATEGORIES for score, chance in CHANCE.items()},
        total=2084,
        means=means,
        outcomes=outcomes,
        accepts=lambda root: any("text_0" in columns_of(root / file) for file in FILES if (root / file).is_file()),
    ),
)

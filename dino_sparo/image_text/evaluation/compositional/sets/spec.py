"""SPEC: size, position, existence and count in generated images; image to text and text to image.

    count/image2text.json   [{"query": image, "keys": [captions], "label": index of the true one}]
    count/text2image.json   [{"query": caption, "keys": [images], "label": index of the true one}]

and five more folders; images are named from their folder on. The authors take the first maximum, so a tie is right if
the true one comes first. Source: Peng et al., "Synthesize, diagnose, and optimize: towards fine-grained vision-language
understanding"; spec/models/clip_wrapper.py of their repository.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome, Weights, equal_means
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question, json_reader, list_of

# Subset -> candidates of a question, and questions in each direction (as the authors' notebook evaluates them).
SUBSETS = {
    "absolute_size": (3, 1500),
    "relative_size": (3, 1500),
    "absolute_spatial": (9, 4500),
    "relative_spatial": (4, 2000),
    "existence": (2, 1000),
    "count": (9, 4500),
}
DIRECTIONS = ("image2text", "text2image")
FILES = {f"{subset}/{direction}": f"{subset}/{direction}.json" for subset in SUBSETS for direction in DIRECTIONS}


def question(split: str, entry: Any) -> Question:
    """One image with all captions, or all images with one caption, which is true for one image."""
    subset, direction = split.split("/")
    query, keys, label = entry["query"], list_of(entry["keys"]), range(len(entry["keys"]))[entry["label"]]
    if direction == DIRECTIONS[0]:
        return Question(split, (f"{subset}/{query}",), tuple(keys), (label,))
    images = tuple(f"{subset}/{key}" for key in keys)
    return Question(split, images, (query,), tuple(0 if number == label else -1 for number in range(len(keys))))


def outcomes(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Outcome]:
    """Whether the true candidate scores strictly highest; officially, whether it is the first maximum."""
    found = []
    for number, (item, answer) in enumerate(zip(questions, answers, strict=True)):
        if is_text := len(item.images) == 1:
            scores, label = list(answer.scores[0]), item.matches[0]
        else:
            scores, label = [row[0] for row in answer.scores], item.matches.index(0)
        right, tied = (answer.text, answer.text_tied) if is_text else (answer.image, answer.image_tied)
        found.append(Outcome(item.split, number, right, tied, float(scores.index(max(scores)) == label)))
    return found


def means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """Mean over all parts, and the authors' mean of each direction."""
    parts = {direction: [split for split in counts if split.endswith(direction)] for direction in DIRECTIONS}
    return equal_means(counts) | {name: dict.fromkeys(part, 1 / len(part)) for name, part in parts.items() if part}


BENCHMARKS = (
    Benchmark(
        "spec",
        "SPEC",
        tuple(FILES.values()),
        json_reader(FILES, question, "query, keys and label"),
        (".",),
        "https://huggingface.co/datasets/wjpoom/SPEC; unpack data.zip",
        licence="Apache 2.0",
        size="1.6 GB",
        chance={split: 100 / SUBSETS[split.split("/")[0]][0] for split in FILES},
        counts={split: SUBSETS[split.split("/")[0]][1] for split in FILES},
        means=means,
        outcomes=outcomes,
    ),
)

"""Hard positives: a caption, a false caption, and a true caption that is as close to the first as the false caption.

    data/visual_genome_attribution.json and two more          [{"true_caption", "false_caption", "image_path"}]
    swapped_data/visual_genome_attribution.json and two more  the same questions, with the other true caption

Three scores per file, of caption c, other true caption p and false caption n:

    original   s(c) > n           as before; n is the false caption of the first file
    augmented  s(c) > s(n) and s(p) > s(n)
    brittle    s(c) > s(n) > s(p) or s(p) > s(n) > s(c): lower is better

`macro` is the mean of `augmented` over SWAP and REPLACE, of which attributes and relations count half each. Source:
Kamath et al., "The hard positive truth about vision-language compositionality", section 4.1; run_eval.py of their
repository.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, Outcome, Weights
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question, json_reader
from dino_sparo.image_text.evaluation.compositional.sets.vl_checklist import nested
from dino_sparo.image_text.evaluation.protocol import Crop, file_of
from dino_sparo.runtime.faults import UserError

NAMES = {
    "swap/attributes": "visual_genome_attribution",
    "replace/attributes": "vl_checklist_attributes",
    "replace/relations": "vl_checklist_relations",
}
FOLDERS = ("data", "swapped_data")
SCORES = {"original": 50.0, "augmented": 100 / 3, "brittle": 100 / 3}  # -> accuracy of guessing


def _question(split: str, entry: Any) -> Question:
    """True and false caption of an entry; SWAP shows a crop of an image of ARO."""
    image: Any = entry["image_path"]
    if split.startswith("swap"):
        left, top, width, height = (float(entry[f"bbox_{side}"]) for side in "xywh")
        image = Crop(f"data/images/{image}", (left, top, left + width, top + height))
    return Question(split, (image,), (entry["true_caption"], entry["false_caption"]))


def read(folder: Path) -> Iterator[Question]:
    """Questions with the image twice, for both true captions; then the false captions of either file."""
    for split, name in NAMES.items():
        files = [f"{part}/{name}.json" for part in FOLDERS]
        if not all((folder / file).is_file() for file in files):
            continue
        expected = "image_path, true_caption and false_caption"
        first, second = (list(json_reader({split: file}, _question, expected)(folder)) for file in files)
        if [each.images for each in first] != [each.images for each in second]:
            raise UserError(f"{folder / files[0]} and {files[1]} are not about the same images; download both again")
        for (_, images, (true, false), _), (_, _, (other, other_false), _) in zip(first, second, strict=True):
            yield Question(split, images * 2, (true, other, other_false, false), (0, 1))


def outcomes(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Outcome]:
    """The three scores of every question."""
    found = []
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        true, other, false, first_false = answer.scores[0]
        rules = {
            "original": (true > first_false, true == first_false),
            "augmented": (true > false and other > false, false in (true, other)),
            "brittle": (true > false > other or other > false > true, False),
        }
        found += [Outcome(f"{question.split}/{score}", number, *rule) for score, rule in rules.items()]
    return found


def means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """Macro averages of the three scores; SWAP and REPLACE count the same."""
    splits = {score: [split for split in counts if split.endswith(score)] for score in SCORES}
    table = {score: nested(parts) for score, parts in splits.items() if parts}
    return {"macro": table["augmented"], "original": table["original"], "brittle": table["brittle"]} if table else {}


BENCHMARKS = (
    Benchmark(
        "hard-positives",
        "hard positives",
        tuple(f"{part}/{name}.json" for part in FOLDERS for name in NAMES.values()),
        read,
        (".",),
        "https://github.com/amitakamath/hard_positives; images of Visual Genome in data/VG_100K and data/VG_100K_2, "
        "ARO's in data/images",
        licence="not stated; images: CC BY 4.0",
        size="20 MB, images 15 GB",
        chance={f"{split}/{score}": chance for split in NAMES for score, chance in SCORES.items()},
        counts={"replace/attributes": 10_575, "replace/relations": 16_868},
        means=means,
        outcomes=outcomes,
        part_of=lambda question: file_of(question.images[0]).split("/")[1],
        accepts=lambda folder: any((folder / FOLDERS[1] / f"{name}.json").is_file() for name in NAMES.values()),
    ),
)

"""PUG: SPAR: two animals in a rendered scene, exchanged in the false caption.

    labels.csv   filename, world_name, character_name, character2_name, character_texture, character2_texture,
                 character1_pos

Asked are the authors' hard negatives about two different animals, without the background's name: their places (left and
right, bottom and top; default texture) and their textures (blue and red, grass and stone). The authors let the true
caption come first or second at random; a tie is then right half of the time. Their questions about single animals, and
retrieval among all captions, are left out. Source: Bordes et al., "PUG: photorealistic and semantically controllable
synthetic data for representation learning"; PUG_SPAR/run_eval_vlms_on_spar.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dino_sparo.data.sources.folders import ALL
from dino_sparo.data.sources.tables import Column, TableRows
from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, questions_of

LABELS = "labels.csv"
COLUMNS = ("filename", "character_name", "character2_name", "character_texture", "character2_texture", "character1_pos")
OPPOSITE = {"left": "right", "bottom": "top"}
TEXTURES = ("Blue", "Grass")
NOBODY, PLAIN = "blank", "Default"


def is_labels(folder: Path) -> bool:
    """Whether a labels.csv is PUG's."""
    with (folder / LABELS).open(encoding="utf-8", errors="replace") as file:
        return set(COLUMNS) <= set(file.readline().strip().split(","))


def read(folder: Path) -> Iterator[Question]:
    """The questions, in the order of the table."""
    path = folder / LABELS
    columns = [Column(name, "", (name,), name=name, is_required=True) for name in COLUMNS]
    entries = ((f"line {line}", cells) for line, cells in TableRows(str(path), columns, split=ALL) if is_pair(cells))
    return questions_of(path, entries, question, f"the columns {', '.join(COLUMNS)}")


def is_pair(cells: Sequence[str]) -> bool:
    """Whether a row shows two different animals in one of the compared ways."""
    _, first, second, texture, _, side = cells
    is_compared = texture in TEXTURES or (texture == PLAIN and side in OPPOSITE)
    return is_compared and NOBODY not in (first, second) and first != second


def question(cells: Sequence[str]) -> Question:
    """The question of a row: places if the textures are plain, else textures."""
    image, first, second, texture, second_texture, side = cells
    if texture == PLAIN:
        other = OPPOSITE[side]
        parts = f"This is a photo of a {{}} on the {side} and a {{}} on the {other} of the picture"
        split = f"{side}, {other}"
    else:
        parts = f"This is a photo of a {{}} textured with {texture} and a {{}} textured with {second_texture}"
        split = texture
    return Question(split, (image,), (parts.format(first, second), parts.format(second, first)))


BENCHMARKS = (
    Benchmark(
        "pug-spar",
        "PUG: SPAR",
        (LABELS,),
        read,
        (".",),
        "https://github.com/facebookresearch/PUG",
        tie_credit=0.5,
        accepts=is_labels,
    ),
)

"""BiVLC: SugarCrepe's captions, with a generated image of each false caption.

    test-00000-of-00002.parquet and one more   image, caption, negative_caption, negative_image, type, subtype

The scores are Winoground's; the authors call the text score I2T and the image score T2I. Source: Miranda et al.,
"BiVLC: extending vision-language compositionality evaluation with text-to-image retrieval";
src/CLIP_fine_tuning/CLIP_utils.py of their repository.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.questions import Question, questions_of
from dino_sparo.image_text.evaluation.compositional.sets.winoground import PAIR_RULES
from dino_sparo.image_text.evaluation.embedded import columns_of, rows_of
from dino_sparo.image_text.evaluation.protocol import Cell

FILES = tuple(f"test-{number:05}-of-00002.parquet" for number in range(2))
TEXTS = ("caption", "negative_caption", "type", "subtype")


def pair_questions(
    folder: Path, files: tuple[str, ...], texts: tuple[str, ...], images: tuple[str, str], split: str | None = None
) -> Iterator[Question]:
    """The questions of tables whose rows hold two images with a caption each.

    Args:
        folder: of the tables.
        files: names of the tables.
        texts: columns of the text, the two captions first.
        images: columns of the images.
        split: column of the split; None: one split.
    """
    for name in files:
        path = folder / name
        if not path.is_file():
            continue

        def question(entry: Any, name: str = name) -> Question:
            number, row = entry
            cells = (Cell(name, images[0], number), Cell(name, images[1], number))
            return Question(row[split] if split else "", cells, (row[texts[0]], row[texts[1]]), (0, 1))

        rows = ((f"row {number}", (number, row)) for number, row in enumerate(rows_of(path, texts)))
        yield from questions_of(path, rows, question, f"the columns {', '.join((*texts, *images))}")


BENCHMARKS = (
    Benchmark(
        "bivlc",
        "BiVLC",
        FILES,
        lambda folder: pair_questions(folder, FILES, TEXTS[:2], ("image", "negative_image")),
        (".",),
        "https://huggingface.co/datasets/imirandam/BiVLC (data/)",
        licence="MIT; images: COCO's terms",
        size="0.5 GB",
        total=2933,
        accepts=lambda folder: any(
            "negative_image" in columns_of(folder / file) for file in FILES if (folder / file).is_file()
        ),
        **PAIR_RULES,
    ),
)

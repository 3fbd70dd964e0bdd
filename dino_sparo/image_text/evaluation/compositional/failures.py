"""Answers -> the clearest errors of a benchmark; `failure_pages.py` draws them for `compositional --failures N`.

An error is an image that scores more with a false caption than with its own. Of each benchmark those with the largest
margin are shown, one per image. Otherwise the largest benchmark would fill the page, and in some sets one odd image
would. A tie is no clear error.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from dino_sparo.image_text.evaluation.compositional.run import AnswerTable
from dino_sparo.image_text.evaluation.questions import Question
from dino_sparo.image_text.scoring.image_files import Crop, ImageName

MAX_FAILURES = 50  # per benchmark: a page holds all its pictures, about 0.3 MB per error


@dataclass(frozen=True)
class Failure:
    """An image that scores more with a false caption than with its own.

    Attributes:
        split: of the question.
        image: path of the file.
        box: part of it that the question shows: left, top, right, bottom, pixels; None: all of it.
        true_caption: the image's.
        false_caption: of the question's others the one that scores most.
        true_score: of image and `true_caption`.
        false_score: of image and `false_caption`.
    """

    split: str
    image: str
    box: tuple[float, float, float, float] | None
    true_caption: str
    false_caption: str
    true_score: float
    false_score: float

    @property
    def name(self) -> ImageName:
        """The image, as questions name it."""
        return self.image if self.box is None else Crop(self.image, self.box)


class Failures(NamedTuple):
    """The errors of a benchmark, as its result holds them.

    Attributes:
        num_asked: questions.
        num_wrong: images that score more, or as much, with a false caption.
        num_tied: those that score as much.
        clearest: errors with the largest margins, the largest first.
    """

    num_asked: int
    num_wrong: int
    num_tied: int
    clearest: list[Failure]

    def __str__(self) -> str:
        tied = f", {self.num_tied:,} of these ties" if self.num_tied else ""
        return f"{self.num_wrong:,} of {self.num_asked:,} wrong{tied}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**self._asdict(), "clearest": [asdict(failure) for failure in self.clearest]}


def clearest_failures(questions: Sequence[Question], answers: AnswerTable, rows: slice, count: int) -> Failures:
    """The clearest errors of a benchmark.

    Args:
        questions: of the benchmark.
        answers: all of them.
        rows: where its questions stand among all.
        count: at most so many.
    """
    confusions = answers.confusions
    margins = (confusions.false_score - confusions.true_score)[rows].masked_fill(~answers.is_answered[rows], -torch.inf)
    clearest: dict[ImageName, Failure] = {}
    for number in margins.argsort(descending=True, stable=True).tolist():
        if margins[number] <= 0 or len(clearest) == count:
            break
        question, row = questions[number], rows.start + number
        image = int(confusions.image[row])
        name = question.images[image]
        file, box = name if isinstance(name, Crop) else (name, None)
        captions = question.captions[question.matches[image]], question.captions[int(confusions.caption[row])]
        scores = float(confusions.true_score[row]), float(confusions.false_score[row])
        clearest.setdefault(name, Failure(question.split, file, box, *captions, *scores))
    num_tied = int((margins == 0).sum())
    num_asked = int(answers.is_answered[rows].sum())
    return Failures(num_asked, int((margins > 0).sum()) + num_tied, num_tied, list(clearest.values()))

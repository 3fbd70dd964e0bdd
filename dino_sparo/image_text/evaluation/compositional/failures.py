"""Answers -> the clearest errors of a benchmark -> an HTML page and sheets of pictures: `compositional --failures N`.

An error is an image that scores higher with a false caption than with its own. The page shows the errors with the
largest margins of each benchmark, one per image, so that neither a large benchmark nor one odd image fills the page. A
tie is not a clear error.

A figure shows the image, the true and the false caption with their scores, and below each caption the maps of an
`ExplainableScorer`.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.draw.figure import PICTURE_HEIGHT, Band, Figure, Layout, Section, Tile, Word, file_names, short_name
from dino_sparo.draw.html import save_page
from dino_sparo.draw.pixels import resize
from dino_sparo.draw.sheet import save_sheet
from dino_sparo.image_text.evaluation.compositional.questions import Answer, Question
from dino_sparo.image_text.evaluation.protocol import ROOT, Cell, Crop, ImageName, file_of, named_source
from dino_sparo.image_text.scorer import ExplainableScorer, Scorer

TITLE = "The clearest errors"
SHEET_ERRORS = 6  # errors on a sheet; the page has all
MAX_LETTERS = 1000  # of a caption; the result file has all
LAYOUT = Layout((160, 160), per_line=5, side=290)
MARKS = {"true": (60, 190, 100), "false": (240, 90, 75)}  # behind words that differ
MARK_LEVEL = 0.22
RULE = (
    "The page shows the questions with the largest lead of a false caption over the true caption, one question per "
    "image and the false caption with the highest score. Words that the other caption lacks there are marked."
)


@dataclass(frozen=True)
class Failure:
    """An image that scores higher with a false caption (the best false caption) than with the true caption.

    Attributes:
        image: as the question names it.
    """

    split: str
    image: ImageName
    true_caption: str
    false_caption: str
    true_score: float
    false_score: float

    def to_json(self) -> dict[str, Any]:
        """Plain values: the image is its file, the `box` of a crop, and the `cell`, column and row, of a table."""
        box = self.image.box if isinstance(self.image, Crop) else None
        cell = self.image[1:] if isinstance(self.image, Cell) else None
        return {**asdict(self), "image": file_of(self.image), "box": box, "cell": cell}


class Failures(NamedTuple):
    """The errors of a benchmark in its result file.

    Attributes:
        num_wrong: questions with a false caption that scores at least as high as the true one, `num_tied` equally.
        clearest: errors by margin, largest first.
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
        return {**self._asdict(), "clearest": [failure.to_json() for failure in self.clearest]}


def clearest_failures(questions: Sequence[Question], answers: Sequence[Answer | None], count: int) -> Failures:
    """The clearest errors of a benchmark, at most `count`."""
    answered = [(question, answer) for question, answer in zip(questions, answers, strict=True) if answer is not None]
    wrong = [(question, answer) for question, answer in answered if answer.margin > 0]
    clearest: dict[ImageName, Failure] = {}
    for question, answer in sorted(wrong, key=lambda pair: -pair[1].margin):
        name = question.images[answer.worst_image]
        captions = question.captions[question.matches[answer.worst_image]], question.captions[answer.false_caption]
        scores = answer.true_score, answer.false_score
        clearest.setdefault(name, Failure(question.split, name, *captions, *scores))
    num_tied = sum(answer.margin == 0 for _, answer in answered)
    return Failures(len(answered), len(wrong) + num_tied, num_tied, list(clearest.values())[:count])


def write_failures(
    scorer: Scorer,
    model: str,
    failures: Mapping[str, Failures],
    stem: Path,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> list[Path]:
    """Write a page of all benchmarks and, of each that has errors, a sheet; returns the files, all named from `stem`.

    `failures` are the errors by title of the benchmark.
    """
    figure = Figure(TITLE, f"{model}  ·  scores: {scorer.measure}", [], LAYOUT, explanation=RULE, ends=None)
    names = file_names([title.replace("/", "_") for title in failures])
    all_sections: list[Section] = []
    sheets: list[Path] = []
    for name, (title, errors) in zip(names, failures.items(), strict=True):
        heading = f"{title}: {errors}"
        sections = []
        for failure in errors.clearest:
            file = file_of(failure.image)
            image = named_source(ROOT, [failure.image], [file], limits).read(0)
            picture, maps = resize(np.asarray(image), PICTURE_HEIGHT), [Band()] * 2
            if isinstance(scorer, ExplainableScorer):
                explanation = scorer.explain(image, (failure.true_caption, failure.false_caption))
                picture, maps = explanation.picture, list(explanation.captions)
                # The sentences on reading are the page's; on a sheet the first two are enough.
                short = ". ".join(explanation.words.split(". ")[:2]).rstrip(".") + "."
                words = f"{RULE} {explanation.words}"
                figure = replace(figure, summary=[short], explanation=words, ends=explanation.ends)
            sections.append(failure_section(failure, Tile(picture, file), maps))
        all_sections += [Section((), heading), *sections]
        if sections:
            path = stem.with_name(f"{stem.name}_{name}.png")
            save_sheet(replace(figure, title=f"{TITLE}  ·  {heading}", sections=sections[:SHEET_ERRORS]), path)
            sheets.append(path)
    page = stem.with_name(f"{stem.name}.html")
    save_page(replace(figure, sections=all_sections), page)
    return [page, *sheets]


def failure_section(failure: Failure, image: Tile, maps: Sequence[Band]) -> Section:
    """The image of an error, and next to it the true and the false caption with their scores and maps."""
    kinds: tuple[Literal["true", "false"], ...] = ("true", "false")
    true, false = (text[:MAX_LETTERS] for text in (failure.true_caption, failure.false_caption))
    captions = differing(true.split(), false.split())
    scores = failure.true_score, failure.false_score
    bands = []
    for kind, caption, score, each in zip(kinds, captions, scores, maps, strict=True):
        words = [Word(word, MARK_LEVEL * is_marked, MARKS[kind]) for word, is_marked in caption]
        bands.append(replace(each, heading=words, label=f"{kind} {score:.3f}", kind=kind))
    margin = failure.false_score - failure.true_score
    about = f"{failure.split}  ·  {short_name(file_of(failure.image))}  ·  false above true by {margin:.3f}"
    return Section(bands, picture=image, about=about)


def differing(first: Sequence[str], second: Sequence[str]) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Words of two captions, each with a mark unless the word lies in a sequence that both captions share."""
    marks = [True] * len(first), [True] * len(second)
    for block in difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        marks[0][block.a : block.a + block.size] = [False] * block.size
        marks[1][block.b : block.b + block.size] = [False] * block.size
    return list(zip(first, marks[0], strict=True)), list(zip(second, marks[1], strict=True))

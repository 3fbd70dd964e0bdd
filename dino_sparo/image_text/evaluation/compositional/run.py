"""Questions of several benchmarks -> answers, some images at a time.

The questions are ordered by the file of their first image, so that an image is decoded once for all benchmarks that ask
about it. Never more than a given number of images are encoded at a time: OC-CLIP keeps 0.4 MB of each. A caption is
encoded once per such part.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from dino_sparo.image_text.evaluation.questions import (
    Answers,
    Confusions,
    Question,
    captions_of,
    confusions,
    judge,
    question_scores,
    with_captions,
)
from dino_sparo.image_text.scoring.image_files import Crop, ImageName, file_of, named_source
from dino_sparo.image_text.scoring.scorer import EncodedTexts, Scorer

logger = logging.getLogger(__name__)

ROOT = Path("/")


@dataclass
class Answered:
    """Answers to all questions, in their order.

    Attributes:
        is_asked: (questions,), false where an image cannot be read.
        answers: false where not asked.
        confusions: zero where not asked.
        marks: name -> (questions,), whether it holds for one of the question's captions: `truncated`, `alike` (the
            model cannot tell the true one from another), or what the model says of its own.
    """

    is_asked: Bool[Tensor, " questions"]
    answers: Answers
    confusions: Confusions
    marks: dict[str, Bool[Tensor, " questions"]]

    def of(self, rows: slice) -> tuple[list[int], Answers]:
        """Those of some questions that were asked: their numbers, counted from the first of them, and answers."""
        asked = self.is_asked[rows].nonzero().flatten()
        return asked.tolist(), Answers(*(column[rows][asked] for column in self.answers))


@torch.no_grad()
def ask(scorer: Scorer, questions: Sequence[Question], chunk_images: int) -> Answered:
    """Ask all questions.

    Args:
        scorer: the model.
        questions: images are absolute paths of files that are there, or parts of them.
        chunk_images: largest number of images that are encoded at a time.
    """
    count = len(questions)

    def nothing(dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    unasked = Confusions(nothing(torch.int64), nothing(torch.int64), nothing(torch.float32), nothing(torch.float32))
    answered = Answered(nothing(), Answers(*(nothing() for _ in Answers._fields)), unasked, {})
    scorer.expect_texts(captions_of(questions))
    parts = list(chunks(questions, chunk_images))
    for number, part in enumerate(parts):
        logger.info("part %d of %d: %d questions", number + 1, len(parts), len(part))
        images = list(dict.fromkeys(image for index in part for image in questions[index].images))
        encoded = scorer.encode_images(named_source(ROOT, images, [file_of(image) for image in images]))
        row = {images[index]: number for number, index in enumerate(encoded.indices.tolist())}
        kept = [index for index in part if all(image in row for image in questions[index].images)]
        if not kept:
            continue
        asked, texts = with_captions(scorer, [questions[index] for index in kept], encoded.payload, row)
        scores = question_scores(asked, scorer.score_pairs)
        rows = torch.tensor(kept)
        answered.is_asked[rows] = True
        columns = (*answered.answers, *answered.confusions)
        for column, values in zip(columns, (*judge(*scores), *confusions(*scores)), strict=True):
            column[rows] = values.cpu()
        own = torch.tensor([question.matches[0] for question in asked.questions])
        for name, marks in _marks(asked.text_of.cpu(), own, texts).items():
            answered.marks.setdefault(name, nothing())[rows] = marks
    return answered


def chunks(questions: Sequence[Question], chunk_images: int) -> Iterator[list[int]]:
    """Numbers of the questions, in parts with a limited number of images; those of one file lie together.

    The parts are about equal, since a small one of nothing but unreadable images would end the run.

    Args:
        questions: all.
        chunk_images: the limit; a single question may have more.
    """
    num_images = len({image for question in questions for image in question.images})
    limit = math.ceil(num_images / math.ceil(num_images / chunk_images))

    def key(index: int) -> tuple[str, tuple[float, ...], int]:
        image = questions[index].images[0]
        return file_of(image), image.box if isinstance(image, Crop) else (), index

    part: list[int] = []
    images: set[ImageName] = set()
    for index in sorted(range(len(questions)), key=key):
        own = set(questions[index].images)
        if part and len(images) + len(own - images) > limit:
            yield part
            part, images = [], set()
        part.append(index)
        images |= own
    if part:
        yield part


def _marks(
    text_of: Int64[Tensor, "questions captions"], own: Int64[Tensor, " questions"], texts: EncodedTexts
) -> dict[str, Bool[Tensor, " questions"]]:
    """Marks of captions -> marks of the questions that have them.

    Args:
        text_of: rows of the captions, -1 where a question has fewer.
        own: index of the first image's caption among the question's.
        texts: all captions.
    """
    is_caption = text_of >= 0
    marks = {name: (values.cpu()[text_of] & is_caption).any(dim=1) for name, values in texts.marks.items()}
    if texts.alike is not None:
        numbers = texts.alike.cpu()[text_of]
        same = (numbers == numbers.gather(1, own[:, None])) & is_caption
        marks["alike"] = same.sum(dim=1) > 1
    return marks


def with_shuffled_images(
    questions: Sequence[Question], seed: int, group_of: Callable[[Question], str]
) -> list[Question]:
    """Each question with the images of another one of its group: a model that is still right does not need them.

    The other one is the next in a random order. It may show the same images; then the question keeps its own.

    Args:
        questions: of one benchmark.
        seed: of the order.
        group_of: question -> its group, see `Benchmark.blind_group`.
    """
    rng = np.random.default_rng(seed)
    by_group: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        by_group.setdefault(group_of(question), []).append(index)
    shuffled = list(questions)
    for own in by_group.values():
        order = rng.permutation(own)
        for here, there in zip(order, np.roll(order, 1), strict=True):
            shuffled[here] = questions[here]._replace(images=questions[there].images)
    return shuffled


def counts_of(values: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, int]:
    """How many of some questions have each mark.

    Args:
        values: name -> (questions,).
        rows: which questions.
    """
    chosen = torch.tensor(list(rows), dtype=torch.int64)
    return {f"num_{name}": int(marks[chosen].sum()) for name, marks in values.items()}

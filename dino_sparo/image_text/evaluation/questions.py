"""Questions with true and false captions, and the rule by which scores answer them.

    images  captions  matches
    1       2         (0,)         SugarCrepe, ARO, VL-CheckList: a true and a false caption
    1       4 or 5    (0,)         What'sUp, the order of words in captions of COCO and Flickr
    2       2         (0, 1)       Winoground: each image has its caption

The rule: right means strictly greater. Equal scores count as wrong, and ties are counted, so that a model which cannot
tell captions apart gains nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dino_sparo.image_text.scoring.image_files import Crop, ImageName, check_file_name


class Question(NamedTuple):
    """Images, captions, and which of them match.

    Attributes:
        split: kind of the question; accuracy is reported per split.
        images: file names, or parts of such images.
        captions: true and false ones.
        matches: index of each image's true caption in `captions`; images have different ones.
    """

    split: str
    images: tuple[ImageName, ...]
    captions: tuple[str, ...]
    matches: tuple[int, ...] = (0,)


def check_question(question: Any) -> None:
    """Refuse a question whose fields, read from a file, cannot be right; raises ValueError."""
    for text in (question.split, *question.captions):
        if not isinstance(text, str):
            raise ValueError(f"{text!r:.80} is not text")
        text.encode()  # a lone surrogate has no UTF-8
    for image in question.images:
        check_file_name(image.name if isinstance(image, Crop) else image)


class Answers(NamedTuple):
    """A scorer's answers, one per question.

    Attributes:
        text: (questions,), whether each image prefers its own caption to all others of the question.
        image: (questions,), whether the caption of each image prefers that image to all others.
        text_tied: (questions,), whether an image has equal scores for its own caption and the best of the others.
        image_tied: (questions,), whether a caption has equal scores for its own image and the best of the others.
    """

    text: Bool[Tensor, " questions"]
    image: Bool[Tensor, " questions"]
    text_tied: Bool[Tensor, " questions"]
    image_tied: Bool[Tensor, " questions"]


class Confusions(NamedTuple):
    """For each question the image and the false caption whose score exceeds that of the image's own caption the most.

    Attributes:
        image: (questions,), index of the image.
        caption: (questions,), index of the false caption.
        true_score: (questions,), of the image and its own caption.
        false_score: (questions,), of the image and the false caption.
    """

    image: Int64[Tensor, " questions"]
    caption: Int64[Tensor, " questions"]
    true_score: Float[Tensor, " questions"]
    false_score: Float[Tensor, " questions"]


class SplitResult(NamedTuple):
    """Accuracy of a split in percent, with its numbers of questions and of ties."""

    accuracy: float
    num_questions: int
    num_ties: int


def judge(scores: Float[Tensor, "questions images captions"], matches: Int64[Tensor, "questions images"]) -> Answers:
    """Scores -> answers.

        text   S(i, m_i) > S(i, c)   for all images i and captions c other than their own, m_i
        image  S(i, m_i) > S(j, m_i) for all images i and j other than i

    Args:
        scores: of every image and caption; -inf where a question has fewer than others.
        matches: m, the true caption of each image; -1 where a question has fewer images.
    """
    is_image = matches >= 0
    own_caption = matches.clamp(min=0)[:, :, None]
    own = scores.gather(2, own_caption)[:, :, 0]
    best_caption = scores.scatter(2, own_caption, -torch.inf).amax(dim=2)
    by_caption = scores.gather(2, own_caption.mT.expand(-1, scores.shape[1], -1))  # image j, caption of image i
    is_own = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
    best_image = by_caption.masked_fill(is_own, -torch.inf).amax(dim=1)
    text, image = (((own > best) | ~is_image).all(dim=1) for best in (best_caption, best_image))
    ties = (((own == best) & is_image).any(dim=1) for best in (best_caption, best_image))
    return Answers(text, image, *ties)


def confusions(
    scores: Float[Tensor, "questions images captions"], matches: Int64[Tensor, "questions images"]
) -> Confusions:
    """The image and the false caption with the greatest S(i, c) - S(i, m_i); arguments as in `judge`."""
    own_caption = matches.clamp(min=0)[:, :, None]
    own = scores.gather(2, own_caption)[:, :, 0]
    best, caption = scores.scatter(2, own_caption, -torch.inf).max(dim=2)
    margins = torch.where(matches >= 0, best - own, -torch.inf)
    image = margins.argmax(dim=1, keepdim=True)
    return Confusions(image[:, 0], *(column.gather(1, image)[:, 0] for column in (caption, own, best)))


def by_split(
    questions: Sequence[Question], right: Bool[Tensor, " questions"], tied: Bool[Tensor, " questions"]
) -> dict[str, SplitResult]:
    """Accuracy of each split, in the order of the questions."""
    rows: dict[str, list[tuple[bool, bool]]] = {}
    for question, *row in zip(questions, right.tolist(), tied.tolist(), strict=True):
        rows.setdefault(question.split, []).append((row[0], row[1]))
    counts = {split: (len(each), *map(sum, zip(*each, strict=True))) for split, each in rows.items()}
    return {split: SplitResult(100 * hits / number, number, ties) for split, (number, hits, ties) in counts.items()}


def macro(results: Mapping[str, SplitResult]) -> float:
    """Mean of the splits' accuracies, in percent."""
    return sum(result.accuracy for result in results.values()) / len(results)


def micro(results: Mapping[str, SplitResult]) -> float:
    """Share of all questions that are right, in percent."""
    total = sum(result.num_questions for result in results.values())
    return sum(result.accuracy * result.num_questions for result in results.values()) / total

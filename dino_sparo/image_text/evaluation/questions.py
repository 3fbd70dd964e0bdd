"""Questions with false answers beside the true one -> which of them a scorer gets right.

A benchmark of compositional understanding is a reader of its files into `Question`s; here they are asked and judged,
for all benchmarks by the same rule. What a question holds, by benchmark:

    images  captions  matches
    1       2         (0,)         SugarCrepe, ARO, VL-CheckList: a true and a false caption
    1       4 or 5    (0,)         What'sUp, the order of words in captions of COCO and Flickr
    2       2         (0, 1)       Winoground: each image has its caption

The rule: right means strictly greater. Equal scores count as wrong, and how often that happens is reported, so that a
model which cannot tell gains nothing. A question without one of its images or captions is left out and counted.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dino_sparo.image_text.scoring.image_files import ImageName, encode_named_images
from dino_sparo.image_text.scoring.scorer import EncodedTexts, Scorer

logger = logging.getLogger(__name__)


class Question(NamedTuple):
    """Images, captions, and which belong together.

    Attributes:
        split: the kind of question, whose accuracy is reported by itself.
        images: file names, or parts of such images.
        captions: in words, true and false ones.
        matches: for each image the place of its true caption in `captions`; different images have different ones.
    """

    split: str
    images: tuple[ImageName, ...]
    captions: tuple[str, ...]
    matches: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class EncodedQuestions:
    """Questions that can be asked, on every process.

    Attributes:
        questions: those that have all their images and captions.
        images: payload of the images, each of them once.
        texts: payload of the different captions.
        image_of: (questions, images), row of each question's images in `images`; -1 where it has fewer than others.
        text_of: (questions, captions), row of its captions in `texts`, likewise.
        num_images: different images of these questions.
        num_empty: questions left out because a caption is empty.
        num_without_image: questions left out because an image is missing or cannot be read.
        num_truncated: different captions that were cut off because they are longer than the context.
    """

    questions: list[Question]
    images: Any
    texts: Any
    image_of: Int64[Tensor, "questions images"]
    text_of: Int64[Tensor, "questions captions"]
    num_images: int
    num_empty: int = 0
    num_without_image: int = 0
    num_truncated: int = 0


class Answers(NamedTuple):
    """What a scorer answers to each question.

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
    """Of each question the image and the false caption whose score exceeds that of the image's own caption the most.

    Attributes:
        image: (questions,), place of the image.
        caption: (questions,), place of the false caption.
        true_score: (questions,), of the image and its own caption.
        false_score: (questions,), of the image and the false one.
    """

    image: Int64[Tensor, " questions"]
    caption: Int64[Tensor, " questions"]
    true_score: Float[Tensor, " questions"]
    false_score: Float[Tensor, " questions"]


class SplitResult(NamedTuple):
    """Of one split: accuracy in percent, and the numbers of questions and of ties among them."""

    accuracy: float
    num_questions: int
    num_ties: int


@torch.no_grad()
def encode_questions(scorer: Scorer, questions: Sequence[Question], image_folder: Path) -> EncodedQuestions:
    """Encode every image and every caption once.

    Args:
        scorer: the model.
        questions: what to ask.
        image_folder: where the images lie.

    Raises:
        ValueError: more than 1 % of the images are missing or cannot be read; no question is left.
    """
    names = list(dict.fromkeys(name for question in questions for name in question.images))
    worded = [question for question in questions if all(text.strip() for text in question.captions)]
    scorer.expect_texts(captions_of(worded))
    images, image_row = encode_named_images(scorer, image_folder, names)
    kept = [question for question in worded if all(name in image_row for name in question.images)]
    num_empty, num_without_image = len(questions) - len(worded), len(worded) - len(kept)
    if len(kept) < len(questions):
        logger.warning(
            "left out %d of %d questions: %d have an empty caption, %d lack an image",
            *(len(questions) - len(kept), len(questions), num_empty, num_without_image),
        )
    if not kept:
        raise ValueError(f"none of {len(questions)} questions has its captions, and its images in {image_folder}")
    encoded, texts = with_captions(scorer, kept, images.payload, image_row)
    return replace(encoded, num_empty=num_empty, num_without_image=num_without_image, num_truncated=texts.num_truncated)


def captions_of(questions: Sequence[Question]) -> list[str]:
    """The different captions of all questions, in order."""
    return list(dict.fromkeys(text for question in questions for text in question.captions))


def with_captions(
    scorer: Scorer, questions: list[Question], images: Any, image_row: Mapping[ImageName, int]
) -> tuple[EncodedQuestions, EncodedTexts]:
    """Encode the captions of questions whose images are encoded, each caption once.

    Args:
        scorer: the model.
        questions: all can be asked.
        images: payload.
        image_row: the row of each image in it.
    """
    texts = captions_of(questions)
    text_row = {text: row for row, text in enumerate(texts)}
    encoded = scorer.encode_texts(texts)
    image_of = _filled([[image_row[name] for name in question.images] for question in questions])
    text_of = _filled([[text_row[text] for text in question.captions] for question in questions])
    num_images = len({name for question in questions for name in question.images})
    rows = image_of.to(scorer.device), text_of.to(scorer.device)
    return EncodedQuestions(questions, images, encoded.payload, *rows, num_images), encoded


def _filled(rows: Sequence[Sequence[int]]) -> Int64[Tensor, "rows most"]:
    """Rows of different lengths, filled up with -1."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows])


# Payload of images, rows of it, payload of captions, rows of it -> scores; `Scorer.score_pairs`.
ScorePairs = Callable[[Any, Tensor, Any, Tensor], Float[Tensor, " pairs"]]


def answer(encoded: EncodedQuestions, score_pairs: ScorePairs) -> Answers:
    """Score all images of each question with all of its captions, and judge.

    Args:
        encoded: the questions.
        score_pairs: the scorer's.

    Raises:
        ValueError: scores that are not finite.
    """
    return judge(*question_scores(encoded, score_pairs))


@torch.no_grad()
def question_scores(
    encoded: EncodedQuestions, score_pairs: ScorePairs
) -> tuple[Float[Tensor, "questions images captions"], Int64[Tensor, "questions images"]]:
    """Scores of all images of each question with all of its captions, and matches: the arguments of `judge`.

    Args:
        encoded: the questions.
        score_pairs: the scorer's.

    Raises:
        ValueError: scores that are not finite.
    """
    is_pair = (encoded.image_of >= 0)[:, :, None] & (encoded.text_of >= 0)[:, None, :]
    number, image, text = is_pair.nonzero().unbind(dim=1)
    pairs = score_pairs(encoded.images, encoded.image_of[number, image], encoded.texts, encoded.text_of[number, text])
    if not pairs.isfinite().all():
        raise ValueError("the scores are not finite; the model is broken or overflowed")
    scores = torch.full(is_pair.shape, -torch.inf, device=pairs.device)
    scores[is_pair] = pairs
    return scores, _filled([question.matches for question in encoded.questions]).to(pairs.device)


def judge(scores: Float[Tensor, "questions images captions"], matches: Int64[Tensor, "questions images"]) -> Answers:
    """Answers by scores.

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
    """Of each question the image and the false caption with the greatest S(i, c) - S(i, m_i).

    Args:
        scores: as for `judge`.
        matches: likewise.
    """
    own_caption = matches.clamp(min=0)[:, :, None]
    own = scores.gather(2, own_caption)[:, :, 0]
    best, caption = scores.scatter(2, own_caption, -torch.inf).max(dim=2)
    margins = torch.where(matches >= 0, best - own, -torch.inf)
    image = margins.argmax(dim=1, keepdim=True)
    return Confusions(image[:, 0], *(column.gather(1, image)[:, 0] for column in (caption, own, best)))


def by_split(
    questions: Sequence[Question], right: Bool[Tensor, " questions"], tied: Bool[Tensor, " questions"]
) -> dict[str, SplitResult]:
    """Accuracy of each split, in the order of the questions.

    Args:
        questions: what was asked.
        right: of `Answers`.
        tied: likewise.
    """
    answers: dict[str, list[tuple[bool, bool]]] = {}
    for question, *each in zip(questions, right.tolist(), tied.tolist(), strict=True):
        answers.setdefault(question.split, []).append((each[0], each[1]))
    results = {}
    for split, each in answers.items():
        hits, ties = map(sum, zip(*each, strict=True))
        results[split] = SplitResult(100 * hits / len(each), len(each), ties)
    return results


def macro(results: dict[str, SplitResult]) -> float:
    """The mean over the splits of their accuracies, in percent."""
    return sum(result.accuracy for result in results.values()) / len(results)


def micro(results: dict[str, SplitResult]) -> float:
    """The share of all questions that are right, in percent."""
    total = sum(result.num_questions for result in results.values())
    return sum(result.accuracy * result.num_questions for result in results.values()) / total

"""Annotation files -> questions with true and false captions -> a scorer's answers, some images at a time.

images  captions  matches
1       2         (0,)         SugarCrepe, ARO, VL-CheckList: a true and a false caption
1       4 or 5    (0,)         What'sUp, the order of words in captions of COCO and Flickr
2       2         (0, 1)       Winoground: each image has its caption
twice   3         (0, 1)       SugarCrepe++: one image, given twice, with two true captions and a false one
2 to 9  1         (0, -1)      SPEC: one caption, which is true of one image

The rule: right means strictly greater. Equal scores count as wrong, and ties are counted, so that a model which cannot
distinguish captions gains nothing.

Questions are sorted by the file of their first image, so that an image that several benchmarks share is decoded once.
`chunk_images` bounds the memory: OC-CLIP keeps 0.4 MB per image. A caption is encoded once per part.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.evaluation.features import WARNINGS
from dino_sparo.image_text.evaluation.compositional.journal import Journal, Part, Table
from dino_sparo.image_text.evaluation.protocol import ROOT, Cell, Crop, ImageName, file_of, named_source
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import read_json

logger = logging.getLogger(__name__)

CHUNK_IMAGES = 2048


class Question(NamedTuple):
    """Images, captions, and which image matches which caption.

    Attributes:
        split: kind of the question; accuracy is reported per split.
        images: file names, parts of such images, or images in a table. An image that is given twice has two captions,
            which do not compete.
        captions: true and false ones.
        matches: index of each image's true caption in `captions`, -1 for none; images have different ones.
    """

    split: str
    images: tuple[ImageName, ...]
    captions: tuple[str, ...]
    matches: tuple[int, ...] = (0,)


def questions_of(
    path: Path, entries: Iterable[tuple[str, Any]], make: Callable[[Any], Question | None], expected: str
) -> Iterator[Question]:
    """The checked questions of a file's entries.

    Args:
        path: the file, for messages.
        entries: name for messages (`entry 3`), and content of any type.
        make: content -> question, None to skip the entry; may raise whatever an unexpected type raises.
        expected: valid content, for messages.

    Raises:
        ValueError: an entry is not a question; the message names file and entry.
    """
    for name, entry in entries:
        try:
            question = make(entry)
            if question is None:
                continue
            names = [image.name if isinstance(image, Crop | Cell) else image for image in question.images]
            for text in (question.split, *question.captions, *names):
                if not isinstance(text, str):
                    raise UserError(f"{text!r:.80} is not text")
                text.encode()  # a lone surrogate has no UTF-8
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise UserError(f"{path}, {name}: expected {expected}; {reason}") from error
        yield question


def json_reader(
    files: Mapping[str, str], make: Callable[[str, Any], Question | None], expected: str, keyed: bool = False
) -> Callable[[Path], Iterator[Question]]:
    """Folder -> the questions of the JSON lists that the folder holds.

    Args:
        files: split -> name of its file.
        make: split and entry of a list -> question, or None; otherwise as in `questions_of`.
        expected: valid entries, for messages.
        keyed: also read the values of an object in place of a list.
    """

    def read(folder: Path) -> Iterator[Question]:
        for split, name in files.items():
            path = folder / name
            if not path.is_file():
                continue
            entries = read_json(path, has_unique_keys=True)
            if not isinstance(entries, list | dict if keyed else list):
                raise UserError(f"{path}: expected a list of {expected}; found {type(entries).__name__}")
            rows = entries.items() if isinstance(entries, dict) else enumerate(entries)
            named = ((f"entry {key!r}", row) for key, row in rows)
            yield from questions_of(path, named, partial(make, split), expected)

    return read


def list_of(value: Any, length: int | None = None) -> list[Any]:
    """A list in an entry, optionally of a fixed length; raises ValueError for anything else, such as a text."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise UserError(f"{value!r:.80} is not a list" + (f" of {length}" if length else ""))
    return value


def first_keys(path: Path) -> set[str]:
    """Keys of the first entry of a JSON list or object; none if there is no such entry."""
    try:
        entries = read_json(path)
        first = next(iter(entries.values() if isinstance(entries, dict) else entries))
        return set(first) if isinstance(first, dict) else set()
    except (OSError, ValueError, StopIteration, TypeError):
        return set()


# Answers.


class Answer(NamedTuple):
    """A scorer's answer to a question.

    Attributes:
        text: each image prefers its own caption to all others of the question.
        image: the caption of each image prefers that image to all others.
        text_tied: an image has equal scores for its own caption and the best of the others.
        image_tied: a caption has equal scores for its own image and the best of the others.
        worst_image: index of the image with the greatest difference between the best false score and the true score.
        false_caption: index of the best false caption of that image.
        true_score: score of that image with its own caption.
        false_score: score of that image with the false caption.
        marks: name -> whether it holds for one of the captions: `truncated`, `alike` (another caption has the tokens of
            the true caption), or a mark of this model.
        scores: of every image of the question with every caption.
    """

    text: bool
    image: bool
    text_tied: bool
    image_tied: bool
    worst_image: int
    false_caption: int
    true_score: float
    false_score: float
    marks: Mapping[str, bool] = MappingProxyType({})
    scores: Sequence[Sequence[float]] = ()

    @property
    def margin(self) -> float:
        """The false score above the true score; positive for an error."""
        return self.false_score - self.true_score


def judge(
    scores: Float[Tensor, "questions images captions"],
    matches: Int64[Tensor, "questions images"],
    image_of: Int64[Tensor, "questions images"] | None = None,
) -> list[Answer]:
    """Scores -> answers, without marks.

        text   S(i, m_i) > S(i, c)   for all images i and captions c that are not true of i
        image  S(i, m_i) > S(j, m_i) for all images i and j other than i

    Args:
        scores: S of every image and caption, padded with -inf.
        matches: m, index of the true caption of each image, padded with -1.
        image_of: row of each image; images of one row are the same image. None: all images differ.
    """
    is_image = matches >= 0
    caption_of = matches.clamp(min=0)[:, :, None]
    is_same = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device).expand(len(scores), -1, -1)
    if image_of is not None:
        is_same = image_of[:, :, None] == image_of[:, None, :]
    is_match = matches[:, :, None] == torch.arange(scores.shape[2], device=scores.device)
    is_true = (is_same.float() @ is_match.float()) > 0  # also the captions of the same image
    true_scores = scores.gather(2, caption_of)[:, :, 0]
    best_caption, caption = scores.masked_fill(is_true, -torch.inf).max(dim=2)
    by_caption = scores.gather(2, caption_of.mT.expand(-1, scores.shape[1], -1))  # image j, caption of image i
    best_image = by_caption.masked_fill(is_same, -torch.inf).amax(dim=1)
    right = [((true_scores > best) | ~is_image).all(dim=1) for best in (best_caption, best_image)]
    ties = [((true_scores == best) & is_image).any(dim=1) for best in (best_caption, best_image)]
    worst = torch.where(is_image, best_caption - true_scores, -torch.inf).argmax(dim=1, keepdim=True)
    confusion = [column.gather(1, worst)[:, 0] for column in (caption, true_scores, best_caption)]
    columns = (column.tolist() for column in (*right, *ties, worst[:, 0], *confusion))
    return [Answer(*row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class EncodedQuestions:
    """Questions whose images can be read, on every process.

    Attributes:
        questions: the questions.
        images: payload of the different images.
        texts: payload of the different captions.
        image_of: (questions, images), rows of a question's images in `images`, padded with -1.
        text_of: (questions, captions), rows of a question's captions in `texts`, padded with -1.
        numbers: index of each question in the list that was to be encoded.
        marks: marks of each question, as in `Answer`.
        num_truncated: number of different captions that are longer than the context.
    """

    questions: list[Question]
    images: Any
    texts: Any
    image_of: Int64[Tensor, "questions images"]
    text_of: Int64[Tensor, "questions captions"]
    numbers: Sequence[int] = ()
    marks: Sequence[Mapping[str, bool]] = ()
    num_truncated: int = 0


def captions_of(questions: Sequence[Question]) -> list[str]:
    """The different captions of all questions, in order."""
    return list(dict.fromkeys(text for question in questions for text in question.captions))


@torch.no_grad()
def encode_questions(
    scorer: Scorer, questions: Sequence[Question], limits: ImageLimits = DEFAULT_LIMITS
) -> EncodedQuestions | None:
    """Encode every image and every caption once; None if no question has its images."""
    names = list(dict.fromkeys(name for question in questions for name in question.images))
    images = scorer.encode_images(named_source(ROOT, names, list(map(file_of, names)), limits))
    image_row = {names[index]: row for row, index in enumerate(images.indices.tolist())}
    numbers = [n for n, question in enumerate(questions) if all(name in image_row for name in question.images)]
    if not numbers:
        return None
    readable = [questions[number] for number in numbers]
    captions = captions_of(readable)
    text_row = {text: row for row, text in enumerate(captions)}
    texts = scorer.encode_texts(captions)
    image_of = _filled([[image_row[name] for name in question.images] for question in readable])
    text_rows = [[text_row[text] for text in question.captions] for question in readable]
    text_marks = {name: values.tolist() for name, values in texts.marks.items()}
    marks = [{name: any(values[row] for row in rows) for name, values in text_marks.items()} for rows in text_rows]
    if texts.alike is not None:
        alike = texts.alike.tolist()
        for question_marks, rows, question in zip(marks, text_rows, readable, strict=True):
            question_marks["alike"] = [alike[row] for row in rows].count(alike[rows[question.matches[0]]]) > 1
    places = image_of.to(scorer.device), _filled(text_rows).to(scorer.device)
    return EncodedQuestions(readable, images.payload, texts.payload, *places, numbers, marks, texts.num_truncated)


def _filled(rows: Sequence[Sequence[int]]) -> Int64[Tensor, "rows most"]:
    """Rows of different lengths, padded with -1."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows])


# Payload of images, rows of it, payload of captions, rows of it -> scores; `Scorer.score_pairs`.
ScorePairs = Callable[[Any, Tensor, Any, Tensor], Float[Tensor, " pairs"]]


def judge_tables(
    questions: Sequence[Question], tables: Sequence[Table], marks: Sequence[Mapping[str, bool]]
) -> list[Answer]:
    """The answers that follow from the scores of each question."""
    shape = max(len(question.images) for question in questions), max(len(question.captions) for question in questions)
    scores = torch.full((len(questions), *shape), -torch.inf)
    for number, table in enumerate(tables):
        scores[number, : len(table), : len(table[0])] = torch.tensor(table)
    image_of = _filled([[question.images.index(name) for name in question.images] for question in questions])
    answers = judge(scores, _filled([question.matches for question in questions]), image_of)
    rows = zip(answers, marks, tables, strict=True)
    return [answer._replace(marks=each, scores=table) for answer, each, table in rows]


@torch.no_grad()
def tables_of(encoded: EncodedQuestions, score_pairs: ScorePairs) -> list[Table]:
    """The scores of each question; raises ValueError for scores that are not finite."""
    is_pair = (encoded.image_of >= 0)[:, :, None] & (encoded.text_of >= 0)[:, None, :]
    number, image, text = is_pair.nonzero().unbind(dim=1)
    rows = encoded.image_of[number, image], encoded.text_of[number, text]
    pairs = score_pairs(encoded.images, rows[0], encoded.texts, rows[1])
    if not pairs.isfinite().all():
        raise UserError("the scores are not finite; the model is broken or overflowed")
    remaining = iter(pairs.tolist())
    return [[list(islice(remaining, len(q.captions))) for _ in q.images] for q in encoded.questions]


def answers_to(encoded: EncodedQuestions, score_pairs: ScorePairs) -> list[Answer]:
    """The answer to each question; raises ValueError for scores that are not finite."""
    marks = encoded.marks or [{}] * len(encoded.questions)
    return judge_tables(encoded.questions, tables_of(encoded, score_pairs), marks)


def ask(scorer: Scorer, questions: Sequence[Question], asked: list[int], limits: ImageLimits) -> Part:
    """Ask some of the questions."""
    known = len(WARNINGS)
    encoded = encode_questions(scorer, [questions[index] for index in asked], limits)
    if encoded is None:
        return Part(asked, [], [], [], WARNINGS[known:])
    answered = [asked[row] for row in encoded.numbers]
    tables = tables_of(encoded, scorer.score_pairs)
    return Part(asked, answered, tables, list(encoded.marks), WARNINGS[known:])


def answer_questions(
    scorer: Scorer,
    questions: Sequence[Question],
    chunk_images: int = CHUNK_IMAGES,
    limits: ImageLimits = DEFAULT_LIMITS,
    journal: Journal | None = None,
) -> list[Answer | None]:
    """Answer all questions; `chunk_images` is the largest number of images encoded at a time.

    Args:
        scorer: the model.
        questions: the questions.
        chunk_images: as above.
        limits: of the images.
        journal: questions that it holds are not asked again.

    Returns:
        The answer to each question, None where an image cannot be read.
    """
    answers: list[Answer | None] = [None] * len(questions)

    def note(part: Part) -> None:
        if part.answered:
            found = judge_tables([questions[index] for index in part.answered], part.tables, part.marks)
            for index, answer in zip(part.answered, found, strict=True):
                answers[index] = answer

    open_questions = set(range(len(questions)))
    for part in journal.read() if journal else ():
        WARNINGS.extend(part.warnings)
        note(part)
        open_questions -= set(part.asked)
    remaining = sorted(open_questions)
    if remaining:
        scorer.expect_texts(captions_of([questions[index] for index in remaining]))
    parts = chunks([questions[index] for index in remaining], chunk_images)
    begin, done = time.monotonic(), 0
    for number, rows in enumerate(parts):
        left = (time.monotonic() - begin) / max(1, done) * (len(remaining) - done)
        eta = f", ETA {timedelta(seconds=round(left))}" if done else ""
        logger.info("part %d of %d: %d questions%s", number + 1, len(parts), len(rows), eta)
        done += len(rows)
        note(part := ask(scorer, questions, [remaining[row] for row in rows], limits))
        if journal:
            journal.append(part)
    return answers


def chunks(questions: Sequence[Question], chunk_images: int) -> list[list[int]]:
    """Indices of the questions in equal parts of at most `chunk_images` images; questions about a file lie together."""
    if not questions:
        return []
    order = sorted(range(len(questions)), key=lambda index: file_of(questions[index].images[0]))
    counts = np.array([len(questions[index].images) for index in order])
    room = max(1, chunk_images - int(counts.max()) + 1)
    starts = counts.cumsum() - counts
    part_of = starts * math.ceil(counts.sum() / room) // counts.sum()
    return [part.tolist() for part in np.split(order, np.flatnonzero(np.diff(part_of)) + 1)]


def with_shuffled_images(
    questions: Sequence[Question], seed: int, group_of: Callable[[Question], str]
) -> list[Question]:
    """Each question with the images of the next question of its group, in a random order.

    A model that still answers correctly does not need the images. `group_of` is the `blind_group` of a benchmark.
    """
    rng = np.random.default_rng(seed)
    by_group: dict[str, list[int]] = defaultdict(list)
    for index, question in enumerate(questions):
        by_group[group_of(question)].append(index)
    shuffled = list(questions)
    for indices in by_group.values():
        order = rng.permutation(indices)
        for here, there in zip(order, np.roll(order, 1), strict=True):
            shuffled[here] = questions[here]._replace(images=questions[there].images)
    return shuffled

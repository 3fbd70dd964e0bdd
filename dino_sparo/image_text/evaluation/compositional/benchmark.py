"""A benchmark of true and false captions: its files, a reader into questions, averages, and its own rule for ties.

A new benchmark is a file in `sets/` and one line of the table there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.image_text.evaluation.questions import Answers, Question, check_question
from dino_sparo.runtime.files import parse_json

# Split -> how much it counts in a mean; the weights of a mean sum to one.
Weights = dict[str, float]


class Outcome(NamedTuple):
    """One comparison that counts in an accuracy.

    Attributes:
        split: whose accuracy it counts in.
        question: its number.
        right: whether the true one is strictly greater.
        tied: whether the best false one has an equal score; then it is not right.
    """

    split: str
    question: int
    right: bool
    tied: bool


def one_per_question(questions: Sequence[Question], answers: Answers) -> list[Outcome]:
    """The image prefers its caption to all others."""
    columns = zip(questions, answers.text.tolist(), answers.text_tied.tolist(), strict=True)
    return [Outcome(question.split, number, *answer) for number, (question, *answer) in enumerate(columns)]


def equal_means(splits: Collection[str]) -> dict[str, Weights]:
    """One macro average, in which every split counts the same; none without splits."""
    return {"macro": dict.fromkeys(splits, 1 / len(splits))} if splits else {}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: on the command line and in result files.
        title: in tables.
        files: its annotations; a folder that holds one of them holds the benchmark.
        read: folder -> questions, whose images are named from one of the folders in `images`.
        images: folders where the images may lie, seen from the annotations, the folder above, and --data_root.
        source: where to get it.
        chance: accuracy of guessing, percent; of every split, or by its name.
        counts: questions per split of the whole benchmark, where known.
        total: questions in all, where known.
        tie_credit: value of a tie in the benchmark's own code, on average: 1 where that code lists the true caption
            first and takes the first of the greatest.
        means: counts -> averages by name; empty where the splits are not to be averaged.
        outcomes: questions and answers -> comparisons that count.
        more: questions and their values, 0 to 1 -> further accuracies, percent.
        part_of: question -> the part of the images that it needs; one may have a part without the others.
        blind_group: question -> the group within which images are exchanged, for a control; by default its split, which
            must not give away the answer.
        is_own: whether a folder with such files is this benchmark's.
    """

    name: str
    title: str
    files: tuple[str, ...]
    read: Callable[[Path], Iterable[Question]]
    images: tuple[str, ...]
    source: str
    chance: float | Mapping[str, float] = 50.0
    counts: Mapping[str, int] = field(default_factory=dict)
    total: int | None = None
    tie_credit: float = 0.0
    means: Callable[[Mapping[str, int]], dict[str, Weights]] = equal_means
    outcomes: Callable[[Sequence[Question], Answers], list[Outcome]] = one_per_question
    more: Callable[[Sequence[Question], Sequence[float]], dict[str, float]] = field(default=lambda questions, worth: {})
    part_of: Callable[[Question], str] = field(default=lambda question: "the images")
    blind_group: Callable[[Question], str] = field(default=lambda question: question.split)
    is_own: Callable[[Path], bool] = field(default=lambda folder: True)

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds it, or a part of it."""
        return bool(self.own_files(folder)) and self.is_own(folder)

    def own_files(self, folder: Path) -> list[str]:
        """Those of its annotation files that a folder holds."""
        return [name for name in self.files if (folder / name).is_file()]

    def chance_of(self, split: str) -> float:
        """Accuracy of guessing in a split, percent."""
        return self.chance[split] if isinstance(self.chance, Mapping) else self.chance


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises ValueError with the path."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); is the download complete?") from error


def questions_of(
    path: Path, entries: Iterable[tuple[Any, Any]], make: Callable[[Any], Question], expected: str
) -> Iterator[Question]:
    """The questions of a file's entries, checked; all readers use this function.

    Args:
        path: the file, for messages.
        entries: name for messages (`entry 3`), and content of any type.
        make: content -> question; may raise whatever an unexpected type raises.
        expected: valid content, for messages.

    Raises:
        ValueError: an entry is no question.
    """
    for name, entry in entries:
        try:
            question = make(entry)
            check_question(question)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise ValueError(f"{path}, {name}: expected {expected}; {reason}") from error
        yield question


def read_entries(path: Path, make: Callable[[Any], Question], expected: str) -> Iterator[Question]:
    """The questions of a JSON list; arguments and errors as for `questions_of`."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of {expected}; found {type(entries).__name__}")
    return questions_of(path, ((f"entry {number}", entry) for number, entry in enumerate(entries)), make, expected)


def read_splits(
    folder: Path, files: Mapping[str, str], make: Callable[[str, Any], Question], expected: str
) -> Iterator[Question]:
    """The questions of those files (split -> name) of a folder that are there; `make` gets split and entry."""
    for split, file in files.items():
        if (folder / file).is_file():
            yield from read_entries(folder / file, partial(make, split), expected)


def list_of(value: Any, length: int | None = None) -> list[Any]:
    """A list in an entry, perhaps of a fixed length; raises ValueError for anything else, such as a text."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError(f"{value!r:.80} is no list" + (f" of {length}" if length else ""))
    return value

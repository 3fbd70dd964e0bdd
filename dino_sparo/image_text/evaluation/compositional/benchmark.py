"""What a benchmark of true and false captions is, and what of it lies in a folder.

A new benchmark is a generator of `Question`s and one entry of `registry.BENCHMARKS`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.data.sources.limits import parse_json
from dino_sparo.image_text.evaluation.questions import Answers, Question

# Split -> how much it counts in a mean; the weights of a mean sum to one.
Weights = dict[str, float]
Read = Callable[[Path], Iterable[Question]]


class Outcome(NamedTuple):
    """What counts as one answer.

    Attributes:
        split: whose accuracy it counts in.
        question: its number.
        right: whether all that was compared is strictly greater.
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


def no_means(counts: Mapping[str, int]) -> dict[str, Weights]:
    """None: the splits are scores of the same questions."""
    return {}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: on the command line and in result files.
        title: in tables.
        files: its annotations; a folder that holds one of them holds the benchmark.
        read: folder -> questions. Names of images start from one of `images`.
        images: folders where the images may lie, seen from the annotations, the folder above, and --data_root.
        source: where to get it.
        chance: accuracy of guessing, percent; of every split, or by its name.
        counts: questions per split of the whole benchmark, where that is known.
        total: questions in all, likewise.
        tie_credit: what its own code gives for a tie, on average: 1 where it lists the true caption first and takes the
            first of the greatest.
        means: counts -> averages by name; empty where the splits are not to be averaged.
        outcomes: questions and answers -> what counts as one answer.
        more: questions and what each is worth, 0 to 1 -> further accuracies, percent.
        part_of: question -> the part of the images that it needs, which one may have without the others.
        blind_group: question -> the group within which images are exchanged, for a control; by default its split, which
            must not tell the answer.
        is_own: whether a folder with such files is this benchmark's.
    """

    name: str
    title: str
    files: tuple[str, ...]
    read: Read
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
        return any((folder / name).is_file() for name in self.files) and self.is_own(folder)

    def missing_files(self, folder: Path) -> list[str]:
        """Annotations that a folder lacks."""
        return [name for name in self.files if not (folder / name).is_file()]

    def chance_of(self, split: str) -> float:
        """Accuracy of guessing in a split, percent."""
        return self.chance[split] if isinstance(self.chance, Mapping) else self.chance


def read_splits(
    folder: Path, files: Mapping[str, str], make: Callable[[str, Any], Question], expected: str
) -> Iterator[Question]:
    """The questions of those files of a folder that are there.

    Args:
        folder: where they lie.
        files: split -> file.
        make: split and entry -> question, as in `read_entries`.
        expected: likewise.
    """
    for split, file in files.items():
        if (folder / file).is_file():
            yield from read_entries(folder / file, partial(make, split), expected)


def caption_options(entry: Any, number: int) -> tuple[str, ...]:
    """So many captions of an entry, the true one first; ValueError if they are more or fewer."""
    captions = tuple(entry["caption_options"])
    if len(captions) != number:
        raise ValueError(f"{len(captions)} captions")
    return captions


def read_entries(path: Path, make: Callable[[Any], Question], expected: str) -> Iterable[Question]:
    """The questions of a JSON list.

    Args:
        path: the file.
        make: entry -> question; raises KeyError, IndexError, TypeError or ValueError for anything else.
        expected: what an entry should be, for the message.

    Raises:
        ValueError: the file is no list of such entries; the message names the first odd one.
    """
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); is the download complete?") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of {expected}; found {type(entries).__name__}")
    for number, entry in enumerate(entries):
        try:
            question = make(entry)
            texts = [question.split, *question.captions]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"captions {question.captions!r} are not all text")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}, entry {number}: expected {expected} ({error!r})") from error
        yield question

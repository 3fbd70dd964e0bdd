"""Answers of an evaluation in progress, in a file next to the result: a killed command resumes where it stopped.

    compositional_NAME.answers.jsonl   what the answers depend on; then one line per part of the questions

The file is removed when all results of the command are written. An incomplete line, of a process that was killed while
it wrote, and all lines after it are ignored. Answers to other questions, or of another model or other options, are
dropped.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.runtime.collectives import broadcast_object
from dino_sparo.runtime.files import plain, write_text, writing
from dino_sparo.runtime.launch import is_main

logger = logging.getLogger(__name__)

ENDING = ".answers.jsonl"
Table = list[list[float]]  # scores of each image of a question with each caption


class Part(NamedTuple):
    """Scores of some questions, in plain values.

    Attributes:
        asked: indices of the questions.
        answered: indices of those whose images can be read.
        tables: scores of each answered question.
        marks: of each answered question.
        warnings: of the features of the images, for the result.
    """

    asked: list[int]
    answered: list[int]
    tables: list[Table]
    marks: list[Mapping[str, bool]]
    warnings: list[str]


class Journal(NamedTuple):
    """The file of answers, and the settings that determine the answers."""

    path: Path
    key: str

    @classmethod
    def of(cls, result: Path, options: Mapping[str, Any], questions: Iterable[object]) -> "Journal":
        """The journal of a result file with these options and questions."""
        words = hashlib.sha256(json.dumps(plain(dict(options)), sort_keys=True).encode())
        for question in questions:
            words.update(repr(question).encode())
        return cls(result.with_name(result.stem + ENDING), words.hexdigest())

    def read(self) -> list[Part]:
        """The parts that are answered, on every process; all other lines are removed from the file."""
        parts = broadcast_object(self._valid() if is_main() else [])
        if is_main():
            lines = [json.dumps({"key": self.key}), *(json.dumps(part) for part in parts)]
            write_text("".join(f"{line}\n" for line in lines), self.path)  # whole, even if killed now
        if parts:
            logger.info("%s: %d questions are answered; resuming", self.path, sum(len(part.asked) for part in parts))
        return parts

    def _valid(self) -> list[Part]:
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        if lines[:1] != [json.dumps({"key": self.key})]:
            logger.warning("%s is of other questions, weights or options, and is overwritten", self.path)
            return []
        parts = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                parts.append(Part(*json.loads(line)))
            except (TypeError, ValueError):
                logger.warning(
                    "%s: line %d is unreadable; its questions and later ones are asked again", self.path, number
                )
                break
        return parts

    def append(self, part: Part) -> None:
        """Write the answers to a part, on rank 0."""
        if is_main():
            with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(part) + "\n")

    def remove(self) -> None:
        """Remove the file, on rank 0."""
        if is_main():
            self.path.unlink(missing_ok=True)

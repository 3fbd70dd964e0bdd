"""Caption -> scene graph, not yet normalised; `command.py` parses all captions of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from dino_sparo.oc_clip.graphs.graph import SceneGraph


class Outcome(NamedTuple):
    """Result of parsing a caption.

    Attributes:
        graph: not normalised; None if the parser found none.
        problem: reason why there is not a graph.
        is_unanswered: whether there is not a graph because there was no answer.
        dropped: relations left out because they are unary or "and".
    """

    graph: SceneGraph | None
    problem: str = ""
    is_unanswered: bool = False
    dropped: int = 0


class Parser(ABC):
    """Captions -> graphs. `record` describes the parser in result files."""

    record: dict[str, Any]

    @abstractmethod
    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order."""

    def __call__(self, caption: str) -> SceneGraph | None:
        """The graph of one caption."""
        return next(self.parse_all(iter([caption]))).graph

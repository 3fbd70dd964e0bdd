"""Caption -> its normalised scene graph, from a file or from a parser: `open_graphs`.

A file has one JSON object per line, as `dino-sparo parse` writes it and as tables of pairs are read:

    {"caption": "a dog on a mat", "entities": ["dog", "mat"],
     "relationships": [{"relationship": "on", "subject": 0, "object": 1}], "image": "7.jpg"}

`image` is optional. Every line is checked when the file is opened. The index has 16 bytes per line (its place and a
hash of its caption), so that loader workers share the graphs of 10^7 captions. Compressed files are refused.
"""

import contextlib
import hashlib
import json
import logging
import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64

from dino_sparo.data.dataset import most_corrupt
from dino_sparo.data.sources.indexes import Arrays, load_index, save_index
from dino_sparo.oc_clip.graphs.graph import LookupCounts, SceneGraph, comparable, normalize
from dino_sparo.oc_clip.options import MAX_NODES, MAX_RELATIONS
from dino_sparo.oc_clip.parsers import Parser
from dino_sparo.oc_clip.parsers.spacy_rules import SpacyParser
from dino_sparo.oc_clip.parsers.templates import TemplateParser
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import file_sha256, open_regular, parse_object, writing
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

Find = Callable[[str], SceneGraph | None]

# Name -> builder of a parser.
PARSERS: dict[str, Callable[[], Parser]] = {"templates": TemplateParser, "spacy": SpacyParser}
MAX_MISSING = 0.01


@dataclass(eq=False)
class CaptionGraphs:
    """The graph of any caption, normalised.

    Attributes:
        find: caption -> graph, not normalised; None if the caption has none.
        record: description of the graphs for result files: the parser, or file and hash; and both caps.
        max_nodes: largest number of entities.
        max_relations: largest number of relations.
        max_missing: share of captions without a graph that `check` tolerates.
    """

    find: Find
    record: Mapping[str, Any]
    max_nodes: int = MAX_NODES
    max_relations: int = MAX_RELATIONS
    max_missing: float = MAX_MISSING

    def __post_init__(self) -> None:
        self.record = {**self.record, "max_nodes": self.max_nodes, "max_relations": self.max_relations}

    def __call__(self, caption: str) -> SceneGraph:
        """The graph of a caption; a caption without a graph becomes one entity."""
        return self.lookup(caption)[0]

    def lookup(self, caption: str) -> tuple[SceneGraph, LookupCounts]:
        """The graph of a caption, and the counts of this lookup."""
        return self.normalized(self.find(caption), caption)

    def normalized(self, graph: SceneGraph | None, caption: str) -> tuple[SceneGraph, LookupCounts]:
        """A graph from elsewhere, such as a shard, within the same caps; None if the caption has none."""
        normalised, counts = normalize(graph or SceneGraph(()), caption, self.max_nodes, self.max_relations)
        return normalised, counts._replace(missing=int(graph is None))

    def check(self, counts: LookupCounts) -> None:
        """Raise ValueError if more captions have no graph than `max_missing` allows."""
        if counts.missing > most_corrupt(self.max_missing, counts.captions):
            source = next((self.record[key] for key in ("file", "shards", "parser") if key in self.record), "memory")
            raise UserError(
                f"{counts.missing:,} of {counts.captions:,} captions have no graph in {source}; at most "
                f"{self.max_missing:.3g} of them may be missing. Parse these captions with dino-sparo parse; or raise "
                "--max_missing_graphs (for a training --max_corrupt), so that each of these captions becomes one entity"
            )


def open_graphs(spec: str | Find, **caps: Any) -> CaptionGraphs:
    """Graphs of a parser or of a file.

    Args:
        spec: a key of `PARSERS`, the path of a file, or a function from a caption to its graph.
        caps: `max_nodes`, `max_relations` and `max_missing` of `CaptionGraphs`.

    Raises:
        ValueError: there is no such parser or file; the file has no line; a line has no caption or is not a graph
            (`file:line`); or a caption stands there twice with different graphs.
    """
    if not isinstance(spec, str):
        return CaptionGraphs(spec, {"parser": repr(spec)}, **caps)
    if spec in PARSERS:
        parser = PARSERS[spec]()
        return CaptionGraphs(parser, parser.record, **caps)
    path = Path(spec)
    if not path.is_file() or path.suffix == ".gz":
        raise UserError(
            f"graphs={spec!r} is not a file of graphs; give {', '.join(PARSERS)}, or a .jsonl file that dino-sparo "
            "parse wrote, not compressed"
        )
    file = open_graph_file(path)
    if not len(file):
        raise UserError(f"graphs={spec!r} has no line; run dino-sparo parse again to write the file")
    logger.info("%s: graphs of %d captions", path, len(file))
    return CaptionGraphs(file, {"file": str(path), "sha256": file.sha256, "captions": len(file)}, **caps)


def graph_record(caption: str, graph: SceneGraph, image: str | None = None) -> dict[str, Any]:
    """A line of a file of graphs."""
    picture = {} if image is None else {"image": image}
    return {**picture, "caption": caption, **graph.to_json()}


# The index of a file.


def caption_bytes(caption: str) -> bytes:
    """A caption without blanks around it; captions are compared in this form."""
    return caption.strip().encode("utf-8", "replace")


def hash_of(text: bytes) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(eq=False)
class GraphFile:
    """Caption -> graph, read at its position in a file.

    Attributes:
        hashes: (U,), of the different captions, sorted; two captions of one hash are not expected.
        offsets: (U,), first byte of each line.
        sha256: of the file.
    """

    path: Path
    hashes: UInt64[np.ndarray, " U"]
    offsets: Int64[np.ndarray, " U"]
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.hashes)

    def __call__(self, caption: str) -> SceneGraph | None:
        """The graph as it stands in the file; None if the caption is not there."""
        wanted = caption_bytes(caption)
        value = np.uint64(hash_of(wanted))
        number = int(np.searchsorted(self.hashes, value))
        if number == len(self) or self.hashes[number] != value:
            return None
        text, graph = self.read(number)
        return graph if caption_bytes(text) == wanted else None

    def read(self, number: int) -> tuple[str, SceneGraph]:
        """Caption and graph of line `number` in the order of the hashes; ValueError if the file changed."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[number])
            line = file.readline()
        return _caption_and_graph(line, f"{self.path}, changed since it was opened, at byte {self.offsets[number]}")


def open_graph_file(path: Path) -> GraphFile:
    """Check all lines of a file, or take its index from the user's cache.

    The index is found by the SHA-256 of the file, which result files contain anyway.

    Raises:
        ValueError: see `open_graphs`.
    """
    path = path.absolute()
    sha256 = file_sha256(path)
    key = f"graphs {path} {sha256}"
    arrays = load_index(key)
    if arrays is None:
        arrays = _index(path)
        if problem := save_index(key, arrays):
            logger.info("the index is not cached: %s", problem)
    return GraphFile(path, arrays["hashes"], arrays["offsets"], sha256)


def _caption_and_graph(line: bytes, location: str) -> tuple[str, SceneGraph]:
    record = parse_object(line, location)
    caption = record.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        raise UserError(f"{location}: 'caption' is {caption!r}; give the caption's text")
    try:
        return caption, SceneGraph.from_json(record)
    except ValueError as error:
        raise UserError(f"{location}: {error}") from error


def _index(path: Path) -> Arrays:
    """Hash and position of the first line of every caption; all lines are checked."""
    hashes, offsets = array("Q"), array("q")
    for number, offset, line in progress(read_lines(path), desc=f"checking the graphs of {path}"):
        hashes.append(hash_of(caption_bytes(_caption_and_graph(line, f"{path}:{number}")[0])))
        offsets.append(offset)
    order = np.argsort(np.array(hashes, dtype=np.uint64), kind="stable")
    file = GraphFile(path, np.array(hashes, dtype=np.uint64)[order], np.array(offsets, dtype=np.int64)[order])
    is_first = np.diff(file.hashes, prepend=file.hashes[:1] + np.uint64(1)) != 0
    for number in np.flatnonzero(~is_first).tolist():
        lines = [file.read(at) for at in (number - 1, number)]
        one, other = (comparable(graph, caption) for caption, graph in lines)
        if one != other:
            content = path.read_bytes()
            places = [1 + content.count(b"\n", 0, int(file.offsets[at])) for at in (number - 1, number)]
            raise UserError(
                f"{path}:{places[1]}: {lines[1][0]!r} has another graph than in line {places[0]}; a caption has one "
                "graph, so remove one of the two"
            )
    return {"hashes": file.hashes[is_first], "offsets": file.offsets[is_first]}


# Lines.


@contextlib.contextmanager
def append_lines(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open a file, to which the function appends JSON objects, one per line, each with one call of the system.

    A process that is killed, or a full disk, may leave part of a line at the end. Opening the file cuts that part off.
    The function raises OSError with path and remedy if the disk is full.
    """
    with path.open("ab", buffering=0) as file:
        if file.tell():  # an empty file cannot be mapped
            with path.open("rb") as whole, mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            file.truncate(end)

        def append(record: dict[str, Any]) -> None:
            line = json.dumps(record).encode() + b"\n"
            with writing(path):
                while line:
                    line = line[file.write(line) :]

        yield append


def read_lines(path: Path | str) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, first byte, and bytes of every line that is not blank."""
    offset = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)

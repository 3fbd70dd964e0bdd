"""Caption -> its normalised scene graph, from a file or from a parser: `open_graphs`.

A file has one JSON object per line, as `dino-sparo parse` writes it and as tables of pairs are read:

    {"caption": "a dog on a mat", "entities": ["dog", "mat"],
     "relationships": [{"relationship": "on", "subject": 0, "object": 1}], "image": "7.jpg"}

`image` is optional. Every line is checked once, when the file is opened; what is kept of it is where it lies and a hash
of its caption (20 bytes), so that loader workers share the graphs of 10^7 captions. Compressed files are refused.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from dino_sparo.data import most_corrupt
from dino_sparo.oc_clip.canonical import canonical
from dino_sparo.oc_clip.graphs import MAX_NODES, MAX_RELATIONS, SceneGraph, normalize
from dino_sparo.oc_clip.json_lines import JsonLines, parse_line, read_lines
from dino_sparo.oc_clip.parsers.spacy_rules import SpacyParser
from dino_sparo.oc_clip.parsers.templates import parse_caption
from dino_sparo.runtime.logs import progress
from dino_sparo.runtime.records import file_sha256
from dino_sparo.sources.cache import load_or_index
from dino_sparo.sources.packed import Arrays

Find = Callable[[str], SceneGraph | None]

# Name -> a parser; built when it is asked for.
PARSERS: dict[str, Callable[[], Find]] = {"templates": lambda: parse_caption, "spacy": SpacyParser}
MAX_MISSING = 0.01


class LookupCounts(NamedTuple):
    """What happened when graphs were looked up; sums over captions.

    Attributes:
        captions: looked up.
        missing: not in the file; such a caption became one entity.
        whole_caption: all that became one entity: missing, or without an entity that the parser found.
        nodes: entities beyond the cap, dropped.
        dangling: relations dropped because one of their entities was.
        loops: relations of an entity with itself, dropped.
        relations: relations beyond the cap, dropped.
    """

    captions: int = 0
    missing: int = 0
    whole_caption: int = 0
    nodes: int = 0
    dangling: int = 0
    loops: int = 0
    relations: int = 0

    def plus(self, other: "LookupCounts") -> "LookupCounts":
        """The sums of both."""
        return LookupCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        names = {
            "missing": "missing",
            "whole_caption": "as one entity",
            "nodes": "entities beyond the cap",
            "dangling": "relations of such entities",
            "loops": "relations of an entity with itself",
            "relations": "relations beyond the cap",
        }
        changed = [f"{getattr(self, field):,} {name}" for field, name in names.items() if getattr(self, field)]
        return ", ".join([f"{self.captions:,} captions", *changed])


class CaptionGraphs:
    """The graph of any caption, normalised.

    Args:
        find: caption -> graph as found; None where there is none.
        record: what a result file says of the graphs: parser, or file and hash.
        max_nodes: as in `graphs.normalize`.
        max_relations: likewise.
        max_missing: share of captions without a graph that `check` tolerates.

    Attributes:
        counts: sums over all calls of this object in this process. Workers of a loader have copies of it: they pass on
            what `lookup` returns.
        record: the same with both caps.
    """

    def __init__(
        self,
        find: Find,
        record: Mapping[str, Any],
        max_nodes: int = MAX_NODES,
        max_relations: int = MAX_RELATIONS,
        max_missing: float = MAX_MISSING,
    ) -> None:
        self.find, self.max_nodes, self.max_relations, self.max_missing = find, max_nodes, max_relations, max_missing
        self.record = {**record, "max_nodes": max_nodes, "max_relations": max_relations}
        self.counts = LookupCounts()

    def __call__(self, caption: str) -> SceneGraph:
        """The caption's graph; one entity, the whole caption, where there is none."""
        graph, counts = self.lookup(caption)
        self.counts = self.counts.plus(counts)
        return graph

    def lookup(self, caption: str) -> tuple[SceneGraph, LookupCounts]:
        """The same, and what happened; `counts` of this object stay as they are.

        Raises:
            ValueError: the caption has no words, or its line in the file is not what it was.
        """
        graph = self.find(caption)
        normalised, counts = self.normalized(graph or SceneGraph(()), caption)
        return normalised, counts._replace(missing=int(graph is None))

    def normalized(self, graph: SceneGraph, caption: str) -> tuple[SceneGraph, LookupCounts]:
        """A graph that was read elsewhere, such as in a shard, within the same caps."""
        normalised, counts = normalize(graph, caption, self.max_nodes, self.max_relations)
        return normalised, LookupCounts(captions=1, missing=0, **counts._asdict())

    def check(self, counts: LookupCounts | None = None) -> None:
        """Refuse to go on where too many captions have no graph.

        Args:
            counts: of the captions seen, from all workers; None: those of this object.

        Raises:
            ValueError: more of them are missing than `max_missing` allows.
        """
        counts = self.counts if counts is None else counts
        if counts.missing > most_corrupt(self.max_missing, counts.captions):
            raise ValueError(
                f"{counts.missing:,} of {counts.captions:,} captions have no graph in "
                f"{self.record.get('file', self.record.get('parser'))}; at most {self.max_missing:.3g} of them may be "
                "missing. Parse them with dino-sparo parse, or raise --max_corrupt"
            )


def open_graphs(
    spec: str,
    *,
    max_nodes: int = MAX_NODES,
    max_relations: int = MAX_RELATIONS,
    max_missing: float = MAX_MISSING,
) -> CaptionGraphs:
    """Graphs by the name of a parser or by a file.

    Args:
        spec: a key of `PARSERS`, or a file with one JSON object per line.
        max_nodes: largest number of entities.
        max_relations: largest number of relations.
        max_missing: see `CaptionGraphs.check`.

    Raises:
        ValueError: there is no such parser or file; a line has no caption or is no graph (`file:line`); or a caption
            stands there twice with different graphs.
        MissingPackageError: spaCy is not installed.
    """
    if spec in PARSERS:
        find = PARSERS[spec]()
        record = getattr(find, "record", {"parser": spec})
        return CaptionGraphs(find, record, max_nodes, max_relations, max_missing)
    path = Path(spec).expanduser()
    if not path.is_file() or path.suffix == ".gz":
        raise ValueError(
            f"graphs={spec!r} is no file of graphs; give {', '.join(PARSERS)}, or a .jsonl file that dino-sparo parse "
            "wrote, not compressed"
        )
    file = open_graph_file(path, max_nodes, max_relations)
    record = {"file": str(path), "sha256": file.sha256, "captions": len(file)}
    return CaptionGraphs(file, record, max_nodes, max_relations, max_missing)


def graphs_in_shards(path: str, key: str, **caps: Any) -> CaptionGraphs:
    """Where the graphs of shards come from, and their caps; `graph_of` reads one, `CaptionGraphs.normalized` bounds it.

    Args:
        path: of the shards.
        key: `--graph_key`.
        caps: those of `CaptionGraphs`.
    """
    return CaptionGraphs(_nowhere, {"shards": path, "graph_key": key}, **caps)


def _nowhere(caption: str) -> SceneGraph | None:
    """A caption alone does not say in which shard it stands."""
    return None


def graph_of(content: Mapping[str, Any], key: str) -> SceneGraph:
    """The graph under a key of the `.json` member of a webdataset shard; see `TarCaptions.json_of`.

    Args:
        content: the member.
        key: `--graph_key`.

    Raises:
        ValueError: there is no such key, or what stands there is no graph.
    """
    if key not in content:
        raise ValueError(f"there is no graph under the key {key!r}; found the keys {', '.join(content) or 'none'}")
    return SceneGraph.from_json(content[key])


def caption_bytes(caption: str) -> bytes:
    """What is compared of a caption: its text without blanks around it."""
    return caption.strip().encode("utf-8", "replace")


def hash_of(*texts: bytes) -> int:
    """64 bits of texts."""
    return int.from_bytes(hashlib.blake2b(b"\0".join(texts), digest_size=8).digest(), "little")


class GraphFile:
    """Caption -> graph, read at its place in a file.

    Args:
        path: of the file.
        hashes: (U,), sorted.
        offsets: (U,), first byte of each line.
        sizes: (U,), bytes of each line.
        sha256: of the file.
    """

    def __init__(
        self,
        path: Path,
        hashes: UInt64[np.ndarray, "U"],
        offsets: Int64[np.ndarray, "U"],
        sizes: Int32[np.ndarray, "U"],
        sha256: str,
    ) -> None:
        self.path, self.hashes, self.offsets, self.sizes, self.sha256 = path, hashes, offsets, sizes, sha256
        self._descriptor: int | None = None

    def __len__(self) -> int:
        """Number of different captions."""
        return len(self.hashes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    def __call__(self, caption: str) -> SceneGraph | None:
        """The graph as it stands in the file; None if the caption is not there."""
        wanted = caption_bytes(caption)
        number = int(np.searchsorted(self.hashes, np.uint64(value := hash_of(wanted))))
        while number < len(self) and int(self.hashes[number]) == value:
            found, graph = self.read(number)
            if caption_bytes(found) == wanted:
                return graph
            number += 1
        return None

    def read(self, number: int) -> tuple[str, SceneGraph]:
        """Caption and graph of line `number` in the order of the hashes.

        Raises:
            ValueError: the file changed since it was opened.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        # Unlike a file's position, the place of `pread` is not shared with the processes that were forked from this.
        line = os.pread(self._descriptor, int(self.sizes[number]), int(self.offsets[number]))
        return _caption_and_graph(line, f"{self.path}, changed since it was opened, at byte {self.offsets[number]}")


def open_graph_file(path: Path, max_nodes: int = MAX_NODES, max_relations: int = MAX_RELATIONS) -> GraphFile:
    """Check all lines of a file, or trust the index in the user's cache if the file has not changed since.

    Args:
        path: of the file.
        max_nodes: two graphs of one caption are compared as they are within these caps.
        max_relations: likewise.

    Raises:
        ValueError: see `open_graphs`.
    """
    path = path.absolute()

    def stamps() -> Int64[np.ndarray, "1 2"]:
        status = path.stat()
        return np.array([[status.st_mtime_ns, status.st_size]])

    arrays, _ = load_or_index(
        f"graphs {path} {max_nodes} {max_relations}",
        lambda: {
            **_index(path, partial(_comparable, max_nodes=max_nodes, max_relations=max_relations)),
            "stamps": stamps(),
        },
        lambda stored: np.array_equal(stored["stamps"], stamps()),
    )
    return GraphFile(path, arrays["hashes"], arrays["offsets"], arrays["sizes"], arrays["sha256"].tobytes().hex())


def write_graphs(path: Path, rows: Iterable[tuple[str, SceneGraph, str | None]]) -> None:
    """Append captions with their graphs, and images where there are any.

    Args:
        path: created if need be.
        rows: caption, graph, and image or None.
    """
    with JsonLines(path) as file:
        for caption, graph, image in rows:
            file.write(graph_record(caption, graph, image))


def graph_record(caption: str, graph: SceneGraph, image: str | None = None) -> dict[str, Any]:
    """A line of a file of graphs."""
    picture = {} if image is None else {"image": image}
    return {**picture, "caption": caption, **graph.to_json()}


def _caption_and_graph(line: bytes, location: str) -> tuple[str, SceneGraph]:
    record = parse_line(line, location)
    caption = record.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"{location}: 'caption' is {caption!r}; give the caption's text")
    try:
        return caption, SceneGraph.from_json(record)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error


def _comparable(caption: str, graph: SceneGraph, max_nodes: int, max_relations: int) -> SceneGraph:
    return canonical(normalize(graph, caption, max_nodes, max_relations)[0])


def _index(path: Path, comparable: Callable[[str, SceneGraph], SceneGraph]) -> Arrays:
    """Where every different caption lies, by hash; all lines are checked."""
    hashes, offsets, sizes, numbers = array("Q"), array("q"), array("i"), array("q")
    for number, offset, line in progress(read_lines(path), desc=f"checking the graphs of {path}"):
        caption, _ = _caption_and_graph(line, f"{path}:{number}")
        hashes.append(hash_of(caption_bytes(caption)))
        offsets.append(offset)
        sizes.append(len(line))
        numbers.append(number)
    order = np.argsort(np.array(hashes, dtype=np.uint64), kind="stable")
    file = GraphFile(
        path,
        np.array(hashes, dtype=np.uint64)[order],
        np.array(offsets, dtype=np.int64)[order],
        np.array(sizes, dtype=np.int32)[order],
        file_sha256(path),
    )
    kept = _different(file, np.array(numbers, dtype=np.int64)[order], comparable)
    content = np.frombuffer(bytes.fromhex(file.sha256), np.uint8)
    return {"hashes": file.hashes[kept], "offsets": file.offsets[kept], "sizes": file.sizes[kept], "sha256": content}


def _different(
    file: GraphFile, lines: Int64[np.ndarray, "U"], comparable: Callable[[str, SceneGraph], SceneGraph]
) -> np.ndarray:
    """(U,), True for the first line of every caption; ValueError where another has a different graph."""
    kept = np.ones(len(file), dtype=bool)
    seen: dict[bytes, tuple[SceneGraph, int]] = {}
    for number in (np.flatnonzero(file.hashes[1:] == file.hashes[:-1]) + 1).tolist():
        if number < 2 or file.hashes[number - 2] != file.hashes[number]:
            caption, graph = file.read(number - 1)
            seen = {caption_bytes(caption): (comparable(caption, graph), int(lines[number - 1]))}
        caption, graph = file.read(number)
        form = comparable(caption, graph)
        first, line = seen.setdefault(caption_bytes(caption), (form, int(lines[number])))
        if form != first:
            raise ValueError(
                f"{file.path}:{lines[number]}: {caption!r} has another graph than in line {line}; a caption has one "
                "graph, so remove one of the two"
            )
        kept[number] = line == lines[number]
    return kept

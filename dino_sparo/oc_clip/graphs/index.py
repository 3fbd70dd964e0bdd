"""A file of graphs -> where every caption lies in it: checked once, read at its places.

`files.py` says what a line holds. What is kept of it is where it lies and a hash of its caption, 20 bytes, so
that loader workers share the graphs of 10^7 captions.
"""

import hashlib
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from dino_sparo.data.sources.cache import load_or_index
from dino_sparo.data.sources.limits import parse_object
from dino_sparo.data.sources.packed import Arrays
from dino_sparo.oc_clip.graphs.canonical import canonical
from dino_sparo.oc_clip.graphs.graph import MAX_NODES, MAX_RELATIONS, SceneGraph, normalize
from dino_sparo.oc_clip.graphs.json_lines import read_lines
from dino_sparo.runtime.logs import progress
from dino_sparo.runtime.records import file_sha256


def caption_bytes(caption: str) -> bytes:
    """What is compared of a caption: its text without blanks around it."""
    return caption.strip().encode("utf-8", "replace")


def hash_of(*texts: bytes) -> int:
    """64 bits of texts."""
    return int.from_bytes(hashlib.blake2b(b"\0".join(texts), digest_size=8).digest(), "little")


@dataclass(eq=False)
class GraphFile:
    """Caption -> graph, read at its place in a file.

    Attributes:
        path: of the file.
        hashes: (U,), sorted.
        offsets: (U,), first byte of each line.
        sizes: (U,), bytes of each line.
        sha256: of the file.
    """

    path: Path
    hashes: UInt64[np.ndarray, " U"]
    offsets: Int64[np.ndarray, " U"]
    sizes: Int32[np.ndarray, " U"]
    sha256: str
    _descriptor: int | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        """Number of different captions."""
        return len(self.hashes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def __call__(self, caption: str) -> SceneGraph | None:
        """The graph as it stands in the file; None if the caption is not there."""
        wanted = caption_bytes(caption)
        number = int(np.searchsorted(self.hashes, np.uint64(value := hash_of(wanted))))
        while number < len(self) and int(self.hashes[number]) == value:
            text, graph = self.read(number)
            if caption_bytes(text) == wanted:
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

    def comparable(caption: str, graph: SceneGraph) -> SceneGraph:
        return canonical(normalize(graph, caption, max_nodes, max_relations)[0])

    arrays, _ = load_or_index(
        f"graphs {path} {max_nodes} {max_relations}",
        lambda: {**_index(path, comparable), "stamps": stamps()},
        lambda stored: np.array_equal(stored["stamps"], stamps()),
    )
    return GraphFile(path, arrays["hashes"], arrays["offsets"], arrays["sizes"], arrays["sha256"].tobytes().hex())


def _caption_and_graph(line: bytes, location: str) -> tuple[str, SceneGraph]:
    record = parse_object(line, location)
    caption = record.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"{location}: 'caption' is {caption!r}; give the caption's text")
    try:
        return caption, SceneGraph.from_json(record)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error


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
    file: GraphFile, lines: Int64[np.ndarray, " U"], comparable: Callable[[str, SceneGraph], SceneGraph]
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

"""Caption -> its normalised scene graph, from a file or from a parser: `open_graphs`.

A file has one JSON object per line, as `dino-sparo parse` writes it and as tables of pairs are read:

    {"caption": "a dog on a mat", "entities": ["dog", "mat"],
     "relationships": [{"relationship": "on", "subject": 0, "object": 1}], "image": "7.jpg"}

`image` is optional. Every line is checked when the file is opened (`index.py`). Compressed files are refused.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dino_sparo.data.dataset import most_corrupt
from dino_sparo.oc_clip.graphs.graph import MAX_NODES, MAX_RELATIONS, LookupCounts, SceneGraph, normalize
from dino_sparo.oc_clip.graphs.index import open_graph_file
from dino_sparo.oc_clip.parsers.spacy_rules import SpacyParser
from dino_sparo.oc_clip.parsers.templates import parse_caption

logger = logging.getLogger(__name__)

Find = Callable[[str], SceneGraph | None]

# Name -> a parser; built when it is asked for.
PARSERS: dict[str, Callable[[], Find]] = {"templates": lambda: parse_caption, "spacy": SpacyParser}
MAX_MISSING = 0.01


class CaptionGraphs:
    """The graph of any caption, normalised.

    Args:
        find: caption -> graph as found; None where there is none.
        record: what a result file says of the graphs: parser, or file and hash.
        max_nodes: as in `graphs.normalize`.
        max_relations: likewise.
        max_missing: share of captions without a graph that `check` tolerates.
        option: of the command, that sets this share; for messages.

    Attributes:
        counts: sums over all calls of this object in this process. Workers of a loader have copies of it: they pass on
            what `lookup` returns.
        record: the same with both caps.
        num_expected: captions that will be looked up, of which `max_missing` is a share; 0: not known.
    """

    def __init__(
        self,
        find: Find,
        record: Mapping[str, Any],
        max_nodes: int = MAX_NODES,
        max_relations: int = MAX_RELATIONS,
        max_missing: float = MAX_MISSING,
        option: str = "--max_missing_graphs",
    ) -> None:
        self.find, self.max_nodes, self.max_relations, self.max_missing = find, max_nodes, max_relations, max_missing
        self.option = option
        self.record = {**record, "max_nodes": max_nodes, "max_relations": max_relations}
        self.counts = LookupCounts()
        self.num_expected = 0

    def uncounted(self) -> "CaptionGraphs":
        """The same graphs, with counts of their own that begin at zero."""
        graphs = copy.copy(self)
        graphs.counts, graphs.num_expected = LookupCounts(), 0
        return graphs

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
        return self.normalized(self.find(caption), caption)

    def normalized(self, graph: SceneGraph | None, caption: str) -> tuple[SceneGraph, LookupCounts]:
        """A graph that was read elsewhere, such as in a shard, within the same caps; None where there is none."""
        normalised, counts = normalize(graph or SceneGraph(()), caption, self.max_nodes, self.max_relations)
        return normalised, counts._replace(missing=int(graph is None))

    def expect(self, captions: Sequence[str]) -> None:
        """Refuse a file that lacks too many of these captions before the work begins.

        A parser is not asked: it may need minutes.

        Args:
            captions: all that will be looked up, beside those that were.

        Raises:
            ValueError: more of them are missing than `max_missing` allows.
        """
        self.num_expected = self.counts.captions + len(captions)
        if "file" in self.record:
            self.check(LookupCounts(len(captions), sum(self.find(caption) is None for caption in captions)))

    def check(self, counts: LookupCounts | None = None) -> None:
        """Refuse to go on where too many captions have no graph.

        Args:
            counts: of the captions seen, from all workers; None: those of this object.

        Raises:
            ValueError: more of them are missing than `max_missing` allows.
        """
        counts = self.counts if counts is None else counts
        if counts.missing > most_corrupt(self.max_missing, max(counts.captions, self.num_expected)):
            source = next(
                (str(self.record[key]) for key in ("file", "shards", "parser") if key in self.record), "memory"
            )
            key = f" under the key {self.record['graph_key']!r}" if "graph_key" in self.record else ""
            raise ValueError(
                f"{counts.missing:,} of {counts.captions:,} captions have no graph in {source}{key}; at most "
                f"{self.max_missing:.3g} of them may be missing. Parse these captions with dino-sparo parse; or raise "
                f"{self.option}, and each becomes one entity"
            )


def open_graphs(
    spec: str, max_nodes: int = MAX_NODES, max_relations: int = MAX_RELATIONS, **tolerance: Any
) -> CaptionGraphs:
    """Graphs by the name of a parser or by a file.

    Args:
        spec: a key of `PARSERS`, or a file with one JSON object per line.
        max_nodes: largest number of entities.
        max_relations: largest number of relations.
        tolerance: `max_missing` and `option` of `CaptionGraphs`.

    Raises:
        ValueError: there is no such parser or file; the file has no line; a line has no caption or is no graph
            (`file:line`); or a caption stands there twice with different graphs.
        MissingPackageError: spaCy is not installed.
    """
    if spec in PARSERS:
        find = PARSERS[spec]()
        record = getattr(find, "record", {"parser": spec})
        return CaptionGraphs(find, record, max_nodes, max_relations, **tolerance)
    path = Path(spec).expanduser()
    if not path.is_file() or path.suffix == ".gz":
        raise ValueError(
            f"graphs={spec!r} is no file of graphs; give {', '.join(PARSERS)}, or a .jsonl file that dino-sparo parse "
            "wrote, not compressed"
        )
    file = open_graph_file(path, max_nodes, max_relations)
    if not len(file):
        raise ValueError(
            f"graphs={spec!r} has no line; run the dino-sparo parse that was to write it again, and see why it ended"
        )
    record = {"file": str(path), "sha256": file.sha256, "captions": len(file)}
    logger.info("%s: graphs of %d captions", path, len(file))
    return CaptionGraphs(file, record, max_nodes, max_relations, **tolerance)


def graphs_in_shards(path: str, key: str, **caps: Any) -> CaptionGraphs:
    """Where the graphs of shards come from, and their caps; `graph_of` reads one, `CaptionGraphs.normalized` bounds it.

    Args:
        path: of the shards.
        key: `--graph_key`.
        caps: those of `CaptionGraphs`.
    """
    # Nothing is found by a caption alone: it does not say in which shard it stands.
    return CaptionGraphs(dict[str, SceneGraph]().get, {"shards": path, "graph_key": key}, **caps)


def graph_of(content: Mapping[str, Any], key: str) -> SceneGraph | None:
    """The graph under a key of the `.json` member of a webdataset shard, None without it; see `TarCaptions.json_of`.

    Args:
        content: the member.
        key: where the graph stands in it, as the option graph_key names it.

    Raises:
        ValueError: what stands there is no graph.
    """
    return SceneGraph.from_json(content[key]) if key in content else None


def graph_record(caption: str, graph: SceneGraph, image: str | None = None) -> dict[str, Any]:
    """A line of a file of graphs."""
    picture = {} if image is None else {"image": image}
    return {**picture, "caption": caption, **graph.to_json()}

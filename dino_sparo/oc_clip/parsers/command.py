"""`dino-sparo parse`: captions -> a file of graphs.

    dino-sparo parse --captions pairs.csv --output pairs.jsonl --parser templates
    dino-sparo parse --captions captions_train2017.json --image_folder train2017 --output coco.jsonl --parser llm \\
        --server http://localhost:8000/v1 --model llama-3-70b-instruct

Every caption is parsed once; where rows have images, every row is written, and the output is a table of pairs. The same
command goes on where it was ended. Beside the output lie OUTPUT.summary.json, with all counts, and OUTPUT.errors.jsonl,
with the captions that have no graph. `graph_files.py` reads the output.
"""

import argparse
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import tee
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, UInt64

from dino_sparo.oc_clip.graph_files import LookupCounts, graph_record
from dino_sparo.oc_clip.graph_index import caption_bytes, hash_of
from dino_sparo.oc_clip.graphs import SceneGraph, normalize
from dino_sparo.oc_clip.json_lines import JsonLines, parse_line, read_lines
from dino_sparo.oc_clip.parsers.annotated import DRAW, AnnotatedImages
from dino_sparo.oc_clip.parsers.caption_rows import Row, Rows, open_rows
from dino_sparo.oc_clip.parsers.llm import LanguageModelParser, LocalModel, Outcome, Server
from dino_sparo.oc_clip.parsers.spacy_rules import SpacyParser
from dino_sparo.oc_clip.parsers.templates import parse_caption
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.logs import progress, setup_logging
from dino_sparo.runtime.records import file_sha256, versions, write_json

logger = logging.getLogger(__name__)


@runtime_checkable
class BulkParser(Protocol):
    """What turns captions into graphs.

    Attributes:
        record: what identifies its graphs.
    """

    record: dict[str, Any]

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order."""


class Templates:
    """`templates.parse_caption` for many captions."""

    def __init__(self) -> None:
        self.record = {"parser": "templates"}

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order."""
        yield from (Outcome(parse_caption(caption)) for caption in captions)


class Spacy:
    """`spacy_rules.SpacyParser` likewise."""

    def __init__(self) -> None:
        self.parser = SpacyParser()
        self.parser("a dog")  # loads the model: if it cannot be loaded, nothing has been written yet
        self.record = self.parser.record

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order."""
        yield from map(Outcome, self.parser.parse_all(captions))


def parse(args: argparse.Namespace) -> dict[str, Any]:
    """Parse what the options say; returns the summary.

    Raises:
        ValueError: the captions cannot be read, options do not fit, or the output has graphs of another parser.
        MendableError: the server of the language model refuses to work.
    """
    setup_logging()
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    parser: BulkParser
    if args.parser in DRAW:
        drawn = (args.seed, args.captions_per_image, args.exclude_images)
        parser = annotated = AnnotatedImages(args.captions, args.parser, args.image_folder, output.parent, *drawn)
        rows: Rows = annotated.rows
    else:
        parser = _open_parser(args, output)
        rows = open_rows(args.captions, output.parent, args.caption_key, args.image_key, args.image_folder, args.split)
    summary = parse_rows(rows, parser, output, args.max_nodes, args.max_relations)
    say(f"{output}: {summary['counts']['captions']:,} lines, {_words_of(summary)}")
    return summary


def parse_rows(rows: Rows, parser: BulkParser, output: Path, max_nodes: int, max_relations: int) -> dict[str, Any]:
    """Add the graphs of all rows that the output has not yet; returns the summary that is written beside it.

    Args:
        rows: goes through them all.
        parser: for their captions.
        output: file of graphs.
        max_nodes: for the counts; the file keeps all entities.
        max_relations: likewise.

    Raises:
        ValueError: the output has graphs of another parser, or is no output of this command.
    """
    summary_path, errors_path = (
        output.with_name(output.name + ending) for ending in (".summary.json", ".errors.jsonl")
    )
    _check_output(output, summary_path, parser)
    counts, run = LookupCounts(), Counter[str](parsed=0, dropped_relations=0, unreadable=0, undone=0)

    def counts_of(caption: str, graph: SceneGraph) -> LookupCounts:
        return LookupCounts(captions=1, **normalize(graph, caption, max_nodes, max_relations)[1]._asdict())

    errors_path.unlink(missing_ok=True)
    hashes = _hashes(rows)
    with JsonLines(output) as file:
        written = array("Q")
        for number, _, line in read_lines(output):
            record = parse_line(line, f"{output}:{number}")
            counts = counts.plus(counts_of(record["caption"], SceneGraph.from_json(record)))
            written.append(_hash(Row(record["caption"], record.get("image"))))
        if written:
            logger.info("%s: goes on after %d lines", output, len(written))
        is_new = _new_rows(hashes, written)
        write_json({**_state(parser, counts, run), "complete": False}, summary_path)
        todo, asked = tee(row for row, new in zip(rows(), is_new, strict=True) if new)
        outcomes = parser.parse_all(row.caption for row in asked)
        parsed = _parsed(zip(todo, outcomes, strict=True), run, errors_path)
        for row, graph in progress(parsed, int(is_new.sum()), "parsing"):
            file.write(graph_record(row.caption, graph, row.image))
            counts = counts.plus(counts_of(row.caption, graph))
    is_complete = not run["undone"] + run["unreadable"]
    summary = {**_state(parser, counts, run), "complete": is_complete, "sha256": file_sha256(output)}
    write_json(summary, summary_path)
    if not is_complete:
        logger.warning(
            "%d captions have no graph: %d answers could not be read, %d requests were not answered; %s lists them; "
            "the same command asks again",
            run["undone"] + run["unreadable"],
            run["unreadable"],
            run["undone"],
            errors_path,
        )
    return summary


def _open_parser(args: argparse.Namespace, output: Path) -> BulkParser:
    if args.parser != "llm":
        return Templates() if args.parser == "templates" else Spacy()
    if not args.model or bool(args.server) == args.local:
        raise ValueError(
            f"--parser llm with --model {args.model} --server {args.server} --local {args.local}: give --model, and "
            "either --server URL or --local"
        )
    complete = LocalModel(args.model) if args.local else Server(args.server, args.model, args.timeout_s)
    cache = Path(args.cache) if args.cache else output.with_name(output.name + ".cache.jsonl")
    return LanguageModelParser(complete, args.model, cache, 1 if args.local else args.concurrency)


def _check_output(output: Path, summary_path: Path, parser: BulkParser) -> None:
    """Nothing is added to another program's file, nor to the graphs of another parser."""
    if not output.is_file() or not output.stat().st_size:
        return
    if not summary_path.is_file():
        raise ValueError(f"{output} exists, and there is no {summary_path} beside it; give another --output")
    before = parse_line(summary_path.read_bytes(), str(summary_path)).get("parser")
    if before != parser.record:
        raise ValueError(
            f"{summary_path} says that the output was written by {before}, not by {parser.record}; give another "
            "--output, or remove both files"
        )


def _parsed(
    outcomes: Iterator[tuple[Row, Outcome]], run: Counter[str], errors_path: Path
) -> Iterator[tuple[Row, SceneGraph]]:
    """The rows that have a graph; the others go to the file of errors. Both are counted."""
    for row, outcome in outcomes:
        run["dropped_relations"] += outcome.dropped
        if outcome.graph is not None:
            run["parsed"] += 1
            yield row, outcome.graph
            continue
        run["undone" if outcome.is_undone else "unreadable"] += 1
        with JsonLines(errors_path) as errors:
            errors.write({"caption": row.caption, "problem": outcome.problem, "undone": outcome.is_undone})


def _state(parser: BulkParser, counts: LookupCounts, run: Counter[str]) -> dict[str, Any]:
    # Captions are missing where graphs are looked up, not here.
    whole_file = {name: number for name, number in counts._asdict().items() if name != "missing"}
    return {"parser": parser.record, "counts": whole_file, "this_run": dict(run), "versions": versions()}


def _words_of(summary: dict[str, Any]) -> str:
    counts = LookupCounts(**summary["counts"])
    dropped = summary["this_run"]["dropped_relations"]
    return f"{counts}" + (f", {dropped:,} relations dropped in this run that are none" if dropped else "")


def _hashes(rows: Rows) -> UInt64[np.ndarray, "rows"]:
    """Of all rows, in order."""
    return np.array(array("Q", (_hash(row) for row in progress(rows(), desc="reading captions"))), dtype=np.uint64)


def _new_rows(hashes: UInt64[np.ndarray, "rows"], written: "array[int]") -> Bool[np.ndarray, "rows"]:
    """True for the first of equal rows, unless the output has it."""
    first = np.zeros(len(hashes), dtype=bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    return first & ~np.isin(hashes, np.array(written, dtype=np.uint64))


def _hash(row: Row) -> int:
    return hash_of(caption_bytes(row.caption), (row.image or "").encode("utf-8", "surrogateescape"))

"""`dino-sparo parse`: captions -> a file of graphs.

    dino-sparo parse --captions pairs.csv --output pairs.jsonl --parser templates
    dino-sparo parse --captions captions_train2017.json --image_folder train2017 --output coco.jsonl --parser llm \\
        --server http://localhost:8000/v1 --model llama-3-70b-instruct
    dino-sparo parse --caption "a red star left of a blue ring"        # shows one graph, writes nothing

Every caption is parsed once. Where rows have images, every row is written, and the output is a table of pairs. The same
command resumes a run that was ended. OUTPUT.summary.json holds all counts, OUTPUT.errors.jsonl the captions without a
graph. One run at a time writes an output, by OUTPUT.lock. `oc_clip/graphs/files.py` reads the output.
"""

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dino_sparo.oc_clip.graphs.files import PARSERS, append_lines, graph_record, read_lines
from dino_sparo.oc_clip.graphs.graph import LookupCounts, SceneGraph, normalize
from dino_sparo.oc_clip.parsers import Outcome, Parser
from dino_sparo.oc_clip.parsers.llm import LanguageModelParser, LocalModel, Server
from dino_sparo.oc_clip.parsers.rows import DRAW, AnnotatedImages, Row, open_rows
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import file_sha256, parse_object, versions, write_json
from dino_sparo.runtime.lock import RunLock, create_output_dir
from dino_sparo.runtime.logs import progress, setup_logging

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 3


@dataclass
class Report:
    """Statistics of the lines of an output; a caption that stands in several lines counts once.

    Attributes:
        max_nodes: cap of `normalize`; the file keeps all entities.
        max_relations: cap of `normalize`; the file keeps all relations.
        counts: changes by `normalize`.
        without_relation: captions whose graph has no relation.
        examples: the first captions and their graphs, in words.
        seen: the captions.
    """

    max_nodes: int
    max_relations: int
    counts: LookupCounts = field(default_factory=LookupCounts)
    without_relation: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set, repr=False)

    def add(self, caption: str, graph: SceneGraph) -> None:
        """Count the caption of a line, unless it was counted before."""
        if caption in self.seen:
            return
        self.seen.add(caption)
        normalised, changes = normalize(graph, caption, self.max_nodes, self.max_relations)
        self.counts = LookupCounts.total([self.counts, changes])
        self.without_relation += not normalised.relations
        if len(self.examples) < NUM_EXAMPLES:
            self.examples[caption] = graph_in_words(normalised)

    def to_json(self) -> dict[str, int]:
        """The counts without missing captions, which only lookups have."""
        counts = {name: number for name, number in self.counts._asdict().items() if name != "missing"}
        return {**counts, "without_relation": self.without_relation}


def parse(args: argparse.Namespace) -> dict[str, Any]:
    """Run the command; returns the summary, or with `--caption` the graph."""
    setup_logging()
    if args.caption is not None:
        return show_graph(args)
    if args.output is None:
        raise UserError("--output is missing: give the file of graphs to write, such as --output graphs.jsonl")
    output = Path(args.output)
    create_output_dir(output.parent, "--output in ")
    rows: Iterable[Row]
    parser: Parser
    if args.parser in DRAW:
        drawn = (args.seed, args.captions_per_image, args.exclude_images)
        parser = annotated = AnnotatedImages(args.captions, args.parser, args.image_folder, output.parent, *drawn)
        rows = annotated.images
    else:
        parser = _open_parser(args, output)
        rows = open_rows(args.captions, output.parent, args.caption_key, args.image_key, args.image_folder, args.split)
    report = Report(args.max_nodes, args.max_relations)
    summary = parse_rows(rows, parser, output, report)
    run = summary["this_run"]
    lines = [f"{output}: {report.counts}", f"{report.without_relation:,} captions have no relation"]
    if run["dropped_relations"]:
        lines.append(f'{run["dropped_relations"]:,} unary relations or "and" dropped in this run')
    reasons = {"without_caption": "without a caption", "repeated": "the same as an earlier row"}
    if left_out := [f"{run[name]:,} {reason}" for name, reason in reasons.items() if run[name]]:
        lines.append(f"left out of {run['rows']:,} rows: {' and '.join(left_out)}")
    lines.append("The first captions and their graphs:")
    examples = [f"  {' '.join(caption.split())}\n{graph}" for caption, graph in report.examples.items()]
    say("\n".join([*lines, *examples]))
    return summary


def show_graph(args: argparse.Namespace) -> dict[str, Any]:
    """Print the graph of `--caption`; returns the line that a file would have."""
    if args.parser in DRAW:
        raise UserError(f"--parser {args.parser} draws captions and reads none; give --captions, or another --parser")
    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = _open_parser(args, Path(folder) / "graph.jsonl").parse_all(iter([args.caption]))
    if outcome.graph is None:
        raise UserError(f"--caption {args.caption!r} has no graph: {outcome.problem}")
    graph, _ = normalize(outcome.graph, args.caption, args.max_nodes, args.max_relations)
    say(graph_in_words(graph))
    return graph_record(args.caption, graph)


def graph_in_words(graph: SceneGraph) -> str:
    """Two lines, such as `entities: dog, mat` and `relations: on(dog, mat)`."""
    names = graph.entities
    relations = [f"{r.predicate}({names[r.subject]}, {names[r.object]})" for r in graph.relations]
    return f"    entities:  {', '.join(names)}\n    relations: {', '.join(relations) or 'none'}"


def parse_rows(rows: Iterable[Row], parser: Parser, output: Path, report: Report) -> dict[str, Any]:
    """Add the graphs of all rows that the output lacks; returns the summary, which is also written.

    Raises:
        OutputDirError: another run writes the output.
        ValueError: the output has graphs of another parser, or was not written by this command; no row has a caption.
    """
    summary_path = output.with_name(f"{output.name}.summary.json")
    errors_path = output.with_name(f"{output.name}.errors.jsonl")
    # In both files on disk the key of a caption whose request was not answered is `undone`.
    run = Counter[str](parsed=0, dropped_relations=0, unreadable=0, undone=0, lines_of_other_rows=0)

    def write_summary(**more: Any) -> dict[str, Any]:
        state = {"parser": parser.record, "counts": report.to_json(), "this_run": dict(run), "versions": versions()}
        write_json({**state, **more}, summary_path)
        return {**state, **more}

    with RunLock(output.parent, output.name) as lock:
        lock.acquire()
        _check_output(output, summary_path, parser)
        is_written = _read_rows(rows, run)
        errors_path.unlink(missing_ok=True)
        with append_lines(output) as append:
            _read_output(output, is_written, report, run)
            new = [row for row, was_written in is_written.items() if not was_written]
            write_summary(complete=False)
            outcomes = parser.parse_all(row.caption for row in new)
            for row, graph in progress(_parsed(new, outcomes, run, errors_path), len(new), "parsing"):
                append(graph_record(row.caption, graph, row.image))
                report.add(row.caption, graph)
        num_failed = run["undone"] + run["unreadable"]
        summary = write_summary(complete=not num_failed, sha256=file_sha256(output))
    if run["lines_of_other_rows"]:
        logger.warning(
            "%d lines of %s belong to captions or images that the input does not have; they stay in the output. For a "
            "file of this input alone give another --output",
            *(run["lines_of_other_rows"], output),
        )
    if num_failed:
        logger.warning(
            "%d captions have no graph: %d answers are unreadable, %d requests were not answered; %s lists them. Run "
            "the same command to ask again",
            *(num_failed, run["unreadable"], run["undone"], errors_path),
        )
    return summary


def _open_parser(args: argparse.Namespace, output: Path) -> Parser:
    if args.parser in PARSERS:
        parser = PARSERS[args.parser]()
        parser("a dog")  # loads spaCy's model before anything is written
        return parser
    if not args.model or bool(args.server) == args.local:
        raise UserError(
            f"--parser llm with --model {args.model} --server {args.server} --local {args.local}: give --model, and "
            "either --server URL or --local"
        )
    complete = LocalModel(args.model) if args.local else Server(args.server, args.model, args.timeout_s)
    cache = Path(args.cache) if args.cache else output.with_name(output.name + ".cache.sqlite")
    return LanguageModelParser(complete, args.model, cache, 1 if args.local else args.concurrency)


def _check_output(output: Path, summary_path: Path, parser: Parser) -> None:
    """Refuse an output of another program or of another parser."""
    if not output.is_file() or not output.stat().st_size:
        return
    if not summary_path.is_file():
        raise UserError(f"{output} exists without its {summary_path}; give another --output")
    before = parse_object(summary_path.read_bytes(), str(summary_path)).get("parser")
    if before != parser.record:
        raise UserError(
            f"{summary_path} says that the output was written by {before}, not by {parser.record}; give another "
            "--output, or remove both files"
        )


def _read_rows(rows: Iterable[Row], run: Counter[str]) -> dict[Row, bool]:
    """The different rows with a caption that are not written yet; all rows are counted."""
    new_rows: dict[Row, bool] = {}
    for row in progress(rows, desc="reading captions"):
        run["rows"] += 1
        run["without_caption"] += not row.caption
        run["repeated"] += row in new_rows
        if row.caption:
            new_rows[row] = False
    if not new_rows:
        raise UserError(f"none of the {run['rows']:,} rows has a caption; give other --captions or --caption_key")
    return new_rows


def _read_output(output: Path, is_written: dict[Row, bool], report: Report, run: Counter[str]) -> None:
    """Mark the rows in an output as written; its lines are counted."""
    for number, _, line in read_lines(output):
        record = parse_object(line, f"{output}:{number}")
        report.add(record["caption"], SceneGraph.from_json(record))
        row = Row(record["caption"], record.get("image"))
        run["lines_of_other_rows"] += row not in is_written
        if row in is_written:
            is_written[row] = True
    if num_written := sum(is_written.values()):
        logger.info("%s: resumed after %d rows", output, num_written)


def _parsed(
    rows: Iterable[Row], outcomes: Iterable[Outcome], run: Counter[str], errors_path: Path
) -> Iterator[tuple[Row, SceneGraph]]:
    """The rows with a graph; rows without one go to the file of errors. Both are counted."""
    for row, outcome in zip(rows, outcomes, strict=True):
        run["dropped_relations"] += outcome.dropped
        if outcome.graph is not None:
            run["parsed"] += 1
            yield row, outcome.graph
            continue
        run["undone" if outcome.is_unanswered else "unreadable"] += 1
        with append_lines(errors_path) as append:
            append({"caption": row.caption, "problem": outcome.problem, "undone": outcome.is_unanswered})

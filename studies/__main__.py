"""`python -m studies NAME`: make the runs of a study that are missing, print its tables, draw its plot."""

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from dino_sparo.runtime.cli import Parser, errors_in_one_line, say
from studies.plans import STUDIES
from studies.report import draw, report
from studies.runs import RESULTS, add_scores, make_runs

logger = logging.getLogger(__name__)


def get_args_parser() -> Parser:
    """The options."""
    questions = "\n".join(f"  {name:<10}{study.question}" for name, study in STUDIES.items())
    parser = Parser("studies", description=f"{__doc__}\n\n{questions}")
    parser.add_argument("name", choices=sorted(STUDIES), help="Which study.")
    parser.add_argument("--data_path", default=None, help="Its images, where it needs some.")
    parser.add_argument("--output_dir", type=Path, default=Path("output/studies"), help="Of checkpoints and logs.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="Of the result files of all studies.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time, with one thread each.")
    parser.add_argument("--epochs", type=int, default=None, help="Instead of the recipe's, to try it out.")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=None,
        help="Of the reported runs; by default all: several machines can share a study.",
    )
    parser.add_argument(
        "--add_scores",
        action="store_true",
        help="Train nothing: measure scores that finished runs lack, where --output_dir has their checkpoints.",
    )
    parser.add_argument("--report", action="store_true", help="Train nothing: tables and plot of what is there.")
    return parser


def main(argv: Sequence[str] | None = None) -> str:
    """Run a study.

    Args:
        argv: the command line; None: the process's.

    Returns:
        The tables.
    """
    args = get_args_parser().parse_args(argv)
    if args.epochs is not None:
        STUDIES[args.name] = STUDIES[args.name].with_epochs(args.epochs)
    with errors_in_one_line(logger):
        if args.add_scores:
            add_scores(args.name, args.data_path, args.output_dir, args.results)
        elif not args.report:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the runs are ended too
            make_runs(args.name, args.data_path, args.output_dir, args.results, args.jobs, args.seeds)
        tables = report(args.name, args.results)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        picture = args.output_dir / f"{args.name}.png"
        draw(args.name, args.results, picture)
    say(f"{tables}\n\nplot: {picture}")
    return tables


if __name__ == "__main__":
    main()

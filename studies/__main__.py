"""`python -m studies NAME`: make the missing runs of a study, print its tables, draw its plot.

python -m studies scenes
python -m studies binding --help        # which encoders know which colour belongs to which shape
python -m studies oc-splits --help      # OC-CLIP's controlled experiment on pairs of objects
python -m studies drawn-sets --help     # scenes in the layouts of compositional benchmarks
python -m studies ibot --help           # iBOT compared with DINO and SimDINO, and continued trainings
python -m studies maps                  # how well the maps of `scenes` find objects, and what single slots encode
python -m studies probes                # all probes on the encoders of the studies, and on demo
python -m studies sweep --help          # CLIP: accuracy and parameters against number and width of slots
python -m studies uses                  # for what the slots of `scenes` help a frozen encoder
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from dino_sparo.__main__ import run
from dino_sparo.demo.run import RunCommand
from dino_sparo.runtime.cli import Option, Parser, positive_int, say
from dino_sparo.runtime.exits import errors_in_one_line
from studies import drawn_sets, ibot, probes, slots, sweep, uses
from studies.binding import run as binding
from studies.oc_splits import run as oc_splits
from studies.plans import STUDIES
from studies.report import draw, report
from studies.runs import FOLDERS, make_runs

logger = logging.getLogger(__name__)


def measure(study: ModuleType, args: argparse.Namespace, command: RunCommand) -> str:
    """Measure what is missing, unless --report is given; print and return the tables."""
    if not args.report:
        study.measure_missing(args, command)
    say(tables := study.report(args.results))
    return tables


# Experiments with further options: the module of these OPTIONS, and body(options, run of a command).
EXPERIMENTS: dict[str, tuple[ModuleType, Callable[..., Any]]] = {
    "binding": (binding, binding.run_binding),
    "drawn-sets": (drawn_sets, lambda args, _: drawn_sets.main(args)),
    "ibot": (ibot, partial(measure, ibot)),
    "maps": (slots, partial(measure, slots)),
    "oc-splits": (oc_splits, oc_splits.run_splits),
    "probes": (probes, partial(measure, probes)),
    "sweep": (sweep, lambda args, _: sweep.collect(args)),
    "uses": (uses, partial(measure, uses)),
}


OPTIONS = {
    "study": {
        "name": Option(None, "The study.", choices=sorted(STUDIES), is_positional=True),
        "data_path": Option(None, "Folder of images, for studies of photographs."),
        **FOLDERS,
        "jobs": Option(1, "Runs at the same time, with one thread each.", positive_int),
        "epochs": Option(None, "Epochs of a trial; by default the epochs of the recipe.", positive_int),
        "seeds": Option(None, "Seeds to run; by default all. Several machines can share a study.", int, nargs="+"),
        "report": Option(False, "Train nothing: tables and plot of the results so far."),
    }
}


def parser_of(name: str) -> Parser:
    """The options of an experiment."""
    module = EXPERIMENTS[name][0]
    return Parser(module.OPTIONS, f"studies {name}", module.__doc__)


def get_args_parser() -> Parser:
    """The options of a study."""
    questions = "\n".join(f"  {name:<10}{study.question}" for name, study in STUDIES.items())
    return Parser(OPTIONS, "studies", f"{__doc__}\n{questions}")


def main(argv: Sequence[str] | None = None) -> Any:
    """Run a study or an experiment; returns its tables, or its results.

    Args:
        argv: the command line; None: that of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in EXPERIMENTS:
        options = parser_of(words[0]).parse_args(words[1:])
        with errors_in_one_line(logger):
            return EXPERIMENTS[words[0]][1](options, run)
    return run_study(get_args_parser().parse_args(words))


def run_study(args: argparse.Namespace) -> str:
    """Make the missing runs, draw the plot, print and return the tables."""
    if args.epochs is not None:
        STUDIES[args.name] = STUDIES[args.name].with_epochs(args.epochs)
    with errors_in_one_line(logger):
        if not args.report:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the runs end too
            make_runs(args)
        tables = report(args.name, args.results)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        picture = args.output_dir / f"{args.name}.png"
        draw(args.name, args.results, picture)
    say(f"{tables}\n\nplot: {picture}")
    return tables


if __name__ == "__main__":
    main()

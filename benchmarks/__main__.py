"""All benchmarks, one report: `python -m benchmarks --help`.

An option that only some scripts know, such as --data_path, reaches those.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

from benchmarks import backbone, binding, clip_step, input_pipeline, knn, linear, readout, scaling, train_step
from benchmarks.report import Section, open_reference, options, publish
from dino_sparo.runtime.precision import set_tf32

logger = logging.getLogger(__name__)

SCRIPTS: dict[str, ModuleType] = {
    "readout": readout,
    "backbone": backbone,
    "train_step": train_step,
    "clip_step": clip_step,
    "binding": binding,
    "input_pipeline": input_pipeline,
    "knn": knn,
    "linear": linear,
    "scaling": scaling,
}


def get_args_parser() -> argparse.ArgumentParser:
    """The options of every script, and the choice of scripts."""
    parser = options("All benchmarks, one report. Options of single scripts are passed to these scripts.")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="Scripts to run.")
    return parser


def main(argv: Sequence[str] | None = None) -> list[Section]:
    """Run the scripts one after the other, print and write the report."""
    parser = get_args_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    args, others = parser.parse_known_args(words)
    parsed = {name: SCRIPTS[name].get_args_parser().parse_known_args(_without_only(words)) for name in args.only}
    unknown = [word for word in others if word.startswith("-") and all(word in left for _, left in parsed.values())]
    if unknown:
        parser.error(f"no script knows {' '.join(unknown)}")
    try:
        reference = open_reference(args.reference)
    except ValueError as error:
        parser.error(str(error))
    set_tf32(allowed=False)  # as in `report.run`
    sections = []
    for name, (script_args, _) in parsed.items():
        logger.info("%s ...", name)
        sections.append(SCRIPTS[name].measure(script_args, reference))
    publish(sections, reference, args)
    return sections


def _without_only(words: list[str]) -> list[str]:
    """The command line without --only and its names."""
    if "--only" not in words:
        return words
    start = words.index("--only")
    end = next((i for i in range(start + 1, len(words)) if words[i].startswith("-")), len(words))
    return words[:start] + words[end:]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    main()

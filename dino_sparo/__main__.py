"""`dino-sparo COMMAND`: all commands under one name. `python -m dino_sparo COMMAND` is the same.

    dino-sparo                                                                        # lists them
    dino-sparo zero-shot --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    dino-sparo train --config run.yaml --epochs 50                                    # options from a file

`commands.py` is the table of commands.
"""

import argparse
import contextlib
import difflib
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from dino_sparo._version import __version__
from dino_sparo.clip.options import TOWERS
from dino_sparo.commands import COMMANDS, SECTIONS, TRAIN, command_for, parser_of
from dino_sparo.image_text.evaluation.options import BENCHMARK_NAMES
from dino_sparo.models.architectures import ARCHITECTURES, HEADS, READOUTS, TIMM
from dino_sparo.runtime.cli import Parser, printable, read_config, say, values_of
from dino_sparo.runtime.exits import errors_in_one_line
from dino_sparo.runtime.faults import MissingPackageError, UserError, explain_full_memory
from dino_sparo.runtime.files import require_inputs
from dino_sparo.training.options import check_run

logger = logging.getLogger("dino_sparo")

# Option -> valid names, as far as they are known without torch.
KNOWN_NAMES: dict[str, Collection[str]] = {
    "arch": ARCHITECTURES,
    "readout": {*READOUTS, *TOWERS},
    "benchmarks": BENCHMARK_NAMES,
}
PUBLIC = {name: command for name, command in COMMANDS.items() if not command.instead_of}


def main(argv: Sequence[str] | None = None) -> Any:
    """Run the command that the first words name; None: of the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if (found := find_command(words)) is not None:
        name, words = found
        return run(name, words)
    parser = Parser(prog="dino-sparo", description=overview())
    parser.add_argument("--version", action="version", version=f"dino_sparo {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="One of the above; COMMAND --help says more.")
    if files := values_of(words, "--config"):
        try:
            named = read_config(files[-1]).get("command")
        except UserError as error:
            parser.error(str(error))
        if named in PUBLIC:
            return run(named, words)
        parser.error(f"--config {files[-1]} names no command; give the command first, or a line like `command: train`")
    name = parser.parse_known_args(words)[0].command
    if name is not None:
        inner = [command for command in PUBLIC if command.startswith(f"{name} ")]
        near = inner or difflib.get_close_matches(name, PUBLIC, n=1)
        parser.error(f"there is no command {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    say(parser.format_help())
    return None


def find_command(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The command that the first words name, as `train-clip` or `train clip`, and its options; None: none."""
    for count in (2, 1):
        for glue in (" ", "-"):
            if (name := glue.join(words[:count]).replace("_", "-")) in PUBLIC:
                return name, list(words[count:])
    return None


def overview() -> str:
    """All commands with their summaries, by section."""
    width = max(map(len, PUBLIC)) + 2
    lines: list[str] = []
    for section, commands in SECTIONS.items():
        lines += [*([""] if lines else []), f"{section}:"]
        lines += [f"  {name:<{width}}{command.summary}" for name, command in commands.items() if name in PUBLIC]
    return "\n".join(lines)


@contextlib.contextmanager
def command_line(
    name: str, words: Sequence[str] | None = None, prog: str | None = None
) -> Iterator[argparse.Namespace]:
    """A command's options; within this context a mistake ends with one line, not a traceback. Arguments as `run`'s."""
    args = parser_of(name, prog).parse_args(words)
    if "torch" not in sys.modules:  # else a file of the user's may have added names, and torch costs no more time
        refuse_early(args, name)
    with errors_in_one_line(logger), explain_full_memory(vars(args)):
        yield args


def run(name: str, words: Sequence[str] | None = None, prog: str | None = None) -> Any:
    """Parse a command's options and run it; a mistake in them ends with one line, not a traceback.

    Args:
        name: a key of `COMMANDS`.
        words: the options; None: the command line's.
        prog: name of the command in `--help`; by default `dino-sparo NAME`.

    Returns:
        The command's result; an evaluation returns the content of its result file.
    """
    words = sys.argv[1:] if words is None else words
    name = command_for(name, words)
    command = COMMANDS[name]
    if command.parser is None:
        return command.function(words)
    with command_line(name, words, prog) as args:
        return command.function(args)


def refuse_early(args: argparse.Namespace, command: str) -> None:
    """End with one line and status 1 if options are wrong: without torch, which takes seconds to import."""
    try:
        require_inputs(vars(args))
        for option, known in KNOWN_NAMES.items():
            given = getattr(args, option, None) or []
            for name in given if isinstance(given, list) else [given]:
                if name.partition(HEADS)[0] not in known and not name.startswith(TIMM):
                    raise UserError(f"--{option} {name} is unknown; choose one of {', '.join(sorted(known))}")
        if (check := COMMANDS[command].check) is not None:
            if command in TRAIN:
                check_run(args)
            check(argparse.Namespace(**vars(args)))  # a copy, since checks fill in values
    except (UserError, MissingPackageError) as error:
        raise SystemExit(f"{time.strftime('%H:%M:%S')} E {printable(str(error))}") from error


def console() -> None:
    """The console script: its exit status is 0 unless a command ended the process."""
    main()


if __name__ == "__main__":
    main()

"""Record the options of every command with their defaults in options.json: `python tests/reference/record_options.py`.

An option that is renamed or lost breaks commands that people have written down, and a changed default changes results.
`tests/test_options.py` compares; after a change that is meant, run this and read the difference.
"""

import json
from pathlib import Path

from dino_sparo.__main__ import COMMANDS

FILE = Path(__file__).with_name("options.json")


def options() -> dict[str, dict[str, str]]:
    """Command -> option -> its default."""
    parsers = {name: command.parser() for name, command in COMMANDS.items() if command.parser is not None}
    return {
        name: {action.dest: repr(action.default) for action in parser._actions} for name, parser in parsers.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(options(), indent=1, sort_keys=True) + "\n")

"""Options of every command: names and defaults are those of `reference/options.json`."""

import json
from pathlib import Path

from reference import record_options

RECORDED = json.loads((Path(__file__).parent / "reference" / "options.json").read_text())


def test_no_option_of_any_command_is_new_lost_or_has_another_default() -> None:
    """After a change that is meant, run `python tests/reference/record_options.py`."""
    assert record_options.options() == RECORDED

"""What a command says when it refuses its options or its files."""

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(message: str) -> Iterator[None]:
    """The command in this block ends with status 1, for an error of one line that holds `message`."""
    with pytest.raises(SystemExit) as ended:
        yield
    said = str(ended.value.__context__)
    assert ended.value.code == 1, said
    assert message in said
    assert "\n" not in said

"""The images of one split: a split's name -> the subfolder, list, table, shards or rows of that split.

A name chooses a split; `ALL` is everything that lies there. None is the split for the purpose (training: `train`,
evaluation: `val`) where splits are recognised, else everything. The log says which it was.
"""

import logging
import os
import re
from collections.abc import Mapping

_logger = logging.getLogger(__name__)

ALL = "all"
# In the order of preference: "test" serves as "val" where there is no "val".
SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
SPLIT_WORDS = {word for words in SPLIT_NAMES.values() for word in words}
LISTING_ENDINGS = (".txt", ".lst", ".csv", ".tsv", ".jsonl")


def find_split(root: str, split: str) -> list[str]:
    """The subfolder or file of a split within a folder, or its several shards.

    Raises:
        ValueError: there is none; says what the folder holds.
    """
    entries = sorted(os.listdir(root))
    names = SPLIT_NAMES.get(split, (split,))
    for name in names:
        for candidate in (name, *(name + ending for ending in (*LISTING_ENDINGS, ".tar"))):
            if candidate in entries and (candidate != name or os.path.isdir(os.path.join(root, name))):
                return [os.path.join(root, candidate)]
        word = re.compile(rf"(^|[-_.]){re.escape(name)}[-_.].*\.tar$")
        shards = [os.path.join(root, entry) for entry in entries if word.search(entry)]
        if shards:
            return shards
    holds = ", ".join(entries[:20]) + (f", ... ({len(entries):,} in all)" if len(entries) > 20 else "")
    parent, own = os.path.split(os.path.abspath(root))
    remedy = (
        f"it is a split itself, give its parent {parent!r}"
        if own in SPLIT_WORDS
        else "give the folder that holds both splits"
    )
    raise ValueError(
        f"data_path={root!r} has no split {split!r}: looked for {' or '.join(names)} as a folder, "
        f"{', '.join(LISTING_ENDINGS)} or *.tar; it holds {holds or 'nothing'}; {remedy}"
    )


def split_of_folder(root: str, default_split: str) -> str:
    """What None means in a folder: the default split if it is recognised, else `ALL`.

    `train` is recognised only beside a validation split: a folder of that name alone may be a class of vehicles.
    """
    needed = ("train", "val") if default_split == "train" else (default_split,)
    try:
        for split in needed:
            find_split(root, split)
    except ValueError:
        return ALL
    _logger.info("%s holds splits, %r is used; --split %s uses everything in it", root, default_split, ALL)
    return default_split


def choose_rows(counts: Mapping[str, int], split: str | None, default_split: str, table: str) -> str | None:
    """The word in a table's column of splits whose rows are used; None: all rows.

    Args:
        counts: word in the column, lower case -> number of rows.
        split: a name, `ALL`, or None for the default split where there are such rows.
        default_split: what None asks for.
        table: what to call the table and its column.

    Raises:
        ValueError: no row is of the split.
    """
    if split == ALL:
        return None
    asked = split or default_split
    word = next((name for name in SPLIT_NAMES.get(asked, (asked.lower(),)) if name in counts), None)
    words = ", ".join(f"{name!r} ({number:,} rows)" for name, number in sorted(counts.items())[:20])
    if word is not None:
        remedy = f"; --split {ALL} uses all" if split is None else ""
        _logger.info("%s: the rows of the split %r are used, of %s%s", table, word, words, remedy)
        return word
    if split is not None:
        raise ValueError(f"{table} has no split {split!r}: it holds {words or 'nothing'}")
    _logger.warning("%s has no split %r, all rows are used: %s; --split NAME chooses", table, default_split, words)
    return None

"""The images of one split: a split's name -> the subfolder, list, table, shards or rows of that split.

A name chooses a split; `ALL` is everything. None is the default split (training: `train`, evaluation: `val`) where
splits are recognised, else everything. The log names the split.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping

_logger = logging.getLogger(__name__)

ALL = "all"
# In the order of preference: "test" serves as "val" where there is no "val".
SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
SPLIT_WORDS = {word for words in SPLIT_NAMES.values() for word in words}
LISTING_ENDINGS = (".txt", ".lst", ".csv", ".tsv", ".jsonl")
SHOWN = 3  # folders, and endings of files, that a message names
WITHOUT_LABELS = (
    "without labels: train with --split all; look at the encoder with `dino-sparo attention --image_path FOLDER`; "
    "write embeddings with `dino-sparo embed`"
)


def find_split(root: str, split: str) -> list[str]:
    """The subfolder or file of a split within a folder, or its several shards.

    Raises:
        ValueError: there is none; three lines with the layout needed, the folder's content, and a remedy.
    """
    chosen = _find_split(root, split)
    if not chosen:
        parent, folder = os.path.split(os.path.abspath(root))
        remedy = f" (it is a split itself: give its parent {parent!r})" if folder in SPLIT_WORDS else ""
        names = SPLIT_NAMES.get(split, (split,))
        raise ValueError(
            f"data_path={root!r} has no split {split!r}: evaluations need {' or '.join(names)} in it, a folder "
            f"with one subfolder per class, a list or table with labels ({', '.join(LISTING_ENDINGS)}) or *.tar"
            f"{remedy}\nit holds {_summary(root)}\n{WITHOUT_LABELS}"
        )
    return chosen


def _find_split(root: str, split: str) -> list[str]:
    """As `find_split`; empty if there is none."""
    entries = set(os.listdir(root))
    for name in SPLIT_NAMES.get(split, (split,)):
        if name in entries and os.path.isdir(os.path.join(root, name)):
            return [os.path.join(root, name)]
        for ending in (*LISTING_ENDINGS, ".tar"):
            if name + ending in entries:
                return [os.path.join(root, name + ending)]
        word = re.compile(rf"(^|[-_.]){re.escape(name)}[-_.].*\.tar$")
        if shards := sorted(entry for entry in entries if word.search(entry)):
            return [os.path.join(root, shard) for shard in shards]
    return []


def _summary(root: str) -> str:
    """A folder's content in a few words: folders by name, files by ending."""
    with os.scandir(root) as scan:
        is_folder = {entry.name: entry.is_dir() for entry in scan}
    folders = sorted(name for name, is_dir in is_folder.items() if is_dir)
    endings = Counter(
        os.path.splitext(name)[1].lower() or "no ending" for name, is_dir in is_folder.items() if not is_dir
    )
    parts = [f"{number:,} of {ending}" for ending, number in endings.most_common(SHOWN)]
    files = f"{endings.total():,} files ({', '.join(parts)}{', ...' if len(endings) > SHOWN else ''})"
    named = f"{len(folders):,} folders ({', '.join(folders[:SHOWN])}{', ...' if len(folders) > SHOWN else ''})"
    return " and ".join([named] * bool(folders) + [files] * bool(endings)) or "nothing"


def split_of_folder(root: str, default_split: str) -> str:
    """The split that None means in a folder: the default split if it is recognised, else `ALL`.

    `train` is recognised only beside a validation split: a folder of that name alone may be a class of vehicles.
    """
    needed = ("train", "val") if default_split == "train" else (default_split,)
    if not all(_find_split(root, split) for split in needed):
        return ALL
    _logger.info("%s holds splits, %r is used; --split %s uses everything in it", root, default_split, ALL)
    return default_split


def choose_rows(counts: Mapping[str, int], split: str | None, default_split: str, table: str) -> str | None:
    """The word in a table's column of splits whose rows are used; None: all rows.

    Args:
        counts: word in the column, lower case -> number of rows.
        split: a name, `ALL`, or None for the default split if there are such rows.
        default_split: the split of None.
        table: name of the table and its column, for messages.

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

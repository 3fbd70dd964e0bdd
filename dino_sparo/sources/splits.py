"""A folder and a split's name -> the subfolder, list, table or shards of that split."""

import os
import re

# In the order of preference: "test" serves as "val" where there is no "val".
SPLIT_NAMES = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
SPLIT_WORDS = {word for words in SPLIT_NAMES.values() for word in words}


def find_split(root: str, split: str) -> list[str]:
    """The subfolder or file of a split within a folder, or its several shards.

    Raises:
        ValueError: there is none; says what the folder holds.
    """
    entries = sorted(os.listdir(root))
    for name in SPLIT_NAMES[split]:
        for candidate in (name, f"{name}.txt", f"{name}.lst", f"{name}.csv", f"{name}.tsv", f"{name}.tar"):
            if candidate in entries and (candidate != name or os.path.isdir(os.path.join(root, name))):
                return [os.path.join(root, candidate)]
        word = re.compile(rf"(^|[-_.]){name}[-_.].*\.tar$")
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
        f"data_path={root!r} has no split {split!r}: looked for {' or '.join(SPLIT_NAMES[split])} as a folder, .txt, "
        f".lst, .csv, .tsv or *.tar; it holds {holds or 'nothing'}; {remedy}"
    )

"""Questions with true and false captions, and how annotation files are read into them.

images  captions  matches
1       2         (0,)         SugarCrepe, ARO, VL-CheckList: a true and a false caption
1       4 or 5    (0,)         What'sUp, the order of words in captions of COCO and Flickr
2       2         (0, 1)       Winoground: each image has its caption
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.image_text.scoring.image_files import Crop, ImageName
from dino_sparo.runtime.files import read_json


class Question(NamedTuple):
    """Images, captions, and which of them match.

    Attributes:
        split: kind of the question; accuracy is reported per split.
        images: file names, or parts of such images.
        captions: true and false ones.
        matches: index of each image's true caption in `captions`; images have different ones.
    """

    split: str
    images: tuple[ImageName, ...]
    captions: tuple[str, ...]
    matches: tuple[int, ...] = (0,)


def questions_of(
    path: Path, entries: Iterable[tuple[str, Any]], make: Callable[[Any], Question], expected: str
) -> Iterator[Question]:
    """The checked questions of a file's entries.

    Args:
        path: the file, for messages.
        entries: name for messages (`entry 3`), and content of any type.
        make: content -> question; may raise whatever an unexpected type raises.
        expected: valid content, for messages.

    Raises:
        ValueError: an entry is no question; the message names file and entry.
    """
    for name, entry in entries:
        try:
            question = make(entry)
            names = [image.name if isinstance(image, Crop) else image for image in question.images]
            for text in (question.split, *question.captions, *names):
                if not isinstance(text, str):
                    raise ValueError(f"{text!r:.80} is not text")
                text.encode()  # a lone surrogate has no UTF-8
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise ValueError(f"{path}, {name}: expected {expected}; {reason}") from error
        yield question


def json_reader(
    files: Mapping[str, str], make: Callable[[str, Any], Question], expected: str, keyed: bool = False
) -> Callable[[Path], Iterator[Question]]:
    """Folder -> the questions of the JSON lists that the folder holds.

    Args:
        files: split -> name of its file.
        make: split and entry of a list -> question; otherwise as in `questions_of`.
        expected: valid entries, for messages.
        keyed: also read the values of an object in place of a list.
    """

    def read(folder: Path) -> Iterator[Question]:
        for split, name in files.items():
            path = folder / name
            if not path.is_file():
                continue
            entries = read_json(path)
            if not isinstance(entries, list | dict if keyed else list):
                raise ValueError(f"{path}: expected a list of {expected}; found {type(entries).__name__}")
            rows = entries.items() if isinstance(entries, dict) else enumerate(entries)
            yield from questions_of(
                path, ((f"entry {key!r}", row) for key, row in rows), partial(make, split), expected
            )

    return read


def list_of(value: Any, length: int | None = None) -> list[Any]:
    """A list in an entry, perhaps of a fixed length; raises ValueError for anything else, such as a text."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError(f"{value!r:.80} is no list" + (f" of {length}" if length else ""))
    return value

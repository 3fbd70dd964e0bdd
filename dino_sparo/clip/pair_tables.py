"""A table (.csv, .tsv) or COCO's annotations (.json) -> the pairs that it names.

Images are files, read when they are asked for; only the first few are looked for when the listing is opened.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dino_sparo.clip.pair_captions import ListedCaptions, PackedTexts
from dino_sparo.clip.pairs import LeftOut, PairSource
from dino_sparo.sources.packed import FileSource
from dino_sparo.sources.tables import PATH_COLUMNS

# In the order of preference; `title` is OpenCLIP's default.
CAPTION_COLUMNS = ("caption", "captions", "title", "text", "sentence", "description")
DELIMITERS = "\t,;|"
FILES_CHECKED = 8

NO_IMAGE, NO_CAPTION, NO_SUCH_IMAGE = "without image", "without caption", "with the id of no image"


class _Header(NamedTuple):
    """How a table is written.

    Attributes:
        delimiter: between columns.
        columns: their names.
        image: number of the column of paths.
        caption: number of the column of captions.
    """

    delimiter: str
    columns: list[str]
    image: int
    caption: int


def open_pair_table(
    path: str, image_key: str | None = None, caption_key: str | None = None, image_folder: str | None = None
) -> tuple[PairSource, str]:
    """The pairs of a table with a header, one per row; also the log's words for how it was opened.

    The delimiter is the one with which the header has both columns. Captions may hold delimiters and line ends in
    double quotes.

    Args:
        path: the table.
        image_key: column of the images' paths; None finds it by name.
        caption_key: column of the captions; None finds it by name.
        image_folder: what relative paths start from; None: the table's folder.

    Raises:
        ValueError: no such column (lists those there are), a row of another length, no pairs, or files that are not
            there.
    """
    paths, captions, left_out = PackedTexts(), PackedTexts(), LeftOut()
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = _read_header(file.readline(), path, image_key, caption_key)
        for line, row in _rows(csv.reader(file, delimiter=header.delimiter), path, header):
            image, caption = row[header.image].strip(), row[header.caption].strip()
            if image and caption:
                paths.append(image)
                captions.append(caption)
            else:
                left_out.add(NO_CAPTION if image else NO_IMAGE, f"{path}, line {line}")
    images = _files(f"table {path}", image_folder or os.path.dirname(path), paths)
    return PairSource(images, ListedCaptions(captions.packed()), left_out), "read"


def _read_header(line: str, path: str, image_key: str | None, caption_key: str | None) -> _Header:
    """Find delimiter and columns."""
    read = {mark: next(csv.reader([line], delimiter=mark), []) for mark in DELIMITERS}
    for mark, columns in read.items():
        image = _column(columns, image_key, PATH_COLUMNS)
        caption = _column(columns, caption_key, CAPTION_COLUMNS)
        if image is not None and caption is not None:
            return _Header(mark, columns, image, caption)
    columns = max(read.values(), key=len)
    lacking = [
        f"{what} ({f'{option} {key!r}' if key else 'one of ' + ', '.join(names)})"
        for what, option, key, names in (
            ("of images", "image_key", image_key, PATH_COLUMNS),
            ("of captions", "caption_key", caption_key, CAPTION_COLUMNS),
        )
        if _column(columns, key, names) is None
    ]
    raise ValueError(
        f"table {path!r} has no column {' and none '.join(lacking)}; found the columns {columns}; name them with "
        "--image_key and --caption_key"
    )


def _column(columns: Sequence[str], key: str | None, names: Sequence[str]) -> int | None:
    """Number of the column called `key`, else of the first that has one of the usual names, in any case."""
    plain = [column.strip() for column in columns]
    if key is not None:
        return plain.index(key) if key in plain else None
    lower = [column.lower() for column in plain]
    return next((lower.index(name) for name in names if name in lower), None)


def _rows(reader: Any, path: str, header: _Header) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row; ValueError if one cannot be read or is of another length."""
    try:
        for row in reader:
            if len(row) == len(header.columns):
                yield reader.line_num + 1, row
            elif row:
                raise ValueError(
                    f"table {path!r}: line {reader.line_num + 1} has {len(row)} columns, the header has "
                    f"{len(header.columns)}: {header.columns}; put captions that hold {header.delimiter!r} or line "
                    "ends in double quotes"
                )
    except csv.Error as error:
        raise ValueError(f"table {path!r}: line {reader.line_num + 1} cannot be read ({error})") from error


def open_coco_captions(path: str, image_folder: str | None = None) -> tuple[PairSource, str]:
    """The images of COCO's caption annotations, each with all of its captions.

    Args:
        path: JSON with `images` (`id`, `file_name`) and `annotations` (`image_id`, `caption`).
        image_folder: what file names start from; None: the annotations' folder.

    Raises:
        ValueError: another kind of JSON (lists its keys), no pairs, or files that are not there.
    """
    files, captions_of, left_out = _read_coco(path)
    paths, captions, ends = PackedTexts(), PackedTexts(), []
    for number, name in files.items():
        if not captions_of[number]:
            left_out.add(NO_CAPTION, name)
            continue
        paths.append(name)
        for caption in captions_of[number]:
            captions.append(caption)
        ends.append(len(captions.ends))
    images = _files(f"captions {path}", image_folder or os.path.dirname(path), paths)
    return PairSource(images, ListedCaptions(captions.packed(), np.array(ends, dtype=np.int64)), left_out), "read"


def _read_coco(path: str) -> tuple[dict[Any, str], dict[Any, list[str]], LeftOut]:
    """File names and captions of every image by its id, and annotations of no image."""
    with open(path, encoding="utf-8") as file:
        try:
            said = json.load(file)
        except ValueError as error:
            raise ValueError(f"annotations {path!r} are no JSON ({error})") from error
    keys = list(said) if isinstance(said, dict) else []
    left_out = LeftOut()
    try:
        files = {image["id"]: str(image["file_name"]) for image in said["images"]}
        captions: dict[Any, list[str]] = {number: [] for number in files}
        for annotation in said["annotations"]:
            if annotation["image_id"] not in captions:
                left_out.add(NO_SUCH_IMAGE, f"image_id {annotation['image_id']}")
            elif text := str(annotation["caption"]).strip():
                captions[annotation["image_id"]].append(text)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"annotations {path!r} are no COCO captions: they need `images` with `id` and `file_name`, and "
            f"`annotations` with `image_id` and `caption`; found the keys {keys}, missing is {error}"
        ) from error
    return files, captions, left_out


def _files(name: str, folder: str, paths: PackedTexts) -> FileSource:
    """The image files, after looking whether the first of them exist."""
    packed = paths.packed()
    if not len(packed):
        raise ValueError(f"{name} holds no pair of an image and a caption")
    for index in range(min(FILES_CHECKED, len(packed))):
        whole = os.path.join(folder, packed[index])
        if not os.path.isfile(whole):
            raise ValueError(
                f"{name} names {packed[index]!r}, but {whole!r} does not exist; give the folder that the names start "
                "from with --image_folder"
            )
    return FileSource(name, folder, packed, None, None)

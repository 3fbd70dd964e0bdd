"""Any data with captions -> rows of a caption and perhaps the file of its image. Images are not opened.

captions.txt                       a caption per line
table.csv, table.tsv, .jsonl       a column of captions, perhaps one of images
any other .json, .jsonl            every text under a key that captions usually have: COCO's annotations, Karpathy's
                                   splits, true and false captions of SugarCrepe, ARO, What'sUp, Winoground, ...
everything else                    data of `image_text.pairs.sources.open_pairs`: shards, scenes, class folders
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.data.sources import CorruptImageError
from dino_sparo.data.sources.decode import IMAGE_ENDINGS
from dino_sparo.data.sources.folders import ALL
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.data.sources.tables import TABLE_ENDINGS, TableRows
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.pairs.tables import CAPTIONS, IMAGES, coco_captions
from dino_sparo.oc_clip.graph_files import read_lines
from dino_sparo.runtime.files import parse_object, read_json

# For JSON that is no table. There, "description" and "title" describe whole files.
CAPTION_KEYS = frozenset(
    (
        *("caption", "captions", "text", "sentence", "raw", "caption_0", "caption_1", "caption_options"),
        *("negative_caption", "true_caption", "false_caption", "POS", "NEG"),
    )
)


class Row(NamedTuple):
    """A caption, perhaps "", and perhaps the file of its image."""

    caption: str
    image: str | None = None


def open_rows(
    data_path: str,
    output_folder: Path,
    caption_key: str | None = None,
    image_key: str | None = None,
    image_folder: str | None = None,
    split: str = ALL,
) -> Iterator[Row]:
    """All rows.

    Args:
        data_path: see the list at the top of this file.
        output_folder: folder that the paths of images in the rows start from.
        caption_key: column or key of the captions; None takes the usual names, like `image_key`.
        image_folder: folder that the table's own paths start from; None: the table's folder. Rows of COCO's annotations
            have images only if it is given.
        split: rows, or part of a folder, to use.
    """
    path = os.path.expanduser(data_path)
    ending = Path(path).suffix.lower()
    keys = CAPTION_KEYS if caption_key is None else frozenset((caption_key,))
    folder = seen_from(output_folder, image_folder or os.path.dirname(path))
    if not os.path.isfile(path) or ending not in (".txt", ".json", *TABLE_ENDINGS):
        yield from _pair_rows(data_path, output_folder, split, caption_key=caption_key, image_folder=image_folder)
    elif ending == ".txt":
        for _, _, line in read_lines(path):
            yield Row(line.decode("utf-8-sig", "replace").strip())
    elif ending == ".json":
        yield from _json_rows(path, keys, folder if image_folder else None)
    elif ending == ".jsonl" and not _is_table(path, caption_key):
        for number, _, line in read_lines(path):
            yield from map(Row, texts_in(parse_object(line, f"{path}:{number}"), keys))
    else:
        columns = replace(IMAGES, is_required=False).named(image_key), CAPTIONS.named(caption_key)
        for _, (image, caption) in TableRows(path, columns, split=split):
            yield Row(caption.strip(), os.path.join(folder, image.strip()) if image.strip() else None)


def texts_in(value: Any, keys: frozenset[str], is_caption: bool = True) -> Iterator[str]:
    """The texts under some keys anywhere in decoded JSON, except names of image files; `is_caption`: `value` counts."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from texts_in(item, keys, key in keys)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item, keys, is_caption)
    elif isinstance(value, str) and is_caption and value.strip():
        is_file = value.lower().encode("utf-8", "replace").endswith(IMAGE_ENDINGS)
        yield from [] if is_file else [value.strip()]


def _json_rows(path: str, keys: frozenset[str], folder: str | None) -> Iterator[Row]:
    """The rows of one JSON value, which is held in memory."""
    content = read_json(path)
    if folder is not None or (isinstance(content, dict) and {"images", "annotations"} <= set(content)):
        files, captions_of, _ = coco_captions(content, path)
        for number, captions in captions_of.items():
            image = None if folder is None else os.path.join(folder, files[number])
            yield from (Row(caption, image) for caption in captions if caption)
        return
    yield from map(Row, texts_in(content, keys))


def _is_table(path: str, caption_key: str | None) -> bool:
    """Whether the first object has a column of captions."""
    first = next((parse_object(line, f"{path}:{number}") for number, _, line in read_lines(path)), {})
    return CAPTIONS.named(caption_key).find(list(first)) is not None


def _pair_rows(data_path: str, output_folder: Path, split: str, **keys: Any) -> Iterator[Row]:
    source = open_pairs(data_path, split=split, default_split="val" if split == "val" else "train", **keys)
    images = source.images if isinstance(source.images, FileSource) else None
    folder = "" if images is None else seen_from(output_folder, images.root)
    for index in range(len(source)):
        try:
            captions = source.captions_of(index)
        except CorruptImageError:
            continue  # training counts and names it
        image = None if images is None else os.path.join(folder, images.paths[index])
        yield from (Row(caption.strip(), image) for caption in captions)


def seen_from(start: Path, folder: str) -> str:
    """The relative path to a folder, so that both folders can be moved together; "" if they are the same."""
    path = os.path.relpath(os.path.realpath(folder or "."), os.path.realpath(start))
    return "" if path == "." else path

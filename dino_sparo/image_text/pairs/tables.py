"""A table (.csv, .tsv, .jsonl), COCO's annotations (.json) or a folder of images and texts -> pairs.

Of the images that a table or annotations name, only the first few must exist when the listing is opened.
"""

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from dino_sparo.data.sources.decode import IMAGE_EXTENSIONS
from dino_sparo.data.sources.decode import left_out as left_out_files
from dino_sparo.data.sources.image_source import FileSource, PackedStrings
from dino_sparo.data.sources.tables import PATHS, SPLITS, Column, TableRows, require_first_files
from dino_sparo.image_text.pairs.batches import NO_CAPTION, NO_IMAGE, LeftOut, PairSource
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import read_json

IMAGES = replace(PATHS, holds="images", option="image_key")
# `title` is OpenCLIP's default.
CAPTION_NAMES = ("caption", "captions", "title", "text", "sentence", "description")
CAPTIONS = Column("captions", "caption_key", CAPTION_NAMES, is_required=True, may_span=True)
NEGATIVES = Column("false captions", "negative_key", (), may_span=True)  # never looked for by name
COLUMNS = IMAGES, CAPTIONS, NEGATIVES, SPLITS

NO_SUCH_IMAGE = "with the id of no image"


class PackedTexts:
    """A growing list of texts in one array of bytes; `packed` returns the list as `PackedStrings`."""

    def __init__(self) -> None:
        self.blob, self.ends = bytearray(), array("q")

    def append(self, text: str) -> None:
        """Add a text; bytes that are not UTF-8 stay, half characters become `?`."""
        try:
            self.blob += text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # JSON may hold half of a surrogate pair
            self.blob += text.encode("utf-8", "replace")
        self.ends.append(len(self.blob))

    def packed(self) -> PackedStrings:
        """All texts so far."""
        return PackedStrings(np.frombuffer(bytes(self.blob), np.uint8), np.array(self.ends, dtype=np.int64))


def listed_captions(texts: PackedStrings, ends: Int64[np.ndarray, " images"] | None, index: int) -> list[str]:
    """The captions of an image of a table or of annotations, from all captions in the order of the images.

    `ends` has the index after the last caption of each image; None: one caption per image.
    """
    if ends is None:
        return [texts[index]]
    return [texts[i] for i in range(int(ends[index - 1]) if index else 0, int(ends[index]))]


def open_pair_table(
    path: str, keys: Sequence[str | None], image_folder: str | None, split: str | None, default_split: str
) -> PairSource:
    """The pairs of a table with a header, one per row; `keys` are the names of `COLUMNS`, see `PairPath` for the rest.

    Captions may hold delimiters and line ends in double quotes.
    """
    paths, captions, negatives, left_out = PackedTexts(), PackedTexts(), PackedTexts(), LeftOut()
    *columns, splits = (column.named(key) for column, key in zip(COLUMNS, keys, strict=True))
    has_negatives = columns[2].name is not None
    for line, cells in TableRows(path, columns, splits, split, default_split):
        image, caption, negative = (cell.strip() for cell in cells)
        if image and caption:
            paths.append(image)
            captions.append(caption)
            if has_negatives:
                negatives.append(negative)
        else:
            left_out.add(NO_CAPTION if image else NO_IMAGE, f"{path}, line {line}")
    images = _files(f"table {path}", image_folder or os.path.dirname(path), paths)
    false_captions = partial(listed_captions, negatives.packed(), None) if has_negatives else None
    return PairSource(images, partial(listed_captions, captions.packed(), None), left_out, false_captions)


def open_coco_captions(path: str, image_folder: str | None = None) -> PairSource:
    """The images of COCO's caption annotations, each with all of its captions.

    The JSON has `images` (`id`, `file_name`) and `annotations` (`image_id`, `caption`); for another kind the UserError
    lists its keys. Relative file names start from `image_folder`, by default the annotations' folder.
    """
    files, captions_of, left_out = coco_captions(read_json(path), path)
    paths, captions, ends = PackedTexts(), PackedTexts(), []
    for number, name in files.items():
        texts = [text for text in captions_of[number] if text]
        if not texts:
            left_out.add(NO_CAPTION, name)
            continue
        paths.append(name)
        for caption in texts:
            captions.append(caption)
        ends.append(len(captions.ends))
    images = _files(f"captions {path}", image_folder or os.path.dirname(path), paths)
    return PairSource(images, partial(listed_captions, captions.packed(), np.array(ends, dtype=np.int64)), left_out)


def open_pair_folder(folder: str) -> PairSource:
    """The images of a folder whose caption is in a .txt file of the same name in the same folder, sorted by name."""
    entries = sorted(os.listdir(folder))
    texts = {entry for entry in entries if entry.endswith(".txt") and os.path.isfile(os.path.join(folder, entry))}
    endings = [Path(entry).suffix.lower() for entry in entries if os.path.isfile(os.path.join(folder, entry))]
    others = Counter(ending for ending in endings if ending not in (*IMAGE_EXTENSIONS, ".txt"))
    paths, captions, left_out = PackedTexts(), PackedTexts(), LeftOut()
    for image in (entry for entry in entries if entry.lower().endswith(IMAGE_EXTENSIONS)):
        caption = Path(image).with_suffix(".txt").name
        if caption in texts:
            paths.append(image)
            captions.append((Path(folder) / caption).read_text(encoding="utf-8-sig", errors="replace").strip())
        else:
            left_out.add("without a .txt", os.path.join(folder, image))
    files = FileSource(f"folder {folder}", folder, paths.packed(), None, None)
    how = f"read{left_out_files(others)}"
    return PairSource(files, partial(listed_captions, captions.packed(), None), left_out, how_opened=how)


def coco_captions(content: Any, path: str) -> tuple[dict[Any, str], dict[Any, list[str]], LeftOut]:
    """File names and captions of every image by its id, and the annotations without an image; a caption may be empty.

    If the file has another form, the UserError lists its keys.
    """
    keys = list(content) if isinstance(content, dict) else []
    left_out = LeftOut()
    try:
        files = {image["id"]: str(image["file_name"]) for image in content["images"]}
        captions: dict[Any, list[str]] = {number: [] for number in files}
        for annotation in content["annotations"]:
            if annotation["image_id"] not in captions:
                left_out.add(NO_SUCH_IMAGE, f"image_id {annotation['image_id']}")
            else:
                captions[annotation["image_id"]].append(str(annotation["caption"]).strip())
    except (KeyError, TypeError) as error:
        raise UserError(
            f"annotations {path!r} are not COCO captions: they need `images` with `id` and `file_name`, and "
            f"`annotations` with `image_id` and `caption`; found the keys {keys}, missing is {error}"
        ) from error
    return files, captions, left_out


def _files(name: str, folder: str, paths: PackedTexts) -> FileSource:
    """The image files; the first files must exist."""
    packed = paths.packed()
    if not len(packed):
        raise UserError(f"{name} holds no pair of an image and a caption")
    require_first_files(name, folder, packed, "give the folder that the names start from with --image_folder")
    return FileSource(name, folder, packed, None, None)

"""Tar shards in webdataset's layout -> pairs: members of one name, `7.jpg` and `7.txt`, are an image and its caption.

Shards are indexed once and read by offset, as in `sources/tars.py` for images alone. Hence order, resuming and sharing
among ranks are exact for any number of shards.
"""

import logging
import os
from functools import partial
from typing import Any

import numpy as np

from dino_sparo.data.sources import CorruptImageError, indexes
from dino_sparo.data.sources.decode import IMAGE_ENDINGS, IMAGE_EXTENSIONS
from dino_sparo.data.sources.tables import FILES_CHECKED
from dino_sparo.data.sources.tars import TarSource, lost_samples
from dino_sparo.image_text.pairs.batches import NO_CAPTION, NO_IMAGE, LeftOut, PairSource
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import open_regular, parse_json

logger = logging.getLogger(__name__)

CAPTION_ENDING, JSON_ENDING = ".txt", ".json"
REMEDIES = {
    JSON_ENDING: "give --caption_key KEY to take captions from .json",
    ".cls": "give --caption_templates to make them from .cls",
    CAPTION_ENDING: "leave out --caption_key to take captions from .txt",
}
DAMAGED = "in damaged shards, as far as known"

# First header and content of an image in blocks of the tar, its bytes, and the same of its caption's content.
PAIR_RECORD = np.dtype(
    [("start", "<u4"), ("block", "<u4"), ("size", "<u4"), ("caption_block", "<u4"), ("caption_size", "<u4")]
)


class TarCaptions:
    """Captions within tar shards, read at their offsets.

    Args:
        index: records with `caption_block` and `caption_size` of every image.
        key: None if a member is the caption; else the key of JSON members that holds a text or a list of texts.
    """

    def __init__(self, index: indexes.ShardIndex, key: str | None) -> None:
        self.index, self.key = index, key

    def __call__(self, index: int) -> list[str]:
        """The captions of image `index`; raises CorruptImageError as `json_of`."""
        return captions_in(self._read(index), self.key, self.location(index))

    def json_of(self, index: int) -> dict[str, Any]:
        """The JSON object of image `index`.

        Raises:
            CorruptImageError: the shard cannot be read, or the member is not a JSON object.
        """
        return _json_object(self._read(index), self.location(index))

    def _read(self, index: int) -> str:
        size = int(self.index.records[index]["caption_size"])
        try:
            with open_regular(self.index.shard_of(index)) as file:
                file.seek(self._offset(index))
                return file.read(size).decode("utf-8", "replace")
        except OSError as error:
            raise CorruptImageError(self.location(index), str(error.strerror)) from error

    def location(self, index: int) -> str:
        """Shard and byte of the caption of image `index`."""
        return f"{self.index.shard_of(index)}, caption at byte {self._offset(index)}"

    def _offset(self, index: int) -> int:
        return int(self.index.records[index]["caption_block"]) * indexes.BLOCK_BYTES


def captions_in(text: str, key: str | None, location: str) -> list[str]:
    """The captions in a member: the text itself, or with a key the text, or the list of texts, of a JSON object.

    Raises:
        CorruptImageError: the object has no such key.
    """
    if key is None:
        return [text]
    content = _json_object(text, location)
    if key not in content:
        raise CorruptImageError(
            location,
            f"has no key {key!r}; give one of its keys as --caption_key: {', '.join(content) or 'it has none'}",
        )
    value = content[key]
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _json_object(text: str, location: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CorruptImageError(location, f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptImageError(location, f"holds a {type(value).__name__}, not a JSON object")
    return value


def open_pair_shards(shards: list[str], name: str, caption_key: str | None = None) -> PairSource:
    """The pairs in tar shards.

    Args:
        shards: paths.
        name: for the log.
        caption_key: key of the `.json` members under which the captions stand; None takes the `.txt` members.

    Raises:
        ValueError: all shards are damaged, or there is no pair; names the members and keys found.
    """
    index, notes = indexes.open_index(pairs_kind(caption_key), shards)
    left_out = _left_out(shards, notes)
    if not len(index):
        endings = dict.fromkeys(ending for note in notes for ending in note.get("endings", ()))
        wanted = CAPTION_ENDING if caption_key is None else JSON_ENDING
        remedies = [remedy for ending, remedy in REMEDIES.items() if ending in endings and ending != wanted]
        if not endings.keys() & set(IMAGE_EXTENSIONS):
            remedies.append(f"convert the images to one of {', '.join(IMAGE_EXTENSIONS)}")
        raise UserError(
            f"{name}: no sample has an image and a {wanted}; the members end in {', '.join(endings) or 'nothing'}; "
            f"{'; '.join(remedies) or f'name the caption of 7.jpg 7{wanted}'}"
        )
    how_opened = f"{len(shards)} shard(s) indexed"
    pairs = PairSource(TarSource(name, index), TarCaptions(index, caption_key), left_out, how_opened=how_opened)
    _require_captions(pairs)
    return pairs


def _require_captions(pairs: PairSource) -> None:
    """UserError unless one of the first pairs has a caption."""
    for index in range(min(FILES_CHECKED, len(pairs))):
        try:
            pairs.captions_of(index)
            return
        except CorruptImageError as error:
            problem = error
    raise UserError(f"{pairs.name}: the first pairs have no captions: {problem}")


def pairs_kind(caption_key: str | None) -> indexes.Kind:
    """How shards of pairs are indexed; `caption_key` as in `open_pair_shards`."""
    ending = CAPTION_ENDING if caption_key is None else JSON_ENDING
    return indexes.Kind(f"pairs {ending}", PAIR_RECORD, partial(_index_pairs, ending=ending.encode()))


def _index_pairs(shard: str, ending: bytes) -> indexes.Piece:
    """The pairs in one shard; its number of samples, endings, and samples that are not pairs."""
    records, samples, endings, left_out = list[tuple[int, ...]](), 0, dict[bytes, None](), LeftOut()
    for key, members in indexes.shard_samples(shard):
        samples += 1
        endings.update(dict.fromkeys(members))
        image = next((member for name, member in members.items() if name.endswith(IMAGE_ENDINGS)), None)
        caption = members.get(ending)
        if image is None or caption is None:
            where = f"{shard}!{os.fsdecode(key)}"
            has = ", ".join(map(os.fsdecode, members))
            left_out.add(*((NO_IMAGE, f"{where} with {has}") if image is None else (NO_CAPTION, where)))
        else:
            records.append((*indexes.blocks_of(image), *indexes.blocks_of(caption)[1:]))
    notes = {
        "samples": samples,
        "endings": [os.fsdecode(ending) for ending in endings],
        "left_out": {reason: (number, left_out.examples[reason]) for reason, number in left_out.counts.items()},
    }
    return indexes.Piece(np.array(records, PAIR_RECORD), notes)


def _left_out(shards: list[str], notes: list[indexes.Notes]) -> LeftOut:
    """Samples that are not pairs, or lie in damaged shards."""
    left_out = LeftOut()
    for note in notes:
        for reason, (number, example) in note.get("left_out", {}).items():
            left_out.add(reason, example, number)
    samples = np.array([note.get("samples", 0) for note in notes])
    damage = {shard: note["damage"] for shard, note in zip(shards, notes, strict=True) if "damage" in note}
    for shard, number in lost_samples(shards, notes, samples).items():
        logger.warning("%s; it is left out, with about %d samples", damage[shard], number)
        left_out.add(DAMAGED, damage[shard], number)
    return left_out

"""Index of an image -> its captions.

Each class is a `Captions`: called with an index it returns the captions of that image, perhaps none. Captions of tables
and annotations lie in flat arrays, as file names do (`sources/image_source.py` says why); those of tar shards stay
there and are read when needed.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from dino_sparo.data.dataset import require_labels
from dino_sparo.data.scene_graphs import ATTRIBUTES
from dino_sparo.data.scenes import Scenes
from dino_sparo.data.sources import CorruptImageError, ImageSource
from dino_sparo.data.sources.image_source import PackedStrings
from dino_sparo.data.sources.shard_index import ShardIndex
from dino_sparo.data.sources.tar_headers import BLOCK_BYTES
from dino_sparo.image_text.classes import ClassList
from dino_sparo.image_text.prompts import prompts
from dino_sparo.runtime.files import open_regular, parse_json

MAX_CAPTION_BYTES = 1 << 20


class PackedTexts:
    """A growing list of texts in one array of bytes; `packed` gives them back as `PackedStrings`."""

    def __init__(self) -> None:
        self.blob, self.ends = bytearray(), array("q")

    def append(self, text: str) -> None:
        """Add a text; bytes that are no UTF-8 stay, half characters become `?`."""
        try:
            self.blob += text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # JSON may hold half of a surrogate pair
            self.blob += text.encode("utf-8", "replace")
        self.ends.append(len(self.blob))

    def packed(self) -> PackedStrings:
        """All texts so far."""
        return PackedStrings(np.frombuffer(bytes(self.blob), np.uint8), np.array(self.ends, dtype=np.int64))


class ListedCaptions:
    """Captions of a table or of annotations.

    Args:
        texts: all captions, in the order of the images.
        ends: (images,), index after the last caption of each image; None: one caption per image.
    """

    def __init__(self, texts: PackedStrings, ends: Int64[np.ndarray, " images"] | None = None) -> None:
        self.texts, self.ends = texts, ends

    def __call__(self, index: int) -> Sequence[str]:
        """The captions of image `index`."""
        if self.ends is None:
            return [self.texts[index]]
        start = int(self.ends[index - 1]) if index else 0
        return [self.texts[i] for i in range(start, int(self.ends[index]))]


class TarCaptions:
    """Captions within tar shards, read at their offsets.

    Args:
        index: records with `caption_block` and `caption_size` of every image.
        key: None if a member is the caption; else the key of JSON members that holds a text or a list of texts.
    """

    def __init__(self, index: ShardIndex, key: str | None) -> None:
        self.index, self.key = index, key

    def __call__(self, index: int) -> Sequence[str]:
        """The captions of image `index`.

        Raises:
            CorruptImageError: the shard cannot be read, or the member is no JSON object.
        """
        text = self._read(index)
        if self.key is None:
            return [text]
        return captions_in_json(text, self.key, self.location(index))

    def json_of(self, index: int) -> dict[str, Any]:
        """The JSON object of image `index`; raises CorruptImageError if there is none."""
        return _json_object(self._read(index), self.location(index))

    def _read(self, index: int) -> str:
        size = int(self.index.records[index]["caption_size"])
        if size > MAX_CAPTION_BYTES:
            raise CorruptImageError(
                self.location(index), f"{size:,} bytes is no plausible caption; at most {MAX_CAPTION_BYTES:,} are read"
            )
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
        return int(self.index.records[index]["caption_block"]) * BLOCK_BYTES


def captions_in_json(text: str, key: str, location: str) -> list[str]:
    """The text, or the list of texts, under a key of a JSON object; raises CorruptImageError if it is no object."""
    value = _json_object(text, location).get(key)
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _json_object(text: str, location: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CorruptImageError(location, f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptImageError(location, f"holds a {type(value).__name__}, not a JSON object")
    return value


class SceneCaptions:
    """The captions of the built-in scenes: what they show, in words.

    Args:
        scenes: the pictures.
        varied: also captions without some of the attributes. Without colour and background, only shapes identify the
            image of a caption in a batch; shapes are hardly learned otherwise.
    """

    # Half of them name shapes and relation alone.
    VARIED = (ATTRIBUTES, ("colour", "texture"), ("colour",), ("texture",), (), (), (), ())

    def __init__(self, scenes: Scenes, varied: bool = False) -> None:
        self.scenes, self.mentioned = scenes, self.VARIED if varied else (ATTRIBUTES,)

    def __call__(self, index: int) -> Sequence[str]:
        """The captions of scene `index`, the complete one first."""
        graph = self.scenes.scene_graph(index)
        return [graph.described(attributes) for attributes in self.mentioned]


class ClassCaptions:
    """Captions made from class names, so that any labelled images are pairs.

    Args:
        source: images with labels.
        classes: names of the classes, from `classes.open_classes`.
        templates: sentences with `{}` for the name; each gives a caption of every image.
    """

    def __init__(self, source: ImageSource, classes: ClassList, templates: tuple[str, ...]) -> None:
        self.class_of = classes.class_of[require_labels(source)]
        self.names, self.templates = classes.names, templates

    def __call__(self, index: int) -> Sequence[str]:
        """One caption per template."""
        return prompts(self.templates, self.names[self.class_of[index]])

"""Any collection of image-caption pairs, by index: tar shards, tables, COCO's annotations, scenes, labelled images.

`open_pairs(data_path)` detects the kind of the path, as `sources.open_source` does for images alone, and returns a
`PairSource`:

    shards-{000..099}.tar, a::b, globs, folder of tars    webdataset's: `7.jpg` + `7.txt`, or a key of `7.json`
    table.csv, table.tsv, .jsonl                          columns of paths and of captions, one pair per row
    captions_train2017.json                               COCO: several captions per image, one is drawn per epoch
    folder of images                                      `7.jpg` + `7.txt`
    scenes, scenes:NUM:SIZE                               the built-in scenes in words
    class folders, labelled sets (cifar10:DIR), ...       captions made from class names
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dino_sparo.data.dataset import most_corrupt
from dino_sparo.data.labels import require_labels
from dino_sparo.data.scenes.graphs import ATTRIBUTES, INDEPENDENT
from dino_sparo.data.scenes.images import Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import ImageLimits, TableColumns, open_source, refuse_remote
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.data.sources.folders import ALL, resolve_split
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.data.sources.indexes import Kind
from dino_sparo.data.sources.tables import TABLE_ENDINGS
from dino_sparo.data.sources.tars import TarSource, find_shards, images_kind
from dino_sparo.image_text.pairs.batches import PairSource
from dino_sparo.image_text.pairs.tables import open_coco_captions, open_pair_folder, open_pair_table
from dino_sparo.image_text.pairs.tars import open_pair_shards, pairs_kind
from dino_sparo.image_text.prompts import AUTO, open_classes, open_templates, prompts
from dino_sparo.runtime.faults import UserError

logger = logging.getLogger(__name__)

# If a larger share of the samples are not pairs, something is wrong with the data.
MAX_LEFT_OUT = 0.01
# Attributes that captions of training scenes mention: half of the captions name shapes and relation alone. Without
# colour and background, only shapes identify the image of a caption in a batch; shapes are hardly learned otherwise.
VARIED = (ATTRIBUTES, ("colour", "texture"), ("colour",), ("texture",), (), (), (), ())


def open_pairs(*args: Any, **options: Any) -> PairSource:
    """Open the pairs that a `PairPath` with these arguments describes; the first is the data path."""
    return PairPath(*args, **options).open()


@dataclass(frozen=True)
class PairPath:
    """A data path, and how its pairs are read.

    Attributes:
        data_path: see the list at the top of this file.
        image_key: a table's column of paths; None finds it by name.
        caption_key: a table's column of captions; None finds it by name. For shards a key of the `.json` members; None
            takes the `.txt` members.
        image_folder: folder of the relative paths in a table or in annotations; None: the folder of the file.
        caption_templates: make all captions from class names by these sentences, lists or files of `prompts.py`; None
            does so with the zero-shot evaluation's own sentences, if labelled images have no other captions.
        max_left_out: tolerated share of samples without image or caption.
        download: fetch a torchvision set that is not on disk.
        split: as in `sources.open_source`, like `default_split`.
        split_column: a table's column of splits; None finds it by name.
        default_split: the split of None, "train" or "val".
        negative_key: a table's column of false captions; None: there are none.
        limits: larger images count as unreadable.
    """

    data_path: str
    image_key: str | None = None
    caption_key: str | None = None
    image_folder: str | None = None
    caption_templates: Sequence[str] | None = None
    max_left_out: float = MAX_LEFT_OUT
    download: bool = False
    split: str | None = None
    split_column: str | None = None
    default_split: str = "train"
    negative_key: str | None = None
    limits: ImageLimits = DEFAULT_LIMITS

    def open(self) -> PairSource:
        """Open the pairs; one log line gives their number and the time, another the number of skipped samples.

        Raises:
            ValueError: nothing lies there, its form is not understood, it has no captions, or too many samples are no
                pairs.
        """
        start = time.perf_counter()
        source = self._open()
        if self.negative_key is not None and source.negatives is None:
            raise UserError(
                f"negative_key={self.negative_key!r} is a column of a table; data_path={self.data_path!r} is no table"
            )
        if isinstance(source.images, FileSource | TarSource):
            source.images.limits = self.limits
        seconds = time.perf_counter() - start
        logger.info("%s: %s pairs, %s in %.2f s", source.name, f"{len(source):,}", source.how_opened, seconds)
        _check_left_out(source, self.max_left_out)
        return source

    @property
    def kind(self) -> Kind:
        """How the tar shards, if there are any, are indexed."""
        return pairs_kind(self.caption_key) if self.caption_templates is None else images_kind(self.limits)

    def _open(self) -> PairSource:
        if self.caption_templates is not None or names_scenes(self.data_path):
            return self._open_without_captions()
        refuse_remote(self.data_path)
        # First, because the caption of an image named `train.jpg` is not a list of a split.
        root, names = self.data_path, ["", self.default_split]
        if self.split is not None:
            names = ["" if self.split == ALL else self.split]
        for folder in (os.path.join(root, name) for name in names):
            if os.path.isdir(folder) and not find_shards(folder) and len(pairs := open_pair_folder(folder)):
                self._columns.refuse_for(self.data_path)
                return pairs
        path, shards, split = resolve_split(self.data_path, self.split, self.default_split)
        is_file = os.path.isfile(path) and not shards
        if is_file and path.lower().endswith(TABLE_ENDINGS):
            keys = self.image_key, self.caption_key, self.negative_key, self.split_column
            return open_pair_table(path, keys, self.image_folder, split, self.default_split)
        if not shards and not (is_file and path.lower().endswith(".json")):
            return self._open_without_captions()
        if split not in (None, ALL):
            raise UserError(
                f"data_path={self.data_path!r} has no split {split!r}; give the folder that holds the splits' shards "
                "or tables, or a table with a column of splits"
            )
        self._columns.refuse_for(self.data_path)
        if shards:
            return open_pair_shards(shards, f"shards {self.data_path}", self.caption_key)
        return open_coco_captions(path, self.image_folder)

    @property
    def _columns(self) -> TableColumns:
        return TableColumns(path=self.image_key, split=self.split_column)

    def _open_without_captions(self) -> PairSource:
        """Images without written captions: scenes describe themselves, labels are put into words.

        Captions of training scenes vary from draw to draw; captions of held-out scenes do not.
        """
        data_path, templates = self.data_path, self.caption_templates
        if names_scenes(data_path):
            part = self.default_split if self.split in (None, ALL) else self.split
            images: Any = Scenes(*parse_scenes_spec(data_path), split=part, ties=INDEPENDENT)
            if templates is None:
                mentioned = VARIED if self.default_split == "train" else (ATTRIBUTES,)
                return PairSource(images, partial(scene_captions, images, mentioned), how_opened="ready")
        else:
            options: dict[str, Any] = {"default_split": self.default_split, "columns": self._columns}
            images = open_source(data_path, self.split, self.download, limits=self.limits, **options)
        if images.labels is None:
            raise UserError(
                f"data_path={data_path!r} has neither captions nor labels; give tar shards with .txt members, a table "
                "with a column of captions, COCO's annotations, a folder of images with a .txt of the same name beside "
                "each, or class folders"
            )
        lists = [(word,) if "{}" in word else open_templates(word, data_path) for word in templates or (AUTO,)]
        sentences = tuple(sentence for words in lists for sentence in words)
        classes = open_classes(images, data_path=data_path)
        logger.info("captions are made from %s by %d templates: %s ...", classes.origin, len(sentences), sentences[0])
        class_of = classes.class_of[require_labels(images)]
        return PairSource(images, partial(class_captions, class_of, classes.names, sentences), how_opened="ready")


def scene_captions(scenes: Scenes, mentioned: Sequence[tuple[str, ...]], index: int) -> list[str]:
    """Captions of scene `index`, one for each tuple of attributes that it mentions."""
    graph = scenes.scene_graph(index)
    return [graph.described(attributes) for attributes in mentioned]


def class_captions(class_of: np.ndarray, names: Sequence[str], templates: tuple[str, ...], index: int) -> list[str]:
    """Captions of image `index` made from the name of its class, one per template."""
    return prompts(templates, names[class_of[index]])


def _check_left_out(source: PairSource, max_left_out: float) -> None:
    """Log how many samples are not pairs; UserError if there are too many."""
    number, total = source.left_out.total, source.left_out.total + len(source)
    if not number:
        return
    message = f"{source.name}: {number:,} of {total:,} samples are left out: {source.left_out}"
    if number > (most := most_corrupt(max_left_out, total)):
        raise UserError(
            f"{message}; that is more than the {most:.0f} that --max_corrupt {max_left_out} allows. Repair them, or "
            f"raise it"
        )
    logger.warning("%s", message)

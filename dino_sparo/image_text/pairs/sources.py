"""Any collection of image-caption pairs, by index: tar shards, tables, COCO's annotations, scenes, labelled images.

`open_pairs(data_path)` detects the kind of the path, as `sources.open_source` does for images alone, and returns a
`PairSource`:

    shards-{000..099}.tar, a::b, globs, folder of tars    webdataset's: `7.jpg` + `7.txt`, or a key of `7.json`
    table.csv, table.tsv, .jsonl                          columns of paths and of captions, one pair per row
    captions_train2017.json                               COCO: several captions per image, one is drawn per epoch
    scenes, scenes:NUM:SIZE                               the built-in scenes in words
    class folders, labelled sets (cifar10:DIR), ...       captions made from class names

The files beside this one, in the order of the data flow: `tars.py`, `tables.py`, `captions.py`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Sequence

from dino_sparo.data.dataset import most_corrupt, require_labels
from dino_sparo.data.scene_graphs import ATTRIBUTES, INDEPENDENT
from dino_sparo.data.scenes import Scenes, names_scenes, parse_scenes_spec
from dino_sparo.data.sources import ImageLimits, ImageSource, TableColumns, open_source, refuse_remote
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.data.sources.folders import ALL, find_split, split_of_folder
from dino_sparo.data.sources.image_source import FileSource
from dino_sparo.data.sources.shard_index import index_share
from dino_sparo.data.sources.tables import TABLE_ENDINGS
from dino_sparo.data.sources.tars import IMAGES, TarSource, find_shards
from dino_sparo.image_text.classes import ClassList, open_classes
from dino_sparo.image_text.pairs.batches import PairSource
from dino_sparo.image_text.pairs.tables import open_coco_captions, open_pair_table
from dino_sparo.image_text.pairs.tars import open_pair_shards, pairs_kind
from dino_sparo.image_text.prompts import AUTO, open_templates, prompts

logger = logging.getLogger(__name__)

# If a larger share of the samples are no pairs, something is wrong with the data.
MAX_LEFT_OUT = 0.01


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


def open_pairs(
    data_path: str,
    image_key: str | None = None,
    caption_key: str | None = None,
    image_folder: str | None = None,
    caption_templates: Sequence[str] | None = None,
    max_left_out: float = MAX_LEFT_OUT,
    download: bool = False,
    *,
    split: str | None = None,
    split_column: str | None = None,
    default_split: str = "train",
    negative_key: str | None = None,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> PairSource:
    """Open pairs; one log line gives their number and the time, another the number of skipped samples.

    Args:
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

    Raises:
        ValueError: nothing lies there, its form is not understood, it has no captions, or too many samples are no
            pairs.
    """
    start = time.perf_counter()
    columns = TableColumns(path=image_key, split=split_column)
    if caption_templates is not None or names_scenes(data_path):
        source, how = _open_without_captions(data_path, split, default_split, download, columns, caption_templates)
    else:
        refuse_remote(data_path)
        path, shards, split = _resolve_split(os.path.expanduser(data_path), split, default_split)
        is_file = os.path.isfile(path)
        if is_file and not shards and path.lower().endswith(TABLE_ENDINGS):
            source, how = open_pair_table(
                *(path, image_key, caption_key, image_folder, split, split_column, default_split, negative_key)
            )
        elif shards or (is_file and path.lower().endswith(".json")):
            _refuse_split(data_path, split)
            columns.refuse_for(data_path)
            source, how = (
                open_pair_shards(shards, f"shards {data_path}", caption_key)
                if shards
                else open_coco_captions(path, image_folder)
            )
        else:
            source, how = _open_without_captions(data_path, split, default_split, download, columns, None)
    if negative_key is not None and source.negatives is None:
        raise ValueError(f"negative_key={negative_key!r} is a column of a table, and data_path={data_path!r} is none")
    if isinstance(source.images, FileSource | TarSource):
        source.images.limits = limits
    logger.info("%s: %s pairs, %s in %.2f s", source.name, f"{len(source):,}", how, time.perf_counter() - start)
    _check_left_out(source, max_left_out)
    return source


def _resolve_split(path: str, split: str | None, default_split: str) -> tuple[str, list[str], str | None]:
    """The file or folder of a path and a split, its tar shards if any, and the split that is still to be chosen."""
    if not os.path.isdir(path):
        return path, find_shards(path), split
    split = split or split_of_folder(path, default_split)
    chosen = [path] if split == ALL else find_split(path, split)
    if not os.path.isdir(chosen[0]):
        return chosen[0], chosen if chosen[0].endswith(".tar") else [], ALL
    shards = find_shards(chosen[0])
    return path, shards, ALL if shards else split


def index_pairs(
    data_path: str,
    split: str | None,
    default_split: str,
    caption_key: str | None,
    caption_templates: Sequence[str] | None,
    number: int,
    count: int,
) -> None:
    """Index every `count`-th shard of a data path, beginning with shard `number`, into the cache.

    The other arguments are those of `open_pairs`, which reads the index. Without shards nothing happens.
    """
    kind = pairs_kind(caption_key) if caption_templates is None else IMAGES
    with contextlib.suppress(ValueError):  # `open_pairs` reports what is wrong with the shards
        _, shards, _ = _resolve_split(os.path.expanduser(data_path), split, default_split)
        index_share(kind, shards, number, count)


def _refuse_split(data_path: str, split: str | None) -> None:
    if split not in (None, ALL):
        raise ValueError(
            f"data_path={data_path!r} has no split {split!r}; give the folder that holds the splits' shards or "
            "tables, or a table with a column of splits"
        )


def _open_without_captions(
    data_path: str,
    split: str | None,
    default_split: str,
    download: bool,
    columns: TableColumns,
    templates: Sequence[str] | None,
) -> tuple[PairSource, str]:
    """Images without written captions: scenes describe themselves, labels are put into words.

    Captions of training scenes vary from draw to draw; captions of held-out scenes do not.
    """
    images: ImageSource
    if names_scenes(data_path):
        num_images, image_size = parse_scenes_spec(data_path)
        part = default_split if split in (None, ALL) else split
        images = Scenes(num_images, image_size, split=part, ties=INDEPENDENT)
        if templates is None:
            return PairSource(images, SceneCaptions(images, varied=default_split == "train")), "ready"
    else:
        images = open_source(data_path, split, download, default_split=default_split, columns=columns)
    if images.labels is None:
        raise ValueError(
            f"data_path={data_path!r} has neither captions nor labels; give tar shards with .txt members, a table with "
            "a column of captions, COCO's annotations, or class folders"
        )
    sentences = tuple(
        sentence
        for word in templates or (AUTO,)
        for sentence in ((word,) if "{}" in word else open_templates(word, data_path))
    )
    classes = open_classes(images, data_path=data_path)
    logger.info("captions are made from %s by %d templates: %s ...", classes.origin, len(sentences), sentences[0])
    return PairSource(images, ClassCaptions(images, classes, sentences)), "ready"


def _check_left_out(source: PairSource, max_left_out: float) -> None:
    """Log how many samples are no pairs; ValueError if there are too many."""
    number, total = source.left_out.total, source.left_out.total + len(source)
    if not number:
        return
    message = f"{source.name}: {number:,} of {total:,} samples are left out: {source.left_out}"
    if number > (most := most_corrupt(max_left_out, total)):
        raise ValueError(
            f"{message}; that is more than the {most:.0f} that --max_corrupt {max_left_out} allows. Repair them, or "
            f"raise it"
        )
    logger.warning("%s", message)

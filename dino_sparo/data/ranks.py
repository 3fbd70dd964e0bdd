"""The same images on all ranks: ranks index shards together, rank 0 opens first, and all ranks compare the images."""

import contextlib
from collections.abc import Iterator
from typing import Any

from dino_sparo.data.sources import ImageSource, open_source
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.data.sources.folders import resolve_split
from dino_sparo.data.sources.image_source import fingerprint_of, hash_of
from dino_sparo.data.sources.indexes import Kind, index_shards
from dino_sparo.data.sources.tars import images_kind
from dino_sparo.runtime.collectives import all_or_none, rank_0_first, require_same
from dino_sparo.runtime.launch import rank, world_size


def open_images(
    data_path: str,
    split: str | None,
    download: bool,
    *,
    default_split: str = "train",
    limits: ImageLimits = DEFAULT_LIMITS,
    **options: Any,
) -> ImageSource:
    """The same images on all ranks, labelled or not; the arguments are those of `open_source`.

    Raises:
        ValueError: there are no such images, or the ranks see different images.
    """
    with opened_together(images_kind(limits), data_path, split, default_split):
        source = open_source(data_path, split, download, default_split=default_split, limits=limits, **options)
    require_same_source(source)
    return source


@contextlib.contextmanager
def opened_together(
    kind: Kind, data_path: str, split: str | None = None, default_split: str = "train"
) -> Iterator[None]:
    """Each rank indexes its share of the shards; then rank 0 runs the context with the cached index, then other ranks.

    Args:
        kind: of the shards' index.
        data_path: as in `open_source`, like `split` and `default_split`; without shards, there is no index.
    """
    if world_size() > 1:
        # What is wrong with the shards is reported when they are opened.
        with all_or_none(f"opening {data_path}"), contextlib.suppress(ValueError):
            index_shards(kind, resolve_split(data_path, split, default_split)[1][rank() :: world_size()])
    with rank_0_first(f"opening {data_path}"):
        yield


def require_same_source(source: ImageSource) -> None:
    """ValueError on every rank unless all ranks have opened the same images: number, names, classes and labels."""
    if world_size() > 1:
        require_same(len(source), f"the number of images of {source.name}")
        require_same(fingerprint_of(source), f"the names of the images of {source.name}")
        require_same(str(source.classes), f"the classes of {source.name}")
        require_same(None if source.labels is None else hash_of(source.labels), f"the labels of {source.name}")

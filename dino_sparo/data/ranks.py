"""The same images on all ranks: ranks index shards together, rank 0 opens first, and all ranks compare the images."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dino_sparo.data.sources import ImageSource, index_images, open_source
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.data.sources.image_source import fingerprint_of, hash_of
from dino_sparo.runtime.collectives import all_or_none, rank_0_first, require_same
from dino_sparo.runtime.launch import rank, world_size


def open_images(data_path: str, split: str | None, download: bool, **options: Any) -> ImageSource:
    """The same images on all ranks, labelled or not; the arguments are those of `open_source`.

    Raises:
        ValueError: there are no such images, or the ranks see different images.
    """
    index = partial(index_images, data_path, split=split, limits=options.get("limits", DEFAULT_LIMITS))
    with opened_together(index, data_path):
        source = open_source(data_path, split, download, **options)
    require_same_source(source)
    return source


@contextlib.contextmanager
def opened_together(index: Callable[[int, int], None], data_path: str) -> Iterator[None]:
    """Each rank indexes its share of the shards; then rank 0 runs the context with the cached index, then other ranks.

    Args:
        index: (number, count) -> puts this process' share of the index into the cache.
        data_path: for messages.
    """
    if world_size() > 1:
        with all_or_none(f"opening {data_path}"):
            index(rank(), world_size())
    with rank_0_first(f"opening {data_path}"):
        yield


def require_same_source(source: ImageSource) -> None:
    """ValueError on every rank unless all ranks have opened the same images: number, names, classes and labels."""
    if world_size() > 1:
        require_same(len(source), f"the number of images of {source.name}")
        require_same(fingerprint_of(source), f"the names of the images of {source.name}")
        require_same(str(source.classes), f"the classes of {source.name}")
        require_same(None if source.labels is None else hash_of(source.labels), f"the labels of {source.name}")

"""Streams of tar shards, local or remote -> batches of pairs, read by webdataset from end to end.

For sets that are too large for an index, or remote. The next shard is drawn at random, with replacement: first its
source, by the sources' weights, then one of the source's shards. A buffer shuffles the samples. The user chooses the
number of pairs of an epoch.

The stream of a loading process follows from (seed, epoch, step at which the epoch was begun or resumed, rank, worker).
So a run without interruption is reproducible; a resumed run begins another stream, which repeats some pairs.
"""

import itertools
import logging
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from dino_sparo.data.dataset import MAX_CORRUPT_IN_A_ROW
from dino_sparo.data.samplers import EpochSampler, image_rng
from dino_sparo.data.sources import IMAGE_EXTENSIONS, CorruptImageError, ImageLimits, decode_image
from dino_sparo.data.sources.decode import DEFAULT_LIMITS, refuse_large_file
from dino_sparo.data.sources.tars import find_shards
from dino_sparo.image_text.pairs.batches import LeftOut, PairBatch, PairItem, PairTransform, collate_pairs
from dino_sparo.image_text.pairs.tars import captions_in
from dino_sparo.runtime.faults import UserError, require

logger = logging.getLogger(__name__)

SHUFFLE_BUFFER = 2000  # samples, per loading process
IMAGE_KINDS = tuple(ending.removeprefix(".") for ending in IMAGE_EXTENSIONS)

Sample = dict[str, Any]


class PairStream(IterableDataset):
    """Micro-batches of pairs, as many as the sampler has left in its epoch; every loading process makes its share.

    Args:
        data_path: sources joined by `::`, each a pattern of local shards, an address, or `pipe:COMMAND`; braces count.
        weights: how often a shard of each source is drawn; None: in proportion to their numbers of shards.
        transform: image -> view.
        sampler: gives epoch, step and size of the batches; its order of pairs is not used.
        context_length: N, tokens.
        caption_key: key of the `.json` members; None takes the `.txt` members.
        limits: larger images are refused.

    Raises:
        ValueError: there is no shard, or the weights are not those of the sources.
    """

    def __init__(
        self,
        data_path: str,
        weights: list[float] | None,
        transform: PairTransform,
        sampler: EpochSampler,
        context_length: int,
        caption_key: str | None = None,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        require("webdataset", "streamed shards")
        self.sources = [_expand(part) for part in data_path.split("::")]
        if weights is not None and (len(weights) != len(self.sources) or min(weights) < 0 or not sum(weights)):
            raise UserError(
                f"--shard_weights {weights}: give one number per source of --data_path, of which there are "
                f"{len(self.sources)}, none negative and not all 0"
            )
        sizes = np.array([len(source) for source in self.sources] if weights is None else weights, np.float64)
        self.probabilities = sizes / sizes.sum()
        self.name, self.left_out = f"stream {data_path}", LeftOut()
        self.transform, self.sampler = transform, sampler
        self.context_length, self.caption_key, self.limits = context_length, caption_key, limits

    def __len__(self) -> int:
        """Micro-batches that are left in the epoch."""
        return len(self.sampler)

    def location(self, index: int) -> str:
        """Number of the pair in a loading process' stream."""
        return f"pair {index} of a loading process' stream"

    def __iter__(self) -> Iterator[PairBatch]:
        info, sampler = get_worker_info(), self.sampler
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        # A stream of its own for every step that an epoch is resumed at, and every loading process of every rank.
        stream = (sampler.start_step * sampler.world_size + sampler.rank) * 1024 + worker
        rng = image_rng(sampler.seed, sampler.epoch, stream)
        pairs, corrupt = self._pairs(rng), list[tuple[str, str]]()
        for _ in range(worker, len(sampler), count):
            items = [self._item(pairs, corrupt, rng) for _ in range(sampler.batch_size)]
            yield replace(collate_pairs(items, self.context_length), corrupt=corrupt)
            corrupt = []

    def _item(self, pairs: Iterator[tuple[int, Sample]], corrupt: list[tuple[str, str]], rng: Any) -> PairItem:
        """The next readable pair; skipped pairs are added to `corrupt`."""
        for _ in range(MAX_CORRUPT_IN_A_ROW):
            index, sample = next(pairs)
            try:
                image, captions = self._read(sample)
                return PairItem(self.transform(image, rng)[0], captions[int(rng.integers(len(captions)))], index)
            except CorruptImageError as error:
                corrupt.append((error.location, error.reason))
        location, reason = corrupt[-1]
        raise UserError(
            f"{MAX_CORRUPT_IN_A_ROW} samples in a row of {self.name} are not pairs, the last is {location} ({reason}); "
            "the images need captions, and names at most one dot"
        )

    def _read(self, sample: Sample) -> tuple[Any, list[str]]:
        location = f"{sample['__url__']}!{sample['__key__']}"
        kind = next((name for name in sample if name.endswith(IMAGE_KINDS) and not name.startswith("__")), None)
        content = sample.get("txt" if self.caption_key is None else "json")
        if kind is None or content is None:
            members = ", ".join(name for name in sample if not name.startswith("__"))[:80]
            raise CorruptImageError(location, f"without {'image' if kind is None else 'caption'}: it has {members}")
        texts = captions_in(content.decode("utf-8", "replace"), self.caption_key, location)
        captions = [caption for caption in texts if caption.strip()]
        if not captions:
            raise CorruptImageError(location, "the caption is missing or empty")
        refuse_large_file(len(sample[kind]), location, self.limits)
        return decode_image(sample[kind], location, self.limits), captions

    def _pairs(self, rng: np.random.Generator) -> Iterator[tuple[int, Sample]]:
        """Numbered samples without end, of shards drawn at random."""
        import webdataset

        skip = _SkipShards(self.name)
        samples = webdataset.tarfile_to_samples(handler=skip)(self._shards(rng))
        mixed = webdataset.shuffle(SHUFFLE_BUFFER, rng=random.Random(int(rng.integers(1 << 62))))(skip.passing(samples))
        return zip(itertools.count(), mixed, strict=False)

    def _shards(self, rng: np.random.Generator) -> Iterator[dict[str, str]]:
        while True:
            source = self.sources[int(rng.choice(len(self.sources), p=self.probabilities))]
            yield {"url": source[int(rng.integers(len(source)))]}


class _SkipShards:
    """webdataset's handler of errors: logs and skips a shard, unless all shards fail."""

    def __init__(self, name: str) -> None:
        self.name, self.in_a_row = name, 0

    def __call__(self, error: Exception) -> bool:
        self.in_a_row += 1
        if self.in_a_row >= MAX_CORRUPT_IN_A_ROW:
            raise UserError(f"{self.in_a_row} errors in a row while reading {self.name}, the last is {error!r}")
        logger.warning("the rest of a shard is left out: %r", error)
        return True

    def passing(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """The samples; each resets the number of errors in a row."""
        for sample in samples:
            self.in_a_row = 0
            yield sample


def _expand(part: str) -> list[str]:
    """Addresses of the shards of one source; ValueError if there are none."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.]*:", part):
        import webdataset

        return webdataset.shardlists.expand_urls(part)
    shards = find_shards(part)
    if not shards:
        raise UserError(f"--data_path: {part!r} is not a tar shard, a pattern of shards or a folder that holds some")
    return shards

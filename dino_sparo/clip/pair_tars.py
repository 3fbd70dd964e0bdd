"""Tar shards, webdataset's way -> pairs: members of one name, `7.jpg` and `7.txt`, are an image and its caption.

Shards are indexed once and read by offset, as `sources/tars.py` does it for images alone. Hence order, resuming and
sharing among ranks are exact, and the number of shards does not matter: fewer than workers and ranks will do.
"""

import json
import logging
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dino_sparo.clip.pair_captions import PackedTexts, TarCaptions
from dino_sparo.clip.pairs import LeftOut, PairSource
from dino_sparo.data import CorruptImageError
from dino_sparo.sources import IMAGE_EXTENSIONS
from dino_sparo.sources.cache import load_or_index
from dino_sparo.sources.packed import Arrays, PackedStrings
from dino_sparo.sources.tars import TarSource

logger = logging.getLogger(__name__)

CAPTION_ENDING, JSON_ENDING = ".txt", ".json"
# How many JSON members are looked at for the caption's key before training begins.
JSONS_CHECKED = 8
BLOCK_BYTES = 512  # of a tar

NO_IMAGE, NO_CAPTION, NOT_THERE = "without image", "without caption", "fewer than sizes.json counts"


def open_pair_shards(shards: list[str], name: str, caption_key: str | None = None) -> tuple[PairSource, str]:
    """The pairs in tar shards, and the log's words for how they were opened.

    Args:
        shards: paths.
        name: what the log calls them.
        caption_key: key of the `.json` members under which the captions stand; None takes the `.txt` members.

    Raises:
        ValueError: a shard is damaged, or there is no pair; says which members and keys there are.
    """
    ending = CAPTION_ENDING if caption_key is None else JSON_ENDING
    statuses = [os.stat(shard) for shard in shards]
    stamps = np.array([[status.st_mtime_ns for status in statuses], [status.st_size for status in statuses]])
    arrays, how = load_or_index(
        f"pairs {ending} in shards " + "\n".join(map(os.path.abspath, shards)),
        build=lambda: {**_index_shards(shards, ending), "stamps": stamps},
        is_current=lambda old: np.array_equal(old["stamps"], stamps),
    )
    if not len(arrays["shard"]):
        raise ValueError(_nothing_found(name, PackedStrings.from_arrays(arrays, "endings").to_list(), caption_key))
    captions = TarCaptions(shards, arrays["shard"], arrays["caption_offset"], arrays["caption_size"], caption_key)
    if caption_key is not None:
        _require_key(captions, name, caption_key)
    images = TarSource(name, shards, {**arrays, **PackedStrings.pack([]).to_arrays("classes")})
    left_out = _left_out(arrays)
    _compare_sizes(shards, arrays["samples"], left_out)
    return PairSource(images, captions, left_out), f"{len(shards)} shard(s) {how}"


@dataclass
class _Sample:
    """Members of one name.

    Attributes:
        key: the name, up to the file name's first dot.
        members: ending, lower case with its dot -> (name, offset, size).
    """

    key: str
    members: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    @property
    def image(self) -> tuple[str, int, int] | None:
        """The first image among the members."""
        return next((place for ending, place in self.members.items() if ending.endswith(IMAGE_EXTENSIONS)), None)


def shard_samples(shard: str) -> Iterator[_Sample]:
    """Group the members of one shard: neighbours of the same name, until an ending comes again.

    Raises:
        ValueError: the file is no plain tar, is truncated or damaged.
    """
    sample = _Sample("")
    for name, offset, size in _shard_files(shard):
        folder, slash, base = name.rpartition("/")
        stem, dot, ending = base.partition(".")
        key, ending = folder + slash + stem, (dot + ending).lower()
        if not stem:
            continue
        if key != sample.key or ending in sample.members:
            if sample.members:
                yield sample
            sample = _Sample(key)
        sample.members[ending] = (name, offset, size)
    if sample.members:
        yield sample


def _shard_files(shard: str) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of every regular file in a tar."""
    try:
        with tarfile.open(shard, "r:", errors="surrogateescape") as tar:
            for member in tar:
                if member.issparse():
                    raise ValueError(
                        f"tar shard {shard!r} has the sparse member {member.name!r}; write it without --sparse"
                    )
                if member.isreg():
                    yield member.name, member.offset_data, member.size
            end = tar.offset
    except tarfile.TarError as error:
        raise ValueError(
            f"tar shard {shard!r} is truncated, or no plain tar file (empty, compressed, or of another kind): {error}"
        ) from error
    # `tarfile` takes a damaged header for the end, which is marked by zeros, or by nothing.
    with open(shard, "rb") as file:
        file.seek(end)
        if file.read(BLOCK_BYTES).strip(b"\0"):
            raise ValueError(f"tar shard {shard!r} is damaged: no valid header at byte {end:,}")


def _index_shards(shards: list[str], ending: str) -> Arrays:
    """Places of images and captions of all pairs, samples per shard, endings there are, and what is no pair."""
    names, places, samples, endings = PackedTexts(), list[tuple[int, ...]](), [], dict[str, None]()
    left_out = LeftOut()
    for number, shard in enumerate(shards):
        count = 0
        for sample in shard_samples(shard):
            count += 1
            endings.update(dict.fromkeys(sample.members))
            image, caption = sample.image, sample.members.get(ending)
            if image is None or caption is None:
                left_out.add(NO_IMAGE if image is None else NO_CAPTION, f"{shard}!{sample.key}")
                continue
            names.append(image[0])
            places.append((number, *image[1:], *caption[1:]))
        samples.append(count)
    table = np.array(places, dtype=np.int64).reshape(-1, 5)
    columns = {
        name: table[:, i].copy() for i, name in enumerate(("offset", "size", "caption_offset", "caption_size"), 1)
    }
    return {
        **names.packed().to_arrays("names"),
        **PackedStrings.pack([os.fsencode(word) for word in endings]).to_arrays("endings"),
        **PackedStrings.pack([os.fsencode(word) for word in left_out.counts]).to_arrays("reasons"),
        **PackedStrings.pack([os.fsencode(word) for word in left_out.examples.values()]).to_arrays("examples"),
        "left_out": np.array(list(left_out.counts.values()), dtype=np.int64),
        "samples": np.array(samples, dtype=np.int64),
        "shard": table[:, 0].astype(np.int32),
        **columns,
        "labels": np.zeros(0, np.int64),
    }


def _left_out(arrays: Arrays) -> LeftOut:
    """What the index left out."""
    reasons, examples = (PackedStrings.from_arrays(arrays, name).to_list() for name in ("reasons", "examples"))
    counts = dict(zip(reasons, arrays["left_out"].tolist(), strict=True))
    return LeftOut(counts, dict(zip(reasons, examples, strict=True)))


def _nothing_found(name: str, endings: list[str], caption_key: str | None) -> str:
    wanted = "an image (.jpg, .png, .webp, ...) and " + (
        "a caption (.txt)" if caption_key is None else f"a .json with the key {caption_key!r}"
    )
    remedy = "give --caption_key KEY to take captions from the .json" if JSON_ENDING in endings else "write them so"
    if any(ending == ".cls" for ending in endings):
        remedy += ", or --caption_templates to make them from the labels in .cls"
    return f"{name}: no sample has {wanted}; the members end in {', '.join(endings) or 'nothing'}; {remedy}"


def _require_key(captions: TarCaptions, name: str, caption_key: str) -> None:
    """Look for the key in the first JSON members; ValueError, with the keys there are, if none of them has it."""
    found: dict[str, None] = {}
    for index in range(min(JSONS_CHECKED, len(captions.shard))):
        try:
            keys = captions.json_of(index)
        except CorruptImageError:
            continue  # one bad member is counted when its turn comes
        if caption_key in keys:
            return
        found.update(dict.fromkeys(keys))
    raise ValueError(
        f"{name}: no .json has the key caption_key={caption_key!r}; found the keys {', '.join(found) or 'none'}"
    )


def _compare_sizes(shards: list[str], samples: np.ndarray, left_out: LeftOut) -> None:
    """Hold the samples of every shard against `sizes.json` in its folder, where there is one."""
    for folder in dict.fromkeys(os.path.dirname(shard) for shard in shards):
        path = os.path.join(folder, "sizes.json")
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                sizes = {name: int(size) for name, size in json.load(file).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path!r} is no JSON object of shard names and numbers of samples ({error})") from error
        for shard, found in zip(shards, samples.tolist(), strict=True):
            told = sizes.get(os.path.basename(shard)) if os.path.dirname(shard) == folder else None
            if told is not None and told > found:
                left_out.add(NOT_THERE, f"{shard} with {found} of {told}", told - found)
            elif told is not None and told < found:
                logger.warning("%s holds %d samples, %s says %d: it is out of date", shard, found, path, told)

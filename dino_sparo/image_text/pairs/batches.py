"""Pairs in, batches out: image-caption pairs by index -> crops and token ids of a batch.

A `PairSource` holds images and their captions; `sources.py` opens one. `PairDataset` cuts a crop of image i and draws
one of its captions, a loader makes batches. All randomness is a pure function of (seed, epoch, index). As in
`data/dataset.py`, a pair with an unreadable image or an empty caption is replaced by the next pair, logged and counted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor

from dino_sparo.data.batch import DeviceBatch
from dino_sparo.data.crops import cut_crop, cut_crop_fast, pixels_in_rows, require_areas, sample_box
from dino_sparo.data.dataset import EpochDataset, read_next
from dino_sparo.data.samplers import image_rng
from dino_sparo.data.sources import CorruptImageError, ImageSource
from dino_sparo.data.sources.image_source import fingerprint_of
from dino_sparo.image_text.options import CROP_SCALE
from dino_sparo.image_text.towers import tokenize

# Added to the seed, so that the draw of a caption is independent of the crop of the image.
CAPTION_STREAM = 0x9E3779B97F4A7C15

Captions = Callable[[int], Sequence[str]]

NO_IMAGE, NO_CAPTION = "without image", "without caption"  # reasons of `LeftOut`


@dataclass
class LeftOut:
    """Samples that a source skips because they are not pairs: reason -> number of samples, location of the first."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str, number: int = 1) -> None:
        """Count `number` samples; `where` is kept of the first."""
        self.counts[reason] += number
        self.examples.setdefault(reason, where)

    @property
    def total(self) -> int:
        """Number of samples."""
        return self.counts.total()

    def __str__(self) -> str:
        return ", ".join(f"{n:,} {reason} (the first is {self.examples[reason]})" for reason, n in self.counts.items())


@dataclass
class PairSource:
    """Images with captions, by index: an `ImageSource` whose images are unreadable without a caption.

    Attributes:
        images: the images; `name`, `classes` and `labels` are theirs.
        captions: index -> the image's captions; raises CorruptImageError if they cannot be read.
        left_out: samples without image or caption, which are not among the images.
        negatives: index -> one false caption of the image, which may be empty; None: there are none.
        how_opened: for the log.
    """

    images: ImageSource
    captions: Captions
    left_out: LeftOut = field(default_factory=LeftOut)
    negatives: Captions | None = None
    how_opened: str = "read"
    name: str = field(init=False)
    classes: list[str] | None = field(init=False)
    labels: np.ndarray | None = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.classes, self.labels = self.images.name, self.images.classes, self.images.labels

    def __len__(self) -> int:
        return len(self.images)

    def location(self, index: int) -> str:
        """Path or position of image `index`."""
        return self.images.location(index)

    def fingerprint(self) -> str | None:
        """Fingerprint of the images."""
        return fingerprint_of(self.images)

    def read(self, index: int) -> Image.Image:
        """Image `index` as 8-bit RGB; raises CorruptImageError, also without a caption."""
        return self.read_pair(index)[0]

    def read_pair(self, index: int) -> tuple[Image.Image, list[str]]:
        """Image `index` and its captions; raises CorruptImageError if either cannot be read."""
        captions = self.captions_of(index)
        return self.images.read(index), captions

    def captions_of(self, index: int) -> list[str]:
        """The captions of image `index` that are not blank; raises CorruptImageError if there are none."""
        captions = [caption for caption in self.captions(index) if caption.strip()]
        if not captions:
            raise CorruptImageError(self.location(index), "the caption is missing or empty")
        return captions


class PairTransform:
    """Image -> one view, a large random crop: CLIP's only distortion.

    Args:
        img_size: side of the view in pixels.
        scale: smallest and largest share of the image's area.
        exact: the pixels of torchvision's pipeline on PIL images, as in OpenCLIP; False resizes with torch, which is
            faster and rounds differently: some pixels are a level off.

    Raises:
        ValueError: a scale that is not an interval within (0, 1].
    """

    def __init__(self, img_size: int, scale: tuple[float, float] = CROP_SCALE, exact: bool = False) -> None:
        require_areas("crop_scale", scale)
        self.img_size, self.scale, self.exact = img_size, scale, exact

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> list[UInt8[Tensor, "C img_size img_size"]]:
        """The view in a list, 8 bit: a quarter of the bytes to send to a GPU, which normalises the view."""
        box = sample_box(rng, image.height, image.width, self.scale)
        if self.exact:
            return [torch.from_numpy(cut_crop(image, box, self.img_size))]
        return [cut_crop_fast(pixels_in_rows(image), box, self.img_size)]


@dataclass(frozen=True)
class PairItem:
    """One pair, ready for a batch.

    Attributes:
        image: (C, H, W), 8 bit.
        caption: in words.
        index: in the source.
        corrupt: (location, reason) of the requested pair, if it was replaced.
        negative: a false caption, if the source has them.
    """

    image: Tensor
    caption: str
    index: int
    corrupt: tuple[tuple[str, str], ...] = ()
    negative: str | None = None


@dataclass
class PairBatch(DeviceBatch):
    """B pairs; caption i belongs to image i, or caption 2i if each caption is followed by a false caption.

    Attributes:
        images: (B, C, H, W), 0 to 255.
        token_ids: (captions, N), the captions.
        indices: (B,), places in the source.
        corrupt: (location, reason) of each pair that was replaced.
        num_truncated: captions that were longer than the context.
    """

    images: UInt8[Tensor, "B C H W"]
    token_ids: Int64[Tensor, "captions N"]
    indices: Int64[Tensor, " B"]
    corrupt: list[tuple[str, str]]
    num_truncated: int


class PairDataset(EpochDataset):
    """Pairs of a source: the crop of an image and one of its captions, drawn anew in every epoch."""

    source: PairSource
    transform: PairTransform

    def item(self, epoch: int, start: int) -> PairItem:
        """The pair of an index in an epoch; an unreadable pair is replaced as in `ImageDataset`."""
        (image, captions), index, corrupt = read_next(self.source.read_pair, start, self.source)
        (view,) = self.transform(image, image_rng(self.seed, epoch, start))
        drawn = image_rng(self.seed + CAPTION_STREAM, epoch, start).integers(len(captions))
        negative = None if self.source.negatives is None else self.source.negatives(index)[0]
        return PairItem(view, captions[int(drawn)], index, tuple(corrupt[:1]), negative)


def collate_pairs(items: Sequence[PairItem], context_length: int) -> PairBatch:
    """Stack images and tokenise captions."""
    images, indices, corrupt = stack_images(items)
    texts = [text for item in items for text in (item.caption, item.negative) if text is not None]
    tokens = tokenize(texts, context_length)
    return PairBatch(images, tokens.ids, indices, corrupt, tokens.num_truncated)


def stack_images(
    items: Sequence[PairItem],
) -> tuple[UInt8[Tensor, "B C H W"], Int64[Tensor, " B"], list[tuple[str, str]]]:
    """Images, indices and unreadable pairs; a worker's images lie in memory shared with the main process."""
    images: Tensor = torch.utils.data.default_collate([item.image for item in items])
    corrupt = [pair for item in items for pair in item.corrupt]
    return images, torch.tensor([item.index for item in items]), corrupt

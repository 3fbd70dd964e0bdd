"""The contract between evaluations and image-text models: scores of images and captions.

    S(image, text), a number in fp32; the greater, the better they fit

CLIP's score is a dot product of two features (`dot_product.py`). Other models have no such features, for example those
that bind the words of a caption to an image's patches. So an evaluation never looks into the payload of a scorer. It
takes rows of the payload and asks for scores:

    pairs   s_p  = S(image_of[p], text_of[p])        questions with true and false captions
    blocks  s_ic = S(image i, text c)                zero-shot classification, retrieval, validation

A class with the methods of `Scorer` can be evaluated by every command.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from PIL import Image
from torch import Tensor, nn

from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.decode import to_rgb
from dino_sparo.draw.figure import Tile
from dino_sparo.draw.pixels import Picture
from dino_sparo.evaluation.features import Features, encoded_batches, extract_split, inference, share_loader


@dataclass(frozen=True)
class EncodedImages:
    """Some images of a source.

    Attributes:
        payload: known to the scorer alone. It has a length, and `payload[i:j]` is the payload of some images.
        labels: (images,), -1 where an image has none.
        indices: (images,), index of each image in the source, ascending.
        num_corrupt: unreadable images, which are not among these.
    """

    payload: Any
    labels: Int64[Tensor, " images"]
    indices: Int64[Tensor, " images"]
    num_corrupt: int


@dataclass(frozen=True)
class EncodedTexts:
    """Captions, or classes.

    Attributes:
        payload: known to the scorer alone, as for images.
        num_truncated: captions that are longer than the context and were cut off.
        alike: (captions,), a number for each caption; the model cannot tell captions of one number apart, whatever the
            image. None if they are not counted.
        marks: name -> (captions,), captions to which something happened: `truncated`, or a mark of the model's own.
    """

    payload: Any
    num_truncated: int
    alike: Int64[Tensor, " captions"] | None = None
    marks: Mapping[str, Bool[Tensor, " captions"]] = field(default_factory=dict)


@runtime_checkable
class Scorer(Protocol):
    """A model, and all that its scores depend on.

    Every process of a run calls the `encode_` methods together. Scores need no other process. Captions that the model
    cannot tell apart have the same score to the last bit, so that a tie is seen as one.
    """

    @property
    def device(self) -> torch.device:
        """The device of the scores."""

    @property
    def measure(self) -> str:
        """Name of a score in a result file, e.g. `cosine`."""

    @property
    def ensemble(self) -> str:
        """The way `encode_classes` combines the templates of a class, in a result file."""

    @property
    def default_templates(self) -> tuple[str, ...] | None:
        """Sentences that make captions of classes by default; None: those of the set of images."""

    @property
    def record(self) -> dict[str, Any]:
        """Description of the model in a result file: plain values `model`, `slots`, `feature`, `view`, `versions`."""

    def encode_images(self, source: ImageSource) -> EncodedImages:
        """All images of a source, on every process.

        A payload that is too large for memory may encode when its rows are taken. Evaluations take rows in order, some
        at a time, give them to `score_block`, and store none; `score_pairs` gets all.
        """

    def image_batches(self, source: ImageSource) -> Iterator[EncodedImages]:
        """This process' share of the images, in order, some at a time; none is stored."""

    def expect_texts(self, captions: Sequence[str]) -> None:
        """Refuse captions that cannot be scored, before the images are encoded, which may take hours.

        Raises:
            ValueError: scores lack something for too many of the captions that `encode_texts` will get.
        """

    def encode_texts(self, captions: Sequence[str], desc: str = "captions") -> EncodedTexts:
        """At least one caption, on every process; `desc` is their name in the log."""

    def encode_classes(self, names: Sequence[str], templates: tuple[str, ...]) -> EncodedTexts:
        """One row per class, on every process; templates with `{}` make captions of a class, which count together."""

    def score_pairs(
        self, images: Any, image_of: Int64[Tensor, " pairs"], texts: Any, text_of: Int64[Tensor, " pairs"]
    ) -> Float[Tensor, " pairs"]:
        """The score of each pair, fp32.

        Args:
            images: payload of images.
            image_of: (pairs,), the row of each pair's image, on `device`.
            texts: payload of captions.
            text_of: (pairs,), the row of each pair's caption, on `device`.
        """

    def score_block(self, images: Any, texts: Any) -> Float[Tensor, "images captions"]:
        """The score of every image with every caption or class, fp32; both are payloads."""


class CaptionMaps(NamedTuple):
    """Maps of a model for one caption.

    Attributes:
        lines: further numbers in words; may be empty.
        tiles: maps over `Explanation.picture`.
    """

    lines: Sequence[str]
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Explanation:
    """Maps of a model on one image, per caption.

    Attributes:
        picture: (H, W, 3), the part of the image that the maps cover.
        captions: maps per caption.
        words: how to read a map and the numbers around it.
        ends: words for the lowest and the highest colour.
    """

    picture: Picture
    captions: Sequence[CaptionMaps]
    words: str
    ends: tuple[str, str]


@runtime_checkable
class ExplainableScorer(Protocol):
    """A scorer whose maps can be drawn."""

    def explain(self, image: Image.Image, captions: Sequence[str]) -> Explanation:
        """Maps of an 8-bit RGB image for each of some captions, in this process alone.

        A model may show what distinguishes one caption from the others.
        """


class ImageRows(ABC):
    """A model, and the settings that determine its image features.

    Attributes:
        model: on `device`, in eval mode.
        transform: (image, rng) -> [view].
        device: where to compute.
        batch_size: images, or texts, per process and step.
        num_workers: processes that load images, per process.
        dtype: fp32, or bf16 or fp16 for autocast; rows are fp32 in any case.
    """

    model: Any
    transform: Callable[..., list[Tensor]]
    device: torch.device
    batch_size: int
    num_workers: int
    dtype: torch.dtype

    @property
    def module(self) -> nn.Module:
        """The model as a module, whose train or eval mode can be switched; a stand-in if it is none."""
        return self.model if isinstance(self.model, nn.Module) else nn.Identity()

    @property
    def storage(self) -> torch.device:
        """The device of the rows of all images."""
        return self.device

    @abstractmethod
    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Rows of images, fp32 whatever the precision they were computed in."""

    def encode_images(self, source: ImageSource) -> EncodedImages:
        """Rows (images, M) of all images of a source, on every process."""
        rows = self._rows(source, self.encode_image, self.storage)
        return EncodedImages(rows.features, rows.labels, rows.indices, rows.num_corrupt)

    def _rows(self, source: ImageSource, encode: Callable[[Tensor], Tensor], storage: torch.device | None) -> Features:
        settings: dict[str, Any] = {name: getattr(self, name) for name in ("batch_size", "num_workers", "dtype")}
        return extract_split(
            self.module, source, self.transform, self.device, encode=encode, storage=storage, **settings
        )

    def image_batches(self, source: ImageSource) -> Iterator[EncodedImages]:
        """Rows of this process' share of the images, in order; none is stored."""
        loader = share_loader(source, self.transform, self.device, self.batch_size, self.num_workers)
        for features, batch, rows in encoded_batches(
            self.module, loader, self.device, self.batch_size, self.encode_image, self.dtype, source.name
        ):
            labels = batch.labels[rows].to(self.device)
            yield EncodedImages(features, labels, batch.indices[rows], len(batch.corrupt))

    def views(self, images: Sequence[Image.Image] | Tensor) -> Float[Tensor, "images C H W"]:
        """The views of images of any size and mode; views stay as they are."""
        if isinstance(images, Tensor):
            return images
        return torch.stack([self.transform(to_rgb(image))[0] for image in images])

    def rows_of(self, images: Sequence[Image.Image] | Tensor) -> Float[Tensor, "images M"]:
        """Rows of images at hand, computed in this process alone."""
        parts = self.views(images).split(self.batch_size)
        with inference(self.module, self.device, self.dtype):
            return torch.cat([self.encode_image(part.to(self.device)) for part in parts])

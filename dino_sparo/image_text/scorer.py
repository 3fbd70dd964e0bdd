"""The contract between evaluations and image-text models: scores of images and captions.

    S(image, text), a number in fp32; the greater, the better they fit

CLIP's score is a dot product of two features: `DotProductScorer` is the scorer of any model with one encoder per side.
Other models have no such features, for example those that bind the words of a caption to an image's patches. So an
evaluation never looks into the payload of a scorer. It takes rows of the payload and asks for scores:

    pairs   s_p  = S(image_of[p], text_of[p])        questions with true and false captions
    blocks  s_ic = S(image i, text c)                zero-shot classification, retrieval, validation

A class with the methods of `Scorer` can be evaluated by every command.
"""

import argparse
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.shares import share_loader
from dino_sparo.data.sources import ImageSource
from dino_sparo.draw.figure import Band
from dino_sparo.draw.pixels import Picture
from dino_sparo.evaluation.features import Features, encoded_batches, extract_split, inference
from dino_sparo.image_text.prompts import prompts
from dino_sparo.image_text.towers import Tokens, without_padding
from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.runtime.logs import progress
from dino_sparo.runtime.precision import PRECISIONS

logger = logging.getLogger(__name__)

PAIR_CHUNK = 1024  # pairs whose features exist side by side
CAPTION_BATCHES = 8  # batches of captions of classes whose features exist at a time


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
        alike: (captions,), group of each caption. Captions of one group have equal tokens, so their scores are equal.
            None if groups are not counted.
        marks: name -> (captions,), whether something happened to a caption: `truncated`, or a mark of this model.
    """

    payload: Any
    num_truncated: int
    alike: Int64[Tensor, " captions"] | None = None
    marks: Mapping[str, Bool[Tensor, " captions"]] = field(default_factory=dict)


@runtime_checkable
class Scorer(Protocol):
    """A model, and all settings that determine its scores.

    Every process of a run calls the `encode_` methods together. Scores need no other process. Captions that the model
    cannot distinguish have bit-identical scores, so that ties are recognised.
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
        """Sentences that make captions of classes by default; None: the sentences of the set of images."""

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


@dataclass(frozen=True)
class Explanation:
    """Maps of a model on one image, per caption.

    Attributes:
        picture: (H, W, 3), the part of the image that the maps cover.
        captions: numbers in words, which may be missing, and maps over `picture`, per caption.
        words: how to read a map and the numbers around it.
        ends: words for the lowest and the highest colour.
    """

    picture: Picture
    captions: Sequence[Band]
    words: str
    ends: tuple[str, str]


@runtime_checkable
class ExplainableScorer(Protocol):
    """A scorer whose maps can be drawn."""

    def explain(self, image: Image.Image, captions: Sequence[str]) -> Explanation:
        """Maps of an 8-bit RGB image for each of some captions, in this process alone.

        A model may show what distinguishes one caption from the others.
        """


def encode_batch(
    model: Any, token_ids: Int64[Tensor, "B N"], batch_size: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "B M"]:
    """A model's features of at most `batch_size` captions, fp32; filled up, so that all products have one size."""
    filled = torch.cat((token_ids, token_ids[:1].expand(batch_size - len(token_ids), -1))).to(device)
    with inference(model, device, dtype):
        features: Tensor = model.encode_text(filled)[: len(token_ids)].float()
    return features


def computation_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of an `ImageRows` that the options of an evaluation name."""
    dtype = PRECISIONS[args.precision]
    return {"batch_size": args.batch_size_per_gpu, "num_workers": args.num_workers, "dtype": dtype}


@dataclass(frozen=True)
class ImageRows(ABC):
    """A model, and the settings that determine its image features.

    Attributes:
        model: on `device`, in eval mode.
        transform: (image, rng) -> [view]; an `EvalTransform`, if images are given without a source.
        device: where to compute.
        batch_size: images, or texts, per process and step.
        num_workers: processes that load images, per process.
        dtype: fp32, or bf16 or fp16 for autocast; rows are fp32 in any case.
        storage: where the rows of all images lie; None: on `device`.
    """

    storage: ClassVar[torch.device | None] = None

    model: Any
    transform: Any
    device: torch.device
    batch_size: int = 128
    num_workers: int = 0
    dtype: torch.dtype = torch.float32

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
            self.model, source, self.transform, self.device, encode=encode, storage=storage, **settings
        )

    def image_batches(self, source: ImageSource) -> Iterator[EncodedImages]:
        """Rows of this process' share of the images, in order; none is stored."""
        loader = share_loader(source, self.transform, self.device, self.batch_size, self.num_workers)
        for features, batch, rows in encoded_batches(
            self.model, loader, self.device, self.batch_size, self.encode_image, self.dtype, source.name
        ):
            labels = batch.labels[rows].to(self.device)
            yield EncodedImages(features, labels, batch.indices[rows], len(batch.corrupt))

    def views(self, images: Sequence[Image.Image] | Tensor) -> Float[Tensor, "images C H W"]:
        """The views of images of any size and mode; views stay as they are."""
        return images if isinstance(images, Tensor) else self.transform.batch(images)

    def rows_of(self, images: Sequence[Image.Image] | Tensor) -> Float[Tensor, "images M"]:
        """Rows of images at hand, computed in this process alone."""
        parts = self.views(images).split(self.batch_size)
        with inference(self.model, self.device, self.dtype):
            return torch.cat([self.encode_image(part.to(self.device)) for part in parts])


@dataclass(frozen=True, kw_only=True)
class DotProductScorer(ImageRows):
    """A model with one encoder per side, and the settings that determine its features; payloads are feature matrices.

    The model's `encode_image` (images (B, C, H, W)) and `encode_text` (token ids (B, N)) give features (B, M).

    Attributes:
        tokenize: captions -> `Tokens`.
        record: description of the model in a result file.
        trim: token ids without the columns that no caption uses. Models without an end token keep all columns.
    """

    measure: ClassVar[str] = "cosine"
    default_templates: ClassVar[tuple[str, ...] | None] = None
    ensemble: ClassVar[str] = "normalised features of the templates averaged, the mean normalised as a whole"

    tokenize: Callable[[list[str]], Tokens]
    record: dict[str, Any] = field(default_factory=dict)
    trim: Callable[[Tensor], Tensor] = without_padding

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Features of images, of length one in fp32 whatever the precision they were computed in."""
        return F.normalize(self.model.encode_image(images).float(), dim=-1)

    def encode_text(self, token_ids: Int64[Tensor, "B N"], desc: str = "captions") -> Float[Tensor, "B M"]:
        """Features of captions, of length one in fp32."""
        settings = self.batch_size, self.device, self.dtype
        parts = progress(token_ids.split(self.batch_size), desc=desc)
        # Normalised outside of inference mode, so that a mask can be trained on the features.
        return torch.cat([F.normalize(encode_batch(self.model, ids, *settings), dim=-1) for ids in parts])

    def image_features(self, source: ImageSource, storage: torch.device | None = None) -> Features:
        """Features of all images of a source, on every process; on `storage`, by default the device.

        Raises:
            UserError: no image can be read.
        """
        images = self._rows(source, self.encode_image, storage)
        if not len(images.features):
            raise UserError(f"none of {images.num_corrupt} images can be read; is the disk still there?")
        return images

    def _shared(
        self, ids: Int64[Tensor, "rows ..."], encode: Callable[[Tensor], Float[Tensor, "part M"]]
    ) -> Float[Tensor, "rows M"]:
        """Features of all rows of token ids, on every process; each process encodes its share."""
        part = ids[len(ids) * rank() // world_size() : len(ids) * (rank() + 1) // world_size()]
        # A process without a row encodes one nevertheless, to know the features' width.
        return all_gather_ragged(encode(part if len(part) else ids[:1])[: len(part)])

    def expect_texts(self, captions: Sequence[str]) -> None:
        """Any caption can be encoded."""

    def encode_texts(self, captions: Sequence[str], desc: str = "captions") -> EncodedTexts:
        """Features (captions, M), on every process; captions of the same tokens are encoded once."""
        tokens = self.tokenize(list(captions))
        if tokens.num_truncated or tokens.num_empty:
            logger.warning(
                "%s: of %d captions %d are longer than the context and cut off, %d are empty",
                *(desc, len(captions), tokens.num_truncated, tokens.num_empty),
            )
        different, rows = torch.unique(self.trim(tokens.ids), dim=0, return_inverse=True)
        features = self._shared(different, partial(self.encode_text, desc=desc))
        truncated = torch.zeros(len(captions), dtype=torch.bool)
        truncated[list(tokens.truncated)] = True
        return EncodedTexts(features[rows.to(self.device)], tokens.num_truncated, rows, {"truncated": truncated})

    def encode_classes(self, names: Sequence[str], templates: tuple[str, ...]) -> EncodedTexts:
        """One feature (classes, M) of length one per class, on every process.

            w_c = u_c / |u_c|,   u_c = mean over templates t of y(t, c)

        with y(t, c) the normalised feature of the caption that template t makes of class c. Source: OpenCLIP,
        `build_zero_shot_classifier`; CLIP, section 3.1.4. For SPARO the mean is normalised as a whole, as in the
        authors' code. Each caption's slots have length one over sqrt(L); their means are shorter the less the templates
        agree on them. So w_c . x is a weighted mean of the slots' cosines, in which a slot that says more about the
        template than about the class counts less. With a single template it is equation 2 again.
        """
        tokens = self.tokenize([text for name in names for text in prompts(templates, name)])
        by_class = self.trim(tokens.ids).unflatten(0, (len(names), len(templates)))

        def encode(token_ids: Int64[Tensor, "classes templates N"]) -> Float[Tensor, "classes M"]:
            features = []
            # Some classes at a time, so that memory does not grow with their number.
            for ids in token_ids.split(max(1, CAPTION_BATCHES * self.batch_size // len(templates))):
                encoded = self.encode_text(ids.flatten(0, 1)).unflatten(0, (len(ids), -1))
                features.append(F.normalize(encoded.mean(dim=1), dim=-1))
            return torch.cat(features)

        return EncodedTexts(self._shared(by_class, encode), tokens.num_truncated)

    @staticmethod
    def score_pairs(
        images: Float[Tensor, "images M"],
        image_of: Int64[Tensor, " pairs"],
        texts: Float[Tensor, "captions M"],
        text_of: Int64[Tensor, " pairs"],
    ) -> Float[Tensor, " pairs"]:
        """The cosine of each pair's image and caption.

        Each is a sum of products by itself and not an entry of a matrix product, whose rounding might differ between
        two captions that are the same.
        """
        chunks = zip(image_of.split(PAIR_CHUNK), text_of.split(PAIR_CHUNK), strict=True)
        return torch.cat([(images[rows] * texts[captions]).sum(dim=1) for rows, captions in chunks])

    def score_block(
        self, images: Float[Tensor, "images M"], texts: Float[Tensor, "captions M"]
    ) -> Float[Tensor, "images captions"]:
        """The cosine of every image and every caption: one matrix product, in float64 and rounded to fp32.

        In fp32 some CPUs round a sum by its place in the matrix, so that equal images or captions would not tie.
        """
        return (images.double() @ texts.double().t()).float()

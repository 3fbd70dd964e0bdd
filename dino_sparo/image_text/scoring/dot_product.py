"""A model with one encoder per side + images or captions -> features of length one; the score is their dot product.

    S(image, text) = x . y

`DotProductScorer` is the `Scorer` of any such model: a `CLIP`, or a subset of its slots. Every image and every caption
counts exactly once, whatever the number of processes. Captions of the same tokens have bit-identical features, so that
a tie is seen as one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.features import Features, inference
from dino_sparo.image_text.prompts import prompts
from dino_sparo.image_text.scoring.scorer import EncodedTexts, ImageRows
from dino_sparo.image_text.text import Tokens
from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.launch import rank, world_size
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

PAIR_CHUNK = 1024  # pairs whose features exist side by side
CAPTION_BATCHES = 8  # batches of captions of classes whose features exist at a time


@runtime_checkable
class ImageTextModel(Protocol):
    """A model with two encoders; the dot product of two features is their similarity."""

    def encode_image(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> features (B, M), of length one."""

    def encode_text(self, token_ids: Tensor) -> Tensor:
        """Token ids (B, N) -> features (B, M), of length one."""


@dataclass(frozen=True)
class DotProductScorer(ImageRows):
    """A model, and all that its features depend on; a `scorer.Scorer` whose payloads are matrices of features.

    Attributes:
        tokenize: captions -> `Tokens`.
        record: description of the model in a result file.
        (The others are those of `ImageRows`.)
    """

    measure: ClassVar[str] = "cosine"
    default_templates: ClassVar[tuple[str, ...] | None] = None
    ensemble: ClassVar[str] = "normalised features of the templates averaged, the mean normalised as a whole"

    model: ImageTextModel
    tokenize: Callable[[list[str]], Tokens]
    transform: Callable[..., list[Tensor]]
    device: torch.device
    batch_size: int = 128
    num_workers: int = 0
    dtype: torch.dtype = torch.float32
    record: dict[str, Any] = field(default_factory=dict)

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Features of images, of length one in fp32 whatever the precision they were computed in."""
        return F.normalize(self.model.encode_image(images).float(), dim=-1)

    def encode_text(self, token_ids: Int64[Tensor, "B N"], desc: str = "captions") -> Float[Tensor, "B M"]:
        """Features of captions, of length one in fp32."""
        features = []
        with inference(self.module, self.device, self.dtype):
            for ids in progress(token_ids.split(self.batch_size), desc=desc):
                # Filled up with the first caption, so that all products have one size, as in `encode_padded`.
                padded = torch.cat((ids, ids[:1].expand(self.batch_size - len(ids), -1))).to(self.device)
                encoded = self.model.encode_text(padded)[: len(ids)]
                features.append(F.normalize(encoded.float(), dim=-1))
        # Put together outside of inference mode, so that a mask can be trained on the features.
        return torch.cat(features)

    def image_features(self, source: ImageSource, storage: torch.device | None = None) -> Features:
        """Features of all images of a source, on every process; on `storage`, by default the device."""
        return self._rows(source, self.encode_image, storage)

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
        different, rows = torch.unique(without_padding(tokens.ids), dim=0, return_inverse=True)
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
        by_class = without_padding(tokens.ids).unflatten(0, (len(names), len(templates)))

        def encode(own: Int64[Tensor, "classes templates N"]) -> Float[Tensor, "classes M"]:
            features = []
            # Some classes at a time, so that memory does not grow with their number.
            for ids in own.split(max(1, CAPTION_BATCHES * self.batch_size // len(templates))):
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

    def similarity(
        self, images: Sequence[Image.Image] | Tensor, captions: Sequence[str]
    ) -> Float[Tensor, "images captions"]:
        """The cosine of every image, or normalised view (images, C, H, W), and every caption, in this process alone."""
        features = self.rows_of(images)
        texts = self.encode_text(without_padding(self.tokenize(list(captions)).ids))
        with torch.no_grad():
            return self.score_block(features, texts)


def without_padding(token_ids: Int64[Tensor, "B N"]) -> Int64[Tensor, "B _"]:
    """Token ids (B, N) without the columns that lie after the end, the largest id, of all captions."""
    return token_ids[:, : int(token_ids.argmax(dim=1).max()) + 1]

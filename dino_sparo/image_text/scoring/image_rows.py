"""The image side of a scorer that keeps one row of numbers per image: views, batches, processes.

Every image counts exactly once, whatever the number of processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.decode import to_rgb
from dino_sparo.evaluation.features import Features, encoded_batches, extract_split, inference, share_loader
from dino_sparo.image_text.scoring.scorer import EncodedImages


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
        return extract_split(
            self.module,
            source,
            self.transform,
            self.device,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            encode=encode,
            dtype=self.dtype,
            storage=storage,
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
        with inference(self.module, self.device, self.dtype):
            return torch.cat(
                [self.encode_image(part.to(self.device)) for part in self.views(images).split(self.batch_size)]
            )


def require_both(images: Any, captions: Any) -> None:
    """Refuse to compare with nothing (ValueError), and anything but lists of images and of captions (TypeError)."""
    if isinstance(images, (Image.Image, str, Path)) or isinstance(captions, str):
        raise TypeError("similarity takes a list of images and a list of captions, also of one")
    for number, image in enumerate(images if isinstance(images, Sequence) else ()):
        if not isinstance(image, Image.Image):
            raise TypeError(f"image {number} is {image!r}; open files first: PIL.Image.open({str(image)!r})")
    if not len(images) or not len(captions):
        raise ValueError(f"{len(images)} images, {len(captions)} captions; give at least one of each")

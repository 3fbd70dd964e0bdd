"""A CLIP model + images or captions -> features of length one in fp32, batch by batch, over all processes.

Between the model and its evaluations: `zero_shot.py`, `retrieval.py`, `sugarcrepe.py`, `winoground.py` and `probe.py`
ask it for features and look at nothing else of a model. So they take whatever can encode images and captions, a `CLIP`
or a choice of its slots. Every image and every caption counts exactly once, whatever the number of processes, and
captions of the same tokens have the same feature to the last bit, so that a tie is seen as one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from dino_sparo.crops import normalized_tensor
from dino_sparo.data import ImageDataset, ImageSource, ShardSampler, create_loader
from dino_sparo.evaluation.features import Features, encode_padded, extract_split, gather_features, inference
from dino_sparo.image_text.text import Tokens
from dino_sparo.runtime.distributed import rank, world_size
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)


@runtime_checkable
class ImageTextModel(Protocol):
    """What an evaluation asks of a model. With `normalize` the dot product of two features is their similarity."""

    def encode_image(self, images: Tensor, normalize: bool = True) -> Tensor:
        """Images (B, C, H, W) -> features (B, M)."""
        ...

    def encode_text(self, token_ids: Tensor, normalize: bool = True) -> Tensor:
        """Token ids (B, N) -> features (B, M)."""
        ...


class ClipView:
    """Image -> one central view: the short side resized to the view's (bicubic), the middle cut out, normalised.

    CLIP's and OpenCLIP's view. DINO's, `crops.EvalTransform`, cuts it out of a larger image.

    Args:
        img_size: side of the view in pixels.
        mean: per channel, of pixels in 0..1.
        std: per channel.
        border: pixels cut off every side of the image first.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(self, img_size: int, mean: tuple[float, ...], std: tuple[float, ...], border: int = 0) -> None:
        if img_size < 1 or border < 0:
            raise ValueError(f"img_size={img_size}, border={border}; give a positive size and a border of 0 or more")
        self.img_size = self.resize_size = img_size
        self.exact = True  # the pixels of torchvision's pipeline on PIL images
        self.mean, self.std, self.border = mean, std, border

    def __call__(
        self, image: Image.Image, rng: np.random.Generator | None = None
    ) -> list[Float[Tensor, "C img_size img_size"]]:
        """The view, in a list as training's crops are; nothing is drawn from `rng`."""
        if self.border:
            box = (self.border, self.border, image.width - self.border, image.height - self.border)
            image = image.crop(box)
        resized = TF.resize(image, [self.img_size], InterpolationMode.BICUBIC)
        return [normalized_tensor(TF.center_crop(resized, [self.img_size]), self.mean, self.std)]


class ImageBatch(NamedTuple):
    """Some images of a source.

    Attributes:
        features: (B, M), of length one.
        labels: (B,), on the same device; -1 where an image has none.
        indices: (B,), places in the source.
        corrupt: (location, reason) of images that were asked for and cannot be read; they are not among the B.
    """

    features: Float[Tensor, "B M"]
    labels: Int64[Tensor, "B"]
    indices: Int64[Tensor, "B"]
    corrupt: list[tuple[str, str]]


@dataclass(frozen=True)
class TextFeatures:
    """Features of a list of captions; captions of the same tokens share one.

    Attributes:
        features: (different captions, M), of length one.
        rows: (captions,), where in `features` each caption's lies, on the same device.
        num_truncated: captions cut off because they were longer than the context.
        num_empty: captions without a word.
    """

    features: Float[Tensor, "U M"]
    rows: Int64[Tensor, " captions"]
    num_truncated: int
    num_empty: int

    def __getitem__(self, captions: slice | Tensor) -> Float[Tensor, "_ M"]:
        """The features of some captions."""
        return self.features[self.rows[captions]]


@dataclass(frozen=True)
class ClipEncoder:
    """A model, and all that its features depend on.

    Attributes:
        model: on `device`, in eval mode.
        tokenize: captions -> `Tokens`.
        transform: (image, rng) -> [view].
        device: where to compute.
        batch_size: images, or captions, per process and step.
        num_workers: processes that load images, per process.
        dtype: fp32, or bf16 or fp16 for autocast; features are fp32 in any case.
    """

    model: ImageTextModel
    tokenize: Callable[[list[str]], Tokens]
    transform: Callable[..., list[Tensor]]
    device: torch.device
    batch_size: int = 128
    num_workers: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def module(self) -> nn.Module:
        """The model as a module, whose train or eval mode can be switched; a stand-in if it is none."""
        return self.model if isinstance(self.model, nn.Module) else nn.Identity()

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Features of images, of length one in fp32 whatever the precision they were computed in."""
        return F.normalize(self.model.encode_image(images, normalize=True).float(), dim=-1)

    def encode_text(self, token_ids: Int64[Tensor, "B N"], desc: str = "captions") -> Float[Tensor, "B M"]:
        """Features of any number of captions, likewise, in batches of equal size; (0, 0) if there are none."""
        features = [torch.empty(0, 0, device=self.device)]
        batches = token_ids.split(self.batch_size) if len(token_ids) else ()
        with inference(self.module, self.device, self.dtype):
            for ids in progress(batches, desc=desc):
                # Filled up with a caption that surely has an end: products of one size, as `encode_padded` has them.
                padded = torch.cat((ids, ids[:1].expand(self.batch_size - len(ids), -1))).to(self.device)
                encoded = self.model.encode_text(padded, normalize=True)[: len(ids)]
                features.append(F.normalize(encoded.float(), dim=-1))
        # Put together outside of inference mode: whoever trains on features needs a tensor that is none of its own.
        return torch.cat(features[1:] or features)

    def image_batches(self, source: ImageSource, desc: str = "") -> Iterator[ImageBatch]:
        """This process' share of the images, in order; nothing is kept.

        Args:
            source: the images.
            desc: what the progress line says; by default the source's name.
        """
        sampler = ShardSampler(len(source), self.batch_size, rank=rank(), world_size=world_size())
        dataset = ImageDataset(source, self.transform)
        is_cuda = self.device.type == "cuda"
        loader = create_loader(dataset, sampler, num_workers=self.num_workers, pin_memory=is_cuda)
        batches = progress(loader, total=len(loader), desc=desc or source.name)
        for asked, batch in zip(sampler, batches, strict=True):
            with inference(self.module, self.device, self.dtype):
                images = batch.views[0].to(self.device, non_blocking=True)
                features = encode_padded(self.encode_image, images, self.batch_size)
            # An image that cannot be read comes replaced by another one, under that one's index.
            kept = (batch.indices == torch.tensor(asked)).nonzero().flatten()
            labels = batch.labels[kept].to(self.device)
            yield ImageBatch(features[kept.to(self.device)], labels, batch.indices[kept], batch.corrupt)

    def image_features(self, source: ImageSource, **options: Any) -> Features:
        """Features of all images of a source, on every process.

        Args:
            source: the images.
            options: of `evaluation.features.extract_features`, such as `storage`.
        """
        return extract_split(
            self.module,
            source,
            self.transform,
            self.device,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            encode=self.encode_image,
            dtype=self.dtype,
            **options,
        )

    def text_features(self, captions: Sequence[str], desc: str = "captions") -> TextFeatures:
        """Features of captions, on every process.

        Args:
            captions: in words.
            desc: what the log says.

        Raises:
            ValueError: there are no captions.
        """
        if not captions:
            raise ValueError(f"{desc}: there are no captions to encode")
        tokens = self.tokenize(list(captions))
        if tokens.num_truncated or tokens.num_empty:
            logger.warning(
                "%s: of %d captions %d are longer than the context and cut off, %d are empty",
                desc, len(captions), tokens.num_truncated, tokens.num_empty,
            )  # fmt: skip
        different, rows = torch.unique(without_padding(tokens.ids), dim=0, return_inverse=True)
        own = ShardSampler(len(different), 1, rank=rank(), world_size=world_size())
        indices = torch.arange(own.start, own.end, device=self.device)
        features = self.encode_text(different[own.start : own.end], desc)
        found = gather_features(Features(features, torch.zeros_like(indices), indices), self.device)
        return TextFeatures(found.features, rows.to(self.device), tokens.num_truncated, tokens.num_empty)


def without_padding(token_ids: Int64[Tensor, "B N"]) -> Int64[Tensor, "B _"]:
    """Token ids (B, N) without the columns that lie after the end, the largest id, of all captions."""
    return token_ids[:, : int(token_ids.argmax(dim=1).max()) + 1]

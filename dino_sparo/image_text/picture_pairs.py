"""Pairs of image and caption that are to be drawn: their source, the views of chosen pairs, and the picture files.

The objectives describe the figures: `clip/slots/pictures.py`, `oc_clip/pictures.py`.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dino_sparo.data.sources import CorruptImageError, ImageSource
from dino_sparo.data.views import PatchView, view_pixels
from dino_sparo.draw.figure import PICTURE_HEIGHT, Figure, describe_model
from dino_sparo.draw.html import save_page
from dino_sparo.draw.pixels import Picture
from dino_sparo.draw.sheet import require_matplotlib, save_sheet
from dino_sparo.evaluation.result import ResultFile
from dino_sparo.image_text.evaluation.task import ModelTask
from dino_sparo.image_text.pairs.batches import PairSource
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.towers import LoadedModel
from dino_sparo.runtime.cli import printable, say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ViewedPair:
    """A pair as a model sees it: the first of the image's captions, and the view, normalised."""

    index: int
    name: str
    caption: str
    image: Float[Tensor, "C H W"]


class PicturesTask(ModelTask):
    """Pictures of a model's attention to some pairs; the options are from `picture_parser`."""

    def __init__(self, args: argparse.Namespace, device: torch.device, load: Callable[..., LoadedModel]) -> None:
        super().__init__(args, device, lambda args: load(args.pretrained_weights))
        require_matplotlib()
        require("open_clip", "captions")

    @cached_property
    def pairs(self) -> PairSource:
        """The pairs to draw; built-in scenes are held-out scenes.

        Images without a caption are left out, however many there are.
        """
        args = self.args
        keys = args.image_key, args.caption_key, args.image_folder
        return open_pairs(args.data_path, *keys, max_left_out=1.0, default_split="val", limits=self.limits)

    def about(self, model_words: Sequence[str], num_shown: int, num_pairs: int) -> tuple[str, str]:
        """A line on the model and on the pairs that are shown, of `num_pairs`; and its second half."""
        pairs = f"{num_shown} of {num_pairs:,} pairs of {printable(self.pairs.name)}"
        model = describe_model(self.loaded.record, self.loaded.model.config.image, *model_words)
        return f"{model}  ·  {pairs}", pairs

    def write(self, file: ResultFile, figure: Figure, numbers: dict[str, Any]) -> dict[str, Any]:
        """Write `file` with `numbers`, and a sheet and a page in the same folder; returns the content of the file."""
        paths = [file.path.with_suffix(f".{ending}") for ending in (self.args.figure_format, "html")]
        save_sheet(figure, paths[0])
        save_page(figure, paths[1])
        say("\n".join(map(str, [*paths, file.path])))
        return file.write({**numbers, "data_path": self.args.data_path}, headline=[])


def view_pictures(source: ImageSource, indices: Sequence[int], view: PatchView) -> list[Picture]:
    """The part of each image that the model sees, in the size of a picture."""
    images = [source.read(index) for index in indices]
    return [view_pixels(image, view.view(image), PICTURE_HEIGHT) for image in images]


def view_pairs(source: PairSource, indices: Sequence[int], view: PatchView) -> Iterator[ViewedPair]:
    """The pairs of some indices; unreadable pairs are skipped, logged and counted.

    Raises:
        ValueError: at the end, if none could be read.
    """
    errors: list[CorruptImageError] = []
    for index in progress(indices, desc=source.name):
        try:
            yield ViewedPair(index, source.location(index), source.captions_of(index)[0], view(source.read(index))[0])
        except CorruptImageError as error:
            errors.append(error)
            logger.warning("left out %s", error)
    if errors and len(errors) == len(indices):
        raise UserError(f"none of {len(errors)} pairs can be read: {errors[0]}")
    if errors:
        logger.warning("%s: left out %d pairs", source.name, len(errors))

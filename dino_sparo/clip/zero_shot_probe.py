"""A model in training + a few labelled images -> its zero-shot accuracy, as `zero_shot.py` measures it.

Stage 4 of the folder, beside `train.py`, which asks for it every few epochs.
"""

from dataclasses import dataclass
from functools import partial

import torch

from dino_sparo.clip.classes import apply_classes, open_classes
from dino_sparo.clip.encode import ClipEncoder, ClipView
from dino_sparo.clip.model import CLIP
from dino_sparo.clip.prompts import open_templates
from dino_sparo.clip.protocol import open_evaluation_images
from dino_sparo.clip.text import tokenize
from dino_sparo.clip.zero_shot import evaluate_zero_shot
from dino_sparo.data import ImageSource
from dino_sparo.evaluation.features import disjoint_subsets

NUM_IMAGES = 4000


@dataclass(frozen=True)
class ZeroShotProbe:
    """What a model is asked during training.

    Attributes:
        images: labelled by their places in `names`.
        names: of the classes.
        templates: sentences with `{}`.
        view: image -> what the model sees of it.
    """

    images: ImageSource
    names: list[str]
    templates: tuple[str, ...]
    view: ClipView

    def accuracy(
        self, model: CLIP, device: torch.device, dtype: torch.dtype, batch_size: int, num_workers: int
    ) -> float:
        """Top-1 accuracy in percent; every process takes part and gets it.

        Args:
            model: on the device; afterwards in the mode it was in.
            device: where to compute.
            dtype: of autocast.
            batch_size: images per process and step.
            num_workers: processes that load images, per process.
        """
        tokens = partial(tokenize, context_length=model.config.text.context_length)
        encoder = ClipEncoder(model, tokens, self.view, device, batch_size, num_workers, dtype)
        was_training = model.training
        try:
            return evaluate_zero_shot(encoder, self.images, self.names, self.templates).top1
        finally:
            model.train(was_training)


def open_probe(data_path: str, view: ClipView, download: bool = False) -> ZeroShotProbe:
    """The images, classes and captions of a probe.

    Args:
        data_path: labelled images, held-out ones where there are any.
        view: what the model sees of an image.
        download: fetch a torchvision set that is not on disk.

    Raises:
        ValueError: there are no labels, or class names that cannot be found.
    """
    source = open_evaluation_images(data_path, download=download)
    classes = open_classes(source, data_path=data_path)
    (images,) = disjoint_subsets(apply_classes(source, classes), (NUM_IMAGES,))
    return ZeroShotProbe(images, classes.names, open_templates("auto", data_path), view)


def open_training_probe(
    zero_shot_path: str | None, data_path: str, view: ClipView, download: bool = False
) -> ZeroShotProbe:
    """The probe of a run: on images of its own, else on those that it trains on.

    Args:
        zero_shot_path: labelled images, or None.
        data_path: the pairs.
        view: what the model sees of an image.
        download: fetch a torchvision set that is not on disk.

    Raises:
        ValueError: the images cannot be classified; it names --zero_shot_path where that was not given.
    """
    if zero_shot_path is not None:
        return open_probe(zero_shot_path, view, download)
    try:
        return open_probe(data_path, view, download)
    except ValueError as error:
        raise ValueError(
            f"--zero_shot_freq needs labelled images, and those of --data_path {data_path} cannot be classified: "
            f"{error}. Give others with --zero_shot_path, e.g. imagenet/val or scenes:1000:48, or leave out "
            f"--zero_shot_freq"
        ) from error

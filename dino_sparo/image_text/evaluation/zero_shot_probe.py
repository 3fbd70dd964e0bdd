"""A model in training + a few labelled images -> its zero-shot accuracy, as `zero_shot.py` measures it.

A training run measures it every few epochs.
"""

from dataclasses import dataclass

from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.features import disjoint_subsets
from dino_sparo.image_text.classes import apply_classes, open_classes
from dino_sparo.image_text.evaluation.protocol import open_evaluation_images
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot
from dino_sparo.image_text.prompts import open_templates
from dino_sparo.image_text.scoring.scorer import Scorer

NUM_IMAGES = 4000


@dataclass(frozen=True)
class ZeroShotProbe:
    """Images, class names and templates of the evaluation during training.

    Attributes:
        images: labelled by their places in `names`.
        names: of the classes.
        templates: sentences with `{}`, for a scorer that has none of its own.
    """

    images: ImageSource
    names: list[str]
    templates: tuple[str, ...]

    def accuracy(self, scorer: Scorer) -> float:
        """Top-1 accuracy in percent; every process takes part and gets it."""
        templates = scorer.default_templates or self.templates
        return evaluate_zero_shot(scorer, self.images, self.names, templates).top1


def open_probe(data_path: str, download: bool = False) -> ZeroShotProbe:
    """The images, classes and captions of a probe.

    Args:
        data_path: labelled images, held-out ones where there are any.
        download: fetch a torchvision set that is not on disk.
    """
    source = open_evaluation_images(data_path, download=download)
    classes = open_classes(source, data_path=data_path)
    (images,) = disjoint_subsets(apply_classes(source, classes), (NUM_IMAGES,))
    return ZeroShotProbe(images, classes.names, open_templates("auto", data_path))


def open_training_probe(zero_shot_path: str | None, data_path: str, download: bool = False) -> ZeroShotProbe:
    """The probe of a run: on images of its own, else on those that it trains on.

    Args:
        zero_shot_path: labelled images, or None.
        data_path: the pairs.
        download: fetch a torchvision set that is not on disk.
    """
    try:
        return open_probe(zero_shot_path or data_path, download)
    except ValueError as error:
        if zero_shot_path:
            raise
        raise ValueError(
            f"--zero_shot_freq needs labelled images, and those of --data_path {data_path} cannot be classified: "
            f"{error}. Give others with --zero_shot_path, e.g. imagenet/val or scenes:1000:48, or leave out "
            f"--zero_shot_freq"
        ) from error

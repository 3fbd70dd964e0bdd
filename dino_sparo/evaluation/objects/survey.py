"""An encoder and images with objects -> the measures of its maps and of all controls, image by image.

The images are read once, in batches; maps are scored and forgotten.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dino_sparo.data import CorruptImageError
from dino_sparo.encoder import Encoder
from dino_sparo.evaluation.attention import maps_and_slots
from dino_sparo.evaluation.features import MAX_NAMED
from dino_sparo.evaluation.objects.masks import ObjectSource, view_objects
from dino_sparo.evaluation.objects.measures import (
    MEASURES,
    PatchObjects,
    count_patches,
    grid_bounds,
    map_jaccards,
    score_maps,
    shuffle_patches,
    summarize,
)
from dino_sparo.evaluation.objects.slots import map_redundancy, value_redundancy
from dino_sparo.evaluation.views import SquareView
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

BATCH_SIZE = 16
# What is scored, in the order of the table.
MODEL, UNTRAINED, OTHER_IMAGE, RANDOM, PATCH_GRID = ROWS = (
    "model", "untrained", "other_image", "random", "patch_grid",
)  # fmt: skip
CONTROLS = (UNTRAINED, OTHER_IMAGE, RANDOM)
NO_SCORE = dict.fromkeys(MEASURES, float("nan"))


class SeenImage(NamedTuple):
    """One image as an encoder takes it.

    Attributes:
        number: its place in the source.
        tensor: (C, H, W), normalised.
        objects: counted by patches.
        classes: (objects,), their classes.
    """

    number: int
    tensor: Float[Tensor, "C H W"]
    objects: PatchObjects
    classes: Int[np.ndarray, " objects"]


@dataclass
class Survey:
    """What was measured.

    Attributes:
        scores: row -> measure -> a number per image with objects.
        jaccards: (objects, maps) per image with objects, of the model's maps.
        classes: (objects,) likewise.
        indices: of the images that were seen, with objects or without.
        values: row -> (images, L, V), the slots of the model and of the untrained encoder; empty without slots.
        redundancy: row -> what is alike -> mean cosine per batch, and the batch's size.
        left_out: location and reason of images that could not be read.
    """

    scores: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {row: {measure: [] for measure in MEASURES} for row in ROWS}
    )
    jaccards: list[Float[np.ndarray, "objects maps"]] = field(default_factory=list)
    classes: list[Int[np.ndarray, " objects"]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    values: dict[str, list[Float[np.ndarray, "B L V"]]] = field(default_factory=lambda: {MODEL: [], UNTRAINED: []})
    redundancy: dict[str, dict[str, list[tuple[float, int]]]] = field(
        default_factory=lambda: {row: {"maps": [], "values": []} for row in (MODEL, UNTRAINED)}
    )
    left_out: list[CorruptImageError] = field(default_factory=list)

    def add_score(self, row: str, scores: dict[str, float]) -> None:
        """Note the measures of one image."""
        for measure, value in scores.items():
            self.scores[row][measure].append(value)

    def measures(self, seed: int) -> dict[str, dict[str, Any]]:
        """Row -> measure -> mean, interval, number of images."""
        return {
            row: {measure: summarize(np.array(values), seed) for measure, values in own.items()}
            for row, own in self.scores.items()
        }

    def differences(self, seed: int) -> dict[str, dict[str, Any]]:
        """Control -> measure -> the model's score minus the control's on the same images: mean, interval, number."""
        return {
            row: {
                measure: summarize(np.array(self.scores[MODEL][measure]) - np.array(self.scores[row][measure]), seed)
                for measure in MEASURES
            }
            for row in CONTROLS
        }

    def mean_redundancy(self) -> dict[str, dict[str, float]]:
        """Row -> "maps" or "values" -> mean absolute cosine over all images."""
        return {
            row: {what: _weighted_mean(parts) for what, parts in own.items() if parts}
            for row, own in self.redundancy.items()
        }


def _weighted_mean(parts: list[tuple[float, int]]) -> float:
    means, sizes = zip(*parts, strict=True)
    return float(np.average(means, weights=sizes))


def survey_objects(
    encoders: dict[str, Encoder],
    source: ObjectSource,
    indices: Sequence[int],
    view: SquareView,
    share: float,
    seed: int,
    num_workers: int = 0,
) -> Survey:
    """Score the maps of an encoder and of its controls.

    Args:
        encoders: those of the rows MODEL and UNTRAINED, of one architecture, in eval mode, on their device.
        source: images with objects.
        indices: of the images to look at; those that cannot be read are left out and counted.
        view: what is seen of an image.
        share: of a map's mass, see `map_jaccards`.
        seed: of the random maps.
        num_workers: threads that read images.

    Raises:
        ValueError: fewer than two images with objects can be read.
    """
    survey = Survey()
    before: np.ndarray | None = None  # the maps of the image before, for the control
    for batch in _batches(survey, source, indices, view, num_workers):
        maps = {row: _look(survey, row, encoder, batch) for row, encoder in encoders.items()}
        others = [before, *maps[MODEL][:-1]]
        before = maps[MODEL][-1]
        for image, own, untrained, other in zip(batch, maps[MODEL], maps[UNTRAINED], others, strict=True):
            if not len(image.classes):
                continue
            shuffled = shuffle_patches(own, np.random.default_rng([seed, image.number]))
            for row, row_maps in ((MODEL, own), (UNTRAINED, untrained), (OTHER_IMAGE, other), (RANDOM, shuffled)):
                # No image is before the first.
                survey.add_score(row, NO_SCORE if row_maps is None else score_maps(row_maps, image.objects, share))
            survey.add_score(PATCH_GRID, grid_bounds(image.objects))
            survey.jaccards.append(map_jaccards(own, image.objects, share))
            survey.classes.append(image.classes)
    _check(survey, source)
    return survey


def _batches(
    survey: Survey, source: ObjectSource, indices: Sequence[int], view: SquareView, num_workers: int
) -> Iterator[list[SeenImage]]:
    """Read the images; what cannot be read is noted."""

    def load(index: int) -> SeenImage | CorruptImageError:
        try:
            image = source.read(index)
            seen = view.view(image)
            objects = view_objects(source.objects(index), seen, source.location(index), image.size)
        except CorruptImageError as error:
            return error
        counts = count_patches(objects.masks, objects.void, view.patch_size)
        return SeenImage(index, view(image)[0], counts, objects.classes)

    with ThreadPoolExecutor(max(num_workers, 1)) as pool:
        for start in progress(range(0, len(indices), BATCH_SIZE), desc="objects"):
            loaded = list(pool.map(load, indices[start : start + BATCH_SIZE]))
            survey.left_out += [item for item in loaded if isinstance(item, CorruptImageError)]
            batch = [item for item in loaded if isinstance(item, SeenImage)]
            survey.indices += [image.number for image in batch]
            if batch:
                yield batch


def _look(survey: Survey, row: str, encoder: Encoder, batch: list[SeenImage]) -> Float[np.ndarray, "B maps h w"]:
    """The maps of a batch; notes the slots and how alike they are."""
    device = encoder.backbone.cls_token.device
    maps, slots = maps_and_slots(encoder, torch.stack([image.tensor for image in batch]).to(device))
    survey.redundancy[row]["maps"].append((map_redundancy(maps), len(batch)))
    if encoder.config.kind.has_slots:
        survey.redundancy[row]["values"].append((value_redundancy(slots), len(batch)))
        survey.values[row].append(slots)
    return maps


def _check(survey: Survey, source: ObjectSource) -> None:
    errors, count = survey.left_out, len(survey.classes)
    named = "; ".join(str(error) for error in errors[:MAX_NAMED])
    if errors:
        logger.warning("%s: left out %d images that cannot be read: %s", source.name, len(errors), named)
    if count < 2:
        without = len(survey.indices) - count
        raise ValueError(
            f"{source.name}: {count} images have objects in view, {without} have none and {len(errors)} cannot be read"
            f"{f' ({named})' if named else ''}; an interval needs at least 2 images with objects"
        )


def slot_values(
    encoder: Encoder, source: ObjectSource, indices: Sequence[int], view: SquareView
) -> Float[np.ndarray, "images L V"]:
    """The slots of an encoder on some images, in their order; the images have been read before.

    Args:
        encoder: in eval mode, on its device.
        source: the images.
        indices: which.
        view: what is seen of them.
    """
    device = encoder.backbone.cls_token.device
    parts = []
    for start in progress(range(0, len(indices), BATCH_SIZE), desc="other model"):
        images = [view(source.read(index))[0] for index in indices[start : start + BATCH_SIZE]]
        parts.append(maps_and_slots(encoder, torch.stack(images).to(device))[1])
    return np.concatenate(parts)

"""An encoder and images with objects -> the measures of its maps and of all controls, image by image.

Images are read once, in batches, and maps are not kept.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dino_sparo.data.shares import MAX_NAMED
from dino_sparo.data.sources import CorruptImageError
from dino_sparo.data.views import PatchView
from dino_sparo.evaluation.attention.maps import maps_and_slots
from dino_sparo.evaluation.features import check_features
from dino_sparo.evaluation.objects import measures
from dino_sparo.evaluation.objects.layouts import ObjectSource, view_objects
from dino_sparo.evaluation.objects.slots import Jaccards, map_redundancy, value_redundancy
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.logs import progress

logger = logging.getLogger(__name__)

BATCH_SIZE = 16
MODEL, UNTRAINED = "model", "untrained"
CONTROLS = (UNTRAINED, "other_image", "moved")
ROWS = (MODEL, *CONTROLS, "patch_grid")  # of the table
NO_SCORE = dict.fromkeys(measures.MEASURES, float("nan"))


class SeenImage(NamedTuple):
    """One image as an encoder takes it.

    Attributes:
        number: its place in the source.
        tensor: (C, H, W), normalised.
        objects: counted by patches.
        classes: (objects,), their classes.
        out_of_view: number of the image's other objects, which the view does not show.
    """

    number: int
    tensor: Float[Tensor, "C H W"]
    objects: measures.PatchObjects
    classes: Int[np.ndarray, " objects"]
    out_of_view: int


@dataclass
class Survey:
    """All scores, image by image.

    Attributes:
        scores: row -> measure -> number, per image with objects.
        jaccards: row -> (objects, maps) per image with objects, for MODEL and UNTRAINED.
        classes: (objects,) per image with objects.
        indices: of all readable images.
        values: (B, L, V) per batch, the model's slots.
        redundancy: row, and "maps" or "values" -> mean cosine and size of each batch.
        subsets: number of subsets per image, and number of maps in each.
        out_of_view: number of objects outside of the view.
        left_out: errors of unreadable images.
    """

    scores: list[dict[str, dict[str, float]]] = field(default_factory=list)
    jaccards: dict[str, list[Jaccards]] = field(default_factory=lambda: defaultdict(list))
    classes: list[Int[np.ndarray, " objects"]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    values: list[Float[np.ndarray, "B L V"]] = field(default_factory=list)
    redundancy: dict[tuple[str, str], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    subsets: tuple[int, int] = (0, 0)
    out_of_view: int = 0
    left_out: list[CorruptImageError] = field(default_factory=list)

    def measures(self, seed: int) -> dict[str, dict[str, Any]]:
        """Row -> measure -> mean, interval, number of images."""
        return {row: _summaries(self._values(row), seed) for row in ROWS}

    def differences(self, seed: int) -> dict[str, dict[str, Any]]:
        """Control -> measure -> model's score minus control's score on the same images: mean, interval, number."""
        return {row: _summaries(self._values(MODEL) - self._values(row), seed) for row in CONTROLS}

    def _values(self, row: str) -> Float[np.ndarray, "measures images"]:
        return np.array([[scores[row][name] for scores in self.scores] for name in measures.MEASURES])

    def mean_redundancy(self) -> dict[str, dict[str, float]]:
        """Row -> "maps" or "values" -> mean absolute cosine over all images."""
        means: dict[str, dict[str, float]] = defaultdict(dict)
        for (row, what), parts in self.redundancy.items():
            of_batches, sizes = zip(*parts, strict=True)
            means[row][what] = float(np.average(of_batches, weights=sizes))
        return means


def _summaries(values: Float[np.ndarray, "measures images"], seed: int) -> dict[str, Any]:
    return {name: measures.summarize(row, seed) for name, row in zip(measures.MEASURES, values, strict=True)}


def survey_objects(
    encoders: dict[str, Encoder],
    source: ObjectSource,
    indices: Sequence[int],
    view: PatchView,
    share: float,
    seed: int,
    num_workers: int = 0,
    maps: int | None = None,
) -> Survey:
    """Score the maps of an encoder and of its controls.

    Args:
        encoders: MODEL and UNTRAINED, of one architecture, in eval mode, on their device.
        source: images with objects.
        indices: of images, in random order, since the maps of the preceding image are a control.
        view: of the encoders.
        share: of a map's mass, see `map_jaccards`.
        seed: of subsets and moved maps.
        num_workers: threads that read images.
        maps: number of maps per score, see `map_subsets`; None: all.
    """
    survey = Survey()
    before: np.ndarray | None = None  # maps of the preceding image, for the control
    for batch in _batches(survey, source, indices, view, num_workers):
        images = torch.stack([image.tensor for image in batch])
        found: dict[str, np.ndarray] = {}
        for row, encoder in encoders.items():
            found[row], slots = maps_and_slots(encoder, images)
            survey.values += [slots] if row == MODEL else []
            survey.redundancy[row, "maps"].append((map_redundancy(found[row]), len(batch)))
            if encoder.config.kind.has_slots:
                survey.redundancy[row, "values"].append((value_redundancy(slots), len(batch)))
        for image, heatmaps_of_model, untrained in zip(batch, found[MODEL], found[UNTRAINED], strict=True):
            if len(image.classes):
                survey.classes.append(image.classes)
                survey.jaccards[MODEL].append(measures.map_jaccards(heatmaps_of_model, image.objects, share))
                survey.jaccards[UNTRAINED].append(measures.map_jaccards(untrained, image.objects, share))
                subsets = measures.map_subsets(len(heatmaps_of_model), maps, [seed, image.number])
                survey.subsets = subsets.shape
                moved = measures.move_maps(heatmaps_of_model, np.random.default_rng([seed, image.number]))
                scores = [
                    NO_SCORE if heatmaps is None else measures.score_subsets(heatmaps, image.objects, share, subsets)
                    for heatmaps in (heatmaps_of_model, untrained, before, moved)
                ]
                survey.scores.append(dict(zip(ROWS, [*scores, measures.grid_bounds(image.objects)], strict=True)))
            before = heatmaps_of_model
    require_objects(survey, source)
    check_features(torch.from_numpy(np.concatenate(survey.values)).flatten(1), "slots of the model")
    return survey


def _batches(
    survey: Survey, source: ObjectSource, indices: Sequence[int], view: PatchView, num_workers: int
) -> Iterator[list[SeenImage]]:
    """Read the images; errors of unreadable images go into the survey."""

    def load(index: int) -> SeenImage | CorruptImageError:
        try:
            image, whole, location = source.images.read(index), source.objects(index), source.images.location(index)
            objects = view_objects(whole, view.view(image), location, image)
        except CorruptImageError as error:
            return error
        counts = measures.count_patches(objects.masks, objects.void, view.patch_size)
        return SeenImage(index, view(image)[0], counts, objects.classes, len(whole.classes) - len(objects.classes))

    with ThreadPoolExecutor(max(num_workers, 1)) as pool:
        for start in progress(range(0, len(indices), BATCH_SIZE), desc="objects"):
            loaded = list(pool.map(load, indices[start : start + BATCH_SIZE]))
            survey.left_out += [item for item in loaded if isinstance(item, CorruptImageError)]
            batch = [item for item in loaded if isinstance(item, SeenImage)]
            survey.indices += [image.number for image in batch]
            survey.out_of_view += sum(image.out_of_view for image in batch)
            if batch:
                yield batch


def require_objects(survey: Survey, source: ObjectSource) -> None:
    """Log unreadable images; UserError unless two images have objects."""
    errors, count = survey.left_out, len(survey.classes)
    named = "; ".join(str(error) for error in errors[:MAX_NAMED])
    if errors:
        logger.warning("%s: left out %d images that cannot be read: %s", source.images.name, len(errors), named)
    if count < 2:
        without = len(survey.indices) - count
        raise UserError(
            f"{source.images.name}: {count} images have objects in view, {without} have none and {len(errors)} cannot "
            f"be read{f' ({named})' if named else ''}; an interval needs at least 2 images with objects"
        )


def slot_values(
    encoder: Encoder, source: ObjectSource, indices: Sequence[int], view: PatchView
) -> Float[np.ndarray, "images L V"]:
    """The slots of an encoder on some readable images, in their order."""
    parts = []
    for start in progress(range(0, len(indices), BATCH_SIZE), desc="other model"):
        images = [view(source.images.read(index))[0] for index in indices[start : start + BATCH_SIZE]]
        parts.append(maps_and_slots(encoder, torch.stack(images))[1])
    return np.concatenate(parts)

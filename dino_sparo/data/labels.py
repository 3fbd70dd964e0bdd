"""Labels of images: checks that every image has a label, and numbers the classes of two sources equally."""

import copy

import numpy as np
from jaxtyping import Int64

from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.folders import WITHOUT_LABELS
from dino_sparo.runtime.faults import UserError


def require_labels(source: ImageSource) -> Int64[np.ndarray, " images"]:
    """The labels of a source, (images,) int64; ValueError unless every image has a label."""
    if source.labels is None:
        raise UserError(
            f"{source.name} has no labels: evaluations need one subfolder per class, a list with a label after each "
            "path, a table with a column `label` (or --label_column NAME), or tar shards with .cls members\n"
            f"it holds {len(source):,} images, the first is {source.location(0)}"
            f"{f'; {why}' if (why := getattr(source, 'why_unlabelled', '')) else ''}\n{WITHOUT_LABELS}"
        )
    missing = np.flatnonzero(source.labels < 0)
    if len(missing):
        raise UserError(
            f"{source.name}: {len(missing)} of {len(source)} images have no label, the first is "
            f"{source.location(int(missing[0]))}; label all images, or remove these"
        )
    return source.labels


def align_classes(source: ImageSource, classes: list[str]) -> ImageSource:
    """The same source with its classes numbered as in `classes`.

    Two folders number their classes independently. If one lacks a class, equal numbers mean different classes.

    Raises:
        ValueError: the source has no labels, or images of a class that is not among `classes`.
    """
    labels = require_labels(source)
    source_classes, number = source.classes or [], {name: i for i, name in enumerate(classes)}
    unknown = [name for i, name in enumerate(source_classes) if name not in number and (labels == i).any()]
    if unknown:
        known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise UserError(
            f"{source.name} has {len(unknown)} classes that the training images lack, the first is {unknown[0]!r}; "
            f"the training images have {len(classes)}: {known}; give matching splits"
        )
    if source_classes == classes:
        return source
    aligned = copy.copy(source)
    aligned.labels = np.array([number.get(name, -1) for name in source_classes], dtype=np.int64)[labels]
    aligned.classes = classes
    return aligned

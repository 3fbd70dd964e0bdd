"""Record torchmetrics' Jaccard indices of drawn masks in segmentation.json.

    pip install torchmetrics==1.9.0
    python tests/reference/record_segmentation.py
"""

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("segmentation.json")
CASES = ((0, 2, 2), (1, 5, 5), (2, 7, 4), (3, 11, 3))  # seed, classes, classes that occur


def drawn(seed: int, num_classes: int, occurring: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels (3, 13, 17), two thirds of them equal, some labels void."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(occurring, size=(3, 13, 17))
    predicted = np.where(rng.random(labels.shape) < 2 / 3, labels, rng.integers(occurring, size=labels.shape))
    return predicted, np.where(rng.random(labels.shape) < 0.1, 255, labels)


def record() -> list[dict]:
    """Per case the macro mean, the index of each class, and the pixel accuracy."""
    import torch
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

    cases = []
    for case in CASES:
        pair = [torch.from_numpy(part) for part in drawn(*case)]
        options = {"num_classes": case[1], "ignore_index": 255}
        cases.append(
            {
                "case": case,
                "miou": multiclass_jaccard_index(*pair, average="macro", **options).item(),
                "iou": multiclass_jaccard_index(*pair, average="none", **options).tolist(),
                "pixel_accuracy": multiclass_accuracy(*pair, average="micro", **options).item(),
            }
        )
    return cases


if __name__ == "__main__":
    import torchmetrics

    content = {"torchmetrics": torchmetrics.__version__, "command": "python tests/reference/record_segmentation.py"}
    FILE.write_text(json.dumps({**content, "cases": record()}, indent=1) + "\n")

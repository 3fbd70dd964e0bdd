"""k-NN accuracy of an encoder during its training, on its training images."""

from typing import Any

import torch

from dino_sparo.data.sources import ImageSource
from dino_sparo.data.views import EvalTransform
from dino_sparo.evaluation.features import disjoint_subsets, extract_split
from dino_sparo.evaluation.knn import classify_shards
from dino_sparo.models.encoder import Encoder

NEIGHBOURS = 20
TEMPERATURE = 0.07
NUM_IMAGES = (4000, 1000)  # images that vote, images that are classified
MAX_WORKERS = 2  # beside the training's, which wait


def knn_probe(
    encoder: Encoder,
    source: ImageSource,
    transform: EvalTransform,
    device: torch.device,
    batch_size: int,
    num_workers: int,
) -> float:
    """20-NN accuracy, percent, on disjoint labelled subsets of the training images."""
    settings: dict[str, Any] = {"batch_size": batch_size, "num_workers": min(num_workers, MAX_WORKERS), "gather": False}
    voters, judged = (
        extract_split(encoder, subset, transform, device, **settings).normalize_()
        for subset in disjoint_subsets(source, NUM_IMAGES)
    )
    return classify_shards(voters, judged, [NEIGHBOURS], TEMPERATURE, device)[NEIGHBOURS].top1

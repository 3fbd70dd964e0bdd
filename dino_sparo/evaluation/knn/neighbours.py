"""Features -> their most similar training features: the search behind `classify.py`.

Similarity is the cosine,

    s_ij = x_i . x_j / (|x_i| |x_j|)

computed block by block, so that memory does not grow with the number of images. Several processes hold a part of the
training features each, search their own part, and merge the results, bit-identical to those of one process. Of equally
similar images those that come first in the training set are the nearer ones. All matrix products have one size, because
rounding depends on the size: with AVX-512 none of 60 million similarities changed with the place of its images.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dino_sparo.runtime.collectives import all_gather_ragged
from dino_sparo.runtime.launch import world_size

TEST_CHUNK = 512  # test images at a time
PRODUCT_ROWS = 4096  # training images in a matrix product; test images are TEST_CHUNK
# The largest intermediate is one block of similarities, test images x (TRAIN_CHUNK + k).
TRAIN_CHUNK = 3 * PRODUCT_ROWS
MIN_NORM = 1e-12  # a feature of zeros is similar to none


class TrainSet:
    """Features as they are, beside one over their lengths: a normalised copy would double the memory."""

    def __init__(self, features: Float[Tensor, "train F"]) -> None:
        self.features = features
        self.scales = checked_lengths("train", features).clamp_(min=MIN_NORM).reciprocal_()


@torch.no_grad()
def nearest(train: TrainSet, images: Float[Tensor, "m F"], k: int) -> tuple[Tensor, Tensor]:
    """The k most similar training images of each test image, best first: similarities and indices, (m, k).

    Among equally similar ones the earlier comes first.

    Args:
        train: where to search.
        images: of length one, at most `TEST_CHUNK`; in their precision similarities are computed.
        k: at most the number of training images.
    """
    step = max(TRAIN_CHUNK, k)
    similarities = images.new_full((len(images), k), -math.inf)
    indices = torch.zeros(len(images), k, dtype=torch.int64, device=images.device)
    padded = _filled_up(images, TEST_CHUNK)
    # The best so far stand before each block: worse candidates are passed over quickly; earlier candidates win ties.
    block = images.new_empty(len(images), k + min(step, len(train.features)))
    products = images.new_empty(TEST_CHUNK, PRODUCT_ROWS)
    for start in range(0, len(train.features), step):
        stop = min(start + step, len(train.features))
        compared = block[:, : k + stop - start]
        compared[:, :k] = similarities
        for first in range(start, stop, PRODUCT_ROWS):
            last = min(first + PRODUCT_ROWS, stop)
            begin = max(min(first, len(train.features) - PRODUCT_ROWS), 0)  # earlier rows rather than zeros: no copy
            rows = train.features[begin : begin + PRODUCT_ROWS].to(images.dtype)
            torch.mm(padded, _filled_up(rows, PRODUCT_ROWS).t(), out=products)
            columns = compared[:, k + first - start : k + last - start]
            torch.mul(products[: len(images), first - begin : last - begin], train.scales[first:last], out=columns)
        similarities, positions = first_largest(compared, k)
        before = indices.gather(1, positions.clamp(max=k - 1))
        indices = torch.where(positions < k, before, positions + (start - k))
    return similarities, indices


def _filled_up(rows: Float[Tensor, "n F"], size: int) -> Float[Tensor, "size F"]:
    """The rows, and zeros below them."""
    return rows if len(rows) == size else torch.cat((rows, rows.new_zeros(size - len(rows), rows.shape[1])))


def first_largest(values: Float[Tensor, "m n"], k: int) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """The k largest values of each row and their positions, largest first, of equal ones the first first.

    torch leaves open which of equal values its `topk` takes, and in which order, so rows with some are sorted anew.
    """
    largest, positions = values.topk(min(k + 1, values.shape[1]))
    is_tied = largest[:, 1:] == largest[:, :-1]
    largest, positions = largest[:, :k].contiguous(), positions[:, :k].contiguous()
    rows = is_tied[:, k - 1 :].any(dim=1).nonzero().flatten()  # a value that is left out equals the last one taken
    if len(rows):
        positions[rows] = values[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    rows = is_tied.any(dim=1).nonzero().flatten()
    if len(rows):
        ascending = positions[rows].sort(dim=1).values
        largest[rows], order = values[rows].gather(1, ascending).sort(dim=1, descending=True, stable=True)
        positions[rows] = ascending.gather(1, order)
    return largest, positions


def merge_ranks(
    similarities: Float[Tensor, "m own"], labels: Int[Tensor, "m own"], k: int, device: torch.device
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """Neighbours that each process found for the same test images -> the k most similar of all, and their labels.

    Of equally similar images the lower rank's come first: it holds the earlier part of the training set.

    Args:
        similarities: best first; fewer than k where this process holds fewer training images.
        labels: of these training images.
        k: at most the number of training images of all processes.
        device: where the processes talk to each other.
    """
    if world_size() == 1:
        return similarities, labels
    width = torch.tensor([similarities.shape[1]], device=device)
    most = int(all_gather_ragged(width).max())
    missing = most - similarities.shape[1]
    padded = torch.nn.functional.pad(similarities.to(device), (0, missing), value=-math.inf)
    padded_labels = torch.nn.functional.pad(labels.to(device), (0, missing), value=-1)
    # Ranks one below the other -> side by side, (m, ranks * most).
    every, every_label = (
        all_gather_ragged(part).unflatten(0, (world_size(), -1)).transpose(0, 1).flatten(1)
        for part in (padded, padded_labels)
    )
    largest, order = every.sort(dim=1, descending=True, stable=True)
    return largest[:, :k], every_label.gather(1, order[:, :k])


def checked_lengths(name: str, features: Tensor) -> Float[Tensor, " images"]:
    """The features' lengths."""
    precision = torch.promote_types(features.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(features, dim=1, dtype=precision).float()
    if not lengths.isfinite().all():
        row = int(lengths.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"{name}_features of image {row} are not finite; the encoder is broken or overflowed")
    return lengths

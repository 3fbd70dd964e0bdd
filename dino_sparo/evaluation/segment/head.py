"""A small head on patch tokens: training, prediction, file and measures.

The protocol is that of DINOv2's linear evaluation: batch normalisation, a 1 x 1 convolution, logits upsampled to the
labels (bilinear), cross-entropy without void pixels, AdamW, linear warm-up and decay. For differences see
docs/segment.md. Source: Oquab et al., "DINOv2", section 7.4, and `dinov2/eval/segmentation` of facebookresearch/dinov2.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from dino_sparo.evaluation.segment.data import VOID
from dino_sparo.evaluation.segment.tokens import TokenCache
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences, written_beside
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.file import load_strictly

WEIGHT_DECAY = 1e-4
WARMUP_SHARE = 1500 / 40_000  # DINOv2's steps of warm-up, of all steps
HIDDEN = 256  # channels of the convolutional head
MAX_VALUES = 2**26  # logits that are upsampled at a time


def linear_head(dim: int, num_classes: int) -> nn.Sequential:
    """Batch normalisation and a linear layer for each patch."""
    return nn.Sequential(nn.BatchNorm2d(dim), nn.Conv2d(dim, num_classes, 1))


def conv_head(dim: int, num_classes: int) -> nn.Sequential:
    """A hidden layer on 3 x 3 patches, then a linear layer."""
    hidden = (nn.Conv2d(dim, HIDDEN, 3, padding=1), nn.BatchNorm2d(HIDDEN), nn.ReLU())
    return nn.Sequential(nn.BatchNorm2d(dim), *hidden, nn.Conv2d(HIDDEN, num_classes, 1))


HEADS: dict[str, Callable[[int, int], nn.Sequential]] = {"linear": linear_head, "conv": conv_head}


def pixel_loss(logits: Float[Tensor, "B classes h w"], labels: Int[Tensor, "B H W"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of the pixels that are not void, with upsampled logits; 0 if all pixels are void."""
    upsampled = F.interpolate(logits, labels.shape[-2:], mode="bilinear")
    total = F.cross_entropy(upsampled, labels, ignore_index=VOID, reduction="sum")
    return total / (labels != VOID).sum().clamp_min(1)


def train_head(
    kind: str,
    num_classes: int,
    samples: TokenCache,
    device: torch.device,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> nn.Sequential:
    """A trained head; each epoch has all images in a random order."""
    rng, indices = np.random.default_rng(seed), samples.source.indices
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = HEADS[kind](samples[indices[0]][0].shape[0], num_classes).to(device)
        for parameter, std in zip(head[-1].parameters(), (0.01, 0.0), strict=True):  # weight, bias
            nn.init.normal_(parameter, std=std)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    warmup = max(1, round(WARMUP_SHARE * steps))
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1) * (1 - step / steps))
    order: list[int] = []
    for _ in progress(range(steps), desc="head"):
        while len(order) < batch_size:
            order += rng.permutation(indices).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        tokens, labels = (torch.stack(part) for part in zip(*(samples.crop(i, rng) for i in chosen), strict=True))
        loss = pixel_loss(head(tokens.to(device).float()), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head.eval()


@torch.no_grad()
def largest(maps: Float[Tensor, "maps h w"], height: int, width: int) -> Int[np.ndarray, "height width"]:
    """For each pixel the number of the largest map, with maps upsampled (bilinear), some at a time."""
    best = maps.new_full((height, width), -torch.inf, dtype=torch.float32)
    winners = torch.zeros_like(best, dtype=torch.int64)
    size = max(1, MAX_VALUES // (height * width))
    for start in range(0, len(maps), size):
        part = maps[start : start + size].float()
        values, numbers = F.interpolate(part[None], (height, width), mode="bilinear")[0].max(dim=0)
        winners = torch.where(values > best, numbers + start, winners)
        best = torch.maximum(best, values)
    return winners.cpu().numpy()


def save_head(head: nn.Module, record: Mapping[str, Any], path: Path) -> None:
    """Write the weights and the record of a head."""
    state = {"segmentation_head": dict(record), "state_dict": {k: v.cpu() for k, v in head.state_dict().items()}}
    with written_beside(path) as file:
        torch.save(state, file)


def load_head(path: str, subject: Mapping[str, Any]) -> tuple[nn.Sequential, dict[str, Any]]:
    """A head and its record; UserError if the file is not a head, or belongs to another encoder than `subject`."""
    if not Path(path).is_file():
        raise UserError(f"--head {path!r} is neither a file nor one of {', '.join(HEADS)}")
    state = load_checkpoint(path)
    record = state.get("segmentation_head")
    if not isinstance(record, dict):
        raise UserError(f"--head {path} holds no segmentation head; give the .pth file that segment wrote")
    if differing := differences(record["encoder"], subject, "in the file", "now"):
        raise UserError(f"--head {path} belongs to another encoder: {'; '.join(differing)}; give its encoder")
    head = HEADS[record["kind"]](record["dim"], len(record["classes"]))
    load_strictly(head, state["state_dict"], path)
    return head.eval(), record


def count_pairs(
    first: Shaped[np.ndarray, "H W"], second: UInt8[np.ndarray, "H W"], rows: int, columns: int
) -> Int[np.ndarray, "rows columns"]:
    """Number of pixels with each pair of numbers, without void pixels of the second."""
    valid = second != VOID
    pairs = first[valid].astype(np.int64) * columns + second[valid]
    return np.bincount(pairs, minlength=rows * columns).reshape(rows, columns)


def class_scores(counts: Int[np.ndarray, "predicted classes"], names: Sequence[str]) -> dict[str, Any]:
    """Intersection over union of each class, their mean, and pixel accuracy, percent.

        IoU_c = n_cc / (sum_p n_pc + sum_t n_ct - n_cc),  n_pt the pixels predicted as p that are t

    The mean is over the classes that occur in labels or predictions.
    """
    hits, predicted, true = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    either = predicted + true - hits

    def percent(part: Any, whole: Any) -> float | None:
        return 100 * float(part) / float(whole) if whole else None

    rows = [
        {"class": name, "iou": percent(*both), "accuracy": percent(hit, pixels), "pixels": percent(pixels, true.sum())}
        for name, both, hit, pixels in zip(names, zip(hits, either, strict=True), hits, true, strict=True)
    ]
    miou = 100 * float(np.mean(hits[either > 0] / either[either > 0])) if either.any() else None
    return {"miou": miou, "pixel_accuracy": percent(hits.sum(), true.sum()), "classes": rows}


def classes_of_slots(counts: Int[np.ndarray, "slots classes"]) -> Int[np.ndarray, " slots"]:
    """For each slot the class with the largest intersection over union."""
    either = counts.sum(axis=1, keepdims=True) + counts.sum(axis=0, keepdims=True) - counts
    return (counts / np.maximum(either, 1)).argmax(axis=1)

"""A model in training -> numbers on held-out data, after some of its epochs.

`validate` measures the loss and the retrieval of held-out pairs, `open_zero_shot_probe` the zero-shot accuracy on
labelled images. Nothing is random: images have the evaluations' view, and the first caption of an image counts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_sparo.data.sources.decode import DEFAULT_LIMITS, ImageLimits
from dino_sparo.data.sources.image_source import Subset
from dino_sparo.evaluation.features import disjoint_subsets
from dino_sparo.image_text.evaluation.protocol import open_evaluation_images, require_few_missing
from dino_sparo.image_text.evaluation.retrieval import recall
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot
from dino_sparo.image_text.pairs.batches import Captions, PairSource
from dino_sparo.image_text.prompts import open_labelled
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.image_text.step import contrastive_loss
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.logs import progress

MAX_PAIRS = 5000  # as many as COCO's usual test has; every image is compared with every caption
PROBE_IMAGES = 4000


@torch.no_grad()
def validate(scorer: Scorer, pairs: PairSource, logit_scale: Tensor, num_compared: int) -> dict[str, float]:
    """`val_loss` in nats, `val_text_r1` and `val_image_r1` in percent, on every process.

    The loss is the mean over whole groups of `num_compared` pairs and comparable with the training loss. Ties count as
    wrong: pairs with equal captions are never found.

    Args:
        scorer: the model.
        pairs: held-out pairs.
        logit_scale: inverse temperature, the factor of the scores in the loss.
        num_compared: pairs per group of the loss, as in a training step.
    """
    images = scorer.encode_images(pairs)
    require_few_missing(images.num_corrupt, len(pairs), f"pairs of {pairs.name} are missing or cannot be read")
    indices = progress(images.indices.tolist(), desc="validation captions")
    captions = [pairs.captions_of(index)[0] for index in indices]
    texts = scorer.encode_texts(captions, "validation captions")
    matches = torch.arange(len(captions))[:, None].expand(-1, 2)
    by_image, by_text = recall(scorer, images.payload, texts.payload, matches, (1,))
    return {
        "val_loss": validation_loss(scorer, images.payload, texts.payload, logit_scale, num_compared),
        "val_text_r1": by_image[1]["any"],
        "val_image_r1": by_text[1]["any"],
    }


def validation_loss(scorer: Scorer, images: Any, texts: Any, logit_scale: Tensor, num_compared: int) -> float:
    """The training loss in nats over whole groups of `num_compared` pairs, or over all pairs if they are fewer.

    Row i of the payloads `images` and `texts` is pair i.
    """
    size = min(num_compared, len(images))
    losses = []
    for start in progress(range(0, len(images) - size + 1, size), desc="validation loss"):
        group = slice(start, start + size)
        losses.append(contrastive_loss(scorer.score_block(images[group], texts[group]), logit_scale))
    return float(torch.stack(losses).mean())


def _captions_of(captions: Captions, indices: np.ndarray, index: int) -> Sequence[str]:
    return captions(int(indices[index]))


def some_pairs(source: PairSource, indices: np.ndarray) -> PairSource:
    """A subset of the pairs of a source, under new indices."""
    captions = partial(_captions_of, source.captions, indices)
    negatives = None if source.negatives is None else partial(_captions_of, source.negatives, indices)
    return PairSource(Subset(source.images, indices), captions, source.left_out, negatives)


def hold_out(source: PairSource, share: float, seed: int) -> tuple[PairSource, PairSource]:
    """Split pairs into training and validation pairs, both in the order of the source.

    Args:
        source: all pairs.
        share: share of validation pairs, in (0, 1); at most `MAX_PAIRS` pairs are held out.
        seed: random seed; the split depends on the seed and the number of pairs alone.
    """
    number = min(round(share * len(source)), MAX_PAIRS)
    if not 0 < number < len(source):
        raise UserError(
            f"--val_share {share} of {len(source)} pairs is {number} pairs; give a share that leaves both sides pairs"
        )
    order = np.random.default_rng(seed).permutation(len(source))
    return some_pairs(source, np.sort(order[number:])), some_pairs(source, np.sort(order[:number]))


def validation_pairs(source: PairSource) -> PairSource:
    """The pairs of a source, or `MAX_PAIRS` of them, evenly spread."""
    if len(source) <= MAX_PAIRS:
        return source
    return some_pairs(source, np.linspace(0, len(source) - 1, MAX_PAIRS).round().astype(np.int64))


def open_zero_shot_probe(
    zero_shot_path: str | None, data_path: str, download: bool = False, limits: ImageLimits = DEFAULT_LIMITS
) -> Callable[[Scorer], float]:
    """The probe of a run: scorer -> top-1 accuracy in percent, in which every process takes part.

    The images are the held-out ones of `zero_shot_path`, or else of the pairs in `data_path`. Their templates are for
    scorers that have none of their own.
    """
    path = zero_shot_path or data_path
    source = open_evaluation_images(path, download=download, limits=limits)
    labelled, classes, templates = open_labelled(source, path)
    (images,) = disjoint_subsets(labelled, (PROBE_IMAGES,))

    def accuracy(scorer: Scorer) -> float:
        result = evaluate_zero_shot(scorer, images, classes.names, scorer.default_templates or templates)
        return float(result["top1"])

    return accuracy

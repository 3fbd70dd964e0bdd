"""Options -> one evaluation of a model of images and captions: of its scores, or of the model itself.

task = ScorerTask.start(args, open_model)
scorer = task.scorer
file = task.open_result("zero_shot")
file.write({"top1": ...}, "a table")    # and weights, slots, view, versions and options
"""

import argparse
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from dino_sparo.data.defaults import MAX_VALUE
from dino_sparo.data.sources import ImageSource
from dino_sparo.evaluation.task import EvaluationTask
from dino_sparo.image_text.evaluation.protocol import open_evaluation_images
from dino_sparo.image_text.scorer import Scorer
from dino_sparo.runtime.files import versions
from dino_sparo.weights.checkpoint import load_checkpoint, weights_sha256
from dino_sparo.weights.entries import max_value_of

# The options, the device and optionally `is_one_of_several` -> the model that `--pretrained_weights` names.
OpenScorer = Callable[..., Scorer]


class PairTask(EvaluationTask):
    """An evaluation of a model of images and captions.

    Args:
        args: parsed options.
        device: where to compute.
        opener: opens the model, when it is needed.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, opener: Callable[..., Any]) -> None:
        super().__init__(args, device)
        self._opener = opener

    @property
    def weights(self) -> Mapping[str, Any]:
        """The hash of the weights; empty for a model without a file."""
        path = self.args.pretrained_weights
        return {"sha256": weights_sha256(path)} if path else {}

    @cached_property
    def max_value(self) -> int:
        """Value of 16-bit images that was white in training."""
        path = self.args.pretrained_weights
        return max_value_of(load_checkpoint(path, verify=False, mmap=True)) if path else MAX_VALUE

    def open_split(self, split: str | None) -> ImageSource:
        """The images of a split of --data_path, by default of val, if there is such a split, else all."""
        return open_evaluation_images(self.args.data_path, split, self.args.download, self.limits)


class ScorerTask(PairTask):
    """An evaluation of the scores of images and captions; its opener is an `OpenScorer`."""

    def for_weights(self, pretrained_weights: str) -> "ScorerTask":
        """The task of one of the models in --pretrained_weights."""
        opener = partial(self._opener, is_one_of_several=len(self.args.pretrained_weights) > 1)
        args = argparse.Namespace(**{**vars(self.args), "pretrained_weights": pretrained_weights})
        return ScorerTask(args, self.device, opener)

    @cached_property
    def scorer(self) -> Any:
        """The `Scorer` of the weights."""
        return self._opener(self.args, self.device)

    def protocol(self) -> dict[str, Any]:
        """The scorer's record, with the slots of --slots if the command has this option."""
        record: dict[str, Any] = self.scorer.record
        return record if hasattr(self.args, "slots") else {k: v for k, v in record.items() if k != "slots"}


class ModelTask(PairTask):
    """An evaluation of the attention or of the text encoder of a model; its opener takes the options."""

    @cached_property
    def loaded(self) -> Any:
        """The `LoadedModel` of the weights, on the CPU."""
        return self._opener(self.args)

    def protocol(self) -> dict[str, Any]:
        """The model and the versions."""
        return {"model": self.loaded.record, "versions": versions(open_clip="open_clip_torch")}

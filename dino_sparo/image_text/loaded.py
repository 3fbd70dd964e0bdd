"""A trained image-text model with its description for result files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dino_sparo.weights.checkpoint import normalization_of, weights_sha256

Loaded = TypeVar("Loaded", bound="LoadedModel")


@dataclass(frozen=True)
class LoadedModel:
    """A trained model and its description for result files.

    Attributes:
        model: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: per channel.
        record: plain values: weights, hash, epoch, configuration.
    """

    model: Any = field(repr=False)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]

    @classmethod
    def of(cls: type[Loaded], model: Any, checkpoint: Mapping[str, Any], path: str | Path, **more: Any) -> Loaded:
        """A model, which has a `config`, with the weights of a checkpoint; `more` goes into the record."""
        origin = {"pretrained_weights": str(path), "sha256": weights_sha256(path), "epoch": checkpoint.get("epoch")}
        return cls(model.eval(), *normalization_of(checkpoint), {**origin, **model.config.to_dict(), **more})


def refuse_foreign_options(source: str, text_heads: int | None, quick_gelu: bool) -> None:
    """Refuse `--text_heads` and `--quick_gelu` for a checkpoint of ours, which describes its own model."""
    if text_heads is not None or quick_gelu:
        option = "quick_gelu" if text_heads is None else "text_heads"
        raise ValueError(
            f"--{option} is for open_clip's weights, but {source} says how its model is built; leave it out"
        )

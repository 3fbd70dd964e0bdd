"""A trained image-text model and its checkpoint -> the model to use, and what a result file says about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dino_sparo.runtime.records import file_sha256
from dino_sparo.weights.checkpoint import normalization_of

Loaded = TypeVar("Loaded", bound="LoadedModel")


@dataclass(frozen=True)
class LoadedModel:
    """A trained model, and what a result file says about it.

    Attributes:
        model: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: likewise.
        record: plain values: weights, hash, epoch, configuration.
    """

    model: Any = field(repr=False)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]

    @classmethod
    def of(cls: type[Loaded], model: Any, checkpoint: Mapping[str, Any], path: str | Path, **more: Any) -> Loaded:
        """A model with the weights of a checkpoint.

        Args:
            model: has a `config`.
            checkpoint: what was read.
            path: of its file.
            more: plain values for the record.
        """
        origin = {"pretrained_weights": str(path), "sha256": file_sha256(Path(path)), "epoch": checkpoint.get("epoch")}
        return cls(model.eval(), *normalization_of(checkpoint), {**origin, **model.config.to_dict(), **more})


def refuse_foreign_options(source: str, text_heads: int | None, quick_gelu: bool) -> None:
    """Refuse what open_clip's weights do not say of themselves for a checkpoint of ours, which says it.

    Args:
        source: the checkpoint's file.
        text_heads: `--text_heads`; None: not given.
        quick_gelu: `--quick_gelu`.

    Raises:
        ValueError: one of them is given.
    """
    if text_heads is not None or quick_gelu:
        option = "quick_gelu" if text_heads is None else "text_heads"
        raise ValueError(
            f"--{option} is for open_clip's weights, but {source} says how its model is built; leave it out"
        )

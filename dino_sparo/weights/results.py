"""The result files of evaluations -> subject, data and scores, for exports, model cards, `info` and `report`.

Every evaluation declares its main scores, the entry `headline` of its result; nobody else knows the other entries.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dino_sparo.runtime.files import parse_json

# Scores of an encoder in an export of a whole CLIP.
ENCODER_RESULTS = ("knn", "linear", "slot_score")
PARTS = ("train", "val", "test", "images", "train2017")  # names of folders that need the name of the folder above


class Score(NamedTuple):
    """A main score of a result.

    Attributes:
        name: such as "20-NN".
        value: in `unit`; None if no image has a value.
        unit: "%", or "" for a number without a unit.
        low: lower end of the 95 % interval, or the mean minus the standard deviation of several draws; None: unknown.
        high: upper end.
    """

    name: str
    value: float | None
    unit: str = "%"
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.number}{' ' * bool(self.unit)}{self.unit}"

    @property
    def number_and_interval(self) -> str:
        """The value, with its interval if there is one."""
        if self.low is None or self.high is None:
            return self.number
        return f"{self.number} [{self._replace(value=self.low).number}, {self._replace(value=self.high).number}]"

    @property
    def number(self) -> str:
        """The value with as many digits as tables show."""
        if self.value is None:
            return "none"
        return f"{self.value:.2f}" if self.unit == "%" else f"{self.value:.4g}"


def data_name(path: str) -> str:
    """The name of data without the folders above it: `cifar10`, `scenes:10000:48`, `imagenet/train`; "" for `.`."""
    prefix, _, folder = path.partition(":")
    if "/" in folder and "/" not in prefix:
        return prefix
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    return "/".join(parts[-2:] if parts[-1:] and parts[-1] in PARTS else parts[-1:])


def scores_beside(
    checkpoint: Path, sha256: str, network: str | None = None, is_encoder: bool = False
) -> dict[str, str]:
    """The scores of these weights in the result files next to a checkpoint, in words, by the stem of the file.

    Results of other weights, of another network of the checkpoint, of some slots and of trained read-outs are left out,
    with `is_encoder` also those of a whole CLIP.
    """
    scores = {}
    for path in sorted(checkpoint.parent.glob("*.json")):
        result: Any = {}
        with contextlib.suppress(ValueError, OSError):
            result = parse_json(path.read_bytes())
        subject = subject_of(result) if isinstance(result, dict) else {}
        is_other = network is not None and subject.get("checkpoint_key", network) != network
        if subject.get("sha256") != sha256 or is_other or subject.get("slots") or result.get("slots"):
            continue
        if "probe" in result.get("best", {}) or (is_encoder and "encoder" not in result):
            continue
        if words := ", ".join(map(str, scores_of(result))):
            data, side = data_name(evaluated_data(result) or ""), result.get("view", {}).get("crop")
            scores[path.stem] = words + f" on {data}" * bool(data) + f" at image size {side}" * bool(side)
    return scores


def subject_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the encoder or model in a result; empty if there is none."""
    subject = result.get("encoder", result.get("model"))
    return subject if isinstance(subject, dict) else {}


def evaluated_data(result: Mapping[str, Any]) -> str | None:
    """The data of a result; results of pictures hold a list of images instead."""
    images = result.get("images", {})
    return (isinstance(images, Mapping) and images.get("data_path")) or result.get("data", {}).get("name")


def scores_of(result: Mapping[str, Any]) -> list[Score]:
    """The main scores in the content of a result file; empty for a result of version 0.1, which declares none."""
    return [Score(**score) for score in result.get("headline", [])]


def scores_in_percent(values: Mapping[str, Any], names: Mapping[str, str]) -> list[Score]:
    """The scores of some entries of a result, in percent; `names` maps an entry to the name of its score."""
    return [Score(name, values[entry]) for entry, name in names.items()]

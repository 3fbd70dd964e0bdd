"""CLIP models of many sizes -> accuracy and number of parameters against L and V (SPARO, section 5.4 and figure 3).

    python -m studies sweep output/*/zero_shot_*.json

Inputs are results of `dino-sparo zero-shot`. Models without slots appear by the width of their encoding. Prints a
table, writes sweep.json and sweep.png.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dino_sparo.clip.config import CLIPConfig
from dino_sparo.clip.model import CLIP, clip_from_config
from dino_sparo.draw.plots import colour_of, panels
from dino_sparo.draw.sheet import require_matplotlib
from dino_sparo.draw.tables import text_table
from dino_sparo.runtime.cli import Option, say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import differences, parse_json, write_json
from dino_sparo.runtime.logs import setup_logging

METRICS = ("top1", "top5", "mean_per_class_recall")
# Accuracies of results that differ in one of these are not comparable.
PROTOCOL = ("images", "prompts", "similarity")
PER_MODEL = ("num_truncated",)  # entries of the protocol that depend on the model's context length
RECORD_OF_WEIGHTS = ("pretrained_weights", "sha256", "epoch")
MAX_COLUMNS = 5  # columns of a legend


OPTIONS = {
    "trained models": {
        "inputs": Option([], "Results of dino-sparo zero-shot (.json).", str, nargs="*", is_positional=True),
        "metric": Option("top1", "The accuracy to compare.", choices=METRICS),
        "output_dir": Option(None, "Folder of the result; by default the folder of all inputs."),
    }
}


@dataclass(frozen=True)
class SweepPoint:
    """One model, with L (`num_slots`), V (`slot_dim`) and the parameters of both towers; accuracy in percent."""

    name: str
    readout: str
    num_slots: int | None
    slot_dim: int | None
    encoding_dim: int
    num_parameters: int
    accuracy: float


def point_of(name: str, build: Callable[[], CLIP], accuracy: float) -> SweepPoint:
    """The point of a model, which is built without memory for its weights."""
    with torch.device("meta"):
        model = build()
    config, num_parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
    has_slots = config.image.kind.has_slots
    num_slots, slot_dim = (config.image.num_slots, config.image.slot_dim) if has_slots else (None, None)
    return SweepPoint(name, config.readout, num_slots, slot_dim, config.embed_dim, num_parameters, accuracy)


def read_result(path: Path) -> dict[str, Any]:
    """A result of `dino-sparo zero-shot`.

    Raises:
        ValueError: the file holds something else, or the result of a selection of slots.
    """
    try:
        result = parse_json(path.read_bytes())
        if result["evaluation"] != "zero-shot classification":
            raise KeyError("zero-shot classification")
        _config(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a result of dino-sparo zero-shot ({error!r})") from error
    if result.get("slots"):
        raise UserError(f"{path} is the result of a choice among a model's slots; give results of whole models")
    return result


def _config(result: Mapping[str, Any]) -> CLIPConfig:
    model = result["model"]
    return CLIPConfig.from_dict({name: value for name, value in model.items() if name not in RECORD_OF_WEIGHTS})


def protocol_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Protocol of an evaluation, without the entries that depend on the model."""
    protocol = {part: result[part] for part in PROTOCOL if part in result}
    for part, value in protocol.items():
        if isinstance(value, dict):
            protocol[part] = {name: each for name, each in value.items() if name not in PER_MODEL}
    return protocol


def _flat(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a protocol by part and name."""
    parts = {part: value if isinstance(value, dict) else {"": value} for part, value in protocol.items()}
    return {f"{part} {name}".strip(): value for part, entries in parts.items() for name, value in entries.items()}


def check_comparable(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse results of different images, prompts or similarities."""
    (first, expected), *others = results.items()
    for name, result in others:
        sides = _flat(protocol_of(expected)), _flat(protocol_of(result))
        if changed := differences(sides[0], sides[1], f"in {first}", f"in {name}"):
            raise UserError(f"{first} and {name} cannot be compared: {changed[0]}; evaluate all models in the same way")


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the results, write sweep.json and the plot, print the table."""
    setup_logging()
    require_matplotlib()
    if not args.inputs:
        raise UserError("there is nothing to compare; give results of dino-sparo zero-shot")
    folder = args.output_dir or os.path.commonpath([Path(name).absolute().parent for name in args.inputs])
    path = Path(folder) / "sweep.json"
    results = {str(name): read_result(Path(name)) for name in args.inputs}
    check_comparable(results)
    points = [
        point_of(name, partial(clip_from_config, _config(result)), result[args.metric])
        for name, result in results.items()
    ]
    points.sort(key=lambda point: (point.num_slots or 0, point.slot_dim or 0, point.readout, point.encoding_dim))
    result = {
        "evaluation": "sweep over L and V",
        "metric": args.metric,
        "points": [asdict(point) for point in points],
        "protocol": protocol_of(next(iter(results.values()))),
        "weights": {name: result["model"]["sha256"] for name, result in results.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_sweep(points, args.metric, path.with_suffix(".png"))
    write_json(result, path)
    say(f"{table(points, args.metric)}\n\n{path}")
    return result


def table(points: Sequence[SweepPoint], metric: str) -> str:
    """One line per model."""
    rows: list[tuple[str, ...]] = [("readout", "L", "V", "M", "parameters", f"{metric} %")]
    for point in points:
        slots = ("" if number is None else f"{number}" for number in (point.num_slots, point.slot_dim))
        sizes = (*slots, f"{point.encoding_dim}", f"{point.num_parameters:,}")
        rows.append((point.readout, *sizes, f"{point.accuracy:.2f}"))
    return text_table(rows, num_words=1)


def draw_sweep(points: Sequence[SweepPoint], metric: str, path: Path) -> None:
    """Draw accuracy and parameters against L for every V, against V for every L, and against M, as a PNG."""
    slotted = [point for point in points if point.num_slots is not None]
    accuracy = f"zero-shot {metric.replace('_', ' ')}, %"
    rows = [("accuracy", accuracy, 1.0), ("num_parameters", "parameters, millions", 1e-6)]
    with panels(path, len(rows), 3) as axes:
        for row, (name, label, unit) in zip(axes, rows, strict=True):
            _draw_curves(row[0], slotted, "num_slots", "slot_dim", "V = ", name, unit)
            _draw_curves(row[1], slotted, "slot_dim", "num_slots", "L = ", name, unit)
            _draw_curves(row[2], points, "encoding_dim", "readout", "", name, unit)
            row[0].set(ylabel=label, xlabel="L, number of slots")
            row[1].set(xlabel="V, width of a slot")
            row[2].set(xlabel="M, width of the encoding")


def _draw_curves(axis: Any, points: Sequence[SweepPoint], x: str, by: str, letter: str, y: str, unit: float) -> None:
    """A curve for every value of `by`: mean of `y` against `x`; each model is a dot."""
    values = sorted({getattr(point, by) for point in points})
    for position, value in enumerate(values):
        curve = [point for point in points if getattr(point, by) == value]
        where, heights = [getattr(point, x) for point in curve], [getattr(point, y) * unit for point in curve]
        colour = colour_of(position, len(values))
        # Dots at the same place stay visible: earlier ones are larger.
        size = 4.5 + 2.5 * (len(values) - 1 - position) / max(1, len(values) - 1)
        axis.plot(where, heights, "o", color=colour, markersize=size, label=f"{letter}{value}")
        # Models of the same M differ in L and V, so no curve connects them.
        if by != "readout" or curve[0].num_slots is None:
            means = {at: [height for here, height in zip(where, heights, strict=True) if here == at] for at in where}
            axis.plot(list(means), [sum(each) / len(each) for each in means.values()], color=colour, linewidth=1.5)
    ticks = sorted({getattr(point, x) for point in points})
    if ticks:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        place_above = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": min(len(values), MAX_COLUMNS)}
        axis.legend(frameon=False, fontsize=9, handletextpad=0.2, columnspacing=1.2, **place_above)

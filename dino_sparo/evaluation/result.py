"""The file of a result: its folder and name, the options that the result depends on, and when it may be overwritten.

Scores can only be compared if their protocol is known. So every result file has the hash of the weights, the images,
their resizing, the options and the versions. The same command always writes the same file.
"""

import argparse
import os
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dino_sparo.evaluation.features import WARNINGS
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import INPUTS, differences, file_sha256, plain, read_json, write_json
from dino_sparo.runtime.launch import is_main
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.options import DEVICE
from dino_sparo.weights.checkpoint import EXPORTED_WEIGHTS
from dino_sparo.weights.entries import NETWORKS
from dino_sparo.weights.results import Score, data_name

# Options that change no number of a result, or that `ResultFile.options` has in another form.
UNRECORDED = {*DEVICE, "pretrained_weights", "output_dir", "overwrite", "batch_size_per_gpu", "use_cuda", "download"}
MAX_PART = 40  # letters of each part of a file's name, which systems limit


@dataclass(frozen=True)
class ResultFile:
    """The file of a result.

    Attributes:
        path: of the JSON file; figures have the same stem.
        options: the entry `options` of the result: weights, data and protocol, from `options_of`.
        protocol: gives the entries of the result that describe the subject: weights, view, versions.
    """

    path: Path
    options: dict[str, Any]
    protocol: Callable[[], Mapping[str, Any]]

    def write(
        self, result: Mapping[str, Any], table: str | None = None, *, headline: Sequence[Score]
    ) -> dict[str, Any]:
        """Write the result with its protocol, options and warnings, and print the table, on rank 0.

        Args:
            result: numbers and protocol.
            table: the numbers for people; None: prints nothing.
            headline: the main scores, which exports, `info` and `report` show; none for a figure.

        Returns:
            The content of the file, on every rank.
        """
        warnings = {"warnings": list(dict.fromkeys(WARNINGS))} if WARNINGS else {}
        protocol = {name: value for name, value in self.protocol().items() if name not in result}
        scores = [score._asdict() for score in headline]
        content = {**result, "headline": scores, **protocol, **warnings, "options": self.options}
        if is_main():
            write_json(content, self.path)
        if is_main() and table is not None:
            say(f"{table}\n\n{self.path}")
        return content


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (of a sample; None for a single value) and the values."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "draws": list(values)}


def result_stem(args: argparse.Namespace, name: str, weights: Mapping[str, Any]) -> str:
    """NAME_WEIGHTS_DATA, with further parts for a student, random weights and some slots.

    WEIGHTS is the name of the file without .pth. In another folder than the weights', the name of their folder stands
    before it. For the argument `weights` see `EvaluationTask.weights`.
    """
    given = vars(args)
    file_part, network = "", weights.get("checkpoint_key")
    if args.pretrained_weights:
        file = Path(os.path.abspath(_weights_beside(args.pretrained_weights)))
        is_elsewhere = file.is_file() and not file.parent.samefile(result_folder(args))
        file_part = (f"{file.parent.name}_" if is_elsewhere else "") + file.name.removesuffix(".pth")
    data = data_name(_absolute(given.get("data_path") or given.get("data_root") or ""))
    parts = [name, file_part, "" if network == NETWORKS[0] else network, data]
    parts += ["untrained"] * bool(weights.get("untrained"))
    parts += ["slots"] * bool(weights.get("slots") or given.get("slots"))
    parts.append(Path(given.get("slots") or "").stem)
    return "_".join(filter(None, (re.sub(r"[^\w.]+", "-", part or "").strip("-.")[:MAX_PART] for part in parts)))


def open_result(
    args: argparse.Namespace,
    stem: str,
    weights: Mapping[str, Any],
    protocol: Callable[[], Mapping[str, Any]],
    unrecorded: Collection[str] = (),
    **options: Any,
) -> ResultFile:
    """The file STEM.json in the folder of the result.

    Args:
        args: parsed options.
        stem: name of the file, from `result_stem`, or a fixed one that figures share.
        weights: description of the weights, with `sha256`.
        protocol: as in `ResultFile`.
        unrecorded: further options that change no number of the result.
        options: further entries of `ResultFile.options`.

    Raises:
        UserError: the file holds a result of other weights, data or options, and --overwrite is not given.
    """
    path = result_folder(args) / f"{stem}.json"
    # Random weights have no hash, but an architecture and a seed.
    options |= {**options_of(args, unrecorded), "weights": weights.get("sha256") or dict(weights)}
    if path.exists() and not args.overwrite:
        saved = read_json(path)
        saved = saved.get("options", {}) if isinstance(saved, dict) else {}
        if differing := differences(saved, plain(options), "in the file", "now"):
            raise UserError(
                f"{path} holds another result: {'; '.join(differing)}. Give another --output_dir, or --overwrite"
            )
    return ResultFile(path, options, protocol)


def options_of(args: argparse.Namespace, unrecorded: Collection[str] = ()) -> dict[str, Any]:
    """The options that a result depends on, without weights; paths are absolute, a file is a path and a hash."""
    options = {name: value for name, value in vars(args).items() if name not in {*UNRECORDED, *unrecorded}}
    for name, value in options.items():
        if isinstance(value, str) and (name in INPUTS or os.sep in value or os.path.isfile(value)):
            path = _absolute(value)
            options[name] = [path, file_sha256(Path(path))] if os.path.isfile(path) else path
    return options


def _absolute(path: str) -> str:
    """The absolute path of a file, a folder or a pattern; other texts, such as scenes:64:32, are unchanged."""
    is_path = path and os.path.exists(os.path.dirname(path) or path)
    return os.path.abspath(path) if is_path else path


def result_folder(args: argparse.Namespace) -> Path:
    """--output_dir, which is created, else the folder of --load_features or of the weights' file.

    For weights without a file, such as timm/NAME, it is the working folder.
    """
    output_dir = args.output_dir or vars(args).get("load_features")
    if not output_dir:
        file = _weights_beside(args.pretrained_weights)
        return file.parent if file.is_file() else Path()
    if Path(output_dir).suffix in (".json", ".png"):
        raise UserError(f"--output_dir {output_dir} names a file; give the folder of the result")
    create_output_dir(folder := Path(output_dir))
    return folder


def _weights_beside(pretrained_weights: str) -> Path:
    """The file of weights at a path, or in the folder of an export."""
    exported = Path(pretrained_weights) / EXPORTED_WEIGHTS
    return exported if exported.is_file() else Path(pretrained_weights)

"""A file or folder of this package -> what it is, in words: checkpoint, export, embeddings, cached features, result.

dino-sparo info runs/vits16/checkpoint.pth
"""

import argparse
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import parse_object, plain
from dino_sparo.weights.checkpoint import load_checkpoint, weights_file
from dino_sparo.weights.encoder import encoder_of
from dino_sparo.weights.entries import NETWORKS, image_text_entry, network_name
from dino_sparo.weights.file import DOCUMENTS_KEY
from dino_sparo.weights.origin import OBJECTIVES, origin_of, training_facts
from dino_sparo.weights.results import evaluated_data, scores_of, subject_of

BEST_SCORES = ("best_knn", "best_top1", "best_zero_shot")  # entries of checkpoints
CHECKED, UNCHECKED = "no: the checksums fit", "not known: there are no checksums"
DefaultsOf = Callable[[str], Mapping[str, Any]]
Folders = Mapping[str, Callable[[Path], dict[str, Any]]]


def show(args: argparse.Namespace, defaults_of: DefaultsOf, folders: Folders) -> dict[str, Any]:
    """`dino-sparo info`: one line per fact; returns the facts."""
    facts = {name: value for name, value in describe(args.path, defaults_of, folders).items() if value}
    width = max(map(len, facts)) + 2
    say("\n".join(f"{name:<{width}}{_in_words(value)}" for name, value in facts.items()))
    return facts


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name}={_in_words(item)}" for name, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def describe(path: str, defaults_of: DefaultsOf, folders: Folders) -> dict[str, Any]:
    """Facts about a file or folder, by their names.

    Args:
        path: anything that this package writes; also "demo", a repository of the hub, and weights of other projects.
        defaults_of: name of a training command -> its options' defaults.
        folders: name of a file -> description of a folder that holds such a file.
    """
    folder = Path(path)
    if folder.suffix == ".json" and folder.is_file():
        return _describe_result(folder)
    for name, describe_folder in folders.items():
        if (folder / name).is_file():
            return describe_folder(folder)
    if folder.suffix == ".onnx" and folder.is_file():
        return _describe_onnx(folder)
    if (folder / "checkpoint.pth").is_file():
        path = str(folder / "checkpoint.pth")
    file = weights_file(path)
    if file.is_dir():
        raise UserError(f"{path} holds no checkpoint, export, embeddings or cached features; give one of their paths")
    return _describe_weights(path, file, defaults_of)


def _describe_weights(path: str, file: Path, defaults_of: DefaultsOf) -> dict[str, Any]:
    content = load_checkpoint(path)
    networks = [name for name in NETWORKS if name in content]
    encoder = encoder_of(content, path, (networks or NETWORKS)[0], is_described=True)
    _require_finite(content, file)
    origin, args, pair = origin_of(content, file), content.get("args", {}), image_text_entry(content)
    has_checksums, is_export = zipfile.is_zipfile(file), "sha256" in content
    recipe = origin["recipe"] or {}
    if args and origin["objective"]:
        command = dict(OBJECTIVES.values())[origin["objective"]]
        defaults = plain(dict(defaults_of(command)))
        recipe = {name: args[name] for name in defaults if name in args and args[name] != defaults[name]}
    best = {name: f"{content[name]:.2f} %" for name in BEST_SCORES if content.get(name, -1) >= 0}
    epochs = args.get("epochs") or recipe.get("epochs")
    origin |= {
        "epoch": origin["epoch"] if epochs is None else f"{origin['epoch']} of {epochs}",
        "data": args.get("data_path") or origin["data"],
        "recipe": {name: value for name, value in recipe.items() if name not in ("data_path", "output_dir")},
        "scores": {**origin["scores"], **best},
    }
    return {
        "file": f"{file}, {file.stat().st_size / 1e6:.1f} MB",
        "kind": "checkpoint of a training" if args else "export" if is_export else "weights",
        "damaged": CHECKED if has_checksums or is_export else UNCHECKED,
        "encoder": encoder.summary,
        "text": pair and {name: value for name, value in pair["text"].items() if not isinstance(value, dict)},
        "networks": networks or network_name(content, "teacher"),
        **training_facts(origin),
        "versions": content.get("versions"),
    }


def _require_finite(content: Mapping[str, Any], file: Path) -> None:
    """Refuse weights that are not finite, of any network in a file."""
    parts = [content, *(part for part in content.values() if isinstance(part, Mapping))]
    for name, value in ((name, value) for part in parts for name, value in part.items()):
        if isinstance(value, Tensor) and not value.isfinite().all():
            raise UserError(f"{file} is damaged: the weights {name} are not finite; take an earlier checkpoint")


def _describe_onnx(file: Path) -> dict[str, Any]:
    """Facts that `export` wrote into the ONNX file itself."""
    require("onnx", "ONNX files")
    import onnx

    try:
        model = onnx.load(str(file))
        onnx.checker.check_model(model)
        documents = {entry.key: entry.value for entry in model.metadata_props}[DOCUMENTS_KEY]
    except KeyError as error:
        raise UserError(f"{file} was not written by dino-sparo export: it does not say where it comes from") from error
    except Exception as error:  # of protobuf and of onnx, without a common type
        raise UserError(f"{file} is damaged ({str(error).splitlines()[0]}); export again") from error
    (record,) = json.loads(documents).values()
    return {
        "file": f"{file}, {file.stat().st_size / 1e6:.1f} MB",
        "kind": "export as ONNX",
        "damaged": "not seen: the graph is valid, but ONNX has no checksums of weights",
        **facts_of({name: record[name] for name in ("encoder", "versions")}),
        "networks": record["checkpoint_key"],
        **training_facts(record),
        **record["onnx"],  # inputs, outputs
    }


def _describe_result(file: Path) -> dict[str, Any]:
    record = parse_object(file.read_bytes(), str(file))
    if file.with_suffix(".safetensors").is_file() or ("encoder" not in record and "model" not in record):
        raise UserError(f"{file} is not a result of an evaluation; for an export or embeddings give the file or folder")
    kind = record.get("evaluation", file.stem)
    try:
        scores, facts = ", ".join(map(str, scores_of(record))), facts_of(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a result of this version, or was changed ({error!r}); evaluate again"
        ) from error
    return {"file": file, "kind": f"result of an evaluation: {kind}", "scores": scores, **facts}


def facts_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that results, embeddings and cached features have in common: the encoder, its weights, the data."""
    encoder = subject_of(record)
    image = encoder.get("image", encoder)
    names = ("arch", "patch_size", "readout", "img_size", "in_chans")
    return {
        "encoder": {name: image[name] for name in names if name in image},
        "weights": {name: encoder[name] for name in ("pretrained_weights", "epoch", "sha256") if encoder.get(name)},
        "data": evaluated_data(record),
        "versions": record.get("versions"),
    }

"""iBOT compared with DINO and SimDINO, from random weights at equal time, and continued on other images.

    python -m studies ibot --data_path cifar10                # class folders of CIFAR-10 in train/ and val/
    python -m studies ibot --report                           # tables of the results so far

First the seconds of processor time of a step are measured for each variant; then each gets the epochs that fit in
`--seconds`. A continued run starts from an encoder of DINO on the scenes and trains on scenes in other colours and with
other textures. Writes a small result file per run.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import jaccard_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dino_sparo import load_encoder
from dino_sparo.data.crops import normalized_tensor
from dino_sparo.data.defaults import IMAGENET_MEAN, IMAGENET_STD
from dino_sparo.data.scenes import patterns
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources import ImageSource, open_source
from dino_sparo.data.views import EvalTransform
from dino_sparo.demo.run import RunCommand, read_recipe
from dino_sparo.distillation.options import REFERENCE_BATCH
from dino_sparo.evaluation.features import Features, extract_split
from dino_sparo.evaluation.knn import classify_shards
from dino_sparo.evaluation.knn_probe import NEIGHBOURS, TEMPERATURE
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.cli import Option, option_words, positive_number, say
from dino_sparo.runtime.files import git_hash, write_json
from studies.report import markdown, mean_and_deviation
from studies.runs import FOLDERS

COMMANDS = {"dino": "train", "simdino": "train-simdino", "ibot": "train-ibot"}
OF_PROTOTYPES = ("out_dim", "freeze_last_layer", "koleo_weight")  # options that SimDINO lacks
READOUTS = ("cls", "sparo")
IMAGES, EVALUATED, SIZE, PATCH = 1024, 1000, 32, 8
CALIBRATION_STEPS = 8
# All three objectives have KoLeo or its like. Short runs need a low momentum and no warm-up of the temperature.
TRAINING = read_recipe("dino")["training"]
RECIPE: dict[str, Any] = {
    **TRAINING,
    "epochs": 1,
    "warmup_epochs": 0.5,
    "knn_freq": 0,
    "num_workers": 0,
    "device": "cpu",
    "precision": "fp32",
    "report_to": [],
}
# iBOT's rate scales with the root of the batch. This factor makes the peak rates of all objectives equal.
IBOT_RATE = (int(TRAINING["batch_size_per_gpu"]) / REFERENCE_BATCH) ** 0.5
IBOT = {"layer_decay": 1, "teacher_temp": 0.04}
CONTINUED: dict[str, Any] = {"lr": 0.001, "saveckp_freq": 1, "epochs": 4, "freeze_backbone_epochs": 1}
OPTIONS = {
    "study": {
        "data_path": Option(None, "CIFAR-10 as class folders in train/ and val/; without it the scenes alone."),
        **FOLDERS,
        "seconds": Option(120.0, "Processor time of a training.", positive_number),
        "seeds": Option([0, 1, 2], "Seeds of the runs.", int, nargs="+"),
        "report": Option(False, "Train nothing: tables of the results so far."),
    }
}


def measure_missing(args: argparse.Namespace, run: RunCommand) -> None:
    """Make the missing runs, all of one seed before the next."""
    folder, results = args.output_dir / "ibot", args.results / "ibot"
    for path in (folder, results):
        path.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name in tasks(args.data_path):
            path = results / f"{name}_seed{seed}.json"
            if not path.exists():
                study = continued if name.startswith("continued") else from_scratch
                write_json(study(name, seed, folder, args, run), path)
                say(f"{path.stem}: done")


def tasks(data_path: str | None) -> Iterator[str]:
    """Names of the runs of one seed; a continued run follows on that of DINO."""
    kinds = ("scenes", "continued", *(["cifar10"] if data_path else []))
    yield from (f"{kind}_{objective}_{readout}" for kind in kinds for objective in COMMANDS for readout in READOUTS)


def words_of(name: str, seed: int, **changes: object) -> list[str]:
    """Options of a training."""
    _, objective, readout = name.split("_")
    options = {**RECIPE, "readout": readout, "seed": seed, **(IBOT if objective == "ibot" else {}), **changes}
    if objective == "ibot":
        options["lr"] = float(str(options["lr"])) * IBOT_RATE
    return option_words({key: v for key, v in options.items() if objective != "simdino" or key not in OF_PROTOTYPES})


def from_scratch(name: str, seed: int, folder: Path, args: argparse.Namespace, run: RunCommand) -> dict[str, Any]:
    """A training from random weights, as long as all others, and its scores."""
    data, objective, _ = name.split("_")
    paths = (f"scenes:{IMAGES}:48", f"scenes:{EVALUATED}:48")
    changes: dict[str, object] = {"data_path": paths[0]}
    if data == "cifar10":
        changes = {"data_path": few_photographs(Path(args.data_path, "train"), IMAGES, folder / "cifar10_train.csv")}
        changes |= {"patch_size": 4, "global_crops_size": 24, "local_crops_size": 12}
    out, command = folder / f"{name}_seed{seed}", COMMANDS[objective]
    steps = IMAGES // int(str(RECIPE["batch_size_per_gpu"]))
    timing = folder / f"{name}_timing.json"  # the same number of epochs for all seeds
    if not timing.exists():
        begin: dict[str, Any] = {**changes, "output_dir": folder / f"{name}_calibration"}
        run(command, words_of(name, seed, **begin, max_steps=2))
        before = time.process_time()
        run(command, words_of(name, seed, **begin, max_steps=2 + CALIBRATION_STEPS))
        write_json({"step_s": (time.process_time() - before) / CALIBRATION_STEPS}, timing)
    step_s = json.loads(timing.read_text())["step_s"]
    epochs = max(round(args.seconds / (steps * step_s)), 1)
    before = time.process_time()
    run(command, words_of(name, seed, **changes, output_dir=out, epochs=epochs))
    seconds = time.process_time() - before
    encoder = load_encoder(out / "checkpoint.pth").eval()
    if data == "scenes":
        sources = [open_source(paths[0], "train"), open_source(paths[1], "val")]
        scores = {**accuracies(encoder, sources[0], sources[1]), "mIoU of patches": patch_miou(encoder)}
        words = {"pretrained_weights": out / "checkpoint.pth", "data_path": "scenes:200:64", "device": "cpu", "maps": 4}
        result = run("slots score", option_words({**words, "num_workers": 0, "output_dir": out, "num_images": 100}))
        scores["slot score"] = 100 * result["measures"]["model"]["jaccard"]["mean"]
    else:
        held_out = few_photographs(Path(args.data_path, "val"), EVALUATED, folder / "cifar10_val.csv")
        scores = accuracies(encoder, open_source(str(changes["data_path"])), open_source(held_out))
    return {
        "scores": scores,
        "epochs": epochs,
        "step_s": step_s,
        "processor_s": round(seconds, 1),
        "commit": git_hash(),
    }


def continued(name: str, seed: int, folder: Path, args: argparse.Namespace, run: RunCommand) -> dict[str, Any]:
    """An encoder of DINO, trained further on other scenes: 20-NN on old and new scenes after every epoch."""
    _, objective, readout = name.split("_")
    start = folder / f"scenes_dino_{readout}_seed{seed}" / "checkpoint.pth"
    out, new = folder / f"{name}_seed{seed}", other_scenes(folder / "other_scenes")
    paths = {"data_path": new / "train", "output_dir": out, "init_from": start}
    run(COMMANDS[objective], words_of(name, seed, **paths, **CONTINUED))
    old = open_source(f"scenes:{IMAGES}:48", "train"), open_source(f"scenes:{EVALUATED}:48", "val")
    others = open_source(str(new / "train")), open_source(str(new / "val"))
    weights = (start, *(out / f"checkpoint{epoch:04}.pth" for epoch in range(CONTINUED["epochs"])))
    encoders = [load_encoder(path).eval() for path in weights]
    scenes = {"old": old, "new": others}
    epochs = [{name: nearest(*features_of(encoder, *each)) for name, each in scenes.items()} for encoder in encoders]
    return {"epochs": epochs, "commit": git_hash()}


def few_photographs(folder: Path, number: int, table: Path) -> str:
    """A table of the first photographs of each class, `number` together."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    rows = [(path, label.name) for label in classes for path in sorted(label.iterdir())[: number // len(classes)]]
    table.write_text("path,label\n" + "".join(f"{path.resolve()},{label}\n" for path, label in rows))
    return str(table)


def other_scenes(folder: Path) -> Path:
    """Scenes whose colours are complements and whose textures are turned and finer, as class folders of PNG files."""
    if (folder / "done").exists():
        return folder
    colours = {name: tuple(tuple(1 - x for x in tone) for tone in t) for name, t in patterns.COLOUR_TABLE.items()}
    textures = {name: (lambda u, v, wave=wave: wave(u + v, u - v)) for name, wave in patterns.TEXTURE_TABLE.items()}
    with ExitStack() as stack:
        for table, values in ((patterns.COLOUR_TABLE, colours), (patterns.TEXTURE_TABLE, textures)):
            stack.enter_context(patch.dict(table, values))
        for split, number in (("train", IMAGES), ("val", EVALUATED)):
            scenes = Scenes(number, 48, split)
            for index in range(number):
                label = (scenes.classes or [])[index % len(patterns.SHAPES)]
                (folder / split / label).mkdir(parents=True, exist_ok=True)
                scenes.read(index).save(folder / split / label / f"{index:05}.png")
    (folder / "done").touch()
    return folder


def features_of(encoder: Encoder, *sources: ImageSource) -> list[Features]:
    """Encodings of all images of each source."""
    return [extract_split(encoder, source, EvalTransform(SIZE), torch.device("cpu")) for source in sources]


def nearest(train: Features, val: Features) -> float:
    """20-NN accuracy, percent; normalises the features in place."""
    voters, judged = train.normalize_(), val.normalize_()
    return classify_shards(voters, judged, [NEIGHBOURS], TEMPERATURE, torch.device("cpu"))[NEIGHBOURS].top1


def accuracies(encoder: Encoder, *sources: ImageSource) -> dict[str, float]:
    """20-NN and logistic regression on the encodings of training and validation images, percent."""
    train, val = features_of(encoder, *sources)
    linear = linear_probe().fit(train.features, train.labels).score(val.features, val.labels)
    return {"20-NN": nearest(train, val), "linear": 100 * float(linear)}


def linear_probe() -> Any:
    """Logistic regression on standardised features."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200))


def patch_miou(encoder: Encoder, numbers: tuple[int, int] = (400, 200), size: int = 64) -> float:
    """mIoU, percent, of logistic regression from patch tokens to the object of most pixels of the patch, or none."""
    rows = list[tuple[np.ndarray, np.ndarray]]()
    for split, number in zip(("train", "val"), numbers, strict=True):
        scenes = Scenes(number, size, split)
        norm = IMAGENET_MEAN, IMAGENET_STD
        images = torch.stack([normalized_tensor(scenes.read(index), *norm) for index in range(number)])
        with torch.inference_mode():
            tokens = encoder.backbone(images)[:, encoder.backbone.num_prefix_tokens :]
        side = round(tokens.shape[1] ** 0.5)
        labels = [patch_labels(*scenes.object_masks(index), side) for index in range(number)]
        rows.append((tokens.flatten(0, 1).numpy(), np.concatenate(labels)))
    predicted = linear_probe().fit(*rows[0]).predict(rows[1][0])
    return 100 * float(jaccard_score(rows[1][1], predicted, average="macro"))


def patch_labels(masks: np.ndarray, classes: np.ndarray, side: int) -> np.ndarray:
    """(side * side,): number of the class with most pixels in each patch, counted from 1; 0 for the background."""
    labels = np.zeros(masks.shape[1:], dtype=np.int64)
    for mask, label in zip(masks, classes, strict=True):
        labels[mask] = label + 1
    patch_side = len(labels) // side
    patches = labels.reshape(side, patch_side, side, patch_side).transpose(0, 2, 1, 3).reshape(side * side, -1)
    return np.array([np.bincount(patch).argmax() for patch in patches])


def report(results: Path) -> str:
    """Tables of all results, whichever way they fell; `results` is the folder of all studies' results."""
    results_of: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((results / "ibot").glob("*.json")):
        results_of.setdefault(path.stem.partition("_seed")[0], []).append(json.loads(path.read_text()))
    columns = ("20-NN", "linear", "slot score", "mIoU of patches")
    scratch = [["percent", "seeds", "epochs", *columns]]
    later = [["20-NN on old / new scenes", "seeds", "start", *(f"epoch {n}" for n in range(1, 5))]]
    for name, runs in results_of.items():
        if name.startswith("continued"):
            pairs = [[[run["epochs"][n][which] for run in runs] for which in ("old", "new")] for n in range(5)]
            cells = [" / ".join(mean_and_deviation(values) for values in pair) for pair in pairs]
            later.append([name, str(len(runs)), *cells])
        else:
            scores = [[run["scores"][column] for run in runs if column in run["scores"]] for column in columns]
            scratch.append([name, str(len(runs)), str(runs[0]["epochs"]), *map(mean_and_deviation, scores)])
    return "\n\n".join(markdown(table[0], table[1:]) for table in (scratch, later) if len(table) > 1)

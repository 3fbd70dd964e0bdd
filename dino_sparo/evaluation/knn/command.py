"""Checkpoint -> encoder -> features -> weighted k-NN accuracy.

    python eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet
    torchrun --nproc_per_node=8 eval_knn.py --pretrained_weights output/checkpoint.pth --data_path data/imagenet

Prints a table and writes knn.json, the accuracies with all that they depend on. The encoder is built as the checkpoint
says; the reference's checkpoints and raw ViT weights are read too. Options as in facebookresearch/dino.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dino_sparo.evaluation.feature_cache import check_same_weights, load_features, save_features
from dino_sparo.evaluation.features import Features, gather_features, total_images
from dino_sparo.evaluation.knn.classify import KNNResult, classify_shards
from dino_sparo.evaluation.options import KNN_BLOCKS
from dino_sparo.evaluation.task import EvaluationTask, write_result


def evaluate_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the encoder or the cached features that the options name, write the result, print the table."""
    task = EvaluationTask.start(args)
    train, val, record = load(task) if args.load_features else extract(task)
    results = classify_shards(train, val, args.nb_knn, args.temperature, task.device)
    totals = {split: total_images(part, task.device) for split, part in (("train", train), ("val", val))}
    result = describe(results, totals, args.temperature, record)
    layers = record.get("feature", {}).get("n_last_blocks", KNN_BLOCKS)
    name = "knn" if layers == KNN_BLOCKS else f"knn_{layers}block{'s' * (layers > 1)}"
    write_result(result, table(results), task.result_path(name, record.get("encoder", {})))
    return result


def load(task: EvaluationTask) -> tuple[Features, Features, dict]:
    """This process' share of the cached features of both splits, and the record of how they were made."""
    args = task.args
    train, val, record = load_features(Path(args.load_features))
    check_beside_cache(args, record)
    check_same_weights(record.get("encoder", {}).get("sha256"), args.pretrained_weights, args.load_features)
    return train.share().to(task.storage), val.share().to(task.storage), record


def check_beside_cache(args: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Refuse options of other features than those in a cache, whose record is given."""
    made = {
        "data_path": record.get("images", {}).get("data_path"),
        "n_last_blocks": record.get("feature", {}).get("n_last_blocks"),
        "untrained": record.get("encoder", {}).get("untrained"),
    }
    for name in ("slots", "dump_features", "img_size", *made):
        value = getattr(args, name)
        if value and value not in (KNN_BLOCKS if name == "n_last_blocks" else None, made.get(name)):
            raise ValueError(f"--{name} {value} with --load_features: leave out one of the two")


def extract(task: EvaluationTask) -> tuple[Features, Features, dict]:
    """This process' share of the features of both splits, and the record of how they were made."""
    layers = task.args.n_last_blocks
    encoder = task.encoder  # opened before the images: wrong weights are refused first
    encode = None if layers == 1 else partial(encoder.probe_features, n_last_blocks=layers)
    train, val = (task.features(source, encode).normalize_() for source in task.splits)
    record = {
        "encoder": task.subject.record,
        "feature": {
            "name": "encoding" if layers == 1 else f"class tokens of {layers} layers, the last of them the encoding",
            "n_last_blocks": layers,
            "dim": train.features.shape[1],
            "precision": task.args.precision,
        },
        **task.images_record({}),
    }
    if task.args.dump_features:
        whole_train, whole_val = (gather_features(part, task.device, on_rank_0=True) for part in (train, val))
        save_features(Path(task.args.dump_features), whole_train, whole_val, record)
    return train, val, record


def describe(
    results: Mapping[int, KNNResult], totals: Mapping[str, tuple[int, int]], temperature: float, record: dict[str, Any]
) -> dict[str, Any]:
    """Accuracies and protocol, as knn.json holds them: the same for every run of the same command.

    `totals` are for each split the images with features, and those that could not be read; `record` describes encoder
    and images.
    """
    num_train = totals["train"][0]
    counts = {f"num_{split}": number for split, (number, _) in totals.items()}
    counts |= {f"num_corrupt_{split}": number for split, (_, number) in totals.items()}
    return {
        "evaluation": "weighted k-NN",
        "results": [
            {"k": k, "neighbours": min(k, num_train), "top1": accuracy.top1, "top5": accuracy.top5}
            for k, accuracy in results.items()
        ],
        "similarity": "cosine",
        "temperature": temperature,
        **record,
        "images": {**record.get("images", {}), **counts},
    }


def table(results: Mapping[int, KNNResult]) -> str:
    """Accuracies for people."""
    rows = [f"{k:>6}  {accuracy.top1:>8.2f}  {accuracy.top5:>8.2f}" for k, accuracy in results.items()]
    return "\n".join([f"{'k':>6}  {'top-1 %':>8}  {'top-5 %':>8}", *rows])

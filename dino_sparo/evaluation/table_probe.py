"""Frozen features and a table -> probes of labels (mAP, AUROC) and of numbers (R2, mean absolute error).

    dino-sparo table-probe --pretrained_weights demo --data_path photos.csv --tags tags --numbers age
    dino-sparo table-probe --embeddings embeddings --data_path photos.csv --binary glasses hat

The table has a column of paths, a column of splits with train and val, and the columns to predict. Each label gets a
logistic regression, and each column of numbers a ridge regression, both of scikit-learn, on features of length one.
Cross-validation on the training images chooses their strength. Missing values are counted, and skipped in their column.

Intervals of 95 % are percentiles of the score over resamples of the validation images with replacement.
"""

import argparse
import logging
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dino_sparo.data.ranks import open_images
from dino_sparo.data.sources import TableColumns
from dino_sparo.data.sources.tables import PATHS, SPLITS, TABLE_ENDINGS, Column, TableRows
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.embed.predict import MAX_STEPS
from dino_sparo.evaluation.embed.store import Embeddings, load_embeddings
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.weights.results import Score

logger = logging.getLogger(__name__)

MISSING = ("", "nan", "na", "n/a", "none", "null", "?")
FALSE, TRUE, UNCERTAIN = ("0", "0.0", "false", "no"), ("1", "1.0", "true", "yes"), ("-1", "-1.0")  # -1: CheXpert's
ALPHAS = [10.0**power for power in range(-4, 4)]  # strengths of ridge regression; leave-one-out chooses one
ROUNDING = 1e-12  # equal numbers have at most this variance, as a share of their mean square
SPLIT_NAMES = ("train", "val")
Features = Float[np.ndarray, "images F"]
Values = Float[np.ndarray, " images"]
Scores = Float[np.ndarray, " resamples"]
Weights = Float[np.ndarray, "resamples images"]


class Part(NamedTuple):
    """The images of a split: features, and the values of each column, NaN if missing."""

    features: Features
    values: dict[str, Values]


@on_first_process
def probe_table(args: argparse.Namespace) -> dict[str, Any]:
    """Fit and test a probe for each column that the options name, write the result, print the table."""
    require("sklearn", "probes of tables")
    check_options(args)
    task = EncoderTask.start_alone(args)
    store = load_embeddings(args.embeddings) if args.embeddings else None
    args.output_dir = args.output_dir or args.embeddings
    record = {name: store.record.get(name) for name in ("encoder", "view", "versions")} if store else None
    file = task.open_result("table_probe", record, **({"store": store.source(args.what)} if store else {}))
    train, val = read_parts(args, task, store)
    rows = [evaluate_column(name, name in args.numbers, train, val, args) for name in train.values]
    scores = [*macro_scores(rows), *(score for row in rows for score in row.pop("scores"))]
    result = {
        "evaluation": "probes of a table",
        "results": rows,
        "rule": {
            "labels": "logistic regression per label; cross-validation chooses C by the log-loss",
            "numbers": "ridge regression; leave-one-out chooses its strength",
            "intervals": f"95 %, {args.resamples} resamples of the validation images",
            "missing": f"cells {', '.join(filter(None, MISSING))} and empty cells, of labels also -1, are skipped",
        },
        **(record or {}),
        "images": {"data_path": args.data_path, "num_train": len(train.features), "num_val": len(val.features)},
    }
    lines = [(score.name, f"{score.number_and_interval} {score.unit}") for score in scores]
    return file.write(result, text_table(lines, num_words=2), headline=scores)


def read_parts(args: argparse.Namespace, task: EncoderTask, store: Embeddings | None) -> list[Part]:
    """Features and values of the training and the validation images that have features."""
    tables, parts = [read_table(args, split) for split in SPLIT_NAMES], []
    labels = sorted({tag for _, cells in tables[0] for tag in tags_of(cells[-1])}) if args.tags else []
    columns = TableColumns(args.path_column, args.tags or (args.binary + args.numbers)[0], args.split_column)
    for split, rows in zip(SPLIT_NAMES, tables, strict=True):
        values = column_values(args, rows, labels)
        if store:
            row_of = {os.path.abspath(path): row for row, path in enumerate(store.index["path"])}
            kept = [i for i, (path, _) in enumerate(rows) if path in row_of]
            features = store.vectors(args.what, [row_of[rows[i][0]] for i in kept]) if kept else np.empty((0, 0))
        else:
            source = open_images(args.data_path, split, args.download, columns=columns, limits=task.limits)
            found = task.features(source).normalize_()
            kept, features = found.indices.tolist(), found.features.numpy(force=True)
        if not kept:
            remedy = f"; {args.embeddings} must hold them: embed the table with --split all" if store else ""
            raise UserError(f"--data_path {args.data_path}: none of the {split} images has features{remedy}")
        if number := len(rows) - len(kept):
            logger.warning("%s: %d of %d images have no features, and are left out", split, number, len(rows))
        parts.append(Part(features, {name: column[kept] for name, column in values.items()}))
    return parts


def check_options(args: argparse.Namespace) -> None:
    """Refuse options without a table, a column or features, or with two kinds of features."""
    args.binary, args.numbers = args.binary or [], args.numbers or []
    if not args.data_path.lower().endswith(TABLE_ENDINGS):
        raise UserError(
            f"--data_path {args.data_path}: give a table ({', '.join(TABLE_ENDINGS)}) with a column of splits"
        )
    if not (args.binary or args.numbers or args.tags):
        raise UserError("no column to predict: give --tags, --binary or --numbers")
    if args.label_column:
        raise UserError(f"--label_column {args.label_column}: name columns of labels with --tags or --binary")
    if bool(args.embeddings) == bool(args.pretrained_weights or args.untrained):
        raise UserError("give either --pretrained_weights, an encoder, or --embeddings, a folder of dino-sparo embed")


def read_table(args: argparse.Namespace, split: str) -> list[tuple[str, list[str]]]:
    """Path and cells of each row of a split: columns of --binary, of --numbers, and the column of --tags."""
    named = [(name, "--binary") for name in args.binary] + [(name, "--numbers") for name in args.numbers]
    named += [(args.tags, "--tags")] if args.tags else []
    columns = [PATHS.named(args.path_column), *(Column("values", option, (), name) for name, option in named)]
    root = os.path.dirname(args.data_path)
    rows = TableRows(args.data_path, columns, SPLITS.named(args.split_column), split)
    return [(os.path.abspath(os.path.join(root, cells[0].strip())), cells[1:]) for _, cells in rows]


def tags_of(cell: str) -> list[str]:
    """The labels of a cell of --tags."""
    return [tag for part in cell.split(";") if (tag := part.strip()).lower() not in MISSING]


def column_values(
    args: argparse.Namespace, rows: Sequence[tuple[str, list[str]]], labels: Sequence[str]
) -> dict[str, Values]:
    """Name of a column or of a tag -> the value of each row."""
    values = {}
    for position, name in enumerate([*args.binary, *args.numbers]):
        parse = parse_label if position < len(args.binary) else parse_number
        values[name] = np.array([parse(cells[position].strip(), name) for _, cells in rows])
    tags = [tags_of(cells[-1]) for _, cells in rows] if args.tags else []
    for label in labels:
        if label in values:
            raise UserError(f"--tags {args.tags}: the label {label!r} is also the name of a column; rename one of them")
        values[label] = np.array([float(label in of_row) if of_row else math.nan for of_row in tags])
    if unknown := {tag for of_row in tags for tag in of_row} - {*labels}:
        logger.warning("no training image has the labels %s, which are left out", ", ".join(sorted(unknown)))
    return values


def parse_label(cell: str, name: str) -> float:
    """1.0, 0.0, or NaN for a missing or uncertain label."""
    text = cell.lower()
    if text in MISSING + UNCERTAIN:
        return math.nan
    if text not in TRUE + FALSE:
        raise UserError(f"--binary {name}: {cell!r} is not a label; give 0, 1, or an empty cell where it is missing")
    return float(text in TRUE)


def parse_number(cell: str, name: str) -> float:
    """The number, or NaN if it is missing."""
    if cell.lower() in MISSING:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise UserError(f"--numbers {name}: {cell!r} is not a finite number; leave the cell empty where it is missing")
    return value


def evaluate_column(name: str, is_number: bool, train: Part, val: Part, args: argparse.Namespace) -> dict[str, Any]:
    """Fit the probe of a column on the training images and test it; `drawn` has its scores in all resamples."""
    from sklearn.linear_model import RidgeCV

    known, tested = (np.flatnonzero(~np.isnan(part.values[name])) for part in (train, val))
    row: dict[str, Any] = {
        "column": name,
        "kind": "number" if is_number else "label",
        "num_train": len(known),
        "num_val": len(tested),
        "num_missing_train": len(train.features) - len(known),
        "num_missing_val": len(val.features) - len(tested),
        "scores": [],
    }
    x, y, targets = train.features[known], train.values[name][known], val.values[name][tested]
    if len(np.unique(y)) < 2 or len(np.unique(targets)) < 2:
        logger.warning("%s is left out: its values in the training or in the validation images are all equal", name)
        return row
    weights = resampled(len(val.features), args)[:, tested]
    if is_number:
        model = RidgeCV(alphas=ALPHAS).fit(x, y)
        row["strength"] = float(model.alpha_)
        row["drawn"] = errors_of(targets, model.predict(val.features[tested]), weights)
    else:
        model = fit_logistic(x, y, args)
        row |= {"strength": float(model.C), "num_positive": int(targets.sum())}
        row["drawn"] = ranks_of(targets, model.predict_proba(val.features[tested])[:, 1], weights)
    for measure, drawn in row["drawn"].items():
        row["scores"].append(score_of(f"{measure} {name}", "" if is_number else "%", drawn))
        row[measure] = row["scores"][-1]._asdict()
    return row


def fit_logistic(x: Features, y: Values, args: argparse.Namespace) -> Any:
    """Logistic regression with the best C, or with the first C if a value has a single image."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    rarest = int(np.unique(y, return_counts=True)[1].min())
    if rarest < 2 or len(args.C) == 1:
        return LogisticRegression(C=args.C[0], max_iter=MAX_STEPS).fit(x, y)
    folds = StratifiedKFold(min(args.folds, rarest), shuffle=True, random_state=args.seed)
    model = LogisticRegression(max_iter=MAX_STEPS)
    return GridSearchCV(model, {"C": args.C}, scoring="neg_log_loss", cv=folds).fit(x, y).best_estimator_


def resampled(num_images: int, args: argparse.Namespace) -> Weights:
    """Number of times that each image is in each resample; the first row has each image once."""
    rng = np.random.default_rng(args.seed)
    drawn = rng.multinomial(num_images, np.full(num_images, 1 / num_images), size=args.resamples)
    return np.concatenate((np.ones((1, num_images)), drawn))


def ranks_of(targets: Values, predicted: Values, weights: Weights) -> dict[str, Scores]:
    """Average precision and area under the ROC curve for each row of weights, percent; NaN without both labels.

    AP = sum over thresholds of (recall - previous recall) x precision;  AUROC = area by the trapezoidal rule
    """
    order = np.argsort(-predicted, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(predicted[order])), len(order) - 1)  # equal predictions: one threshold
    hits = np.cumsum(weights[:, order] * targets[order], axis=1)[:, ends]
    others = np.cumsum(weights[:, order] * (1 - targets[order]), axis=1)[:, ends]
    rises, runs = np.diff(hits, prepend=0, axis=1), np.diff(others, prepend=0, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.nan_to_num(hits / (hits + others))
        ap = (rises * precision).sum(axis=1) / hits[:, -1]
        auroc = (runs * (hits - rises / 2)).sum(axis=1) / (hits[:, -1] * others[:, -1])
    ap[np.isnan(auroc)] = math.nan
    return {"AP": 100 * ap, "AUROC": 100 * auroc}


def errors_of(targets: Values, predicted: Values, weights: Weights) -> dict[str, Scores]:
    """R2 and mean absolute error for each row of weights; R2 is NaN for equal targets."""
    with np.errstate(invalid="ignore", divide="ignore"):
        total = weights.sum(axis=1)
        centered = targets - targets.mean()
        squares = weights @ centered**2 / total
        variance = squares - (weights @ centered / total) ** 2
        variance[variance <= ROUNDING * squares] = math.nan
        r2 = 1 - weights @ (targets - predicted) ** 2 / total / variance
        return {"R2": r2, "MAE": weights @ np.abs(targets - predicted) / total}


def score_of(name: str, unit: str, drawn: Scores) -> Score:
    """The score of the images themselves, the first of `drawn`, and its interval."""
    finite = drawn[1:][np.isfinite(drawn[1:])]
    low, high = np.percentile(finite, [2.5, 97.5]).tolist() if len(finite) else (None, None)
    return Score(name, float(drawn[0]), unit, low, high)


def macro_scores(rows: Sequence[dict[str, Any]]) -> list[Score]:
    """mAP and mean AUROC, if there are several labels; removes `drawn` from the rows."""
    found = [(row["kind"], row.pop("drawn")) for row in rows if "drawn" in row]
    labels = [drawn for kind, drawn in found if kind == "label"]
    if len(labels) < 2:
        return []
    names = {"AP": "mAP", "AUROC": "mean AUROC"}
    return [
        score_of(name, "%", np.ma.masked_invalid([drawn[measure] for drawn in labels]).mean(axis=0).filled(math.nan))
        for measure, name in names.items()
    ]

"""Labelled embeddings -> a classifier, its accuracy, and predictions for new images.

    dino-sparo predict labelled_embeddings --images new_embeddings --output predictions.csv
    dino-sparo predict labelled_images --images new_images --pretrained_weights demo

    predictions.csv    row, path, the most probable classes and their probabilities
    predictions.json   protocol and accuracy

The classifier is a logistic regression on features of length one. Its accuracy is measured by cross-validation, with
--val also on other labelled embeddings. Rows without a label are skipped. Images are embedded in a temporary folder.
"""

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dino_sparo.evaluation.embed import store
from dino_sparo.evaluation.embed.command import embed_as
from dino_sparo.evaluation.embed.store import RECORD, Embeddings, is_store
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import refuse_existing, versions, write_json
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.weights.results import Score

logger = logging.getLogger(__name__)

MAX_STEPS = 1000  # of the solver


@on_first_process
def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Fit the classifier, measure its accuracy, predict; returns the content of predictions.json."""
    setup_logging()
    require("sklearn", "predictions")
    new = args.images or args.folder
    output = Path(args.output or Path(new if is_store(new) else "") / "predictions.csv")
    record = output.with_suffix(".json")
    if output == record:
        raise UserError(f"--output {output} names the table; the record is put beside it as JSON: give a .csv")
    refuse_existing([output, record] if args.images else [record], args.overwrite, "--output")
    with tempfile.TemporaryDirectory(prefix="dino_sparo_") as temporary:
        paths = dict.fromkeys(filter(None, (args.folder, args.images, args.val)))
        if args.pretrained_weights and all(map(is_store, paths)):
            raise UserError("--pretrained_weights: all folders hold embeddings already; leave it out")
        stores: dict[str, Embeddings] = {}
        for number, path in enumerate(paths):
            stores[path] = open_store(path, args, Path(temporary, str(number)), stores.get(args.folder))
        return predict_from(stores, args, output)


def open_store(path: str, args: argparse.Namespace, folder: Path, labelled: Embeddings | None) -> Embeddings:
    """The embeddings at a path, or of the images at a path, which are embedded into `folder` as `labelled` were."""
    if is_store(path):
        return store.load_embeddings(path)
    if not args.pretrained_weights:
        raise UserError(
            f"{path} has no embeddings: there is no {RECORD} in it; give the folder that dino-sparo embed wrote, or "
            "images and --pretrained_weights"
        )
    names = ("pretrained_weights", "checkpoint_key", "img_size", "device", "num_workers")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return embed_as(labelled, path, folder, what=[args.what], **given)


def predict_from(stores: Mapping[str, Embeddings], args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Fit the classifier, measure and predict; the keys of `stores` are the paths in the options."""
    labelled = stores[args.folder]
    others = {folder: stores[folder] for folder in (args.images, args.val) if folder}
    record, warnings = output.with_suffix(".json"), []
    for folder, embeddings in stores.items():
        warnings += store.check_sample(embeddings.array(args.what), f"{args.what} in {folder}")
        store.require_same_encoder(labelled, embeddings)
    features, labels = _labelled_rows(labelled, args.what, args.folder)
    warnings += _warnings_of_fitted_images(labelled, others, args.what)
    classifier, accuracy = fit_classifier(features, labels, args.C, args.folds, args.seed)
    accuracy_on = {}
    for folder, other in others.items():
        if folder == args.val or any(other.index["label"]):
            held_out, truths = _labelled_rows(other, args.what, folder)  # images of unknown classes are wrong
            accuracy_on[folder] = 100 * float(np.mean(classifier.predict(held_out) == np.array(truths)))
    scores = [Score("accuracy by cross-validation", accuracy["accuracy"])]
    scores += [Score(f"accuracy on {folder}", value) for folder, value in accuracy_on.items()]
    result = {
        "evaluation": "predict",
        "headline": [score._asdict() for score in scores],
        "data": {"name": args.folder},
        "embeddings": {"labelled": args.folder, "images": args.images, "val": args.val, "what": args.what},
        "files": {folder: each.source(args.what)["file"] for folder, each in stores.items()},
        "encoder": labelled.record["encoder"],
        "classifier": {"name": "LogisticRegression", "C": classifier.C, "seed": args.seed},
        "classes": classifier.classes_.tolist(),
        "num_labelled": len(labels),
        "cross_validation": accuracy,
        "accuracy_on": accuracy_on,
        "versions": versions(sklearn="scikit-learn"),
        **({"warnings": warnings} if warnings else {}),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    if args.images:
        store.write_csv(output, _prediction_rows(classifier, others[args.images], args.what, args.top))
    write_json(result, record)
    say(_table(result))
    say(f"\n{output if args.images else record}")
    return result


def _warnings_of_fitted_images(labelled: Embeddings, others: Mapping[str, Embeddings], kind: str) -> list[str]:
    """Log and return a warning for each of `others` with images whose path or features a labelled image has."""
    rows = [row for row, label in enumerate(labelled.index["label"]) if label]
    paths = {labelled.index["path"][row] for row in rows}
    fitted = {hash(labelled.arrays[kind][row].tobytes()) for row in rows}
    warnings = []
    for folder, other in others.items():
        pairs = zip(other.index["path"], other.arrays[kind], strict=True)
        if number := sum(path in paths or hash(row.tobytes()) in fitted for path, row in pairs):
            total = len(other.index["path"])
            warnings.append(
                f"{folder} has the images that the classifier is fitted on ({number:,} of {total:,}), so "
                "the accuracy on them is too high; report the accuracy by cross-validation, or give other images"
            )
            logger.warning("%s", warnings[-1])
    return warnings


def _labelled_rows(embeddings: Embeddings, kind: str, folder: str) -> tuple[Float[np.ndarray, "rows F"], list[str]]:
    """Features and labels of the rows that have a label."""
    rows = [row for row, label in enumerate(embeddings.index["label"]) if label]
    if not rows:
        raise UserError(f"the images in {folder} have no labels; embed a folder per class, or a table with labels")
    return embeddings.vectors(kind, rows), [embeddings.index["label"][row] for row in rows]


def fit_classifier(
    features: Float[np.ndarray, "rows F"], labels: list[Any], strengths: Sequence[float], num_folds: int, seed: int
) -> tuple[Any, dict[str, Any]]:
    """A classifier with the best C by cross-validation, and the accuracy for each C, percent.

    Classes with a single image are fitted, but not cross-validated.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    counts = Counter(labels)
    single = sorted(name for name, count in counts.items() if count < 2)
    if len(counts) - len(single) < 2:
        raise UserError(f"a classifier needs two classes with two images each; there are {dict(counts.most_common(5))}")
    if single:
        logger.warning("%d classes with a single image are not cross-validated, such as %r", len(single), single[0])
    rows = [row for row, label in enumerate(labels) if counts[label] > 1]
    rarest = min(count for count in counts.values() if count > 1)
    folds = StratifiedKFold(min(num_folds, rarest), shuffle=True, random_state=seed)
    search = GridSearchCV(LogisticRegression(max_iter=MAX_STEPS), {"C": list(strengths)}, cv=folds, refit=False)
    search.fit(features[rows], [labels[row] for row in rows])
    accuracies = 100 * search.cv_results_["mean_test_score"]
    by_strength = {f"C={strength:g}": float(value) for strength, value in zip(strengths, accuracies, strict=True)}
    record = {"folds": folds.n_splits, "accuracy": float(accuracies.max()), "accuracies": by_strength}
    classifier = LogisticRegression(max_iter=MAX_STEPS, **search.best_params_).fit(features, labels)
    return classifier, {**record, "left_out_classes": single}


def _prediction_rows(classifier: Any, new: Embeddings, kind: str, top: int) -> Iterator[tuple[Any, ...]]:
    """Names of columns, then the most probable classes of every new image and their probabilities."""
    top = min(top, len(classifier.classes_))
    names = [f"{name}_{number}" for number in range(2, top + 1) for name in ("prediction", "probability")]
    yield "row", "path", "prediction", "probability", *names
    for start in range(0, len(new.index["path"]), store.BLOCK_ROWS):
        probabilities = classifier.predict_proba(new.vectors(kind, slice(start, start + store.BLOCK_ROWS)))
        order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
        for row, (of_image, best) in enumerate(zip(probabilities, order, strict=True), start):
            cells = [cell for i in best for cell in (classifier.classes_[i], f"{of_image[i]:.6f}")]
            yield row, new.index["path"][row], *cells


def _table(result: dict[str, Any]) -> str:
    """Accuracies for the terminal."""
    validation = result["cross_validation"]
    strength = f"C={result['classifier']['C']:g}"
    lines = [
        f"{result['num_labelled']:,} labelled images, {len(result['classes'])} classes, {strength}",
        f"accuracy by {validation['folds']}-fold cross-validation: {validation['accuracy']:.2f} %",
    ]
    lines += [f"accuracy on {folder}: {accuracy:.2f} %" for folder, accuracy in result["accuracy_on"].items()]
    return "\n".join(lines)

"""`dino-sparo finetune`: train, then write the accuracies of the run into finetune_WEIGHTS_DATA.json.

    python eval_finetune.py --pretrained_weights demo --data_path scenes:2000:48 --output_dir runs/fine \\
        --epochs 10 --lr 0.004

WEIGHTS are those that the run started from: the result says what they are good for. The same command resumes the run.
"""

import argparse
from pathlib import Path
from typing import Any

from dino_sparo.data.views import EvalTransform
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.result import ResultFile, options_of, result_stem
from dino_sparo.evaluation.task import view_record
from dino_sparo.runtime.files import read_log, versions
from dino_sparo.runtime.launch import is_main
from dino_sparo.training.objective import Objective
from dino_sparo.training.options import RUN
from dino_sparo.training.run import train
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import normalization_of
from dino_sparo.weights.results import Score

SELECTION = "the epoch of `best` was chosen on the validation images themselves, so its accuracy is optimistic"
PATHS = ("output_dir", "pretrained_weights")  # which may have moved
UNRECORDED = {*RUN, "max_steps", "val_freq"} - {"seed"}


def finetune(args: argparse.Namespace, objective_class: type[Objective[Any]]) -> None:
    """Train what the options say; then rank 0 writes the result and prints a table, unless no epoch was validated."""
    train(args, objective_class)
    folder = Path(args.output_dir)
    rows = [row for row in read_log(folder) if "val_top1" in row] if is_main() else []
    if not rows:
        return
    checkpoint = load_checkpoint(folder / "checkpoint.pth", mmap=True)
    start, classes = checkpoint["finetune"]["start"], checkpoint["finetune"]["classes"]
    # The options of the run: a finished run that is started again with others is not trained again.
    of_run = {name: value for name, value in checkpoint["args"].items() if name not in PATHS}
    args = argparse.Namespace(**{**vars(args), **of_run})
    chosen = {"last": rows[-1], "best": max(rows, key=lambda row: row["val_top1"])}
    results = {
        name: {"epoch": row["epoch"], "top1": row["val_top1"], "top5": row["val_top5"]} for name, row in chosen.items()
    }
    counts = {"num_classes": len(classes), "num_train": checkpoint["num_images"]}
    result = {
        "evaluation": "fine-tuning",
        **results,
        "selection": SELECTION,
        "images": {"data_path": args.data_path, "val_split": args.val_split, **counts},
        "view": view_record(EvalTransform(args.img_size, *normalization_of(checkpoint)), args.exif),
        "encoder": start,
    }
    options = {**options_of(args, UNRECORDED), "global_batch_size": checkpoint["global_batch"]}
    path = folder / f"{result_stem(args, 'finetune', start)}.json"
    headline = [Score("fine-tuned top-1", results["best"]["top1"])]
    cells = [(name, f"{row['epoch']}", f"{row['top1']:.2f}", f"{row['top5']:.2f}") for name, row in results.items()]
    table = text_table([("", "epoch", "top-1 %", "top-5 %"), *cells], num_words=1)
    ResultFile(path, options, lambda: {"versions": versions()}).write(result, table, headline=headline)

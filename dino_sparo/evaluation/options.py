"""Options that evaluations of an encoder share; options of k-NN, few-labels, table-probe and report; no torch here."""

from typing import Any

from dino_sparo.data.defaults import MAX_VALUE
from dino_sparo.data.options import COLUMNS, DOWNLOAD, IMAGE_LIMITS
from dino_sparo.runtime.cli import Group, Option, Parser, number, path, positive_int, positive_number
from dino_sparo.runtime.options import DEVICE, PRECISIONS
from dino_sparo.weights.options import CHECKPOINT, FOREIGN_WEIGHTS

KNN_BLOCKS = 1  # whose class tokens k-NN reads by default

OUTPUT: Group = {
    "output_dir": Option(None, "Folder of the result; by default the folder of the weights."),
    "overwrite": Option(False, "Overwrite a result of other weights, data or options."),
}
USE_CUDA = Option(True, "Keep features on the GPU, if there is one. Give false if they do not fit.")
FEATURE_FILES: Group = {
    "dump_features": Option(None, "Folder to write features and labels to."),
    "load_features": Option(None, "Folder to read features and labels from; weights and images are then not needed."),
    "use_cuda": USE_CUDA,
}
EVALUATION_LIMITS: Group = {
    **IMAGE_LIMITS,
    "max_value": IMAGE_LIMITS["max_value"]._replace(
        default=None,
        help=f"Value of 16-bit images that becomes white. By default the value of the training, else {MAX_VALUE}.",
    ),
}
ENCODER: Group = {
    **CHECKPOINT,
    "readout": Option(None, "Read-out of an untrained encoder without a checkpoint; by default sparo.", str),
    "seed": Option(0, "Random seed of untrained weights, probes, crops and random choices."),
}
IMAGES: Group = {
    "data_path": Option("", "Folder with train/ and val/, table with a column of splits, cifar10:DIR, or scenes."),
    "download": DOWNLOAD,
    "img_size": Option(
        None, "Side of the images in pixels; by default the size of the encoder's position grid.", positive_int
    ),
    "fast_views": Option(
        False,
        "Resize with torch instead of Pillow, about twice as fast. Most pixels differ by at most one level, "
        "pixels at hard edges of tall images by more, so do not use this option for numbers that you report.",
    ),
    "batch_size_per_gpu": Option(128, "Images per process and step.", positive_int),
}
RESULT: Group = {
    "precision": Option(
        "fp32",
        "Precision of the model; use fp32 for numbers that you report. tf32: fp32 with less precise matrix "
        "products on GPUs, including those of k-NN and probes.",
        choices=PRECISIONS,
    ),
    **OUTPUT,
}
FOLDS = Option(
    5,
    "Folds of the cross-validation, at least 2.",
    number(int, lambda folds: folds >= 2, "at least 2 for the cross-validation"),
)
SLOTS = Option(
    None,
    "Evaluate only these slots: numbers such as 0,3,7, or a file of dino-sparo slots study or slots select. "
    "The name of the result file gets the suffix _slots.",
)


def evaluation_parser(
    groups: dict[str, Group], images: Group = IMAGES, columns: Group = COLUMNS, defaults: dict[str, Any] | None = None
) -> Parser:
    """The options of every evaluation, and `groups` of one evaluation.

    Args:
        groups: title -> options.
        images: options of the images.
        columns: those of tables of images.
        defaults: option -> default, where the tables have another.
    """
    every_group = {
        "encoder: what is evaluated": ENCODER,
        "images": images,
        "files of images": columns | EVALUATION_LIMITS,
        **groups,
        "computation and result": RESULT,
        "foreign weights": FOREIGN_WEIGHTS,
        "device and processes": DEVICE,
    }
    return Parser(every_group, defaults=defaults)


REPORT_FORMATS = {"markdown": "md", "latex": "tex", "csv": "csv"}  # format -> ending of its file
REPORT: Group = {
    "runs": Option(
        None, "Folders with result files, searched with their subfolders; or the files.", nargs="+", is_positional=True
    ),
    "format": Option("markdown", "Format of the table that is printed.", choices=tuple(REPORT_FORMATS)),
    "output_dir": Option(None, "Folder for report.md, report.tex, report.csv and report.png, the plot."),
    "overwrite": Option(False, "Overwrite an earlier report in this folder."),
}


def report_parser() -> Parser:
    """The options of `report.py`."""
    return Parser({"report": REPORT})


IMAGE_ENCODER = Option(
    False,
    "Use only the image encoder of a CLIP or an OC-CLIP. By default these models have a protocol and "
    "options of their own.",
)

KNN: Group = {
    "slots": SLOTS,
    "n_last_blocks": Option(
        KNN_BLOCKS,
        "Number of last layers whose class tokens are concatenated, as in eval_linear.py; 1: only the encoding.",
        positive_int,
    ),
    "nb_knn": Option([10, 20, 100, 200], "Numbers of neighbours; 20 is usually best.", positive_int),
    "temperature": Option(
        0.07, "Temperature of the vote: a neighbour's weight is exp(cosine / temperature).", positive_number
    ),
    **FEATURE_FILES,
}


def label_share(text: str) -> float | str:
    """A share of the labels, above 0 and at most 1, or the path of a file."""
    try:
        share = float(text)
    except ValueError:
        return path(text)
    if not 0 < share <= 1:
        raise ValueError(f"{text}: give a share above 0 and at most 1, or a file")
    return share


CLASSIFIERS = ("knn", "logistic", "linear")
FEW_LABELS: Group = {
    "label_share": Option(
        [0.01, 0.1],
        "Shares of the training labels, such as 0.01, drawn balanced over the classes; or files that name the labelled "
        "images, one per line, such as the 1 %% and 10 %% lists of SimCLR.",
        label_share,
        metavar="SHARE|FILE",
    ),
    "draws": Option(5, "Random draws of each share; the result is their mean and standard deviation.", positive_int),
    "classifiers": Option(
        ["knn", "logistic"],
        "knn: weighted k-NN. logistic: logistic regression of scikit-learn. linear: the probe of dino-sparo linear "
        "with --fast.",
        choices=CLASSIFIERS,
        nargs="+",
    ),
    "C": Option(
        [10.0, 1.0, 100.0],
        "Inverse strengths of regularisation of logistic; cross-validation on the labelled images chooses one. With "
        "one label per class, it is the first.",
        positive_number,
    ),
    "folds": FOLDS,
    "epochs": Option(100, "Number of epochs of linear.", positive_int),
    "lr": Option([0.003, 0.01, 0.03, 0.1, 0.3, 1.0], "Learning rates of linear for a batch of 256.", positive_number),
}


def few_labels_parser() -> Parser:
    """The options of `few_labels.py`."""
    return evaluation_parser({"few labels": FEW_LABELS, "features and k-NN": KNN}, defaults={"nb_knn": [5, 20]})


TABLE_PROBE: Group = {
    "tags": Option(None, "Column with labels separated by semicolons; each label gets a probe.", str),
    "binary": Option(None, "Columns of 0 and 1; each gets a probe.", str, nargs="+"),
    "numbers": Option(None, "Columns of numbers; each gets a probe.", str, nargs="+"),
    "embeddings": Option(
        None, "Folder of dino-sparo embed with the images of the table; an encoder is then not needed."
    ),
    "what": Option("encoding", "Features of --embeddings.", choices=("encoding", "slots", "cls", "mean")),
    "C": Option(
        [1.0, 10.0, 100.0],
        "Inverse strengths of regularisation of the labels' probes; cross-validation chooses one.",
        positive_number,
    ),
    "folds": FOLDS,
    "resamples": Option(1000, "Resamples of the validation images for the intervals.", positive_int),
}


def table_probe_parser() -> Parser:
    """The options of `table_probe.py`."""
    return evaluation_parser({"probes of the table": TABLE_PROBE})


def knn_parser() -> Parser:
    """The options of `knn.py`."""
    return evaluation_parser({"k-NN": KNN})


def map_parser(groups: dict[str, Group], encoder: Group | None = None) -> Parser:
    """The options of an evaluation of maps or patch tokens; `encoder` has further options of the checkpoint."""
    checkpoint = {"encoder": CHECKPOINT | (encoder or {}), "foreign weights": FOREIGN_WEIGHTS}
    return Parser({**checkpoint, **groups, "device and processes": DEVICE}, defaults={"num_workers": 4})

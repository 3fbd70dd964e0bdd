"""The options of `dino-sparo embed`, `cluster`, `search` and `predict`; no torch here."""

from dino_sparo.draw.options import FIGURE_FORMAT, SHOW_CHANNELS
from dino_sparo.evaluation.options import FOLDS, IMAGES, OUTPUT, evaluation_parser
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, positive_number, share_above_0, whole_number
from dino_sparo.runtime.options import DEVICE
from dino_sparo.weights.options import CHECKPOINT

FEATURES = ("encoding", "slots", "cls", "patches", "mean", "captions")  # that embed writes
VECTORS = ("encoding", "slots", "cls", "mean")  # that clusters and classifiers use

EMBEDDINGS: Group = {
    "split": Option(None, "Name of the split to embed, or all; by default the split that training uses.", str),
    "what": Option(
        ["encoding"],
        "Features to write. encoding: the read-out's result, which k-NN and retrieval use. slots: the same, "
        "slot by slot. cls, patches: the class token and the patch tokens of the last block, after its "
        "LayerNorm. mean: the mean of the patch tokens. captions: the features of captions from a CLIP or an "
        "OC-CLIP, without other features.",
        choices=FEATURES,
    ),
    "captions": Option(
        None,
        "For --what captions: file with the captions of the images in --data_path, in a format of dino-sparo "
        "retrieval. Not needed if --data_path is a table, shards or scenes with captions.",
    ),
    "dtype": Option("float32", "Type of the arrays on disk.", choices=("float32", "float16")),
}


def embed_parser() -> Parser:
    """The options of `dino-sparo embed`, in data-flow order."""
    return evaluation_parser({"embeddings": EMBEDDINGS}, defaults={"batch_size_per_gpu": 64})


VECTOR_FEATURES: Group = {
    "what": Option("encoding", "Features to use, normalised to length one; slots are concatenated.", choices=VECTORS),
    "seed": Option(0, "Random seed."),
}
CLUSTERS: Group = {
    "clusters": Option(20, "Number of clusters of k-means.", positive_int),
    "slot": Option(None, "Number of the only slot to cluster by; needs --what slots.", whole_number),
    "examples": Option(12, "Number of images per cluster on the page.", positive_int),
    "map": Option(
        "tsne", "Method of the map. t-SNE preserves neighbourhoods, PCA large distances.", choices=("tsne", "pca")
    ),
    "figure_format": FIGURE_FORMAT,
    **SHOW_CHANNELS,
    "data_path": Option(None, "New path of the images for the page, if they were moved after embedding."),
    "output_dir": OUTPUT["output_dir"]._replace(help="Folder of the result; by default the folder of the embeddings."),
    "overwrite": OUTPUT["overwrite"],
}


def cluster_parser() -> Parser:
    """The options of `dino-sparo cluster`."""
    return Parser({"features": {"folder": SEARCHED["folder"], **VECTOR_FEATURES}, "clusters and map": CLUSTERS})


SEARCHED: Group = {
    "folder": Option(None, "Embeddings, written by dino-sparo embed.", is_positional=True),
    "what": VECTOR_FEATURES["what"],
    "slots": Option(
        None,
        "Search by these slots only: numbers such as 3,7, or a file of dino-sparo slots study. With features encoding "
        "or slots.",
    ),
    "images": Option(
        None,
        "Images whose nearest images are searched: an image, anything that embed takes as --data_path, or "
        "embeddings of the same encoder.",
    ),
    "top": Option(12, "Number of nearest images.", positive_int),
    "duplicates": Option(
        None,
        "List groups of near copies: images whose cosine similarity is at least this number, such as 0.97, and "
        "images that such pairs connect.",
        share_above_0,
    ),
    "pretrained_weights": Option(
        None, "Weights that embed the images of --images; by default those that embedded the folder, at their path."
    ),
}
FOUND: Group = {
    **SHOW_CHANNELS,
    **{name: CLUSTERS[name] for name in ("data_path", "output_dir", "overwrite")},
    **{name: DEVICE[name] for name in ("device", "num_workers")},
}


def search_parser() -> Parser:
    """The options of `dino-sparo search`."""
    return Parser({"search": SEARCHED, "result and device": FOUND}, defaults={"num_workers": 4})


CLASSIFIED: Group = {
    "folder": Option(
        None,
        "Embeddings of labelled images, written by dino-sparo embed; or with --pretrained_weights the images.",
        is_positional=True,
    ),
    "images": Option(
        None,
        "Embeddings of new images, from the same encoder, or the images. Without this option, only the accuracy is "
        "measured.",
    ),
    "val": Option(None, "Embeddings of other labelled images, or the images, to measure the accuracy on."),
}
# For images in place of embeddings.
ENCODER_OF_IMAGES: Group = {
    "pretrained_weights": CHECKPOINT["pretrained_weights"]._replace(
        help="Encoder of images that are given in place of embeddings: a checkpoint, an export, released weights or "
        "demo. The embeddings are temporary; to keep them, use dino-sparo embed."
    ),
    "checkpoint_key": CHECKPOINT["checkpoint_key"],
    "img_size": IMAGES["img_size"],
    **{name: DEVICE[name] for name in ("device", "num_workers")},
}
CLASSIFIER: Group = {
    "C": Option(
        (1.0, 10.0, 100.0),
        "Inverse strengths of regularisation; cross-validation chooses one.",
        positive_number,
        nargs="+",
    ),
    "folds": FOLDS,
    "top": Option(3, "Number of most probable classes in the table.", positive_int),
    "output": Option(None, "Table of predictions (.csv); by default predictions.csv in the folder of --images."),
    "overwrite": Option(False, "Overwrite the table."),
}


def predict_parser() -> Parser:
    """The options of `dino-sparo predict`."""
    groups = {"features": CLASSIFIED | VECTOR_FEATURES, "images in place of embeddings": ENCODER_OF_IMAGES}
    return Parser({**groups, "classifier": CLASSIFIER})

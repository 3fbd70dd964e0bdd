"""The options of `dino-sparo embed`, `cluster` and `predict`; no torch here, so that `--help` is fast."""

from dino_sparo.evaluation.options import evaluation_parser
from dino_sparo.runtime.cli import Parser, add_device_options, positive_int, positive_number

FEATURES = ("encoding", "slots", "cls", "patches", "mean", "captions")
VECTORS = ("encoding", "slots", "cls", "mean")  # that clusters and classifiers use


def embed_parser() -> Parser:
    """The options of `dino-sparo embed`, in data-flow order."""
    parser = evaluation_parser()
    group = parser.add_argument_group("embeddings")
    group.add_argument("--split", default=None, help="Split to embed, by its name, or all; by default the training's.")
    group.add_argument(
        "--what",
        nargs="+",
        default=["encoding"],
        choices=FEATURES,
        help="Features to write. encoding: the read-out's result, which k-NN and retrieval use. slots: the same, slot "
        "by slot. cls, patches: the class token and the patch tokens of the last block, through its LayerNorm. mean: "
        "the mean of the patch tokens. captions: of a CLIP or an OC-CLIP, the features of captions; alone.",
    )
    group.add_argument(
        "--captions",
        default=None,
        help="For --what captions: file with the captions of the images in --data_path, as retrieval takes it. By "
        "default --data_path is a table, shards or scenes with captions.",
    )
    group.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="Type of the arrays on disk.")
    group.add_argument("--overwrite", action="store_true", help="Replace other embeddings in --output_dir.")
    add_device_options(parser)
    parser.set_defaults(batch_size_per_gpu=64)
    return parser


def _add_vector_options(parser: Parser) -> None:
    """Which features of a folder are used."""
    group = parser.add_argument_group("features")
    group.add_argument(
        "--what",
        choices=VECTORS,
        default="encoding",
        help="Features to use, one vector of length one per image; slots are concatenated.",
    )
    group.add_argument("--seed", type=int, default=0, help="Random seed.")


def cluster_parser() -> Parser:
    """The options of `dino-sparo cluster`."""
    parser = Parser()
    parser.add_argument("folder", help="Embeddings, written by dino-sparo embed.")
    _add_vector_options(parser)
    group = parser.add_argument_group("clusters")
    group.add_argument("--clusters", type=positive_int, default=20, help="Number of clusters of k-means.")
    group.add_argument("--slot", type=int, default=None, help="Cluster by one slot alone, by its number; --what slots.")
    group = parser.add_argument_group("result")
    group.add_argument("--output_dir", default=None, help="Folder of the result; by default that of the embeddings.")
    group.add_argument("--overwrite", action="store_true", help="Replace older clusters in --output_dir.")
    group.add_argument("--examples", type=positive_int, default=12, help="Images of each cluster on the page.")
    group.add_argument(
        "--map",
        choices=("tsne", "pca"),
        default="tsne",
        help="Method of the map in two dimensions. t-SNE keeps neighbours together; PCA keeps large distances.",
    )
    group.add_argument("--figure_format", choices=("png", "pdf", "svg"), default="png", help="File format of the map.")
    group.add_argument(
        "--data_path", default=None, help="The images, if they have moved since they were embedded; for the page."
    )
    return parser


def predict_parser() -> Parser:
    """The options of `dino-sparo predict`."""
    parser = Parser()
    parser.add_argument("folder", help="Embeddings of labelled images, written by dino-sparo embed.")
    parser.add_argument(
        "--images",
        default=None,
        help="Embeddings of new images, by the same encoder; without them only the accuracy is measured.",
    )
    parser.add_argument("--val", default=None, help="Embeddings of other labelled images, to measure the accuracy on.")
    _add_vector_options(parser)
    group = parser.add_argument_group("classifier")
    group.add_argument(
        "--C",
        type=positive_number,
        nargs="+",
        default=(1.0, 10.0, 100.0),
        help="Inverse strength of the penalty on weights; cross-validation chooses one.",
    )
    group.add_argument("--folds", type=positive_int, default=5, help="Parts of the labelled images, at least 2.")
    group = parser.add_argument_group("result")
    group.add_argument(
        "--output",
        default=None,
        help="Table of predictions, a .csv; a .json of the same name holds the accuracy. By default predictions.csv in "
        "the folder of --images.",
    )
    group.add_argument("--top", type=positive_int, default=3, help="Most probable classes in the table.")
    group.add_argument("--overwrite", action="store_true", help="Replace an older table.")
    return parser

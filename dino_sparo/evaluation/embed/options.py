"""The options of `dino-sparo embed`; no torch here, so that `--help` is fast."""

from dino_sparo.evaluation.options import evaluation_parser
from dino_sparo.runtime.cli import Parser, add_device_options

FEATURES = ("encoding", "slots", "cls", "patches", "mean")


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
        "the mean of the patch tokens.",
    )
    group.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="Type of the arrays on disk.")
    group.add_argument("--overwrite", action="store_true", help="Replace other embeddings in --output_dir.")
    add_device_options(parser)
    parser.set_defaults(batch_size_per_gpu=64)
    return parser

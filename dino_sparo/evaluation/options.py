"""The options of the commands that evaluate, draw and export an encoder; no torch here, so that `--help` is fast."""

from dino_sparo.data.defaults import MAX_VALUE
from dino_sparo.data.options import CHANNELS, COLUMNS, DOWNLOAD, IMAGE_LIMITS
from dino_sparo.draw.options import FIGURE_FORMAT, SHOW_CHANNELS
from dino_sparo.models.options import SLOT_SIZES
from dino_sparo.runtime.cli import (
    Group,
    Option,
    Parser,
    number_from_0,
    positive_int,
    positive_number,
    share_above_0,
    whole_number,
)
from dino_sparo.runtime.options import DEVICE, PRECISIONS
from dino_sparo.weights.options import CHECKPOINT, FOREIGN_WEIGHTS

KNN_BLOCKS = 1  # whose class tokens k-NN reads by default
FEATURES = ("encoding", "slots", "cls", "patches", "mean", "captions")  # that embed writes
PROBES = ("linear", "sparo", "ep", "attention")  # names of `--probe`
VECTORS = ("encoding", "slots", "cls", "mean")  # that clusters and classifiers use

OUTPUT: Group = {
    "output_dir": Option(None, "Folder of the result; by default the folder of the weights."),
    "overwrite": Option(False, "Overwrite what other weights, data or options gave."),
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
        "Precision of the encoder; use fp32 for numbers that you report. tf32: fp32 with less precise matrix "
        "products on GPUs, including those of k-NN and probes.",
        choices=PRECISIONS,
    ),
    **OUTPUT,
}
SLOTS = Option(
    None,
    "Evaluate only these slots: numbers such as 0,3,7, or a file of dino-sparo slots study or slots select. "
    "The name of the result file gets the suffix _slots.",
)


def evaluation_parser(groups: dict[str, Group]) -> Parser:
    """The options of every evaluation, and those of one: what to evaluate, on which images, where the result goes."""
    return Parser(
        {
            "encoder: what is evaluated": ENCODER,
            "images": IMAGES,
            "files of images": COLUMNS | EVALUATION_LIMITS,
            **groups,
            "computation and result": RESULT,
            "foreign weights": FOREIGN_WEIGHTS,
            "device and processes": DEVICE,
        }
    )


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


def knn_parser() -> Parser:
    """The options of `eval_knn.py`, in data-flow order."""
    return evaluation_parser({"k-NN": KNN})


PROBE_FEATURES: Group = {
    "image_encoder": IMAGE_ENCODER,
    "slots": SLOTS,
    "n_last_blocks": Option(
        None,
        "Number of last layers whose class tokens are concatenated. 4 suits a ViT-S, 1 a ViT-B. (default: 4 for vision "
        "transformers, 1 for networks of stages and for XCiT)",
        positive_int,
    ),
    "avgpool_patchtokens": Option(
        False, "Also concatenate the mean of the patch tokens; false suits a ViT-S, true a ViT-B."
    ),
}
ATTENTIVE_PROBES: Group = {
    "probe": Option(
        None,
        "Train read-outs on the frozen tokens, each with a linear classifier, and compare accuracy and number "
        "of parameters. linear: the encoder's own read-out, frozen. sparo: slots. ep: efficient probing. "
        "attention: one query with several heads. Writes for each kind an encoder with the trained read-out.",
        choices=PROBES,
        nargs="+",
    ),
    **SLOT_SIZES,
    "ep_queries": Option(32, "Number of queries of ep.", positive_int),
    "ep_reduction": Option(1, "Width of a token divided by the width of ep's encoding.", positive_int),
    "attention_heads": Option(16, "Number of heads of attention; it divides the width of a token.", positive_int),
    "warmup_epochs": Option(
        None, "Epochs of warm-up of the learning rate, with --probe; by default a ninth of --epochs.", number_from_0
    ),
}
PROBE_TRAINING: Group = {
    "epochs": Option(
        None, "Number of epochs; the learning rate falls to 0. By default 100, with --probe 90.", positive_int
    ),
    "lr": Option(
        None,
        "Learning rates for a batch of 256 images, scaled with the batch; each trains one probe. By default "
        "0.001 0.003 0.01 0.03 0.1 0.3, with --probe 0.1 0.2 0.5 1.",
        positive_number,
        nargs="+",
    ),
    "fast": Option(
        False,
        "Encode every image once, without crops and flips, and train on these features: minutes instead of "
        "hours, usually a little less accurate. Every process keeps the features of all images on its GPU, or "
        "with --use_cuda false in main memory: 27 GB for ImageNet with the defaults of ViT-S and SPARO.",
    ),
    "val_freq": Option(1, "Epochs between two validations.", positive_int),
    "num_labels": Option(
        None, "Expected number of classes; the command ends if the data have a different number.", positive_int
    ),
    "evaluate": Option(
        False,
        "Train nothing, and test the probes that the same command without this option trained. Without such probes, "
        "linear.pth in the same folder is read, which may be a linear head of facebookresearch/dino.",
    ),
    "use_cuda": USE_CUDA,
}


def linear_parser() -> Parser:
    """The options of `eval_linear.py`, in data-flow order."""
    return evaluation_parser(
        {
            "features of the probe": PROBE_FEATURES,
            "read-outs on frozen tokens": ATTENTIVE_PROBES,
            "training of the probes": PROBE_TRAINING,
        }
    )


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
    parser = evaluation_parser({"embeddings": EMBEDDINGS})
    parser.set_defaults(batch_size_per_gpu=64)
    return parser


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
    "output_dir": Option(None, "Folder of the result; by default the folder of the embeddings."),
    "overwrite": Option(False, "Overwrite clusters in --output_dir."),
}


def cluster_parser() -> Parser:
    """The options of `dino-sparo cluster`."""
    folder = Option(None, "Embeddings, written by dino-sparo embed.", is_positional=True)
    return Parser({"features": {"folder": folder, **VECTOR_FEATURES}, "clusters and map": CLUSTERS})


MEASURED_IMAGES: Group = {
    "data_path": Option("", "The images: any data that training takes."),
    "split": Option(None, "Name of the split to measure, or all; by default the split that training uses.", str),
    "download": DOWNLOAD,
    "batch_size_per_gpu": Option(64, "Images per batch.", positive_int),
}


def statistics_parser() -> Parser:
    """The options of `dino-sparo statistics`."""
    files = COLUMNS | IMAGE_LIMITS | CHANNELS
    processes = {"num_workers": DEVICE["num_workers"]}
    return Parser({"images": MEASURED_IMAGES, "files of images": files, "processes": processes})


CLASSIFIED: Group = {
    "folder": Option(None, "Embeddings of labelled images, written by dino-sparo embed.", is_positional=True),
    "images": Option(
        None, "Embeddings of new images, from the same encoder. Without this option, only the accuracy is measured."
    ),
    "val": Option(None, "Embeddings of other labelled images, to measure the accuracy on."),
}
CLASSIFIER: Group = {
    "C": Option(
        (1.0, 10.0, 100.0),
        "Inverse strengths of regularisation; cross-validation chooses one.",
        positive_number,
        nargs="+",
    ),
    "folds": Option(5, "Folds of the cross-validation, at least 2.", positive_int),
    "top": Option(3, "Number of most probable classes in the table.", positive_int),
    "output": Option(None, "Table of predictions (.csv); by default predictions.csv in the folder of --images."),
    "overwrite": Option(False, "Overwrite the table."),
}


def predict_parser() -> Parser:
    """The options of `dino-sparo predict`."""
    return Parser({"features": CLASSIFIED | VECTOR_FEATURES, "classifier": CLASSIFIER})


SLOT_RANKING: Group = {
    "choosing_images": Option(
        10_000, "Number of training images held out to rank the slots, at most a fifth of all.", positive_int
    ),
    "numbers": Option(
        None, "Numbers of slots to evaluate; by default powers of two and all slots.", positive_int, nargs="+"
    ),
    "keep": Option(
        None,
        "Number of slots in the result file; by default the most accurate number on the --choosing_images.",
        positive_int,
    ),
    "draws": Option(5, "Number of random orders of the slots, as a control.", positive_int),
}
SLOT_KNN: Group = {
    "nb_knn": Option(20, "Number of neighbours.", positive_int),
    "temperature": Option(0.07, "Temperature of the vote.", positive_number),
}
SLOT_PROBES: Group = {
    "probe": Option(False, "Also train linear probes on the chosen slots: 1 + --draws probes for each of --numbers."),
    "epochs": Option(30, "Epochs of the probes.", positive_int),
    "lr": Option(
        [0.01, 0.1, 1.0], "Learning rates for a batch of 256 images; the --choosing_images select one.", positive_number
    ),
    "use_cuda": USE_CUDA,
}


def slot_study_parser() -> Parser:
    """The options of `dino-sparo slots study`, in data-flow order."""
    return evaluation_parser({"slots": SLOT_RANKING, "k-NN": SLOT_KNN, "linear probes": SLOT_PROBES})


DRAWN_IMAGES: Group = {
    "data_path": Option(
        None,
        "An image, a folder, or any data that training takes; by default the images of --atlas, else a built-in scene.",
        spellings=("image_path",),
    ),
    **EVALUATION_LIMITS,
    "img_size": Option(
        None,
        "Size of the image in pixels: one number for the short side (several images are cropped to the central "
        "square), or height and width. By default twice the training size, for finer maps.",
        positive_int,
        nargs="+",
        spellings=("image_size",),
    ),
    "num_images": Option(8, "Number of images taken from a folder, evenly spread.", positive_int),
}
PICTURES: Group = {
    "output_dir": Option(".", "Where the files are written."),
    "overwrite": OUTPUT["overwrite"],
    "threshold": Option(
        None,
        "Also draw masks.png: the fewest patches that contain this share of a map's mass, e.g. 0.6.",
        share_above_0,
    ),
    "save_each": Option(False, "Also write one PNG per map."),
    "figure_format": FIGURE_FORMAT,
    **SHOW_CHANNELS,
    "max_maps": Option(None, "Number of maps in a grid, most concentrated first; by default all maps.", positive_int),
    "compare": Option(None, "Another checkpoint, drawn below this one in compare.png."),
}
ATLAS: Group = {
    "atlas": Option(
        None,
        "Images to search for those that activate each slot most: a folder, or any data that --data_path takes, "
        "such as scenes. Writes atlas.png, atlas.html and atlas.json.",
    ),
    "atlas_images": Option(8, "Images per slot.", positive_int),
    "atlas_max_images": Option(2000, "Largest number of images to search, a random subset.", positive_int),
}


def map_parser(groups: dict[str, Group], encoder: Group | None = None) -> Parser:
    """The options of an evaluation of attention maps, in data-flow order; `encoder` adds to those of the checkpoint."""
    checkpoint = {"encoder": CHECKPOINT | (encoder or {}), "foreign weights": FOREIGN_WEIGHTS}
    return Parser({**checkpoint, **groups, "device and processes": DEVICE}, defaults={"num_workers": 4})


def attention_parser() -> Parser:
    """The options of `visualize_attention.py`."""
    groups = {"images": DRAWN_IMAGES, "pictures": PICTURES, "slot atlas": ATLAS}
    return map_parser(groups, {"image_encoder": IMAGE_ENCODER})


MASKED_IMAGES: Group = {
    "data_path": Option(
        "scenes",
        "scenes; a folder in VOC's layout; a folder with images/ and masks/; or a folder of images, with --masks.",
    ),
    "masks": Option(
        None,
        "For a folder of images: a folder of PNG masks with the images' stems (0: background, every other "
        "value: an object), or COCO's annotations (.json).",
    ),
    "num_images": Option(500, "Number of images: a random subset, the same in every run.", positive_int),
    **EVALUATION_LIMITS,
    "img_size": Option(
        None,
        "Side of the central square in pixels; by default twice the training size, for finer maps.",
        positive_int,
    ),
}
MEASURES: Group = {
    "share": Option(0.6, "Share of a map's mass that is kept for the Jaccard index, as in DINO.", share_above_0),
    "maps": Option(
        None,
        "Number of maps to score, as a mean over 5 random subsets per image; by default all maps. To compare "
        "encoders with different numbers of maps, give the smallest number for all of them.",
        positive_int,
    ),
    "match": Option(
        "", "Another checkpoint, for example with another seed, whose slots are matched to the slots of this one."
    ),
    "seed": Option(0, "Random seed of controls, subsets and intervals."),
    **OUTPUT,
}


def slot_score_parser() -> Parser:
    """The options of `objects/command.py`."""
    return map_parser({"images and masks": MASKED_IMAGES, "measures": MEASURES})


def info_parser() -> Parser:
    """The options of `dino_sparo.evaluation.info`."""
    path = Option(
        None, "A file or folder that dino-sparo wrote, or a checkpoint of another package.", is_positional=True
    )
    return Parser({"file": {"path": path}})

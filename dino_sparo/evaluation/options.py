"""The options of the commands that evaluate, draw and export an encoder; no torch here, so that `--help` is fast."""

import argparse

from dino_sparo.runtime.choices import EXPORT_FORMATS, PRECISIONS
from dino_sparo.runtime.cli import (
    Parser,
    add_checkpoint_options,
    add_device_options,
    add_download_option,
    add_feature_options,
    add_foreign_weights_options,
    add_max_value_option,
    add_source_options,
    add_storage_option,
    bool_flag,
    positive_int,
)

KNN_BLOCKS = 1  # whose class tokens k-NN reads by default


def evaluation_parser() -> Parser:
    """The options of every evaluation: what to evaluate, on which images, and where the result goes."""
    parser = Parser()
    group = parser.add_argument_group("encoder: what is evaluated")
    add_checkpoint_options(group)
    group.add_argument(
        "--readout", default=None, help="Read-out of an untrained encoder without a checkpoint; by default sparo."
    )
    group.add_argument(
        "--seed", type=int, default=0, help="Seed of untrained weights, probes, crops and random choices."
    )
    group = parser.add_argument_group("images")
    group.add_argument(
        "--data_path",
        default="",
        help="Required: a folder with train/ and val/, a table with a column of splits, a torchvision set "
        "(cifar10:DIR), or scenes.",
    )
    add_download_option(group)
    group.add_argument(
        "--img_size",
        type=positive_int,
        default=None,
        help="Side of the view in pixels, cut from the image resized to 256/224 of it; by default the size of the "
        "encoder's position grid.",
    )
    group.add_argument(
        "--fast_views",
        action="store_true",
        help="Resize with torch instead of Pillow, about twice as fast; most pixels are equal or a level "
        "apart, those of hard edges in tall images by more, so do not use it for numbers that you report.",
    )
    group.add_argument("--batch_size_per_gpu", type=int, default=128, help="Images per process and step.")
    add_source_options(parser)
    group = parser.add_argument_group("computation and result")
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="Precision of the encoder; take fp32 for numbers that you report. tf32 is fp32 with rounded factors of "
        "matrix products on GPUs, also of k-NN's and the probes'.",
    )
    group.add_argument(
        "--output_dir", default=None, help="Where the result is written; by default beside the checkpoint."
    )
    add_foreign_weights_options(parser)
    return parser


def add_slots_option(group: argparse._ArgumentGroup) -> None:
    """`--slots`."""
    group.add_argument(
        "--slots",
        default=None,
        help="Evaluate some of the encoder's slots: their numbers, as in 0,3,7, or a file of dino-sparo slot-study or "
        "select. The result file gets the ending _slots.",
    )


def knn_parser() -> Parser:
    """The options of `eval_knn.py`, in data-flow order."""
    parser = evaluation_parser()
    group = parser.add_argument_group("k-NN")
    add_slots_option(group)
    group.add_argument(
        "--n_last_blocks",
        type=int,
        default=KNN_BLOCKS,
        help="Layers whose class tokens are concatenated, as by eval_linear.py; 1: the encoding alone. More are a "
        "control: is a wide encoding better because it is wide?",
    )
    group.add_argument(
        "--nb_knn", type=int, nargs="+", default=[10, 20, 100, 200], help="Numbers of neighbours; 20 is usually best."
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.07,
        help="Temperature of the vote: a neighbour's weight is exp(cosine / temperature).",
    )
    add_feature_options(group)
    add_device_options(parser)
    return parser


def linear_parser() -> Parser:
    """The options of `eval_linear.py`, in data-flow order."""
    parser = evaluation_parser()
    group = parser.add_argument_group("features of the probe")
    add_slots_option(group)
    group.add_argument(
        "--n_last_blocks",
        type=int,
        default=4,
        help="Layers whose class tokens are concatenated; with sparo and gap the last one is the encoding. 4 suits a "
        "ViT-S, 1 a ViT-B.",
    )
    group.add_argument(
        "--avgpool_patchtokens",
        type=bool_flag,
        default=False,
        help="Also concatenate the mean of the patch tokens; false suits a ViT-S, true a ViT-B.",
    )
    group = parser.add_argument_group("training of the probes")
    group.add_argument("--epochs", type=int, default=100, help="Epochs, over which the learning rate falls to 0.")
    group.add_argument(
        "--lr",
        type=float,
        nargs="+",
        default=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
        help="Learning rates for a batch of 256 images, scaled with the batch; one probe each. The best one depends on "
        "the checkpoint.",
    )
    group.add_argument(
        "--fast",
        action="store_true",
        help="Encode every image once, without crops and flips, and train on that: minutes instead of hours, usually a "
        "little less accurate. Every process keeps the features of all images, on its GPU or with --use_cuda false in "
        "the host's memory: 27 GB for ImageNet with the defaults of ViT-S and SPARO.",
    )
    group.add_argument("--val_freq", type=int, default=1, help="Epochs between two validations.")
    group.add_argument(
        "--num_labels",
        type=int,
        default=None,
        help="Expected number of classes; the command ends if the data have another.",
    )
    group.add_argument(
        "--evaluate",
        action="store_true",
        help="Only test the probes of linear.pth in --output_dir on the validation images; a linear head of "
        "facebookresearch/dino under that name is read, too.",
    )
    add_storage_option(group)
    add_device_options(parser)
    return parser


def slot_study_parser() -> Parser:
    """The options of `dino-sparo slot-study`, in data-flow order."""
    parser = evaluation_parser()
    group = parser.add_argument_group("slots")
    group.add_argument(
        "--choosing_images",
        type=int,
        default=10_000,
        help="Training images that rank the slots, classified by the others; at most a fifth of them.",
    )
    group.add_argument(
        "--numbers",
        type=int,
        nargs="+",
        default=None,
        help="Numbers of slots to keep; by default powers of two. All slots are always among them.",
    )
    group.add_argument(
        "--keep",
        type=int,
        default=None,
        help="Slots of the selection that the result file holds; by default as many as classify the choosing images "
        "best.",
    )
    group.add_argument("--draws", type=int, default=5, help="Random orders of the slots, for comparison.")
    group = parser.add_argument_group("k-NN")
    group.add_argument("--nb_knn", type=int, default=20, help="Number of neighbours.")
    group.add_argument("--temperature", type=float, default=0.07, help="Temperature of the vote.")
    group = parser.add_argument_group("linear probes")
    group.add_argument(
        "--probe",
        action="store_true",
        help="Also train linear probes on the slots kept: (1 + draws) x numbers of them.",
    )
    group.add_argument("--epochs", type=int, default=30, help="Epochs of the probes.")
    group.add_argument(
        "--lr",
        type=float,
        nargs="+",
        default=[0.01, 0.1, 1.0],
        help="Learning rates for a batch of 256 images; the choosing images pick one.",
    )
    add_storage_option(group)
    add_device_options(parser)
    return parser


def attention_parser() -> Parser:
    """The options of `visualize_attention.py`, in data-flow order."""
    parser = Parser()
    group = parser.add_argument_group("encoder")
    add_checkpoint_options(group)
    add_foreign_weights_options(parser)
    group = parser.add_argument_group("images")
    group.add_argument(
        "--image_path", default=None, help="An image, a folder, or whatever --data_path takes; else a built-in scene."
    )
    add_max_value_option(group)
    group.add_argument(
        "--image_size",
        type=positive_int,
        nargs="+",
        default=None,
        help="Size that the encoder sees, pixels: one number for the short side (of several images the central square "
        "is seen), or height and width. By default twice the size of training: more patches show finer maps.",
    )
    group.add_argument("--max_images", type=int, default=8, help="Number of images taken from a folder, evenly spread.")
    group = parser.add_argument_group("pictures")
    group.add_argument("--output_dir", default=".", help="Where the files are written.")
    group.add_argument(
        "--threshold",
        type=float,
        default=None,
        help="Also draw masks.png: the fewest patches that hold this share of a map's mass, e.g. 0.6.",
    )
    group.add_argument("--save_each", action="store_true", help="Also write one PNG per map.")
    group.add_argument(
        "--figure_format", choices=("png", "pdf", "svg"), default="png", help="File format of figures with words."
    )
    group.add_argument(
        "--max_maps", type=int, default=None, help="Maps in a grid, most peaked first; by default all of an image."
    )
    group.add_argument("--compare", default=None, help="Another checkpoint, drawn below this one in compare.png.")
    group = parser.add_argument_group("slot atlas")
    group.add_argument(
        "--atlas",
        default=None,
        help="Images in which to search for each slot's strongest responses: a folder, or what --data_path takes, e.g. "
        "scenes. Writes atlas.png, atlas.html and atlas.json.",
    )
    group.add_argument("--atlas_images", type=int, default=8, help="Images per slot.")
    group.add_argument(
        "--atlas_max_images",
        type=int,
        default=2000,
        help="Most images to search; of more, a random subset.",
    )
    add_device_options(parser, num_workers=4)
    return parser


def slot_score_parser() -> Parser:
    """The options of `objects/command.py`, in data-flow order."""
    parser = Parser()
    group = parser.add_argument_group("encoder")
    add_checkpoint_options(group)
    add_foreign_weights_options(parser)
    group = parser.add_argument_group("images and masks")
    group.add_argument(
        "--data_path",
        default="scenes",
        help="scenes; a folder in VOC's layout; a folder with images/ and masks/; or a folder of images, with --masks.",
    )
    group.add_argument(
        "--masks",
        default=None,
        help="For a folder of images: the folder of masks, PNGs of the images' stems (0 background, every other number "
        "an object), or COCO's annotations (.json).",
    )
    group.add_argument(
        "--num_images", type=int, default=500, help="Number of images, a random subset that is always the same."
    )
    add_source_options(parser, columns=())
    group.add_argument(
        "--image_size",
        type=positive_int,
        default=None,
        help="Side of the central square that the encoder sees, pixels. By default twice the size of training: more "
        "patches show finer maps.",
    )
    group = parser.add_argument_group("measures")
    group.add_argument(
        "--share", type=float, default=0.6, help="Share of a map's mass that is kept for the Jaccard index, as in DINO."
    )
    group.add_argument(
        "--maps",
        type=int,
        default=None,
        help="Number of maps scored together, as a mean over 5 random subsets of each image. To compare encoders with "
        "different numbers of maps, give the smallest of these numbers to all. By default all maps.",
    )
    group.add_argument(
        "--match", default="", help="Another checkpoint, of another seed for example, whose slots are matched to these."
    )
    group.add_argument("--seed", type=int, default=0, help="Random seed of controls, subsets and intervals.")
    group.add_argument(
        "--output_dir", default=None, help="Where result and plots are written; by default beside the checkpoint."
    )
    add_device_options(parser, num_workers=4)
    return parser


def export_parser() -> Parser:
    """The options of `dino_sparo.weights.export`."""
    parser = Parser()
    parser.add_argument("checkpoint", help="Ours, the reference's, or raw ViT weights.")
    parser.add_argument("out", help="Where to: a path without suffix; for huggingface a folder.")
    parser.add_argument("--checkpoint_key", default="teacher", help="Network in the checkpoint: teacher or student.")
    parser.add_argument(
        "--format",
        choices=EXPORT_FORMATS,
        default="safetensors",
        help="safetensors, huggingface and onnx hold any read-out; timm holds vanilla encoders (cls). Of a CLIP "
        "safetensors holds both towers, so do open_clip (cls) and sparo_clip (sparo, linear, cls).",
    )
    parser.add_argument(
        "--img_size",
        type=positive_int,
        default=None,
        help="Side of the images in pixels, if not that of training; onnx files take no other.",
    )
    add_foreign_weights_options(parser)
    return parser


def push_parser() -> Parser:
    """The options of `dino-sparo push`."""
    parser = Parser()
    parser.add_argument("checkpoint", help="Ours, the reference's, or an export.")
    parser.add_argument("repository", help="USER/NAME on the Hugging Face hub; created if it does not exist.")
    parser.add_argument("--checkpoint_key", default="teacher", help="Network in the checkpoint: teacher or student.")
    parser.add_argument("--private", action="store_true", help="Create a private repository.")
    return parser

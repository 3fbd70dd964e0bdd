"""The options that the trainings of all image-text objectives share, in the order of the data flow.

Parsing is pure: it opens no file, touches no device, asks no network.
"""

import argparse
from collections.abc import Iterable

from dino_sparo.image_text.choices import CROP_SCALE
from dino_sparo.image_text.recipes import Recipes
from dino_sparo.runtime.choices import ARCHITECTURES
from dino_sparo.runtime.cli import add_training_data_options, bool_flag
from dino_sparo.training.options import add_compute_options, add_run_options, check_ranges, check_whole_patches

POSITIVE_OPTIONS = (
    *("epoch_pairs", "epochs", "max_steps", "batch_size", "grad_accum_steps", "patch_size", "img_size"),
    *("keep_checkpoints", "eps"),
)
NON_NEGATIVE_OPTIONS = (
    *("warmup_steps", "saveckp_freq", "saveckp_minutes", "zero_shot_freq", "num_workers"),
    *("clip_grad", "lr", "min_lr", "weight_decay"),
)


def add_preset_option(parser: argparse.ArgumentParser, recipes: Recipes) -> None:
    """`--preset`."""
    group = parser.add_argument_group("recipe")
    group.add_argument(
        "--preset",
        default=None,
        help=f"Values for those options below that are not given, one of {', '.join(recipes.presets)}.",
    )


def add_pair_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Where the pairs are, how they are read and cropped; returns the group, for what an objective adds."""
    group = parser.add_argument_group("pairs of images and captions")
    group.add_argument(
        "--data_path",
        default=None,
        help="The pairs: tar shards in webdataset's form ('shard-{000..099}.tar', a.tar::b.tar, a folder of "
        "tars), a table (.csv, .tsv, .jsonl), COCO's annotations (.json), the built-in scenes (scenes:NUMBER:SIZE), or "
        "labelled images (class folders, cifar10:DIR), whose captions are made from class names.",
    )
    _add_shard_options(group)
    add_pair_key_options(group)
    group.add_argument(
        "--caption_templates",
        nargs="+",
        default=None,
        help="How captions are made from class names: sentences with {}, template lists or files, as --templates of "
        "dino-sparo zero-shot. Default for labelled images: auto.",
    )
    _add_validation_options(group)
    add_training_data_options(group, "samples without readable image or without caption")
    group.add_argument(
        "--crop_scale",
        type=float,
        nargs=2,
        default=CROP_SCALE,
        help="Share of the image's area in a crop; a caption is about all of the image.",
    )
    group.add_argument(
        "--exact_crops",
        action="store_true",
        help="Resize crops by Pillow, whose pixels are those of OpenCLIP's pipeline. By default torch resizes them, "
        "which takes less of a loading process' time; at most one pixel in fifty is then off, by one level of 255.",
    )
    return group


def _add_shard_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--shards",
        choices=["indexed", "streamed"],
        default="indexed",
        help="How tar shards are read. indexed: any pair by its number, so that an epoch sees each pair once and a "
        "resumed run is exact. streamed: from end to end by webdataset, shards drawn at random with replacement; for "
        "remote shards (https://..., 'pipe:COMMAND') and hundreds of millions of pairs; needs --epoch_pairs.",
    )
    group.add_argument(
        "--epoch_pairs", type=int, default=None, help="Pairs that make an epoch of --shards streamed, over all ranks."
    )
    group.add_argument(
        "--shard_weights",
        type=float,
        nargs="+",
        default=None,
        help="How often --shards streamed draws a shard of each source of --data_path (sources are joined by ::); by "
        "default every shard is as likely.",
    )


def _add_validation_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--val_path",
        default=None,
        help="Pairs of any of these kinds to validate on after every epoch: loss and retrieval both ways, in log.txt.",
    )
    group.add_argument(
        "--val_share",
        type=float,
        default=0.0,
        help="Share of the pairs to hold out for that instead, at most 5000 pairs; 0: none.",
    )


def add_pair_key_options(group: argparse._ArgumentGroup) -> None:
    """Where a table, annotations or shards have their images and captions."""
    group.add_argument("--image_key", default=None, help="Column of the images' paths in a table; else found by name.")
    group.add_argument(
        "--caption_key",
        default=None,
        help="Column of the captions in a table, else found by name; for shards the key of the .json members that "
        "holds the caption, else the .txt members are the captions.",
    )
    group.add_argument(
        "--image_folder",
        default=None,
        help="Folder of the paths in a table or in annotations; by default the folder of that file.",
    )


def add_image_options(parser: argparse.ArgumentParser, recipes: Recipes) -> argparse._ArgumentGroup:
    """The image encoder, and what both encoders start from.

    Args:
        parser: to add to.
        recipes: whose defaults the help names.

    Returns:
        The group, for what an objective adds.
    """
    group = parser.add_argument_group("image encoder: images -> tokens")
    recipes.add_option(group, "arch", str, f"Architecture, one of {', '.join(sorted(ARCHITECTURES))}.")
    recipes.add_option(group, "patch_size", int, "Side of a patch.")
    recipes.add_option(group, "img_size", int, "Side of a crop in pixels.")
    group.add_argument(
        "--pre_norm",
        type=bool_flag,
        default=True,
        help="CLIP's vision transformer; false takes DINO's, which --init_from a DINO or timm ViT needs.",
    )
    group.add_argument(
        "--quick_gelu",
        type=bool_flag,
        default=False,
        help="OpenAI's activation in both encoders, which starting from OpenAI's weights needs, and from those whose "
        "OpenCLIP name ends in -quickgelu.",
    )
    group.add_argument(
        "--init_from",
        default=None,
        help="Start the image encoder from the weights in this file: a checkpoint of DINO, a DINO or timm ViT, or the "
        "image tower of a CLIP, of the same width and patch size. A read-out of the same sizes is taken, too; all else "
        "starts at random. A resumed run takes its own weights.",
    )
    group.add_argument(
        "--init_clip",
        default=None,
        help="Start both encoders from the CLIP in this file, ours, OpenCLIP's or sparo-clip's, as far as it has the "
        "same parts; --init_from beside it gives the image encoder.",
    )
    return group


def add_text_options(parser: argparse.ArgumentParser, recipes: Recipes) -> argparse._ArgumentGroup:
    """The text encoder; arguments and result as for the image encoder."""
    group = parser.add_argument_group("text encoder: captions -> tokens")
    for name, text in (
        ("text_width", "Width of the tokens."),
        ("text_heads", "Attention heads of a block; they are usually 64 wide."),
        ("text_layers", "Blocks, the one that sparo replaces included."),
        ("context_length", "Longest caption in tokens, start and end included; longer ones are cut off and counted."),
    ):
        recipes.add_option(group, name, int, text)
    return group


def add_optimization_options(parser: argparse.ArgumentParser, recipes: Recipes) -> argparse._ArgumentGroup:
    """Length of the run, batch, learning rate, precision; arguments and result as for the image encoder."""
    group = parser.add_argument_group("optimisation")
    recipes.add_option(group, "epochs", int, "Epochs of the run, which the schedule spans.")
    group.add_argument(
        "--max_steps", type=int, default=None, help="Stop after this many steps in all, for trials; the schedule stays."
    )
    recipes.add_option(
        group, "batch_size", int, "Pairs per step, over all processes; every image is compared with all captions."
    )
    group.add_argument(
        "--grad_accum_steps",
        type=int,
        default=1,
        help="Parts in which a process computes its share of the batch, one after the other; gradients are the same, "
        "memory is that of one part, and everything is encoded twice.",
    )
    for name, text in (
        ("lr", "Learning rate after the warm-up."),
        ("weight_decay", "Weight decay of matrices."),
        ("beta1", "AdamW's decay of the mean gradient."),
        ("beta2", "AdamW's decay of the mean squared gradient."),
        ("eps", "AdamW's guard against division by zero."),
    ):
        recipes.add_option(group, name, float, text)
    group.add_argument("--min_lr", type=float, default=0.0, help="Learning rate at the end.")
    recipes.add_option(
        group,
        "warmup_steps",
        int,
        "Steps of linear warm-up of the learning rate; if the run is shorter than that, a tenth of it.",
    )
    group.add_argument(
        "--clip_grad", type=float, default=0.0, help="Largest norm of all gradients together; 0 for no limit."
    )
    add_compute_options(
        group, "both encoders", precision=None, describe=lambda text: recipes.with_default(text, "precision")
    )
    return group


def add_pair_run_options(parser: argparse.ArgumentParser) -> None:
    """Saving, and what is evaluated during training."""
    group = add_run_options(parser, saveckp_freq=0)
    group.add_argument(
        "--zero_shot_freq",
        type=int,
        default=0,
        help="Classify a few thousand labelled images zero-shot every so many epochs, and keep the best checkpoint; 0: "
        "never.",
    )
    group.add_argument(
        "--zero_shot_path",
        default=None,
        help="Labelled images for --zero_shot_freq. Default: the validation split of --data_path if there is one, else "
        "--data_path.",
    )


def check_pair_options(
    args: argparse.Namespace, positive: Iterable[str] = (), non_negative: Iterable[str] = ()
) -> None:
    """Refuse numbers that cannot be.

    Args:
        args: parsed options.
        positive: options beside `POSITIVE_OPTIONS`.
        non_negative: options beside `NON_NEGATIVE_OPTIONS`.

    Raises:
        ValueError: names the option and what would fit.
    """
    check_ranges(args, (*POSITIVE_OPTIONS, *positive), (*NON_NEGATIVE_OPTIONS, *non_negative), ("max_corrupt",))
    if (args.shards == "streamed") != (args.epoch_pairs is not None):
        raise ValueError(
            f"--shards {args.shards} with --epoch_pairs {args.epoch_pairs}: a stream has no length, so streamed needs "
            "the number of pairs to call an epoch, and indexed takes none"
        )
    if args.shard_weights is not None and args.shards != "streamed":
        raise ValueError("--shard_weights is for --shards streamed alone")
    if args.shards == "streamed" and args.caption_templates is not None:
        raise ValueError("--caption_templates with --shards streamed: a stream has written captions alone")
    if args.shards == "streamed" and args.val_share:
        raise ValueError("--val_share with --shards streamed: a stream cannot be split; give --val_path")
    if args.shards == "streamed" and args.zero_shot_freq and not args.zero_shot_path:
        raise ValueError("--zero_shot_freq with --shards streamed: give labelled images with --zero_shot_path")
    if not 0 <= args.val_share < 1 or (args.val_share and args.val_path):
        raise ValueError(
            f"--val_share {args.val_share} with --val_path {args.val_path}: give a share from 0 to below 1, or a path"
        )
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give a number from 0 to below 1")
    check_whole_patches(args, "img_size")

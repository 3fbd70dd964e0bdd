"""Options shared by the commands, one group per stage, and their output.

Parsing is pure: it opens no file, touches no device, asks no network. It imports no torch either, so that `--help` and
mistakes are answered at once.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dino_sparo.runtime.choices import (
    ARCHITECTURES,
    DINO_READOUTS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    KEY_DIM,
    MAX_IMAGE_MB,
    MAX_IMAGE_MPIX,
    MAX_VALUE,
    MIN_CORRUPT,
    NUM_SLOTS,
    SLOT_DIM,
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints every option's default after its help, no `(default: None)`, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default == "":
            return action.help
        return super()._get_help_string(action)


def printable(words: str, keep: str = "") -> str:
    """Words with escape sequences for control characters, bytes that are no UTF-8, and the like.

    File names may hold them. On a terminal they could move the cursor, in a log they could look like another line.

    Args:
        words: any text.
        keep: characters that stay as they are, such as line breaks.
    """
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in words
    )


def say(text: str) -> None:
    """Write a result to the standard output, with escaped control characters. A closed pipe is no error."""
    try:
        sys.stdout.write(printable(text, keep="\n\t") + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would try once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """Options of a command, spelled in full; help shows the defaults, and a mistake is answered in one line."""

    def __init__(self, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(prog, description=description, formatter_class=HelpFormatter, allow_abbrev=False)
        self.raises_errors = False

    def parse_keywords(self, keywords: Mapping[str, Any]) -> argparse.Namespace:
        """Parse option names with their values, as a call from Python or a configuration file gives them.

        Raises:
            ValueError: one line, without the name of the command: an unknown option with the nearest ones, a value of
                another type, a value that is not among the choices.
        """
        self.raises_errors = True
        try:
            return self.parse_args(self.words(keywords))
        finally:
            self.raises_errors = False

    def words(self, keywords: Mapping[str, Any]) -> list[str]:
        """Option names with their values -> the command line that says the same; None: the option is left out.

        Raises:
            ValueError: an option takes one value, and several are given.
        """
        actions = {action.dest: action for action in self._actions}
        words, positional = [], []
        for name, value in keywords.items():
            name = name.replace("-", "_")
            action = actions.get(name)
            takes_several = action is not None and action.nargs not in (None, "?", 0)
            if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not takes_several):
                self.error(f"argument --{name}: expected one value, not {value}")
            if value is None or value == []:
                continue
            if isinstance(value, (list, tuple)):
                words += [f"--{name}", *map(str, value)]
            elif action is not None and not action.option_strings:
                positional.append(str(value))
            elif action is not None and action.nargs == 0:
                words += [f"--{name}"] if bool_flag(str(value)) else []
            else:
                words.append(f"--{name}={value}")
        return positional + words

    def error(self, message: str) -> NoReturn:
        """End with exit status 2 and one line that names the nearest options; `parse_keywords` raises it instead."""
        words = message.partition("unrecognized arguments: ")[2].split(" ")
        unknown = [word.partition("=")[0] for word in words if word.startswith("--")]
        near = list(dict.fromkeys(option for word in unknown for option in self._nearest(word)))
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        if self.raises_errors:
            raise ValueError(message + hint)
        self.exit(2, f"{self.prog}: {message}{hint}; --help lists the options\n")

    def _nearest(self, word: str) -> list[str]:
        """The options that begin with a word, else the one that resembles it most."""
        known = self._option_string_actions
        return [option for option in known if option.startswith(word)] or difflib.get_close_matches(word, known, n=1)


def positive_int(text: str) -> int:
    """The type of an option that takes a whole number from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def bool_flag(text: str) -> bool:
    """`true`, `on`, `1` or `false`, `off`, `0`, in any case, as the reference's options take them."""
    values = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def positive_number(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_architecture_options(parser: argparse.ArgumentParser) -> None:
    """How the encoder is built, for training."""
    group = parser.add_argument_group("encoder: images -> tokens -> slots")
    group.add_argument(
        "--arch",
        default="vit_small",
        help=f"Architecture of the backbone, one of {', '.join(sorted(ARCHITECTURES))}. vit_micro is for laptops.",
    )
    group.add_argument(
        "--patch_size",
        type=int,
        default=16,
        help="Side of a patch in pixels. Smaller patches are more accurate and cost more; 4 suits images of 32 pixels.",
    )
    group.add_argument(
        "--readout",
        default="sparo",
        help=f"How tokens become the encoding, one of {', '.join(sorted(DINO_READOUTS))}, or another name of "
        "dino_sparo/models/readouts.py: sparo replaces the last block by slots, cls is vanilla DINO's class token, "
        "gap averages all tokens.",
    )
    add_slot_options(group, NUM_SLOTS, SLOT_DIM, KEY_DIM)
    group.add_argument(
        "--pre_norm",
        type=bool_flag,
        default=False,
        help="CLIP's vision transformer instead of DINO's, which --init_from a CLIP needs.",
    )
    group.add_argument(
        "--quick_gelu",
        type=bool_flag,
        default=False,
        help="OpenAI's activation, which --init_from OpenAI's CLIP needs.",
    )
    group.add_argument(
        "--drop_path_rate", type=float, default=0.1, help="Stochastic depth of the student; 0 for short runs."
    )
    group.add_argument(
        "--init_from",
        default=None,
        help="Start the encoder from the weights in this file: a checkpoint, a DINO or timm ViT, or the image tower of "
        "a CLIP (ours, OpenCLIP's or sparo-clip's), of the same width and patch size. A read-out of the same sizes is "
        "taken, too; another one, and the head, start at random. A resumed run takes its own weights.",
    )


def add_slot_options(
    group: argparse._ArgumentGroup,
    num_slots: int | None,
    slot_dim: int | None,
    key_dim: int | None,
    describe: Callable[[str, str], str] = lambda text, option: text,
) -> None:
    """Sizes of a read-out with slots.

    Args:
        group: gets the options.
        num_slots: default.
        slot_dim: likewise.
        key_dim: likewise.
        describe: (help, option) -> the help of an option with such a default.
    """
    for name, default, text in (
        ("sparo_slots", num_slots, "Number of slots L."),
        ("sparo_slot_dim", slot_dim, "Width of a slot V; the encoding has L*V numbers."),
        ("sparo_key_dim", key_dim, "Width of the attention's keys and queries."),
    ):
        group.add_argument(f"--{name}", type=int, default=default, help=describe(text, name))
    group.add_argument(
        "--sparo_group_size",
        type=int,
        default=1,
        help="Slots that share one key projection; 2 or 4 save parameters when there are many slots.",
    )


def add_download_option(group: argparse._ArgumentGroup) -> None:
    """`--download`."""
    group.add_argument("--download", action="store_true", help="Download a torchvision set that is not on disk.")


def add_checkpoint_options(group: argparse._ArgumentGroup) -> None:
    """Which encoder of which checkpoint."""
    group.add_argument("--pretrained_weights", default="", help="Checkpoint, ours or the reference's.")
    group.add_argument(
        "--checkpoint_key", default="teacher", help="Network in the checkpoint: teacher (usually better) or student."
    )
    group.add_argument(
        "--untrained",
        action="store_true",
        help="Random weights instead of the checkpoint's, to see what training brings; built as the checkpoint says, "
        "or without a checkpoint as options like --arch and --patch_size say.",
    )


def add_feature_options(group: argparse._ArgumentGroup) -> None:
    """Where features are kept, and whether they are computed."""
    group.add_argument("--dump_features", default=None, help="Folder to write features and labels to.")
    group.add_argument(
        "--load_features", default=None, help="Folder to read them from; then neither weights nor images are needed."
    )
    add_storage_option(group)


def add_storage_option(group: argparse._ArgumentGroup) -> None:
    """`--use_cuda`."""
    group.add_argument(
        "--use_cuda",
        type=bool_flag,
        default=True,
        help="Keep features on the GPU, where there is one; false if they do not fit.",
    )


def add_source_options(parser: argparse.ArgumentParser, columns: Sequence[str] = ("path", "label", "split")) -> None:
    """How the files of --data_path are read.

    Args:
        parser: gets the options.
        columns: of a table, which can be named.
    """
    group = parser.add_argument_group("files of images")
    for name, holds in (("path", "paths"), ("label", "labels"), ("split", "splits")):
        if name in columns:
            group.add_argument(
                f"--{name}_column", default=None, help=f"Column of the {holds} in a table, if it has no usual name."
            )
    group.add_argument(
        "--max_image_mb",
        type=float,
        default=MAX_IMAGE_MB,
        help="Largest image file, 10^6 bytes; larger ones count as unreadable.",
    )
    group.add_argument(
        "--max_image_mpix",
        type=float,
        default=MAX_IMAGE_MPIX,
        help="Largest image, 10^6 pixels; larger ones count as unreadable. Decoding takes up to 8 bytes per pixel in "
        "each process that loads images.",
    )
    add_max_value_option(group)


def add_max_value_option(group: argparse._ArgumentGroup) -> None:
    """`--max_value`."""
    group.add_argument(
        "--max_value",
        type=int,
        default=MAX_VALUE,
        help="Value of 16-bit grayscale images that becomes white; 4095 for images of 12 bits, as in medicine.",
    )


def add_training_data_options(group: argparse._ArgumentGroup, unreadable: str) -> None:
    """Which of the data of --data_path are trained on, and how many may be `unreadable`, in words."""
    group.add_argument(
        "--split",
        default=None,
        help="Part of --data_path to train on: the name of a subfolder, list, table or shards in it, or a word in a "
        "table's column of splits; all for everything. Left out: train wherever there is such a part, else everything.",
    )
    add_download_option(group)
    group.add_argument(
        "--max_corrupt",
        type=float,
        default=0.01,
        help=f"Share of {unreadable} above which the run stops; {MIN_CORRUPT} are always allowed, except with 0.",
    )


def add_normalization_options(
    parser: argparse.ArgumentParser,
    mean: tuple[float, float, float] = IMAGENET_MEAN,
    std: tuple[float, float, float] = IMAGENET_STD,
) -> None:
    """Mean and standard deviation of the images; the arguments are the defaults."""
    group = parser.add_argument_group("normalisation")
    group.add_argument("--norm_mean", type=float, nargs=3, default=mean, help="Mean per channel, of pixels in [0, 1].")
    group.add_argument("--norm_std", type=float, nargs=3, default=std, help="Standard deviation per channel, likewise.")


def add_device_options(parser: argparse.ArgumentParser, num_workers: int = 10) -> None:
    """Where to compute, and how processes find each other."""
    group = parser.add_argument_group("device and processes")
    group.add_argument(
        "--device", default="auto", help="auto (cuda where there is one, else cpu), cpu, cuda or cuda:N."
    )
    group.add_argument(
        "--num_workers", type=int, default=num_workers, help="Processes that load images, per GPU; about one per core."
    )
    group.add_argument(
        "--dist_url",
        default="env://",
        help="Where several processes meet; not needed under torchrun and Slurm.",
    )
    group.add_argument(
        "--dist_timeout_min",
        type=positive_number,
        default=10.0,
        help="Minutes that a process waits for another one, or for images, before the run ends. While one process "
        "works for all others, as when it saves, they wait six times as long.",
    )
    group.add_argument(
        "--local_rank",
        "--local-rank",
        type=int,
        default=0,
        help="Ignored. Older launchers set it; the rank comes from the environment.",
    )


def add_foreign_weights_options(parser: argparse.ArgumentParser) -> None:
    """Overrides for weights that do not say how their model was built."""
    group = parser.add_argument_group("foreign weights")
    group.add_argument(
        "--arch",
        default=None,
        help=f"Architecture, one of {', '.join(sorted(ARCHITECTURES))}; needed only if the shapes of foreign "
        "weights do not show it.",
    )
    group.add_argument(
        "--patch_size",
        type=int,
        default=None,
        help="Side of a patch in pixels; weights show it, so it is only for --untrained without weights.",
    )
    group.add_argument(
        "--quick_gelu",
        type=bool_flag,
        default=False,
        help="true if the weights are a CLIP's image tower trained with OpenAI's activation; needed only if no "
        "open_clip_config.json lies beside them.",
    )

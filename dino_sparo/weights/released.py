"""Names of the weights that facebookresearch/dino released -> their files, downloaded once into torch's hub folder.

    dino-sparo knn --pretrained_weights dino_vits16 --data_path imagenet
    torch.hub.load("path/to/clone", "dino_vits16", source="local")

The reference publishes no hashes, so a download is checked by its size, and on loading by the names and shapes of all
weights. Addresses: the reference's hubconf.py, utils.py and eval_image_retrieval.py, commit 7c446df.
"""

import argparse
import logging
import os
import shutil
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import torch
from tqdm import tqdm

from dino_sparo.models.architectures import TIMM
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import written_beside

logger = logging.getLogger(__name__)

ADDRESS = "https://dl.fbaipublicfiles.com/dino/"
TIMEOUT_S = 30  # without an answer, or without a further byte
# Endings of names of weights that one script of the reference takes instead: `eval_image_retrieval.py` those trained on
# Google Landmarks v2, `visualize_attention.py` those of a longer training.
LANDMARKS, LONGER = "_landmarks", "_300ep"


@dataclass(frozen=True)
class Release:
    """Weights that were released together.

    Attributes:
        arch: architecture, as `EncoderConfig.arch`.
        patch_size: P, or the stride of the last feature map, in pixels.
        stem: common part of the names of the files.
        has_classifier: a linear classifier of ImageNet was released too, which `eval_linear.py --evaluate` reads.
    """

    arch: str
    patch_size: int
    stem: str
    has_classifier: bool = True


RELEASES: dict[str, Release] = {
    "dino_vits16": Release("vit_small", 16, "deitsmall16"),
    "dino_vits8": Release("vit_small", 8, "deitsmall8"),
    "dino_vitb16": Release("vit_base", 16, "vitbase16"),
    "dino_vitb8": Release("vit_base", 8, "vitbase8"),
    "dino_resnet50": Release("timm/resnet50", 32, "resnet50"),
    "dino_xcit_small_12_p16": Release("timm/xcit_small_12_p16_224", 16, "xcit_small_12_p16"),
    "dino_xcit_small_12_p8": Release("timm/xcit_small_12_p8_224", 8, "xcit_small_12_p8"),
    "dino_xcit_medium_24_p16": Release("timm/xcit_medium_24_p16_224", 16, "xcit_medium_24_p16"),
    "dino_xcit_medium_24_p8": Release("timm/xcit_medium_24_p8_224", 8, "xcit_medium_24_p8"),
    f"dino_vits16{LANDMARKS}": Release("vit_small", 16, "vitsmall16_googlelandmark", has_classifier=False),
    f"dino_vits8{LONGER}": Release("vit_small", 8, "deitsmall8_300ep", has_classifier=False),
}


def release_of(path: str | Path) -> Release | None:
    """The release that a name stands for; None for any other name, and where a file or folder has this name."""
    return None if os.path.lexists(path) else RELEASES.get(str(path))


def take_released_weights(
    args: argparse.Namespace, preferred: str = "", arch: str = "vit_small", patch_size: int = 16
) -> None:
    """Without --pretrained_weights and --untrained, use the weights that the reference's script uses.

    Args:
        args: parsed options.
        preferred: ending of the names that come first, `LANDMARKS` or `LONGER`.
        arch: the script's default architecture.
        patch_size: the script's default for a vision transformer of ours; a model of timm has only one.

    Raises:
        UserError: the reference released no weights for this architecture and patch size.
    """
    if args.pretrained_weights or args.untrained or vars(args).get("load_features"):
        return
    arch = args.arch or arch
    size = args.patch_size or (None if arch.startswith(TIMM) else patch_size)
    fitting = [
        name for name, release in RELEASES.items() if release.arch == arch and size in (None, release.patch_size)
    ]
    if not fitting:
        released = ", ".join(sorted({f"{release.arch}/{release.patch_size}" for release in RELEASES.values()}))
        raise UserError(
            f"--pretrained_weights is empty, and DINO's authors released no weights of {arch}/{size}, only of "
            f"{released}; give the path of a checkpoint, or --untrained"
        )
    # A sort keeps the order of equals, and weights for all purposes come first in the table.
    args.pretrained_weights = min(fitting, key=lambda name: not (preferred and name.endswith(preferred)))
    logger.info("no --pretrained_weights: %s, released by DINO's authors", args.pretrained_weights)


def released_file(name: str, part: str = "pretrain") -> Path:
    """The file of a release in torch's hub folder; it is downloaded unless it is there.

    Args:
        name: a key of `RELEASES`.
        part: `pretrain` for the backbone, `linearweights` for the classifier of ImageNet.

    Raises:
        UserError: the file can neither be found nor downloaded.
    """
    stem = f"dino_{RELEASES[name].stem}"
    path = Path(torch.hub.get_dir()) / "checkpoints" / f"{stem}_{part}.pth"
    if path.is_file():
        return path
    address = f"{ADDRESS}{stem}_pretrain/{path.name}"
    with written_beside(path) as part_of_file:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with urlopen(address, timeout=TIMEOUT_S) as answer, part_of_file.open("wb") as file:
                total = int(answer.headers.get("Content-Length") or 0)
                with tqdm.wrapattr(answer, "read", total=total or None, desc=path.name, leave=False) as body:
                    shutil.copyfileobj(body, file)
                if total and file.tell() != total:
                    raise HTTPException(f"{file.tell()} of {total} bytes arrived")
        except (OSError, HTTPException) as error:  # an error of the address is an OSError
            raise UserError(
                f"{address} could not be downloaded ({error}); where there is a network, download the file, and put it "
                f"at {path}"
            ) from error
    return path

"""Encoder and images -> rankings -> mean average precision, for image retrieval and copy detection.

    python eval_image_retrieval.py --data_path revisited --dataset roxford5k --imsize 512 --multiscale true
    python eval_copy_detection.py --data_path copydays --whitening_path whitening --distractors_path distractors

Protocols as in facebookresearch/dino, commit 7c446df: equal features give equal numbers.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from dino_sparo.data.crops import normalized_tensor
from dino_sparo.data.labels import require_labels
from dino_sparo.data.sources import ImageSource
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.result import ResultFile
from dino_sparo.evaluation.retrieval import datasets
from dino_sparo.evaluation.retrieval.measures import KAPPAS, mean_precision, rank_database
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.released import LANDMARKS, take_released_weights
from dino_sparo.weights.results import Score

SCALES = (1.0, 0.5**0.5, 0.5)  # of an image, for --multiscale
GEM_POWER = 4  # exponent of the generalised mean over patches
MIN_VALUE = 1e-6  # of a patch token before the power
MIN_EIGENVALUE = 1e-5  # as a share of the largest eigenvalue
SHOWN = 20  # first ranks that count in copy detection, as in the reference


def evaluate_retrieval(args: argparse.Namespace) -> dict[str, Any]:
    """Search for images of the same building or class; write and print the mean average precision."""
    take_released_weights(args, LANDMARKS)
    task = EncoderTask.start(args)
    file = task.open_result(f"image_retrieval_{args.dataset}")
    if args.dataset in datasets.REVISITED:
        task.encoder.eval()  # opened before the images: wrong weights are refused first
        found = datasets.open_revisited(args.data_path, args.dataset, task.limits)
    else:
        source = task.open_split("val")
        require_labels(source)
        found = datasets.labelled_set(source)
    encode = partial(encode_scales, task.encoder, scales=SCALES if args.multiscale else SCALES[:1])
    view = partial(thumbnail_view, side=args.imsize, task=task)
    database = features(task, found.database, view, encode)
    queries = database if found.queries is None else features(task, found.queries, view, encode)
    return write_precision(file, task, "image retrieval", found, rank_database(queries, database))


def detect_copies(args: argparse.Namespace) -> dict[str, Any]:
    """Search for the originals of strongly changed copies; write and print the mean average precision."""
    take_released_weights(args, arch="vit_base", patch_size=8)
    task = EncoderTask.start(args)
    file = task.open_result("copy_detection")
    encoder = task.encoder
    found = datasets.open_copydays(args.data_path, task.limits)
    view = partial(square_view, side=args.imsize, task=task)
    encode = partial(copy_features, encoder, parts=tuple(args.parts))
    database, queries = (features(task, source, view, encode) for source in (found.database, found.queries) if source)
    if args.distractors_path:
        database = torch.cat((database, features(task, folder(args.distractors_path, task), view, encode)))
    if args.whitening_path:
        whiten = whitening(features(task, folder(args.whitening_path, task), view, encode))
        database, queries = whiten(database), whiten(queries)
    rankings = rank_database(F.normalize(queries), F.normalize(database))
    return write_precision(file, task, "copy detection", found, rankings, SHOWN)


def folder(path: str, task: EncoderTask) -> ImageSource:
    """All images of a folder."""
    if not Path(path).is_dir():
        raise UserError(f"{path} is not a folder; give a folder of images, or leave the option out")
    return datasets.file_source(path, Path(path), datasets.image_files(Path(path)), task.limits)


def features(
    task: EncoderTask, source: ImageSource, view: Callable[..., list[Tensor]], encode: Callable[[Tensor], Tensor]
) -> Float[Tensor, "images F"]:
    """Features of all images of a source, on every process; UserError if an image is unreadable."""
    found = task.features(source, encode, gather=True, view=view)
    if found.num_corrupt:
        raise UserError(f"{found.num_corrupt} images of {source.name} cannot be read, so ranks cannot be compared")
    return found.features


def thumbnail_view(image: Image.Image, rng: np.random.Generator, *, side: int, task: EncoderTask) -> list[Tensor]:
    """A list of the whole image, with a longer side of at most `side` pixels."""
    image = image.copy()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return [normalized_tensor(image, task.subject.mean, task.subject.std)]


def square_view(image: Image.Image, rng: np.random.Generator, *, side: int, task: EncoderTask) -> list[Tensor]:
    """A list of the whole image, resized to a square of `side` pixels."""
    square = TF.resize(image, [side, side], InterpolationMode.BICUBIC)
    return [normalized_tensor(square, task.subject.mean, task.subject.std)]


def encode_scales(
    encoder: Encoder, images: Float[Tensor, "B C H W"], scales: tuple[float, ...] = SCALES
) -> Float[Tensor, "B F"]:
    """Mean of the encodings of an image at several scales, scaled to length one."""
    sizes = (
        images if scale == 1 else F.interpolate(images, scale_factor=scale, mode="bilinear", align_corners=False)
        for scale in scales
    )
    return F.normalize(torch.stack([encoder(resized) for resized in sizes]).mean(dim=0))


def copy_features(
    encoder: Encoder, images: Float[Tensor, "B C H W"], parts: tuple[str, ...] = ("encoding", "gem")
) -> Float[Tensor, "B F"]:
    """Concatenated encoding and generalised mean (mean_n max(h_n, 1e-6)^4)^(1/4) of the patches h_n."""
    found = {"encoding": encoder(images)} if "encoding" in parts else {}
    if "gem" in parts:
        tokens = encoder.backbone.intermediate_tokens(images, 1)[0][:, encoder.backbone.num_prefix_tokens :]
        found["gem"] = tokens.float().clamp(min=MIN_VALUE).pow(GEM_POWER).mean(dim=1).pow(1 / GEM_POWER)
    return torch.cat([found[part] for part in parts], dim=1)


def whitening(learned: Float[Tensor, "images F"]) -> Callable[[Tensor], Tensor]:
    """The map y = E^-1/2 V (x - m): m is the mean, V and E are eigenvectors and eigenvalues of X^T X / images.

    As in the reference, X is not centered. Smaller eigenvalues are raised to `MIN_EIGENVALUE` of the largest.
    """
    rows = learned.double()
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    values = values.clamp(min=float(values.max()) * MIN_EIGENVALUE)
    matrix = (vectors / values.sqrt()).flip(1)
    return lambda found: ((found.double() - rows.mean(dim=0)) @ matrix).float()


def write_precision(
    file: ResultFile,
    task: EncoderTask,
    name: str,
    found: datasets.SearchSet,
    rankings: Int[Tensor, "queries images"],
    most: int | None = None,
) -> dict[str, Any]:
    """Write the precision of each protocol and print a table; `most` is the number of first ranks that count."""
    args = task.args
    scores = {name: mean_precision(rankings[:, :most], answers) for name, answers in found.protocols.items()}
    result = {
        "evaluation": name,
        "results": scores,
        "images": {"data_path": args.data_path, "num_database": rankings.shape[1]},
        "view": {"side": args.imsize, "mean": list(task.subject.mean), "std": list(task.subject.std)},
    }
    table = [("", "mAP %", *(f"P@{kappa} %" for kappa in KAPPAS), "queries")]
    for protocol, score in scores.items():
        *shares, num_queries = score.values()
        table.append((protocol, *(f"{share:.2f}" for share in shares), str(num_queries)))
    headline = [Score(f"mAP {protocol}", score["map"]) for protocol, score in scores.items()]
    return file.write(result, text_table(table, num_words=1), headline=headline)

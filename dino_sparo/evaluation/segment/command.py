"""Images with masks -> a segmentation head, its mIoU, a picture of its errors, and masks of new images.

    dino-sparo segment --pretrained_weights demo --data_path scenes:200:64 --slot_masks --output_dir segmentation
    dino-sparo segment --pretrained_weights checkpoint.pth --data_path photos --masks masks --images photos
    dino-sparo segment --pretrained_weights checkpoint.pth --data_path VOC2012 --head conv
    dino-sparo segment --pretrained_weights checkpoint.pth --head segment_checkpoint_photos.pth --images new_photos

For layouts, protocol and measures see `docs/segment.md`.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn

from dino_sparo.data.sources import CorruptImageError, ImageSource, open_source
from dino_sparo.data.sources.folders import ALL
from dino_sparo.draw.figure import describe_model, file_names
from dino_sparo.draw.sheet import require_matplotlib, save_sheet
from dino_sparo.draw.tables import text_table
from dino_sparo.evaluation.segment import head as heads
from dino_sparo.evaluation.segment.data import MaskSource, open_splits
from dino_sparo.evaluation.segment.pictures import SegmentedImage, save_mask, segmentation_figure
from dino_sparo.evaluation.segment.tokens import TokenCache, WindowedView, map_encoder, token_encoder
from dino_sparo.evaluation.task import EncoderTask
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import refuse_existing
from dino_sparo.runtime.launch import on_first_process
from dino_sparo.runtime.lock import create_output_dir
from dino_sparo.runtime.logs import progress
from dino_sparo.weights.results import Score

logger = logging.getLogger(__name__)

UNRECORDED = ("images", "pictures", "cache_gb")  # options that change no number of a result


@dataclass(frozen=True)
class Segmenter:
    """An encoder with a head: image -> label of each pixel.

    Attributes:
        head: on the encoder's device, in eval mode.
        view: the windows of the image.
        encode: windows -> patch features.
        classes: class number -> name, in the order of the head's outputs.
    """

    head: nn.Module
    view: WindowedView
    encode: Callable[[Tensor], Tensor]
    classes: dict[int, str]

    @torch.no_grad()
    def __call__(self, image: Image.Image) -> Int[np.ndarray, "H W"]:
        """Labels 0, 1, ... in the order of `classes`, at the size of the image."""
        tokens = self.view.features(image, self.encode)
        return heads.largest(self.head(tokens[None].to(self.view.device))[0], image.height, image.width)


@on_first_process
def segment(args: argparse.Namespace) -> dict[str, Any]:
    """Train a head or read one, measure it, predict masks of new images.

    Returns:
        The content of the result file; {} on processes other than the first.
    """
    task = EncoderTask.start_alone(args)
    require_matplotlib()
    is_saved = args.head not in heads.HEADS
    if not args.data_path and not (is_saved and args.images):
        raise UserError("--data_path is empty; give images with masks, or a trained --head and --images")
    config = task.subject.encoder.config
    if args.slot_masks and config.kind.shows == "average":
        raise UserError(f"--slot_masks: readout={config.readout!r} averages all tokens and has no maps; leave it out")
    file = task.open_result("segment_evaluate" if is_saved else "segment", unrecorded=UNRECORDED)
    folder = file.path.with_name(f"{file.path.stem}_masks")
    refuse_existing([folder] if args.images else [], args.overwrite)
    # All images are opened before the head is trained, so that a wrong path ends the command at once.
    splits = open_splits(args, task.limits) if args.data_path else ()
    new_images = open_source(args.images, ALL, limits=task.limits) if args.images else None
    segmenter, head_record = trained_head(task, splits, file.path.with_suffix(".pth"))
    seen = {"exif": args.exif, "crop": segmenter.view.img_size, "window": segmenter.view.window}
    result: dict[str, Any] = {"evaluation": "segmentation", "head": head_record, "view": seen}
    written = [] if is_saved else [file.path.with_suffix(".pth")]
    if splits:
        shown, measured = measure(task, segmenter, *splits)
        counts = {f"num_{name}": len(source.indices) for name, source in zip(("train", "val"), splits, strict=True)}
        images = {"data_path": args.data_path, **counts}
        result |= {**measured, "class_numbers": list(segmenter.classes), "images": images}
        written.append(draw(task, shown, segmenter, file.path.with_suffix("")))
    if new_images is not None:
        written += predict_masks(task, segmenter, new_images, folder)
    headline = [Score("mIoU", result["miou"])] if splits else []
    headline += [Score("mIoU of slots", result["slot_masks"]["miou"])] if "slot_masks" in result else []
    content = file.write(result, table(result) if splits else None, headline=headline)
    say("\n".join(map(str, written)))
    return content


def trained_head(task: EncoderTask, splits: Sequence[MaskSource], path: Path) -> tuple[Segmenter, dict[str, Any]]:
    """The head in the file --head, or a head trained on the first split and written to `path`; and its record."""
    args, subject = task.args, task.subject
    config = subject.encoder.config
    identity = {name: value for name, value in task.weights.items() if name != "pretrained_weights"}
    head: nn.Sequential | None = None
    record: dict[str, Any] = {}
    if args.head not in heads.HEADS:
        head, record = heads.load_head(args.head, identity)
    img_size = args.img_size or record.get("img_size") or 2 * config.img_size
    window = args.window or record.get("window") or img_size
    view = WindowedView(img_size, window, config.patch_size, subject.mean, subject.std, args.batch_size, task.device)
    blocks = record.get("n_last_blocks") or args.n_last_blocks or 1
    encode = token_encoder(task, blocks)
    if head is None:
        samples = TokenCache(splits[0], view, encode, args.cache_gb * 1e9)
        options = {name: getattr(args, name) for name in ("steps", "batch_size", "lr", "seed")}
        head = heads.train_head(args.head, len(splits[0].classes), samples, task.device, **options)
        training = {"optimizer": f"AdamW, weight decay {heads.WEIGHT_DECAY:g}, warm-up, linear decay to 0", **options}
        record = {
            "kind": args.head,
            "dim": head[0].num_features,
            "classes": splits[0].classes,
            "img_size": img_size,
            "window": window,
            "n_last_blocks": blocks,
            "encoder": identity,
            "training": training,
        }
        heads.save_head(head, record, path)
    shown = {name: record[name] for name in ("kind", "dim", "n_last_blocks", "training")}
    return Segmenter(head.to(task.device), view, encode, record["classes"]), shown


def measure(
    task: EncoderTask, segmenter: Segmenter, train: MaskSource, val: MaskSource
) -> tuple[list[SegmentedImage], dict[str, Any]]:
    """The worst validation images, and the measures of the head, with --slot_masks also of the slots."""
    train, val = (replace(source, classes=segmenter.classes) for source in (train, val))
    names, slots = list(segmenter.classes.values()), None
    if task.args.slot_masks:
        slots = Segmenter(nn.Identity(), segmenter.view, map_encoder(task), {})
        class_of_slot = name_slots(slots, train)
    counts, slot_counts = (np.zeros((len(names), len(names)), dtype=np.int64) for _ in range(2))
    worst: list[SegmentedImage] = []
    for index in progress(val.indices, desc="measures"):
        image, labels = val.read(index)
        by_slots = slots(image) if slots else None
        item = SegmentedImage(val.images.location(index), image, segmenter(image), labels, by_slots)
        counts += (pairs := heads.count_pairs(item.predicted, labels, *counts.shape))
        if item.slots is not None:
            slot_counts += heads.count_pairs(class_of_slot[item.slots], labels, *counts.shape)
        if pairs.any():  # else all pixels are void
            worst.append(item._replace(miou=heads.class_scores(pairs, names)["miou"]))
            worst = sorted(worst, key=lambda item: item.miou or 0)[: task.args.pictures]
    if not worst:
        raise UserError(f"{val.images.name}: all pixels of the {len(val.indices)} validation masks are void")
    result = heads.class_scores(counts, names)
    if slots:
        by_class = heads.class_scores(slot_counts, names)
        result["slot_masks"] = {**by_class, "class_of_slot": [names[i] for i in class_of_slot]}
    return worst, result


def name_slots(slots: Segmenter, train: MaskSource) -> Int[np.ndarray, " slots"]:
    """The class of each slot, by the pixels of the training images; nothing is trained."""
    counts: Any = 0
    for index in progress(train.indices, desc="slots"):
        image, labels = train.read(index)
        maps = slots.view.features(image, slots.encode)
        numbers = heads.largest(maps, image.height, image.width)
        counts = counts + heads.count_pairs(numbers, labels, len(maps), len(train.classes))
    return heads.classes_of_slots(counts)


def predict_masks(task: EncoderTask, segmenter: Segmenter, source: ImageSource, folder: Path) -> list[Path]:
    """Write a PNG of class numbers for each readable new image, and a picture of the first images."""
    locations = [source.location(index) for index in range(len(source))]
    stems = [PurePath(location).stem for location in locations]
    # Other commands find a mask by the stem of its image.
    names = stems if len(set(stems)) == len(stems) else file_names(locations)
    create_output_dir(folder)
    numbers = list(segmenter.classes)
    shown: list[SegmentedImage] = []
    for index in progress(range(len(source)), desc="masks"):
        try:
            image = source.read(index)
        except CorruptImageError as error:
            logger.warning("left out %s", error)
            continue
        item = SegmentedImage(locations[index], image, segmenter(image))
        save_mask(item.predicted, numbers, folder / f"{names[index]}.png")
        shown += [item] * (len(shown) < task.args.pictures)
    return [folder, *([draw(task, shown, segmenter, folder)] if shown else [])]


def draw(task: EncoderTask, images: Sequence[SegmentedImage], segmenter: Segmenter, stem: Path) -> Path:
    """Write a sheet of segmented images; returns its path."""
    about = describe_model(task.weights, task.subject.encoder.config)
    title = "Segmentation: " + ("new images" if images[0].truth is None else "the worst validation images")
    path = stem.with_name(f"{stem.name}.png")
    save_sheet(segmentation_figure(images, segmenter.classes, title, about), path)
    return path


def table(result: dict[str, Any]) -> str:
    """Measures for the terminal, a line per class."""
    rows: list[list[Any]] = [["class", "IoU %", "accuracy %", "pixels %"]]
    rows += [[row["class"][:19], row["iou"], row["accuracy"], row["pixels"]] for row in result["classes"]]
    rows += [["mean IoU", result["miou"], "", ""], ["pixel accuracy", "", result["pixel_accuracy"], ""]]
    if slots := result.get("slot_masks"):
        values = ["slots: IoU %", *(row["iou"] for row in slots["classes"]), slots["miou"], ""]
        rows = [[*row, value] for row, value in zip(rows, values, strict=True)]
    cells = [
        ["-" if value is None else f"{value:.1f}" if isinstance(value, float) else value for value in row]
        for row in rows
    ]
    images = result["images"]
    counts = f"{images['num_train']} training images, {images['num_val']} validation images"
    return f"{text_table(cells, num_words=1)}\n{counts}"

"""Encoder and any images, labelled or not -> a folder of embeddings.

    dino-sparo embed --pretrained_weights runs/vits16/checkpoint.pth --data_path photographs --output_dir embeddings
    torchrun --nproc_per_node=8 -m dino_sparo embed --what encoding patches --dtype float16 --data_path shards \\
        --pretrained_weights runs/vits16/checkpoint.pth --output_dir embeddings

For the folder see `store.py`. The same command resumes a killed run; the result is bit-identical.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dino_sparo.data.dataset import ImageDataset
from dino_sparo.data.sources import ImageSource
from dino_sparo.data.sources.image_source import fingerprint_of, sizes_and_times
from dino_sparo.evaluation.embed import store
from dino_sparo.evaluation.embed.options import embed_parser
from dino_sparo.evaluation.embed.store import Embeddings, EmbeddingWriter
from dino_sparo.evaluation.features import encoded_batches
from dino_sparo.evaluation.task import EncoderTask, view_record
from dino_sparo.models.encoder import Encoder
from dino_sparo.runtime.cli import say
from dino_sparo.runtime.collectives import all_or_none, broadcast_object, on_rank_0
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import is_main, rank, world_size
from dino_sparo.runtime.lock import RunLock

CLASS_TOKEN = "cls"  # this kind of feature in --what


def embed_images(args: argparse.Namespace) -> dict[str, Any]:
    """Embed the images that the options name; returns the content of embedding.json."""
    if args.captions:
        raise UserError(f"--captions {args.captions} without --what captions; leave it out, or embed captions")
    task = EncoderTask.start(args)
    task.encoder.eval()  # opened before the images: wrong weights are refused first
    source = task.open_split(args.split)
    shapes = feature_shapes(task)
    writer = EmbeddingWriter(Path(args.output_dir), shapes, args.dtype, source, args.batch_size_per_gpu)
    record = _record(task, source, shapes)
    return write_embeddings(writer, record, args.overwrite, lambda: _write_chunks(task, writer))


def embed_as(like: Embeddings | None, images: str, folder: Path, **options: Any) -> Embeddings:
    """Embed all images at a path into a folder, read as those of `like` were; with further options of `embed`."""
    read = {} if like is None else store.options_of(like)
    options = {"data_path": images, "output_dir": str(folder), "split": "all", **read, **options}
    embed_images(embed_parser().parse_keywords(options))
    return store.load_embeddings(folder)


def write_embeddings(
    writer: EmbeddingWriter, record: dict[str, Any], overwrite: bool, write_chunks: Callable[[], None]
) -> dict[str, Any]:
    """Open the folder, write the missing chunks, finish; returns the content of embedding.json."""
    folder = writer.folder
    with RunLock(folder) as lock:
        with all_or_none(f"locking {folder}"):
            lock.acquire()
        on_rank_0(lambda: writer.open(record, overwrite), f"opening {folder}")
        if not broadcast_object((store.read_record(folder) or record).get("complete")):
            with all_or_none("embedding"):
                write_chunks()
            on_rank_0(lambda: writer.finish(record), f"finishing {folder}")
        result = store.read_record(folder) or record
    if is_main():
        split = getattr(writer.source, "chosen_split", None)
        images = writer.source.name + (f" (split {split!r}; --split all embeds all)" if split else "")
        counts = f"{result['num_images']:,} {writer.unit} of {images}, {result['num_unreadable']:,} unreadable"
        say(f"{counts}: {folder}")
    return result


def announce(writer: EmbeddingWriter) -> list[int]:
    """Print what will be written; returns the numbers of the chunks that this process writes."""
    remaining: list[int] = broadcast_object(writer.remaining())
    if is_main():
        sizes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in writer.shapes.items())
        size = f"{writer.num_bytes / 1e6:,.1f} MB on disk"
        say(f"{writer.num_images:,} {writer.unit} -> {sizes} in {writer.dtype}, {size}: {writer.folder}")
        if len(remaining) < writer.num_chunks:
            say(f"resuming: {writer.num_chunks - len(remaining)} of {writer.num_chunks} chunks are done")
    return remaining[rank() :: world_size()]


def feature_shapes(task: EncoderTask) -> dict[str, tuple[int, ...]]:
    """The shape of each kind of feature in --what for one image."""
    what, config = task.args.what, task.encoder.config
    if CLASS_TOKEN in what and not task.encoder.backbone.has_class_token:
        raise UserError(f"--what cls: {config.arch} has no class token; take encoding, patches or mean")
    if "slots" in what and not config.kind.has_slots:
        raise UserError(f"--what slots: readout {config.readout!r} has no slots; take encoding, cls, patches or mean")
    with torch.inference_mode():
        return {name: tuple(value.shape[1:]) for name, value in features_of(task.encoder, what, task.blank).items()}


def features_of(encoder: Encoder, what: Sequence[str], images: Float[Tensor, "B C H W"]) -> dict[str, Tensor]:
    """Several kinds of features in one pass.

    Returns:
        encoding (B, L*V), slots (B, L, V), cls (B, D), patches (B, N - prefix, D), mean (B, D); those asked for.
    """
    tokens = encoder.backbone(images)
    patches = tokens[:, encoder.backbone.num_prefix_tokens :]
    slots = encoder.readout(tokens).slots
    features = {
        "encoding": slots.flatten(1),
        "slots": slots,
        CLASS_TOKEN: tokens[:, 0],
        "patches": patches,
        "mean": patches.mean(dim=1),
    }
    return {name: features[name] for name in what}


def _record(task: EncoderTask, source: ImageSource, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Record of the embeddings; a resumed run must have the same `settings`."""
    args = task.args
    settings = {
        "weights": task.subject.record.get("sha256"),
        "what": " ".join(args.what),
        **{name: getattr(args, name) for name in ("dtype", "precision", "fast_views", "batch_size_per_gpu")},
        "img_size": task.transform.img_size,
        "images": fingerprint_of(source) or source.name,
        "sizes_and_times": sizes_and_times(source) if is_main() else None,
        "labels": store.text_hash(store.labels_of(source)),
        "num_images": len(source),
        "limits": asdict(task.limits),
    }
    return {
        "settings": settings,
        **task.protocol(),
        "features": {name: list(shape) for name, shape in shapes.items()},
        "images": {
            "data_path": args.data_path,
            "split": args.split,
            "columns": [args.path_column, args.label_column, args.split_column],
            "classes": source.classes,
        },
        "view": view_record(task.transform, args.exif),
    }


def _write_chunks(task: EncoderTask, writer: EmbeddingWriter) -> None:
    """Embed this process' share of the unfinished chunks."""
    chunks = {chunk: writer.batches(chunk) for chunk in announce(writer)}
    batches = [batch for of_chunk in chunks.values() for batch in of_chunk]
    last_batches = {of_chunk[-1][0]: chunk for chunk, of_chunk in chunks.items()}
    source, loader = writer.source, task.loader(ImageDataset(writer.source, task.transform), batches)
    widths = [int(np.prod(shape)) for shape in writer.shapes.values()]

    def encode(images: Tensor) -> Tensor:  # all features of an image in one row
        features = features_of(task.encoder, list(writer.shapes), images)
        return torch.cat([value.flatten(1) for value in features.values()], dim=1)

    encoded = encoded_batches(
        task.encoder, loader, task.device, writer.batch_size, encode, task.dtype, f"embedding {source.name}"
    )
    unreadable = []
    for batch_indices, (features, batch, kept) in zip(batches, encoded, strict=True):
        rows = np.zeros((len(batch_indices), features.shape[1]), np.float32)
        rows[kept.numpy()] = features.float().cpu().numpy()
        for (name, shape), part in zip(writer.shapes.items(), np.split(rows, np.cumsum(widths)[:-1], 1), strict=True):
            writer.write(name, batch_indices[0], part.reshape(-1, *shape))
        reasons = dict(batch.corrupt)
        for place in np.setdiff1d(np.arange(len(batch_indices)), kept.numpy()).tolist():
            location = source.location(batch_indices[place])
            unreadable.append((batch_indices[place], location, reasons.get(location, "")))
        if batch_indices[0] in last_batches:
            writer.finish_chunk(last_batches[batch_indices[0]], unreadable)
            unreadable = []

"""A checkpoint of CLIP or OC-CLIP and captions -> a folder of embeddings, as `dino-sparo embed` writes it.

    dino-sparo embed --what captions --pretrained_weights runs/clip/checkpoint.pth --data_path data/coco/val2017 \\
        --captions data/coco/annotations/captions_val2017.json --output_dir caption_embeddings

captions.npy has one row per caption; the index has its image's path and its words. A CLIP's rows have length one, so
that the dot product with a normalised image feature is CLIP's score. OC-CLIP's rows are its text encoder's output for
the whole caption as one phrase; they have no counterpart among images.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dino_sparo.data.sources.image_source import Subset, fingerprint_of
from dino_sparo.evaluation.embed.command import announce, write_embeddings
from dino_sparo.evaluation.embed.store import EmbeddingWriter, labels_of, text_hash
from dino_sparo.image_text.evaluation.caption_sets import open_caption_set
from dino_sparo.image_text.evaluation.task import ModelTask
from dino_sparo.image_text.scorer import encode_batch
from dino_sparo.image_text.towers import LoadedModel
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.files import versions
from dino_sparo.runtime.logs import progress


def embed_captions(
    args: argparse.Namespace, open_encoder: Callable[[argparse.Namespace], LoadedModel]
) -> dict[str, Any]:
    """Embed the captions that the options name; returns the record that embedding.json holds.

    The model's `encode_text` takes token ids (B, context_length) and gives (B, F).

    Raises:
        ValueError: the checkpoint has no text encoder, or the options do not fit the captions or the folder.
    """
    if len(args.what) > 1:
        raise UserError(
            f"--what {' '.join(args.what)}: captions and images have different rows; embed them into two folders"
        )
    task = ModelTask.start(args, open_encoder)
    device, encoder = task.device, task.loaded
    encoder.model.to(device)
    data = open_caption_set(args.data_path, args.captions or "", args.split)

    def encode(captions: list[str]) -> Float[Tensor, "B F"]:
        ids = encoder.model.text.tokenize(captions).ids
        return encode_batch(encoder.model, ids, args.batch_size_per_gpu, device, task.dtype)

    shapes = {"captions": tuple(encode(data.captions[:1]).shape[1:])}
    images = Subset(data.images, data.image_of)
    writer = EmbeddingWriter(Path(args.output_dir), shapes, args.dtype, images, args.batch_size_per_gpu, data.captions)
    settings = {
        "weights": encoder.record["sha256"],
        "what": "captions",
        **{name: getattr(args, name) for name in ("dtype", "precision", "batch_size_per_gpu")},
        "num_captions": len(data.captions),
        "captions": text_hash(data.captions),
        "images": fingerprint_of(images),
        "labels": text_hash(labels_of(images)),
        "img_size": None,
    }
    record = {
        "settings": settings,
        "encoder": encoder.record,
        "features": {name: list(shape) for name, shape in shapes.items()},
        "images": {"data_path": args.data_path, "captions": args.captions, "split": args.split, "classes": None},
        "versions": versions(open_clip="open_clip_torch"),
    }

    def write_chunks() -> None:
        for chunk in progress(announce(writer), desc="embedding captions"):
            for batch in writer.batches(chunk):
                features = encode([data.captions[index] for index in batch])
                writer.write("captions", batch.start, features.cpu().numpy())
            writer.finish_chunk(chunk, [])

    return write_embeddings(writer, record, args.overwrite, write_chunks)

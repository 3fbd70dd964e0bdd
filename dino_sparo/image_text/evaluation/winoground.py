"""Two images and two captions of the same words -> how often each is given to its own: Winoground.

    dino-sparo winoground --pretrained_weights output/checkpoint.pth --data_path data/winoground

The data is read from disk as its authors publish it: `examples.jsonl`, one JSON object per line
with `image_0`, `image_1`, `caption_0`, `caption_1` and perhaps tags, and the folder `images`. Prints a table and writes
winoground.json, the numbers with all that they depend on. Source: Thrush et al., "Winoground: probing vision and
language models for visio-linguistic compositionality", section 3.2.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dino_sparo.image_text.choices import WINOGROUND_EXAMPLES
from dino_sparo.image_text.evaluation.encode import ClipEncoder
from dino_sparo.image_text.evaluation.image_files import encode_named_images
from dino_sparo.image_text.evaluation.protocol import (
    OpenModel,
    file_record,
    report,
)
from dino_sparo.image_text.evaluation.sugarcrepe import similarities
from dino_sparo.runtime.distributed import init_distributed
from dino_sparo.runtime.logs import setup_logging
from dino_sparo.sources.limits import parse_json

logger = logging.getLogger(__name__)

TAG = "collapsed_tag"  # Object, Relation or Both: what changes its place in the caption
SCORES = ("text", "image", "group")


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        images: file names of image 0 and image 1, with or without ending.
        captions: of image 0 and image 1.
        tag: what kind it is; may be empty.
    """

    images: tuple[str, str]
    captions: tuple[str, str]
    tag: str


@dataclass(frozen=True)
class WinogroundResult:
    """What `evaluate_winoground` finds.

    Attributes:
        examples: those whose images can be read.
        right: (examples, 3), whether the text, image and group scores count each.
        num_ties: examples in which a caption is exactly as near to the wrong image, or an image to the wrong caption.
        num_left_out: examples that lack an image or a caption.
        num_truncated: captions cut off because they are longer than the context.
    """

    examples: list[Example]
    right: Bool[Tensor, "examples 3"]
    num_ties: int
    num_left_out: int
    num_truncated: int


def read_examples(path: Path) -> list[Example]:
    """The examples of a file.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; give the folder with Winoground's {WINOGROUND_EXAMPLES} and its folder images as "
            f"--data_path"
        )
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            images, captions = ((row[f"{what}_0"], row[f"{what}_1"]) for what in ("image", "caption"))
            examples.append(Example(images, captions, str(row.get(TAG, ""))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number + 1} is not Winoground's: expected an object with image_0, image_1, caption_0 "
                f"and caption_1 ({error!r})"
            ) from error
    if not examples:
        raise ValueError(f"{path} is empty")
    return examples


def count_right(scores: Float[Tensor, "examples 2 2"]) -> tuple[Bool[Tensor, "examples 3"], int]:
    """Text, image and group score of every example.

        text   s(C0, I0) > s(C1, I0)  and  s(C1, I1) > s(C0, I1)     each image prefers its caption
        image  s(C0, I0) > s(C0, I1)  and  s(C1, I1) > s(C1, I0)     each caption prefers its image
        group  both

    Strictly greater: a model that cannot tell scores nothing. By chance 25, 25 and 16.7 % are right.

    Args:
        scores: (examples, 2, 2), [e, i, c] the similarity of image i and caption c of example e.

    Returns:
        (examples, 3), and the number of examples in which two of the compared scores are equal.
    """
    own = scores.diagonal(dim1=1, dim2=2)  # (examples, 2)
    wrong_caption = torch.stack((scores[:, 0, 1], scores[:, 1, 0]), dim=1)  # of image 0, of image 1
    wrong_image = wrong_caption.flip(1)  # of caption 0, of caption 1
    text, image = (own > wrong_caption).all(dim=1), (own > wrong_image).all(dim=1)
    is_tied = ((own == wrong_caption) | (own == wrong_image)).any(dim=1)
    return torch.stack((text, image, text & image), dim=1), int(is_tied.sum())


@torch.no_grad()
def evaluate_winoground(encoder: ClipEncoder, examples: Sequence[Example], image_folder: Path) -> WinogroundResult:
    """Examples in, scores out. Every process takes part and gets the result.

    Args:
        encoder: the model.
        examples: what to ask.
        image_folder: where the images lie.

    Raises:
        ValueError: more than 1 % of the images are missing or cannot be read; features that are not finite; no
            example is left.
    """
    names = list(dict.fromkeys(name for example in examples for name in example.images))
    images, row = encode_named_images(encoder, image_folder, names)
    kept = [
        example
        for example in examples
        if all(name in row for name in example.images) and all(text.strip() for text in example.captions)
    ]
    if len(kept) < len(examples):
        logger.warning("left out %d of %d examples without image or caption", len(examples) - len(kept), len(examples))
    if not kept:
        raise ValueError(f"none of {len(examples)} examples has both images and captions")
    texts = encoder.text_features([text for example in kept for text in example.captions])
    image_of = torch.tensor([[row[name] for name in example.images] for example in kept], device=encoder.device)
    text_of = torch.arange(2 * len(kept), device=encoder.device).unflatten(0, (-1, 2))
    pairs = [similarities(images, image_of[:, i], texts, text_of[:, c]) for i in (0, 1) for c in (0, 1)]
    scores = torch.stack(pairs, dim=1).unflatten(1, (2, 2))
    if not scores.isfinite().all():
        raise ValueError("the features are not finite; the model is broken or overflowed")
    right, num_ties = count_right(scores)
    return WinogroundResult(kept, right.cpu(), num_ties, len(examples) - len(kept), texts.num_truncated)


def evaluate_checkpoint(args: argparse.Namespace, open_model: OpenModel) -> dict[str, Any]:
    """Evaluate what the options say, write the result, show the table.

    Raises:
        ValueError: options, files or data that do not fit; the message says what would.
    """
    place = init_distributed(args.device, args.dist_url, args.dist_timeout_min)
    setup_logging()
    if not args.data_path:
        raise ValueError(f"--data_path is empty; give the folder with Winoground's {WINOGROUND_EXAMPLES}")
    path = Path(args.data_path) / WINOGROUND_EXAMPLES
    images = Path(args.images) if args.images else path.parent / "images"
    examples = read_examples(path)
    evaluated = open_model(args, place)
    found = evaluate_winoground(evaluated.encoder, examples, images)
    result = {
        "evaluation": "Winoground",
        **summary(found.right),
        "by_tag": {
            tag: summary(found.right[[example.tag == tag for example in found.examples]])
            for tag in sorted({example.tag for example in found.examples if example.tag})
        },
        "rule": "strictly greater cosines, in fp32",
        **evaluated.record,
        "examples": {
            **file_record(path),
            "images": str(images),
            "num_ties": found.num_ties,
            "num_left_out": found.num_left_out,
            "num_truncated_captions": found.num_truncated,
        },
    }
    return report(result, table(result), args, "winoground.json")


def summary(right: Bool[Tensor, "examples 3"]) -> dict[str, float]:
    """The three scores in percent, and the number of examples."""
    means = (100 * right.double().mean(dim=0)).tolist()
    return {**dict(zip(SCORES, means, strict=True)), "num_examples": len(right)}


def table(result: dict[str, Any]) -> str:
    """Scores for people."""
    head = f"{'':<10}" + "".join(f"  {name + ' %':>8}" for name in SCORES) + f"  {'examples':>8}"
    rows = {"all": result, **result["by_tag"]}
    lines = [
        f"{name:<10}" + "".join(f"  {row[score]:>8.2f}" for score in SCORES) + f"  {row['num_examples']:>8}"
        for name, row in rows.items()
    ]
    return "\n".join([head, *lines])

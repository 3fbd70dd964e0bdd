"""Published models of images and captions -> scorers: `compositional --model open_clip:NAME/TAG hf:NAME FOLDER`.

    open_clip:ViT-B-32/laion2b_s34b_b79k     a name and weights of open_clip; the weights may be a file
    open_clip:local-dir:FOLDER               a folder that open_clip or dino-sparo export wrote
    hf:google/siglip-base-patch16-224        a model of Hugging Face that transformers opens; or a folder of such files

Any model with one encoder per side fits: CLIP, SigLIP, ALIGN and others. SigLIP's captions have no end token, so token
ids keep their padding. A model of one's own is a function in OPENERS; docs/extending.md has an example.
"""

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor, nn

from dino_sparo.data.defaults import MAX_VALUE
from dino_sparo.evaluation.result import ResultFile, open_result, result_stem
from dino_sparo.image_text.evaluation.options import HUGGING_FACE, OPEN_CLIP
from dino_sparo.image_text.evaluation.task import ScorerTask
from dino_sparo.image_text.scorer import DotProductScorer, Scorer, computation_of
from dino_sparo.image_text.towers import Tokens
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import file_sha256, versions

# Captions and their number of tokens -> token ids (captions, tokens), padded.
Tokenize = Callable[[list[str], int], Int64[Tensor, "captions tokens"]]


def view_of(transform: Callable[[Image.Image], Tensor], image: Image.Image, rng: object = None) -> list[Tensor]:
    """The view of an RGB image by the transform of a published model; nothing is random."""
    return [transform(image)]


def tokens_of(tokenize: Tokenize, length: int, texts: list[str]) -> Tokens:
    """Token ids of captions, and which captions lost words: captions that have more tokens at twice the length."""
    ids, longer, empty = tokenize(texts, length), tokenize(texts, 2 * length), tokenize([""], length)
    words, all_words = (torch.isin(each, empty, invert=True).sum(dim=1) for each in (ids, longer))
    truncated = (words < all_words).nonzero().flatten().tolist()
    return Tokens(ids, len(truncated), int((all_words == 0).sum()), tuple(truncated))


def dot_product_scorer(
    model: nn.Module,
    tokenize: Tokenize,
    context_length: int,
    transform: Callable[[Image.Image], Float[Tensor, "C H W"]],
    args: argparse.Namespace,
    device: torch.device,
) -> DotProductScorer:
    """The scorer of a model with `encode_image` (images) and `encode_text` (token ids), features (B, M) of any length.

    Args:
        model: in eval mode.
        tokenize: captions and a number of tokens -> ids.
        context_length: tokens of a caption.
        transform: RGB image -> the model's input.
        args: options of the command; `pretrained_weights` is the model's name.
        device: where to compute.
    """
    name = args.pretrained_weights
    record = {
        "model": {"name": name, **weights_of(name)},
        "slots": None,
        "feature": {"name": "normalised feature", "precision": args.precision},
        # Without addresses of functions, so that the same command writes the same file.
        "view": re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(transform).split())),
        "versions": versions(open_clip="open_clip_torch", transformers="transformers"),
    }
    texts: dict[str, Any] = {"tokenize": partial(tokens_of, tokenize, context_length), "trim": lambda ids: ids}
    view = partial(view_of, transform)
    return DotProductScorer(model.eval().to(device), view, device, record=record, **texts, **computation_of(args))


def open_open_clip(name: str, args: argparse.Namespace, device: torch.device) -> Scorer:
    """A model of open_clip: NAME/TAG, or the location of its files (local-dir:, hf-hub:)."""
    require("open_clip", "models of open_clip")
    import open_clip
    from safetensors import SafetensorError

    model, _, tag = (name, "", "") if ":" in name else name.partition("/")
    if not tag and ":" not in name:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(model)) or "the path of a file"
        raise UserError(f"--model {OPEN_CLIP}:{name} names no weights; give {OPEN_CLIP}:{name}/TAG with one of {tags}")
    try:
        network, _, transform = open_clip.create_model_and_transforms(model, pretrained=tag or None)
        tokenizer = open_clip.get_tokenizer(model)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(model))
        known = f"; weights of {model}: {tags}" if tags else ""
        raise UserError(f"--model {OPEN_CLIP}:{name} cannot be opened: {error}{known}") from error
    tokenize = lambda texts, length: tokenizer(texts, context_length=length)  # noqa: E731
    return dot_product_scorer(network, tokenize, tokenizer.context_length, transform, args, device)


class HuggingFaceTowers(nn.Module):
    """A model of transformers with the methods that `DotProductScorer` calls; captions are ids and, if used, masks.

    Args:
        model: with `get_image_features` and `get_text_features`.
        has_mask: whether captions are (B, 2 tokens): ids, then the attention mask.
    """

    def __init__(self, model: nn.Module, has_mask: bool) -> None:
        super().__init__()
        self.model: Any = model
        self.has_mask = has_mask

    def encode_image(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B M"]:
        """Features of images."""
        features = self.model.get_image_features(pixel_values=images)
        return getattr(features, "pooler_output", features)  # a tensor before transformers 5

    def encode_text(self, token_ids: Int64[Tensor, "B N"]) -> Float[Tensor, "B M"]:
        """Features of captions."""
        ids, *mask = token_ids.chunk(2, dim=1) if self.has_mask else (token_ids,)
        features = self.model.get_text_features(input_ids=ids, **({"attention_mask": mask[0]} if mask else {}))
        return getattr(features, "pooler_output", features)


def _tokenize(tokenizer: Any, texts: list[str], length: int) -> Int64[Tensor, "captions tokens"]:
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return torch.cat([tokens[name] for name in ("input_ids", "attention_mask") if name in tokens], dim=1)


def _transform(processor: Any, image: Image.Image) -> Float[Tensor, "C H W"]:
    return processor(images=image, return_tensors="pt")["pixel_values"][0]


def open_hugging_face(name: str, args: argparse.Namespace, device: torch.device) -> Scorer:
    """A model that transformers opens, by its name on Hugging Face or a folder."""
    require("transformers", "models of Hugging Face")
    from safetensors import SafetensorError
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    model: Any
    try:
        model, loading = AutoModel.from_pretrained(name, output_loading_info=True)
        tokenizer, processor = (kind.from_pretrained(name) for kind in (AutoTokenizer, AutoImageProcessor))
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--model {name} cannot be opened by transformers: {reason:.300}") from error
    if not hasattr(model, "get_text_features"):
        raise UserError(f"--model {name} is a {type(model).__name__}, which has no encoders of images and captions")
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"--model {name} lacks weights of {type(model).__name__}, such as {missing[0]}; get all files")
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made by transformers if the files are missing
        raise UserError(f"--model {name} has a tokenizer without words; get all files, such as tokenizer.json")
    text = model.config.get_text_config()
    length = min(text.max_position_embeddings, tokenizer.model_max_length)
    towers = HuggingFaceTowers(model, "attention_mask" in tokenizer.model_input_names)
    tokenize, transform = partial(_tokenize, tokenizer), partial(_transform, processor)
    return dot_product_scorer(towers, tokenize, length, transform, args, device)


# Word before the colon of --model -> (the rest, options, device) -> scorer.
OPENERS: dict[str, Callable[[str, argparse.Namespace, torch.device], Scorer]] = {
    OPEN_CLIP: open_open_clip,
    HUGGING_FACE: open_hugging_face,
}


def is_published(model: str) -> bool:
    """Whether a model is opened by one of OPENERS, and is not a checkpoint."""
    return not Path(model).is_file() and (":" in model or Path(model).is_dir())


class PublishedTask(ScorerTask):
    """The task of a published model: a folder of Hugging Face's files, or WORD:NAME with a word of OPENERS."""

    @classmethod
    def of(cls, task: ScorerTask, model: str) -> "PublishedTask":
        """The task of a model in --model."""
        kind, _, name = (HUGGING_FACE, "", model) if Path(model).is_dir() else model.partition(":")
        if kind not in OPENERS:
            words = ", ".join(f"{word}:" for word in OPENERS)
            raise UserError(f"--model {model}: {kind}: is unknown; give one of {words}")
        args = argparse.Namespace(**{**vars(task.args), "pretrained_weights": model})
        return cls(args, task.device, lambda args, device: OPENERS[kind](name, args, device))

    @property
    def weights(self) -> Mapping[str, Any]:
        """The hashes of a folder's files, or the name."""
        return weights_of(self.args.pretrained_weights)

    def open_result(
        self, name: str, features: Mapping[str, Any] | None = None, unrecorded: Collection[str] = (), **options: Any
    ) -> ResultFile:
        """As for other models; the name of the model is in the name of the file."""
        model = self.args.pretrained_weights
        named = argparse.Namespace(**vars(self.args))
        named.pretrained_weights = model if Path(model).is_dir() else model.replace("/", "-")
        stem = result_stem(named, name, self.weights)
        return open_result(named, stem, self.weights, self.protocol, unrecorded, **options)

    @cached_property
    def max_value(self) -> int:
        """16-bit images are white at their largest value."""
        return MAX_VALUE


def weights_of(model: str) -> Mapping[str, Any]:
    """Identity of a published model in a result: the hashes of its files, or its name."""
    files = sorted(path for kind in ("*.safetensors", "*.bin", "*.pt") for path in Path(model).glob(kind))
    return {"files": {path.name: file_sha256(path) for path in files}} if Path(model).is_dir() else {"name": model}

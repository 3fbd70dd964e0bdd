"""Captions -> token ids -> tokens -> slots: CLIP's text encoder, with any read-out. Both towers: sizes, start weights.

The text encoder is the counterpart of `dino_sparo.models.encoder`. open_clip's tokenizer makes the ids. The end token
is the last id of the vocabulary, so the largest id of a caption is its end, as in CLIP; read-outs do not see the tokens
behind the end. spaCy, which parsers of captions and a benchmark use, is opened here too.

`weights/initialize.py` starts an image encoder alone.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from timm.layers import QuickGELU
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dino_sparo.models.architectures import KEY_DIM, NUM_SLOTS, SLOT_DIM
from dino_sparo.models.encoder import EncoderConfig
from dino_sparo.models.readout import ReadoutOutput
from dino_sparo.models.readouts import readout_kind
from dino_sparo.runtime.faults import MissingPackageError, UserError, require
from dino_sparo.weights.checkpoint import load_checkpoint, weights_sha256
from dino_sparo.weights.entries import clip_weights, image_text_entry, normalization_of
from dino_sparo.weights.file import CheckpointError
from dino_sparo.weights.initialize import check_same_blocks, initialize_from

logger = logging.getLogger(__name__)

CONTEXT_LENGTH = 77
VOCAB_SIZE = 49408
SPACY_MODEL = "en_core_web_sm"


@dataclass(frozen=True)
class TextConfig:
    """Sizes of a text encoder; every checkpoint stores them.

    Attributes:
        context_length: N, the longest caption in tokens, start and end token included.
        vocab_size: number of ids; the last id is the end token.
        width: D, of the tokens.
        heads: attention heads of a block.
        layers: blocks, including the block that a read-out may replace.
        readout: a key of `readouts.READOUTS`.
        num_slots: L, of a slotted read-out.
        slot_dim: V, of a slotted read-out.
        key_dim: A, of a slotted read-out.
        group_size: G, of `sparo`.

    Raises:
        ValueError: a size is out of range.
    """

    context_length: int = CONTEXT_LENGTH
    vocab_size: int = VOCAB_SIZE
    width: int = 512
    heads: int = 8
    layers: int = 12
    readout: str = "sparo"
    num_slots: int = NUM_SLOTS
    slot_dim: int = SLOT_DIM
    key_dim: int = KEY_DIM
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.context_length < 3:
            raise UserError(
                f"context_length={self.context_length} has no room for a start token, a word and an end token; give at "
                f"least 3, usually {CONTEXT_LENGTH}"
            )
        if self.heads < 1 or self.width < 1 or self.width % self.heads:
            raise UserError(f"text width={self.width} is not a multiple of heads={self.heads}; CLIP's are 64 wide")


class TextEncoder(nn.Module):
    """A causal pre-norm transformer over token ids, and a read-out.

        x_0 = E[ids] + pos
        x_i = x'_i + MLP(LN(x'_i)),  x'_i = x_{i-1} + causal MHSA(LN(x_{i-1}))
        tokens = LN(x_depth), or x_depth for a read-out that takes raw tokens

    LayerNorm eps 1e-5, MLP ratio 4, GELU. Initialisation is CLIP's: normal, std 0.02 for token and 0.01 for position
    embeddings, D^-1/2 for qkv, (2D)^-1/2 for the MLP's first layer, D^-1/2 (2 depth)^-1/2 for what is added to the
    residual stream; biases are 0 in attention and as `nn.Linear` draws them in the MLP. Source: Radford et al.,
    CLIP, section 2.4; OpenCLIP, `transformer.py`.

    Args:
        config: sizes.
        readout: tokens and mask -> `ReadoutOutput`.
        depth: number of blocks, if fewer than `config.layers`.
        quick_gelu: OpenAI's activation.
    """

    def __init__(
        self, config: TextConfig, readout: nn.Module, depth: int | None = None, quick_gelu: bool = False
    ) -> None:
        super().__init__()
        self.config, self.depth = config, config.layers if depth is None else depth
        self.grad_checkpointing = False
        self.token_embed = nn.Embedding(config.vocab_size, config.width)
        self.pos_embed = nn.Parameter(torch.empty(config.context_length, config.width))
        activation = QuickGELU if quick_gelu else nn.GELU
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, 4.0, qkv_bias=True, act_layer=activation, norm_layer=nn.LayerNorm)
            for _ in range(self.depth)
        )
        self.norm = nn.Identity() if readout_kind(config.readout).takes_raw_tokens else nn.LayerNorm(config.width)
        self.readout = readout
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.token_embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.01)
        width = self.config.width
        residual_std = width**-0.5 * (2 * self.depth) ** -0.5
        block: Any
        for block in self.blocks:
            nn.init.normal_(block.attn.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.attn.proj.weight, std=residual_std)
            nn.init.normal_(block.mlp.fc1.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(block.mlp.fc2.weight, std=residual_std)
            nn.init.zeros_(block.attn.qkv.bias)
            nn.init.zeros_(block.attn.proj.bias)

    def forward(self, token_ids: Int64[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
        """Token ids, at most as many as the context has, -> tokens after the final LayerNorm.

        A token has seen itself and those before it.
        """
        tokens = self.token_embed(token_ids) + self.pos_embed[: token_ids.shape[1]]
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, is_causal=True, use_reentrant=False)
            else:
                tokens = block(tokens, is_causal=True)
        return self.norm(tokens)

    def readout_output(self, token_ids: Int64[Tensor, "B N"]) -> ReadoutOutput:
        """Slots (B, L, V) and their attention (B, L, N), zero after the end token."""
        return self.readout(self(token_ids), end_token_mask(token_ids))

    def tokenize(self, texts: Sequence[str]) -> "Tokens":
        """Captions -> ids, at most as many as the context has."""
        return tokenize(texts, self.config.context_length)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the blocks' inputs for the backward pass; see `Backbone.set_grad_checkpointing`."""
        self.grad_checkpointing = enable


def end_token_mask(token_ids: Int64[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """True up to and including the end token, the first occurrence of the largest id of a caption."""
    return torch.arange(token_ids.shape[1], device=token_ids.device) <= token_ids.argmax(dim=-1, keepdim=True)


def without_padding(token_ids: Int64[Tensor, "B N"]) -> Int64[Tensor, "B _"]:
    """Token ids (B, N) without the columns that lie after the end, the largest id, of all captions."""
    return token_ids[:, : int(token_ids.argmax(dim=1).max()) + 1]


class Tokens(NamedTuple):
    """Tokenized captions.

    Attributes:
        ids: (B, N) int64: start token, words, end token, zeros.
        num_truncated: number of captions that were too long and lost their last words.
        num_empty: number of captions without words.
        truncated: indices of the captions that were too long.
    """

    ids: Int64[Tensor, "B N"]
    num_truncated: int
    num_empty: int
    truncated: tuple[int, ...] = ()


def tokenize(texts: Sequence[str], context_length: int = CONTEXT_LENGTH) -> Tokens:
    """Captions -> ids, with open_clip's tokenizer and its bundled vocabulary.

    Args:
        texts: the captions.
        context_length: N, at least 3; longer captions lose their last words, not their end token.

    Raises:
        ValueError: one string instead of a list.
    """
    if isinstance(texts, str):
        raise UserError(f"texts={texts!r} is one caption; give a list of captions")
    tokenizer = simple_tokenizer()
    ids = tokenizer(texts, context_length=context_length)
    end = tokenizer.eot_token_id
    full = (ids[:, -1] == end).nonzero().flatten().tolist()
    truncated = tuple(index for index in full if len(tokenizer.encode(texts[index])) + 2 > context_length)
    return Tokens(ids, len(truncated), int((ids[:, 1] == end).sum()), truncated)


@lru_cache(maxsize=1)
def simple_tokenizer() -> Any:
    """open_clip's `SimpleTokenizer`, read once per process."""
    require("open_clip", "captions")
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()


def spacy_record(purpose: str) -> dict[str, Any]:
    """Versions of spaCy and of its model, for a result file.

    Args:
        purpose: what needs them, in the plural, for the MissingPackageError.
    """
    require("spacy", purpose)
    import spacy

    if not spacy.util.is_package(SPACY_MODEL):
        raise MissingPackageError(
            f"{purpose} need spaCy's model {SPACY_MODEL}; install it with: python -m spacy download {SPACY_MODEL}"
        )
    return {"spacy": spacy.__version__, "model": f"{SPACY_MODEL} {spacy.util.get_package_version(SPACY_MODEL)}"}


@lru_cache(maxsize=1)
def _pipeline() -> Any:
    import spacy

    return spacy.load(SPACY_MODEL, exclude=["ner", "lemmatizer"])


def spacy_documents(texts: Iterable[str]) -> Iterator[Any]:
    """spaCy's document of every text, in batches; its tokens have `text`, `tag_`, `pos_`, `dep_` and `head`."""
    yield from _pipeline().pipe(texts)


# Both towers.

Loaded = TypeVar("Loaded", bound="LoadedModel")


def tower_configs(
    readouts: tuple[str, str],
    arch: str,
    patch_size: int,
    text_width: int = 512,
    text_heads: int = 8,
    text_layers: int = 12,
    context_length: int = CONTEXT_LENGTH,
    vocab_size: int = VOCAB_SIZE,
    pre_norm: bool = True,
    slots: Mapping[str, Any] = {},
    **image: Any,
) -> tuple[EncoderConfig, TextConfig]:
    """The configurations of both towers; the defaults are CLIP's for a ViT-B/32.

    Args:
        readouts: of the image and of the text tower, keys of `READOUTS`.
        arch: a key of `architectures.ARCHITECTURES`.
        patch_size: P, pixels.
        text_width: D, of the text's tokens.
        text_heads: of each block of the text encoder.
        text_layers: blocks of the text encoder's architecture.
        context_length: the longest text in tokens.
        vocab_size: number of token ids.
        pre_norm: CLIP's vision transformer; False takes DINO's, whose pretrained weights fit then.
        slots: fields that both towers have, such as `num_slots`.
        image: further fields of the image tower.
    """
    text = TextConfig(context_length, vocab_size, text_width, text_heads, text_layers, readouts[1], **slots)
    return EncoderConfig(arch, patch_size, readouts[0], pre_norm=pre_norm, **slots, **image), text


@dataclass(frozen=True)
class LoadedModel:
    """A trained model and its description for result files.

    Attributes:
        model: in eval mode, on the CPU.
        mean: of its images' pixels in 0..1, per channel.
        std: per channel.
        record: plain values: weights, hash, epoch, configuration.
    """

    model: Any = field(repr=False)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    record: dict[str, Any]

    @classmethod
    def of(cls: type[Loaded], model: Any, checkpoint: Mapping[str, Any], path: str | Path, **more: Any) -> Loaded:
        """A model, which has a `config`, with the weights of a checkpoint; `more` goes into the record."""
        origin = {"pretrained_weights": str(path), "sha256": weights_sha256(path), "epoch": checkpoint.get("epoch")}
        return cls(model.eval(), *normalization_of(checkpoint), {**origin, **model.config.to_dict(), **more})


def initialize_towers(model: Any, path: str | Path, with_rest: bool = True, with_image: bool = True) -> set[str]:
    """Load weights of another model into both towers, in place; returns the names of the loaded weights.

    Loaded are the blocks that both models have, and read-outs and projections of the same sizes. If the file's text
    encoder has a longer context, its first positions are loaded.

    Args:
        model: a module with `image`, `text` and `config`.
        path: a CLIP of ours, of OpenCLIP or of sparo-clip (.pth, .pt, .safetensors), or an OC-CLIP.
        with_rest: also load read-out and projections of the text, projection of the image, and temperature; False for a
            model whose scores are computed in another way.
        with_image: also load the image tower; False if the image tower starts from other weights.

    Raises:
        CheckpointError: the file cannot be read or holds no CLIP, or its towers have another width, number of heads or
            activation.
    """
    checkpoint, source = load_checkpoint(path), str(path)
    weights = clip_weights(checkpoint, source)
    if weights is None:
        raise CheckpointError(f"{source} holds no CLIP; --init_from starts the image encoder from other weights")
    check_same_blocks(checkpoint, model.config.quick_gelu, model.config.image.arch, source)
    description = image_text_entry(checkpoint)
    if description is not None and description["text"]["heads"] != model.config.text.heads:
        raise CheckpointError(
            f"{source} has a text encoder with {description['text']['heads']} heads, the model "
            f"{model.config.text.heads}; build it alike (--text_heads)"
        )
    state = model.state_dict()
    if "text.norm.weight" not in state:  # the read-out has the last LayerNorm, or there is none
        weights = {name.replace("text.norm.", "text.readout.norm."): value for name, value in weights.items()}
    text = _fitting_text(weights, state, source)
    image = None
    if with_image:
        tower = {name.removeprefix("image."): value for name, value in weights.items() if name.startswith("image.")}
        image = initialize_from(model.image, tower, source)
    ends = {name: weights[name] for name in _fitting_ends(weights, state)} if with_rest else {}
    model.load_state_dict({**model.state_dict(), **text, **ends})
    taken = {f"image.{name}" for name in (image.taken if image else ())} | text.keys() | ends.keys()
    left = (name for name in state if name not in taken and not name.startswith("image."))
    new = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in left)) or "nothing"
    logger.info("start from %s: image tower: %s; of the rest new: %s", source, image or "not taken", new)
    return taken


def _fitting_text(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The text encoder's weights before its read-out, of the blocks that both models have."""
    before_readout = (name for name in state if name.startswith("text.") and not name.startswith("text.readout."))
    text = {name: weights[name] for name in before_readout if name in weights}
    text["text.pos_embed"] = weights["text.pos_embed"][: len(state["text.pos_embed"])]
    if wrong := [name for name, value in text.items() if value.shape != state[name].shape]:
        shapes = ", ".join(f"{name} {tuple(text[name].shape)}, not {tuple(state[name].shape)}" for name in wrong[:2])
        raise CheckpointError(
            f"{source} has a text encoder of another kind: {shapes}; build it alike (--text_width, --context_length)"
        )
    return text


def _fitting_ends(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """The text's read-out and both projections, each whole or not at all, and the temperature."""
    fitting = ["logit_scale"]
    for stem in ("text.readout.", "image_proj.", "text_proj."):
        names = {name for name in (*state, *weights) if name.startswith(stem)}
        if all(name in state and name in weights and state[name].shape == weights[name].shape for name in names):
            fitting += sorted(names)
    return fitting

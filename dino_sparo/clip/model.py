"""Images and captions -> encodings whose inner product is their similarity; files -> models.

Training compares its slots, evaluation measures them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.clip.config import SLOT_SIZES, CLIPConfig, infer_clip_config, towers_of
from dino_sparo.clip.options import FREEZABLE
from dino_sparo.data.views import ClipView
from dino_sparo.image_text.options import FOREIGN_OPTION
from dino_sparo.image_text.scorer import DotProductScorer
from dino_sparo.image_text.step import INITIAL_LOGIT_SCALE
from dino_sparo.image_text.towers import LoadedModel, TextEncoder, tower_configs, without_padding
from dino_sparo.models.backbone import default_patch_size
from dino_sparo.models.encoder import Encoder, encoder_from_config
from dino_sparo.models.readout import ReadoutOutput
from dino_sparo.models.readouts import ReadoutSizes, readout_kind
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.checkpoint import load_checkpoint
from dino_sparo.weights.entries import activation_of, clip_weights, image_text_entry
from dino_sparo.weights.file import CheckpointError, load_strictly

PATCH_SIZE = 32  # pixels, of our own vision transformers in a CLIP
MAX_BATCH = 128  # images, or captions, that `LoadedClip.similarity` encodes at a time


def is_frozen(name: str, parts: Iterable[str]) -> bool:
    """Whether the weight of this name belongs to one of `parts`, keys of `FREEZABLE`."""
    return any(name.startswith(FREEZABLE[part][0]) and not name.startswith(FREEZABLE[part][1]) for part in parts)


class ClipOutput(NamedTuple):
    """Input of the contrastive loss: normalised features, as many captions for every image, the inverse temperature."""

    image_features: Float[Tensor, "B M"]
    text_features: Float[Tensor, "captions M"]
    logit_scale: Float[Tensor, ""]


class CLIP(nn.Module):
    """An image and a text encoder whose encodings live in one space.

        similarity(image, text) = y_image . y_text,   y normalised

    With `sparo` every slot is normalised by itself, y = concat(y_1 / |y_1|, ..., y_L / |y_L|) / sqrt(L), so that the
    similarity is the mean over l of the cosines of slots l. Source: CLIP, section 2.3; SPARO, section 3.3, equation 2.

    Args:
        image: images -> slots.
        text: token ids -> slots.
        image_proj: slots -> slots, applied to each; the identity where the read-out's slots are the encoding.
        text_proj: as `image_proj`, of the text tower.
        config: how all were built.
    """

    def __init__(
        self, image: Encoder, text: TextEncoder, image_proj: nn.Module, text_proj: nn.Module, config: CLIPConfig
    ) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.image_proj, self.text_proj = image_proj, text_proj
        self.logit_scale = nn.Parameter(torch.tensor(math.log(INITIAL_LOGIT_SCALE)))
        self.config = config
        self._frozen: list[nn.Module] = []

    def freeze(self, parts: Iterable[str]) -> None:
        """Keep parts of `FREEZABLE` as they are: no gradients, and eval mode even after `train`.

        Raises:
            ValueError: the parts hold the codebook of `fdt`, which is both towers'.
        """
        parts = list(parts)
        if self.config.image.kind.needs_codes and {"image", "text"} & set(parts):
            raise UserError(
                f"readout {self.config.readout!r} has one codebook for both towers, so neither can be frozen whole; "
                "freeze image_backbone or text_backbone"
            )
        for name, parameter in self.named_parameters():
            if is_frozen(name, parts):
                parameter.requires_grad_(False)
        self._frozen = [
            module
            for module in self.modules()
            if (weights := list(module.parameters())) and not any(weight.requires_grad for weight in weights)
        ]
        self.train(self.training)

    def train(self, mode: bool = True) -> "CLIP":
        """Switch between training and evaluation; frozen parts stay in evaluation."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def forward(self, images: Float[Tensor, "B C H W"], token_ids: Int64[Tensor, "captions N"]) -> ClipOutput:
        """Pairs -> normalised features of both sides and the inverse temperature."""
        return ClipOutput(self.encode_image(images), self.encode_text(token_ids), self.logit_scale.exp())

    def encode_image(self, images: Float[Tensor, "B C H W"], normalize: bool = True) -> Float[Tensor, "B M"]:
        """Images -> encodings.

        Args:
            images: (B, C, H, W), with the mean and std of the model's training.
            normalize: to length one as the read-out wants it, else the slots side by side as they are.
        """
        return self._encoding(self.image_output(images), normalize)

    def encode_text(self, token_ids: Int64[Tensor, "B N"], normalize: bool = True) -> Float[Tensor, "B M"]:
        """Token ids (`towers.tokenize`) -> encodings; see `encode_image`."""
        return self._encoding(self.text_output(token_ids), normalize)

    def image_output(self, images: Float[Tensor, "B C H W"]) -> ReadoutOutput:
        """Slots (B, L, V), not normalised, and their attention (B, L, N) over class token and patches."""
        output = self.image.readout_output(images)
        return ReadoutOutput(slots=self.image_proj(output.slots), attention=output.attention)

    def text_output(self, token_ids: Int64[Tensor, "B N"]) -> ReadoutOutput:
        """Slots (B, L, V), not normalised, and their attention (B, L, N) over the caption's tokens."""
        output = self.text.readout_output(token_ids)
        return ReadoutOutput(slots=self.text_proj(output.slots), attention=output.attention)

    def _encoding(self, output: ReadoutOutput, normalize: bool) -> Tensor:
        if not normalize:
            return output.slots.flatten(1)
        per_slot = self.config.image.kind.normalized_per_slot
        return normalize_slots(output.slots if per_slot else output.slots.flatten(1)[:, None])


def normalize_slots(slots: Float[Tensor, "B L V"]) -> Float[Tensor, "B M"]:
    """Slots -> encoding of length one: every slot normalised, side by side, over sqrt(L) (SPARO, equation 2).

    In fp32 at least: a cosine in bf16 has three digits.
    """
    exact = slots.to(torch.promote_types(slots.dtype, torch.float32))
    return F.normalize(exact, dim=-1).flatten(1) / math.sqrt(slots.shape[1])


def create_clip(
    arch: str = "vit_base",
    patch_size: int | None = None,
    readout: str = "sparo",
    *,
    embed_dim: int = 512,
    bottleneck_dim: int = 512,
    num_codes: int = 16384,
    replace_block: bool | None = None,
    norm_first: bool = False,
    quick_gelu: bool = False,
    **sizes: Any,
) -> CLIP:
    """Build a CLIP model with random weights.

    Both encoders start as OpenCLIP's do; without `pre_norm` the image encoder starts as DINO's.

    Args:
        arch: a key of `architectures.ARCHITECTURES`, or `timm/NAME`.
        patch_size: P, pixels; None: 32, or the timm model's own.
        readout: a key of `TOWERS`, or another read-out with slots.
        embed_dim: M, width of the encoding; a slotted read-out's is L*V, whatever is given here.
        bottleneck_dim: m, for `linear`.
        num_codes: number of codes, for `fdt`.
        replace_block: remove the last block of both towers; by default as the read-out declares (`sparo` does).
        norm_first: `gap`, `gap_image` and `fdt` read tokens that passed the tower's last LayerNorm, as in checkpoints
            of earlier versions; False is the authors' code, where gap normalises the average, and fdt nothing.
        quick_gelu: OpenAI's activation in both encoders.
        sizes: of the slots (`SLOT_SIZES`), and those of `towers.tower_configs`.
    """
    patch_size = default_patch_size(arch, PATCH_SIZE) if patch_size is None else patch_size
    towers = towers_of(readout, norm_first)
    slots = {name: sizes.pop(name) for name in SLOT_SIZES if name in sizes}
    image, text = tower_configs(towers[:2], arch, patch_size, slots=slots, **sizes)
    width = image.num_slots * image.slot_dim if image.kind.has_slots else embed_dim
    replaces = image.kind.replaces_block if replace_block is None else replace_block
    config = CLIPConfig(image, text, readout, width, bottleneck_dim, num_codes, replaces, quick_gelu)
    return clip_from_config(config)


def clip_from_config(config: CLIPConfig) -> CLIP:
    """Build the model that a configuration describes, with random weights; see `create_clip`."""
    codebook = None
    if config.image.kind.needs_codes:
        codebook = nn.Parameter(torch.randn(config.num_codes, config.embed_dim))
    image, text = encoder_from_config(config.image, codebook=codebook), config.text
    slots = text.num_slots, text.slot_dim, text.key_dim, text.group_size
    sizes = ReadoutSizes(text.width, *slots, codebook, context_length=text.context_length)
    readout = readout_kind(text.readout).build(sizes)
    text_encoder = TextEncoder(text, readout, text.layers - config.replace_block, config.quick_gelu)
    image_proj, text_proj = (_projection(config, width) for width in (image.backbone.embed_dim, config.text.width))
    return CLIP(image, text_encoder, image_proj, text_proj, config)


def _projection(config: CLIPConfig, width: int) -> nn.Module:
    """From a tower's single slot to the encoding, drawn as CLIP draws it: normal, std width^-1/2, no bias."""
    if config.image.kind.has_slots or config.image.kind.needs_codes:
        return nn.Identity()
    has_bottleneck = towers_of(config.readout).has_bottleneck
    first = nn.Linear(width, config.bottleneck_dim if has_bottleneck else config.embed_dim, bias=False)
    nn.init.normal_(first.weight, std=width**-0.5)
    if not has_bottleneck:
        return first
    # The linear bottleneck: CLIP with an encoding of width m, and an affine map from there (SPARO, appendix 0.B.2).
    return nn.Sequential(first, nn.Linear(config.bottleneck_dim, config.embed_dim))


class LoadedClip(LoadedModel):
    """A trained model, and its description for result files; see `LoadedModel`."""

    model: CLIP

    def similarity(
        self, images: Sequence[Image.Image] | Tensor, captions: Sequence[str]
    ) -> Float[Tensor, "images captions"]:
        """The similarity of each image and each caption: the scores that every evaluation compares.

            S(image, caption) = y_image . y_caption, a cosine; for `sparo` the mean of the slots' cosines

            loaded = load_clip("output/checkpoint.pth")
            loaded.similarity([Image.open("dog.jpg")], ["a photo of a dog", "a photo of a cat"])  # (1, 2)

        Args:
            images: images of any size and mode; or (images, C, H, W), resized and normalised with `mean` and `std`.
            captions: texts; longer ones than the context are cut off.

        Returns:
            (images, captions), fp32, in [-1, 1], where the model is.
        """
        model, tokenize = self.model, self.model.text.tokenize
        view = ClipView(model.config.image.img_size, self.mean, self.std)
        batch_size = min(max(len(images), len(captions)), MAX_BATCH)
        scorer = DotProductScorer(model, view, model.logit_scale.device, batch_size, tokenize=tokenize)
        texts = scorer.encode_text(without_padding(tokenize(list(captions)).ids))
        return scorer.score_block(scorer.rows_of(images), texts)


def load_clip(
    path: str | Path,
    text_heads: int | None = None,
    quick_gelu: bool = False,
    checkpoint: Mapping[str, Any] | None = None,
) -> LoadedClip:
    """The model of a checkpoint, built as the checkpoint says, in eval mode, on the CPU.

    Args:
        path: one of our checkpoints, or weights of open_clip (.pt, .pth, .safetensors) of a plain CLIP with a ViT.
        text_heads: of open_clip's weights, which do not tell; by default they are 64 wide.
        quick_gelu: activation of open_clip's weights, which do not tell either: True for OpenAI's and their
            descendants, whose open_clip names end in `-quickgelu`. Not needed where `open_clip_config.json` lies beside
            them, as it does where they are published.
        checkpoint: what `load_checkpoint` read from `path`; None: read it now.

    Raises:
        CheckpointError: the file cannot be read, is no CLIP, or its weights do not fit.
        ValueError: the checkpoint was saved with something that this version does not know, or `text_heads` or
            `quick_gelu` are given for one of ours, or `quick_gelu` against what weights were published with.
    """
    checkpoint = load_checkpoint(path) if checkpoint is None else checkpoint
    description, source = checkpoint.get("clip"), str(path)
    if description is None and image_text_entry(checkpoint) is not None:
        raise CheckpointError(
            f"{source} holds another image-text model than a CLIP; it has no encodings whose dot product is a score. "
            "zero-shot, retrieval, compositional and linear evaluate it"
        )
    weights = clip_weights(checkpoint, source)
    if weights is None:
        raise CheckpointError(
            f"{source} holds no CLIP: neither `clip`, which says how one is built, nor open_clip's names; for the "
            f"encoder of a DINO checkpoint use load_encoder"
        )
    if description is not None:
        for name, value in {"text_heads": text_heads, "quick_gelu": quick_gelu}.items():
            if value:
                raise UserError(FOREIGN_OPTION.format(name=name, source=source))
        if missing := {"image", "text", "readout", "embed_dim", "mean", "std"} - description.keys():
            raise CheckpointError(f"{source} does not say {', '.join(sorted(missing))} of its CLIP under `clip`")
        config = CLIPConfig.from_dict(description)
    else:
        published = activation_of(checkpoint)
        if quick_gelu and published is False:
            raise UserError(f"--quick_gelu is given, but {source} was published without (open_clip_config.json)")
        config = infer_clip_config(weights, text_heads, quick_gelu or bool(published))
    model = clip_from_config(config)
    load_strictly(model, weights, source)
    return LoadedClip.of(model, checkpoint, path)

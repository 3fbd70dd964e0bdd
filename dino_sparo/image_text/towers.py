"""Sizes of two towers by the names of the options -> the configurations of an image and a text encoder."""

from dataclasses import dataclass
from typing import Any

from dino_sparo.image_text.text import CONTEXT_LENGTH, VOCAB_SIZE, TextConfig
from dino_sparo.models.encoder import EncoderConfig


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of the image and the text encoder of a model; the defaults are CLIP's for a ViT-B/32.

    Attributes:
        arch: a key of `choices.ARCHITECTURES`.
        patch_size: P, pixels.
        img_size: side in pixels of the images whose grid the position embedding stores.
        text_width: D, of the text's tokens.
        text_heads: of each block of the text encoder.
        text_layers: blocks of the text encoder's architecture.
        context_length: the longest text in tokens.
        vocab_size: number of token ids.
        in_chans: number of image channels.
        pre_norm: CLIP's vision transformer; False takes DINO's, whose pretrained weights fit then.
        quick_gelu: OpenAI's activation in both encoders.
    """

    arch: str = "vit_base"
    patch_size: int = 32
    img_size: int = 224
    text_width: int = 512
    text_heads: int = 8
    text_layers: int = 12
    context_length: int = CONTEXT_LENGTH
    vocab_size: int = VOCAB_SIZE
    in_chans: int = 3
    pre_norm: bool = True
    quick_gelu: bool = False

    def configs(self, image_readout: str, text_readout: str, **slots: Any) -> tuple[EncoderConfig, TextConfig]:
        """The configurations of both encoders.

        Args:
            image_readout: a key of `readout_table.READOUTS`.
            text_readout: a key of the same table.
            slots: sizes of slots, the same for both: fields of `EncoderConfig` and of `TextConfig`.
        """
        image = EncoderConfig(
            self.arch,
            self.patch_size,
            image_readout,
            img_size=self.img_size,
            in_chans=self.in_chans,
            pre_norm=self.pre_norm,
            quick_gelu=self.quick_gelu,
            **slots,
        )
        sizes = (self.context_length, self.vocab_size, self.text_width, self.text_heads, self.text_layers)
        return image, TextConfig(*sizes, text_readout, **slots)

"""An encoder as a model of transformers; `huggingface.py` copies this file into exports, behind the encoder's code.

It imports transformers, so nothing in this package imports it at its top.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.image_transforms import to_pil_image
from transformers.image_utils import make_flat_list_of_images
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.timm_wrapper.image_processing_timm_wrapper import TimmWrapperImageProcessor

from dino_sparo.models.encoder import EncoderConfig, encoder_from_config


class SparoEncoderConfig(PretrainedConfig):
    """Configuration of an exported encoder: fields of `EncoderConfig` with mean and std; origin of the weights."""

    model_type = "sparo_encoder"

    def __init__(
        self, encoder: dict[str, Any] | None = None, origin: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.encoder, self.origin = encoder or {}, origin or {}


@dataclass
class SparoEncoderOutput(BaseModelOutputWithPooling):
    """Output of an exported encoder.

    Attributes:
        last_hidden_state: (B, N, D), tokens of the last block or stage, prefix tokens (class token, registers) first.
        pooler_output: (B, L*V), the encoding.
        slots: (B, L, V).
        slot_attentions: (B, L, N), the weight of each token in each slot.
    """

    slots: Tensor | None = None
    slot_attentions: Tensor | None = None


class SparoImageProcessor(TimmWrapperImageProcessor):
    """timm's preparation of images, after Pillow's conversion of grey and transparent images to RGB."""

    def preprocess(self, images: Any, return_tensors: Any = "pt") -> Any:
        """Normalised images (B, 3, H, W) of one image or several: of Pillow, or 8-bit arrays (H, W, 3)."""
        flat: Any = make_flat_list_of_images(images)
        return super().preprocess([to_pil_image(image).convert("RGB") for image in flat], return_tensors)


class SparoEncoderModel(PreTrainedModel):
    """Backbone and read-out: images -> tokens, slots and encoding."""

    config_class = SparoEncoderConfig
    main_input_name = "pixel_values"

    def __init__(self, config: SparoEncoderConfig) -> None:
        super().__init__(config)
        settings = {name: value for name, value in config.encoder.items() if name not in ("mean", "std")}
        self.encoder = encoder_from_config(EncoderConfig(**settings))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load a model; buffers that no file holds, such as frequencies of rotary positions, are computed again."""
        loaded = super().from_pretrained(*arguments, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        module: Any
        for module in model.modules():
            if hasattr(module, "init_non_persistent_buffers"):
                module.init_non_persistent_buffers()
        return loaded

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: the modules initialize their weights themselves."""

    def forward(self, pixel_values: Tensor, return_dict: bool = True, **kwargs: Any) -> SparoEncoderOutput | tuple:
        """Encode normalised images (B, C, H, W); see `SparoEncoderOutput`."""
        tokens = self.encoder.backbone(pixel_values)
        output = self.encoder.readout(tokens)
        encoding = output.slots.flatten(1)
        result = SparoEncoderOutput(tokens, encoding, slots=output.slots, slot_attentions=output.attention)
        return result if return_dict else result.to_tuple()

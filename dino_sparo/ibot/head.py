"""Student and teacher of iBOT: encodings and patch tokens -> logits over prototypes, and the mask token.

Keys of a checkpoint: DINO's (`backbone.*`, `readout.*`, `head.mlp.*`, `head.last_layer.*`), and `head.patches.*`.
So encoder and head start from a checkpoint of DINO, and evaluations read the encoder as that of DINO.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from dino_sparo.distillation.head import DINOHead
from dino_sparo.distillation.network import NUM_TEACHER_CROPS, EncoderWithHead
from dino_sparo.models.encoder import Encoder, encode_crops
from dino_sparo.runtime.faults import UserError


class Outputs(NamedTuple):
    """Logits, encodings and tokens of student or teacher.

    Attributes:
        logits: (S*B, K), of the crops, crop by crop.
        patch_logits: (chosen, K), of the chosen patches; K may differ from that of the crops.
        encodings: (S*B, L*V), of the crops.
        tokens: (T*B, N, D), patches of the global crops.
    """

    logits: Float[Tensor, "SB K"]
    patch_logits: Float[Tensor, "chosen _"]
    encodings: Float[Tensor, "SB _"]
    tokens: Float[Tensor, "TB N D"]


class PatchHead(nn.Module):
    """The mask token, and the head of the patches unless they share that of the crops.

    Args:
        embed_dim: D, width of a token.
        head: of the patches; None: shared.
    """

    def __init__(self, embed_dim: int, head: DINOHead | None) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, embed_dim))
        self.head = head


class IBOTNetwork(EncoderWithHead):
    """Student or teacher: crops -> `Outputs`.

    Args:
        encoder: images -> tokens -> encodings.
        head: encodings -> logits; also of the patches if `patch_head` is None.
        patch_head: tokens -> logits.

    Raises:
        UserError: the backbone has no patches to mask, or a shared head needs encodings as wide as a token.
    """

    def __init__(self, encoder: Encoder, head: DINOHead, patch_head: DINOHead | None) -> None:
        encoder.backbone.require_patches()
        if patch_head is None and encoder.encoding_dim != encoder.backbone.embed_dim:
            raise UserError(
                f"--separate_heads false: an encoding has {encoder.encoding_dim} numbers and a patch token "
                f"{encoder.backbone.embed_dim}, so one head cannot read both; leave it out, or give --readout cls"
            )
        super().__init__(encoder, head)
        head.add_module("patches", PatchHead(encoder.backbone.embed_dim, patch_head))

    @property
    def last_layers(self) -> list[nn.Module]:
        """The prototypes of all heads."""
        return [part for name, part in self.head.named_modules() if name.endswith("last_layer")]

    def compile_regions(self) -> bool:
        """False: masks and patches are not passed through regions."""
        return False

    def forward(  # type: ignore[override]
        self,
        crops: Sequence[Float[Tensor, "B C _ _"]],
        patches: Int64[Tensor, " chosen"],
        masked: Bool[Tensor, "TB N"] | None = None,
    ) -> Outputs:
        """Encode global crops with masks, and local crops without; logits of the crops and of some patches.

        Args:
            crops: S or T crops, global ones first.
            patches: places in the T*B*N patches of the global crops.
            masked: where the mask token stands in for a patch; None: all patches are seen.
        """
        backbone, patch_part = self.backbone, self.head.get_submodule("patches")
        assert isinstance(patch_part, PatchHead)
        tokens = backbone(torch.cat(list(crops[:NUM_TEACHER_CROPS])), masked, patch_part.mask_token)
        encodings = self.readout(tokens).slots.flatten(1)
        if len(crops) > NUM_TEACHER_CROPS:
            local = encode_crops(backbone, self.readout, crops[NUM_TEACHER_CROPS:], self.is_vanilla)
            encodings = torch.cat([encodings, local])
        tokens = tokens[:, backbone.num_prefix_tokens :]
        patch_head = patch_part.head or self.head
        return Outputs(self.head(encodings), patch_head(tokens.flatten(0, 1)[patches]), encodings, tokens)

"""`EncoderWithHead`, the type of student and teacher; the MLP of their heads; their batch norm."""

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from dino_sparo.models.backbone import init_linear
from dino_sparo.models.encoder import Encoder, encode_crops

logger = logging.getLogger(__name__)

NUM_TEACHER_CROPS = 2  # the teacher sees the first of the student's crops, the global ones


class EncoderWithHead(nn.Module):
    """Student or teacher: crops -> what the loss compares. Its keys are `backbone.*`, `readout.*` and `head.*`.

    Args:
        encoder: images -> encodings; its parts become parts of the network.
        head: encodings -> the rows that the loss compares; DINO's are logits.
    """

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.backbone = encoder.backbone
        self.readout = encoder.readout
        self.head = head
        self.config = encoder.config
        self.is_vanilla = encoder.is_vanilla

    @property
    def encoder(self) -> Encoder:
        """The encoder without its head; it shares the parameters."""
        return Encoder(self.backbone, self.readout, self.config)

    def prepare(self, sides: Iterable[int]) -> None:
        """Resample positions for crops of these sides, pixels; ValueError if the backbone cannot read one of them."""
        for side in sides:
            self.backbone.prepare(side)

    def forward(
        self, crops: Float[Tensor, "_ C H W"] | Sequence[Float[Tensor, "_ C _ _"]], with_encodings: bool = False
    ) -> Float[Tensor, "SB K"] | tuple[Float[Tensor, "SB K"], Float[Tensor, "SB M"]]:
        """Crops -> rows (S*B, K), crop by crop: the first B rows belong to the first crop.

        `with_encodings` also returns the input of the head, (S*B, L*V).
        """
        encodings = encode_crops(self.backbone, self.readout, crops, self.is_vanilla)
        return (self.head(encodings), encodings) if with_encodings else self.head(encodings)


DINONetwork = EncoderWithHead  # its name in earlier versions, before other objectives than DINO


def mlp(widths: list[int], use_bn: bool) -> nn.Module:
    """Linear layers between the given widths; one alone is the bare layer, as the reference has it."""
    layers: list[nn.Module] = []
    for in_width, out_width in pairwise(widths):
        if layers and use_bn:
            layers.append(nn.BatchNorm1d(in_width))
        if layers:
            layers.append(nn.GELU())
        linear = nn.Linear(in_width, out_width)
        init_linear(linear)
        layers.append(linear)
    return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network has batch norm."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in network.modules())


def synchronize_batch_norm(
    student: EncoderWithHead, teacher: EncoderWithHead, device: torch.device
) -> tuple[EncoderWithHead, EncoderWithHead]:
    """Batch norm takes the statistics of all GPUs; on CPUs torch has no such layer."""
    if device.type != "cuda":
        logger.warning("batch norm is synchronised on GPUs only: here every process normalises by its own images")
        return student, teacher
    return convert_sync_batchnorm(student), convert_sync_batchnorm(teacher)

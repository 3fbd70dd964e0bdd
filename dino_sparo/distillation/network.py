"""`EncoderWithHead`, the type of student and teacher; the MLP of their heads; their batch norm."""

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from dino_sparo.models.backbone import Backbone, init_linear
from dino_sparo.models.encoder import Encoder, encode_crops
from dino_sparo.models.regions import Regions

logger = logging.getLogger(__name__)

NUM_TEACHER_CROPS = 2  # the teacher sees the first of the student's crops, the global ones


class EncoderWithHead(nn.Module):
    """Student or teacher: crops -> what the loss compares. Its keys are `backbone.*`, `readout.*` and `head.*`.

    Args:
        encoder: images -> encodings; its parts become parts of the network.
        head: encodings -> the rows that the loss compares; DINO's are logits.
    """

    regions: Regions | None

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.backbone = encoder.backbone
        self.readout = encoder.readout
        self.head = head
        self.config, self.regions = encoder.config, None
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
        if self.regions is not None:
            rows, encodings = self.regions(crops)
        else:
            encodings = encode_crops(self.backbone, self.readout, crops, self.is_vanilla)
            rows = self.head(encodings)
        return (rows, encodings) if with_encodings else rows

    def compile_regions(self) -> bool:
        """Compile the forward pass in regions; False if this network has none, and must be compiled whole."""
        backbone, is_vanilla = self.backbone, self.is_vanilla
        if not isinstance(backbone, Backbone) or backbone.depth <= is_vanilla:
            return False

        def finish(groups: list[Tensor]) -> tuple[Tensor, Tensor]:
            if is_vanilla:
                encodings = torch.cat([backbone.last_class_tokens(tokens) for tokens in groups])
            else:
                encodings = torch.cat([self.readout(backbone.norm(tokens)).slots.flatten(1) for tokens in groups])
            return self.head(encodings), encodings

        self.regions = Regions(backbone, finish, backbone.depth - is_vanilla)
        return True


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

"""Encoding -> feature of unit length: SimDINO's head, which is DINO's without prototypes."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.distillation.network import mlp
from dino_sparo.models.readout import require_positive


class SimDINOHead(nn.Module):
    """feature = MLP(encoding) / ||MLP(encoding)||_2, with three linear layers and GELU between them.

    Source: RobinWu218/SimDINO, the head of its vision transformer, with its parameter names.

    Args:
        in_dim: width of the encoding, L*V.
        out_dim: width of the feature.
        hidden_dim: width of the hidden layers.
        use_bn: batch norm before every GELU.
    """

    def __init__(self, in_dim: int, out_dim: int = 256, hidden_dim: int = 2048, use_bn: bool = False) -> None:
        super().__init__()
        require_positive("the SimDINO head", in_dim=in_dim, out_dim=out_dim, hidden_dim=hidden_dim)
        self.mlp = mlp([in_dim, hidden_dim, hidden_dim, out_dim], use_bn)

    def forward(self, encodings: Float[Tensor, "B in_dim"]) -> Float[Tensor, "B out_dim"]:
        """Encodings (B, L*V) -> features (B, out_dim)."""
        return F.normalize(self.mlp(encodings), dim=-1)

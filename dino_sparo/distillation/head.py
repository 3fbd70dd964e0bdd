"""Encoding -> logits over K prototypes: the DINO head.

The head is the reference's, unchanged, with its parameter names; only the deprecated `torch.nn.utils.weight_norm` is
replaced by a module that holds the same two parameters.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dino_sparo.distillation.network import mlp
from dino_sparo.models.readout import require_positive


class WeightNormLinear(nn.Module):
    """A bias-free linear layer whose rows are a direction and a length.

        logits = x W^T,  W_k = g_k v_k / ||v_k||_2

    The parameters are `weight_v` (K, in), drawn as `nn.Linear` draws its weight, and `weight_g` (K, 1), set to one.
    Source: Salimans and Kingma, weight normalisation, equation 2; names as `torch.nn.utils.weight_norm` gave them.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1))
        self.weight_v = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())

    def forward(self, x: Float[Tensor, "*B in"]) -> Float[Tensor, "*B K"]:
        """Project (..., in) to (..., K)."""
        # The norm is taken in the parameters' own precision, also under autocast.
        norms = torch.linalg.vector_norm(self.weight_v, dim=1, keepdim=True)
        return F.linear(x, self.weight_v * (self.weight_g / norms))


class DINOHead(nn.Module):
    """The projection head of DINO.

        logits = last_layer( MLP(encoding) / ||MLP(encoding)||_2 )

    The MLP has `num_layers` linear layers with GELU (and batch norm, on request) between them; the last layer is
    weight-normalised. Source: DINO, section 3.1 and appendix C; facebookresearch/dino, `vision_transformer.py`.

    Args:
        in_dim: width of the encoding, L*V.
        out_dim: K, number of prototypes.
        use_bn: batch norm before every GELU.
        norm_last_layer: keep the prototypes' lengths fixed at one (the recommended choice for large models).
        num_layers: linear layers in the MLP.
        hidden_dim: width of the hidden layers.
        bottleneck_dim: width of the normalised output of the MLP.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        use_bn: bool = False,
        norm_last_layer: bool = True,
        num_layers: int = 3,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
    ) -> None:
        super().__init__()
        widths = {"in_dim": in_dim, "out_dim": out_dim, "hidden_dim": hidden_dim, "bottleneck_dim": bottleneck_dim}
        require_positive("the DINO head", num_layers=num_layers, **widths)
        self.mlp = mlp([in_dim, *[hidden_dim] * (num_layers - 1), bottleneck_dim], use_bn)
        self.last_layer = WeightNormLinear(bottleneck_dim, out_dim)
        self.last_layer.weight_g.requires_grad_(not norm_last_layer)

    def forward(self, encodings: Float[Tensor, "B in_dim"]) -> Float[Tensor, "B K"]:
        """Encodings (B, L*V) -> logits (B, K)."""
        return self.last_layer(F.normalize(self.mlp(encodings), dim=-1))

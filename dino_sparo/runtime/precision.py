"""Precision of training and evaluations (fp32, TF32, bf16 or fp16), and the form of attention that suits it.

`Updater.autocast` (training) and `features.inference` (evaluations) apply the dtype to forward passes.
"""

from typing import Any

import torch
from torch import nn

from dino_sparo.runtime.faults import UserError

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in matrix products and cuDNN's convolutions: several times faster, with about three digits.

    Every command calls this before the first product, since an environment may have changed torch's default: NVIDIA's
    containers allow TF32. bf16, fp16 and CPUs are not affected.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def choose_precision(precision: str, use_fp16: bool | None, device: torch.device) -> torch.dtype:
    """The dtype of autocast on a device.

    Args:
        precision: `auto` (bf16 where the device supports it natively, else fp32), or a key of `PRECISIONS`.
        use_fp16: the reference's option: True for fp16, False for fp32; None leaves the choice to `precision`.
        device: of the networks.

    Raises:
        ValueError: the two options contradict each other, or fp16 on a CPU.
    """
    if use_fp16 is not None:
        wanted = "fp16" if use_fp16 else "fp32"
        if precision not in ("auto", wanted):
            raise UserError(f"--use_fp16 {str(use_fp16).lower()} means {wanted}, but --precision says {precision}")
        precision = wanted
    if precision == "auto":
        precision = "bf16" if _has_bf16(device) else "fp32"
    if precision == "fp16" and device.type != "cuda":
        raise UserError(f"fp16 needs a CUDA device, but this run is on {device.type}; use --precision bf16 or fp32")
    return PRECISIONS[precision]


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return device.type == "cpu" and any(check() for check in checks if check is not None)


def prefers_fused_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's fused attention is faster: always, except in bf16 on a CPU."""
    return device.type != "cpu" or dtype != torch.bfloat16


def use_fused_attention(module: nn.Module, fused: bool) -> None:
    """Choose between torch's fused attention (the default) and plain matrix products in a module's layers, all of timm.

    They agree up to rounding; see `prefers_fused_attention`.
    """
    layer: Any
    for layer in module.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = fused

"""How GPUs multiply matrices of fp32 numbers, the same for all of a process."""

import torch


def set_fp32_products(allow_tf32: bool) -> None:
    """Multiply exactly, or round factors to TF32's 11 bits, which is several times as fast on GPUs.

    An environment or an import may have changed torch's default: NVIDIA's containers allow TF32. So whoever computes in
    fp32 calls this once, before the first product.

    Args:
        allow_tf32: round the factors of matrix products and of cuDNN's convolutions.
    """
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32

"""How exact fp32 is on a GPU; for training and for evaluations."""

import torch


def set_tf32(allowed: bool) -> None:
    """Let the tensor cores of a GPU round the factors of fp32 products to 11 bits, or forbid it.

    An environment or an import may have changed torch's default: NVIDIA's containers allow TF32. So who computes in
    fp32 calls this once, before the first product. It does not matter in bf16 and fp16, nor on a CPU.

    Args:
        allowed: TF32 in matrix products and in cuDNN's convolutions, several times faster, with about three digits;
            False for exact fp32.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed

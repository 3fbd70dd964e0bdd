"""How exact fp32 is on a GPU; for training and for evaluations."""

import torch


def set_tf32(allowed: bool) -> None:
    """Let the tensor cores of a GPU round the factors of fp32 products to 11 bits, or forbid it.

    Matrix products and convolutions have a switch each: torch starts with exact products and rounded convolutions, and
    other code of the process may have changed both. Neither matters in bf16 and fp16, nor on a CPU.

    Args:
        allowed: TF32, several times faster, with about three digits; False for exact fp32.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed

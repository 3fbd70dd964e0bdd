"""For tests without a GPU: a device that cannot be read, and a note of everything that makes the host wait for it.

The device is torch's `meta`, whose tensors have no values. Reading one is an error there: `.item()`, `.tolist()`, `if`,
`nonzero`, `unique`, a boolean index, a copy to the host. What is left to note are copies to the device. Torch waits for
the device's queue at a copy that is not marked `non_blocking`, and hides such copies in `torch.tensor(..., device=...)`
and in an index that lies on the host.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)  # from numbers of the host
ASSIGNMENTS = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


class HostTraffic(TorchDispatchMode):
    """Notes what goes from the host to the device.

    Attributes:
        launches: number of operations on the device, views left out.
        waits: operations that wait until the device's queue is empty.
        copies: operations that copy to the device without waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.waits: list[str] = []
        self.copies: list[str] = []
        self.makers = _Makers(self)

    def __enter__(self) -> "HostTraffic":
        self.makers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.makers.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
        if not any(value.device == DEVICE for value in (*given, *made)):
            return output
        self.launches += not func.is_view
        on_host = [value for value in given if value.device != DEVICE]
        name = f"{func} of {[tuple(value.shape) for value in on_host]}"
        if func in COPIES and on_host:
            is_free = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            (self.copies if is_free else self.waits).append(name)
        elif any(value.ndim for value in on_host):  # a number is an argument of the kernel
            self.waits.append(name)
        elif func in ASSIGNMENTS and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.waits.append(f"{func} with a boolean index")
        return output


class _Makers(TorchFunctionMode):
    """`torch.tensor(..., device=...)` copies where no dispatch mode sees it."""

    def __init__(self, traffic: HostTraffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in MAKERS and output.device == DEVICE and not isinstance(args[0], Tensor):
            self.traffic.waits.append(f"torch.{func.__name__} of {tuple(output.shape)}")
        return output

"""Forward and backward pass as one recording: on a GPU a single launch replaces two thousand launches from Python.

    outputs = recorder(compute, inputs, key)        the gradients are then in the parameters

`compute` turns tensors into gradients and outputs. It must read nothing from the device, exchange nothing with other
ranks and draw random numbers on the device alone. Everything else of a step (schedules, clipping, optimizer, moving
average, center) stays outside: its launches from Python are hidden behind the replay. Without a recording, as on CPUs,
`compute` is called directly.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dino_sparo.runtime.faults import is_device_fault
from dino_sparo.training.compile import CompileError

logger = logging.getLogger(__name__)

Outputs = dict[str, Tensor]
Compute = Callable[[Sequence[Tensor]], Outputs]
# A function without arguments -> a function that repeats its work on the device, and its outputs.
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
WARM_UP_CALLS = 3  # before a recording: they compile, and fill the caches of CUDA's libraries


def cuda_recording(device: torch.device) -> Record:
    """`record_on_cuda`, after a separate stream of the GPU was selected for the whole run.

    CUDA records nothing on its default stream, and memory is reused only on the same stream.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)
    return record_on_cuda


def record_on_cuda(function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Record a function's launches on the current stream as a CUDA graph.

    Raises:
        CompileError: the function cannot be recorded. CUDA's allocator is unusable afterwards, so the run ends.
        RuntimeError: the GPU failed meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: the thread that pins memory may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            outputs = function()
    except RuntimeError as error:
        if is_device_fault(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CompileError(f"the step cannot be recorded; give --cuda_graph off ({reason})") from error
    return graph.replay, outputs


class HostTensors(TorchDispatchMode):
    """Within this context `are_used` becomes true if an operation on a device takes a tensor of the host.

    A recording cannot copy such a tensor. The device may be `meta`, so the test needs no GPU.
    """

    are_used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation."""
        outputs = func(*args, **(kwargs or {}))
        given, made = ([leaf for leaf in tree_leaves(v) if isinstance(leaf, Tensor)] for v in ((args, kwargs), outputs))
        self.are_used |= any(tensor.is_cpu for tensor in given) and not all(tensor.is_cpu for tensor in made)
        return outputs


class Recorder:
    """Calls the first part of a step, or records and replays it.

    A recording is valid for one key and for inputs of one shape. After a change, the function is called
    `WARM_UP_CALLS` times, then recorded again.

    Args:
        parameters: the trained ones.
        record: makes a recording; None: call the function directly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], record: Record | None = None) -> None:
        self.parameters, self.record = parameters, record
        self.drop()

    def drop(self) -> None:
        """Forget the recording and free its memory, as before an evaluation."""
        self.key: Hashable = None
        self.num_calls = 0
        self.replay: Callable[[], None] | None = None
        self.inputs, self.gradients, self.outputs = list[Tensor](), list[Tensor | None](), Outputs()
        for parameter in self.parameters:
            parameter.grad = None  # it may lie in the recording's memory

    def __call__(self, compute: Compute, inputs: Sequence[Tensor], key: Hashable, is_only_part: bool = True) -> Outputs:
        """Add the gradients of these inputs to those of the parameters.

        Args:
            compute: inputs -> outputs; adds to the gradients.
            inputs: on the device.
            key: all values that `compute` depends on and that are not tensors. A new key drops the recording.
            is_only_part: the step has one micro-batch. Otherwise the gradients are added to those of the others.

        Returns:
            The outputs of `compute`. A recording writes them in place, so the scalars among them are copies; the other
            outputs are copies if the step has several parts, else valid until the next step.
        """
        if self.record is None:
            return compute(inputs)
        key = key, *((value.shape, value.dtype) for value in inputs)
        if key != self.key:
            self.drop()
            self.key = key
        self.num_calls += 1
        if self.num_calls <= WARM_UP_CALLS:
            return compute(inputs)
        replay = self.replay or self._record(self.record, compute, inputs)
        torch._foreach_copy_(self.inputs, list(inputs))
        replay()
        self._add_gradients(is_only_part)
        if not is_only_part:
            return {name: value.clone() for name, value in self.outputs.items()}
        names = [name for name, value in self.outputs.items() if value.ndim == 0]
        copies = torch.stack([self.outputs[name] for name in names]).unbind()
        return {**self.outputs, **dict(zip(names, copies, strict=True))}

    def _record(self, record: Record, compute: Compute, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Record with static inputs; the gradients, which must not exist before, become static too."""
        self.inputs = [value.clone() for value in inputs]
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.replay, self.outputs = record(lambda: compute(self.inputs))
        self.gradients = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        logger.info("the step is recorded as one CUDA graph")
        return self.replay

    def _add_gradients(self, is_only_part: bool) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient if is_only_part else gradient.clone()
            else:
                parameter.grad += gradient

"""Memory layout, alignment and device of tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def heads_outside(x: Tensor) -> bool:
    """Whether the head stride of `[B, H, T, D]` is at least the token stride."""
    return x.stride(1) >= x.stride(2)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether Triton may load 16 bytes at a time from all rows of the tensors."""
    return all(
        x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels launched inside run on the tensor's GPU, whichever is the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

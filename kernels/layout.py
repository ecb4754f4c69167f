"""Memory layout, alignment, dtype and device of tensors."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def heads_outside(x: Tensor) -> bool:
    """Return whether the head stride of `[B, H, T, D]` is at least the token stride."""
    return x.stride(1) >= x.stride(2)


def new_like(
    x: Tensor, dtype: torch.dtype, *, zeros: bool = False, head_dim: int | None = None
) -> Tensor:
    """Make a tensor `[B, H, T, D]` with the shape and memory layout of x.

    Args:
        x: `[B, H, T, D]`.
        dtype: dtype of the result.
        zeros: whether the result is filled with zeros or uninitialized.
        head_dim: D of the result; None means the D of x.
    """
    make = x.new_zeros if zeros else x.new_empty
    batch, heads, tokens, own = x.shape
    head_dim = own if head_dim is None else head_dim
    if heads_outside(x):
        return make((batch, heads, tokens, head_dim), dtype=dtype)
    return make((batch, tokens, heads, head_dim), dtype=dtype).transpose(1, 2)


def is_aligned(*tensors: Tensor) -> bool:
    """Return whether Triton may load 16 bytes at a time from all rows of the tensors."""
    return all(
        x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Context manager in which kernels run on the tensor's GPU, not on the current GPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def in_dtypes(tensors: Iterable[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Convert tensors to the dtypes, on a GPU in one launch; matching tensors are not copied."""
    pairs = list(zip(tensors, dtypes, strict=True))
    if sum(x.dtype != dtype for x, dtype in pairs) < 2:
        return [x if x.dtype == dtype else x.to(dtype) for x, dtype in pairs]
    made = [x if x.dtype == d else torch.empty_like(x, dtype=d) for x, d in pairs]
    changed = [i for i, (x, _) in enumerate(pairs) if made[i] is not x]
    torch._foreach_copy_([made[i] for i in changed], [pairs[i][0] for i in changed])
    return made

"""Per-sample gradient operations on the CPU: products by torch, norms and sums by grads_cpu.cpp.

Other operations are those of `reference.py`. The kernels need `native.library`.

Letters: B samples, T tokens of a sample, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import noise_cpu, reference
from .noise import NoiseStream
from .noise_cpu import call, write_noised, written
from .spans import Spans

# Elements of per-sample gradients per thread.
_WORK_OF_A_THREAD = 1 << 19
# Elements of per-sample gradients that are kept for a norm; they stay in the cache.
_AT_ONCE = 1 << 17
# grads_cpu.cpp's kSquaresBlock, and the additions that a square goes through in a block.
_SQUARES_BLOCK, _SQUARES_ADDITIONS = 4096, 132


def __getattr__(name: str) -> Any:
    return getattr(reference, name)


def clip_factors(squared_norms: Tensor, bound: float, function: str = "hard") -> Tensor:
    """See `reference.clip_factors`."""
    if function != "hard":
        return reference.clip_factors(squared_norms, bound, function)
    squares = squared_norms.contiguous()
    factors = torch.empty(squares.shape, dtype=torch.float32, device="cpu")
    numbers = float(bound), 1 + reference.FP64_SLACK, 1 - reference.FP64_SLACK, len(squares)
    call("clip_factors", squares.dtype, squares, *numbers, factors)
    return factors


def squared_norm(grads: Tensor, *, into: Tensor | None = None) -> Tensor:
    """See `reference.squared_norm`."""
    grads = _readable(grads)
    batch, elements = grads.shape[0], grads.shape[1:].numel()
    squares = torch.zeros(batch, dtype=torch.float64, device="cpu") if into is None else into
    blocks = -(-elements // _SQUARES_BLOCK)
    rounding = reference.upper_bound(1.0, min(elements, _SQUARES_ADDITIONS + blocks))
    sizes = grads.stride(0), batch, elements, _threads(grads)
    call("squared_norms", grads.dtype, rounding, grads, *sizes, squares)
    return written(squares)


def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.per_sample_grad`."""
    grads = reference.per_sample_grad(x, dy, spans=spans)
    assert isinstance(grads, Tensor)
    return (grads, squared_norm(grads)) if return_squares else grads


def grad_norm(
    x: Tensor, dy: Tensor, *, form: str | None = None, spans: Spans | None = None
) -> Tensor:
    """See `reference.grad_norm`."""
    if spans is not None:
        return reference.by_span(functools.partial(grad_norm, form=form), spans, x, dy)
    if form is None and x.shape[1] == 1:
        return squared_norm(x.flatten(1)) * squared_norm(dy.flatten(1))
    if (form or reference.cheaper_norm(x.shape[1], x, dy)) == "gram":
        return reference.grad_norm(x, dy, form="gram")
    count = x.shape[0]
    squares = torch.empty(count, dtype=torch.float64, device="cpu")
    size = min(count, max(1, _AT_ONCE // (x.shape[2] * dy.shape[2])))
    for begin in range(0, count, max(1, size)):
        # All of one size: a product's bits may depend on how many samples it is of.
        begin = min(begin, count - size)
        part = slice(begin, begin + size)
        grads = reference.per_sample_grad(x[part], dy[part])
        assert isinstance(grads, Tensor)
        squares[part] = squared_norm(grads)
    return squares


def clip_reduce(
    grads: Tensor,
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Tensor | None = None,
    noise: NoiseStream | None = None,
) -> Tensor:
    """See `reference.clip_reduce`."""
    if grid is None:
        return reference.clip_reduce(grads, factors, noise=noise)
    grads, factors = _readable(grads), _readable(factors).contiguous()
    shape = grads.shape[1:]
    sizes = factors.itemsize, grads.stride(0), grads.shape[0]
    if noise is not None and noise.std > 0 and noise_cpu.serves(grads, noise):
        out = torch.empty(shape, dtype=grads.dtype, device="cpu")
        return write_noised("noised_sum", noise, out, grads, factors, *sizes)
    total = torch.empty(shape, dtype=torch.float64, device="cpu") if into is None else into
    numbers = *sizes, into is None, _threads(grads), total.numel()
    call("clipped_sum", grads.dtype, float(grid), grads, factors, *numbers, total)
    written(total)
    return total if noise is None else noise.add_to_(total).to(grads.dtype)


def _readable(grads: Tensor) -> Tensor:
    """In fp32 or fp64, the elements of a sample next to each other, samples anywhere."""
    grads = grads.resolve_neg()
    if grads.dtype not in (torch.float32, torch.float64):
        grads = grads.float()
    return grads if _is_readable(grads) else grads.contiguous()


def _is_readable(grads: Tensor) -> bool:
    # By hand: grads[0] is a tensor more for each parameter of a step.
    step = 1
    for size, stride in zip(grads.shape[:0:-1], grads.stride()[:0:-1], strict=True):
        if size != 1 and stride != step:
            return 0 in grads.shape
        step *= size
    return True


def _threads(grads: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + grads.numel() // _WORK_OF_A_THREAD)

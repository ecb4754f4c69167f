"""Per-sample gradient operations on the CPU: products by torch, norms and sums by grads_cpu.cpp.

All other operations are those of `reference.py`. The kernels need `native.library`.

Letters: B samples, T tokens of a sample, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import noise_cpu, reference
from .noise import NoiseStream, add_noise_
from .noise_cpu import Part, call, noised_part, table, write_noised, written
from .spans import Spans

# Elements of per-sample gradients per thread; small calls use fewer threads.
_WORK_OF_A_THREAD = 1 << 19
# Elements of per-sample gradients that are stored at a time for a norm; they fit into the cache.
_AT_ONCE = 1 << 17


def __getattr__(name: str) -> Any:
    return getattr(reference, name)


def clip_factors(
    squared_norms: Tensor, bound: float, function: str = "hard", *, keep: Tensor | None = None
) -> Tensor:
    """See `reference.clip_factors`."""
    if function != "hard":
        return reference.clip_factors(squared_norms, bound, function, keep=keep)
    squares = squared_norms.contiguous()
    factors = torch.empty(squares.shape, dtype=torch.float32, device="cpu")
    numbers = float(bound), 1 + reference.FP64_SLACK, 1 - reference.FP64_SLACK, len(squares)
    call("clip_factors", squares.dtype, squares, *numbers, factors)
    return factors if keep is None else factors * keep


def squared_norm(*grads: Tensor, into: Tensor | None = None) -> Tensor:
    """See `reference.squared_norm`."""
    batch = grads[0].shape[0]
    squares = torch.zeros(batch, dtype=torch.float64, device="cpu") if into is None else into
    grads = tuple(map(_readable, grads))
    for dtype in dict.fromkeys(g.dtype for g in grads):  # in a deterministic order
        own = [_part(g) for g in grads if g.dtype == dtype]
        call("squared_norms", dtype, *table(own), batch, squares)
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
        # All parts have the same size, since a product's bits may depend on the number of samples.
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
    intos, noises = None if into is None else [into], None if noise is None else [noise]
    return clip_reduce_all([grads], factors, grid=grid, into=intos, noise=noises)[0]


def clip_reduce_all(
    grads: Sequence[Tensor],
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Sequence[Tensor] | None = None,
    noise: Sequence[NoiseStream] | None = None,
) -> Sequence[Tensor]:
    """See `reference.clip_reduce_all`."""
    if grid is None or len({g.dtype for g in grads}) > 1:
        return [
            clip_reduce(own, factors, grid=grid, into=total, noise=stream)
            for own, total, stream in reference.of_each(grads, into, noise)
        ]
    grads, factors = [_readable(g) for g in grads], _readable(factors).contiguous()
    dtype = grads[0].dtype
    of_samples = factors, factors.itemsize, len(factors)
    if noise is not None and _are_fused(noise, factors):
        outs = _buffer(grads, dtype)
        parts = [
            Part(g.data_ptr(), g.stride(0), *noised_part(out, stream))
            for g, out, stream in zip(grads, outs, noise, strict=True)
        ]
        write_noised("noised_sums", noise, outs, parts, *of_samples)
        return outs
    totals = _buffer(grads, torch.float64) if into is None else into
    own = [_part(g, total) for g, total in zip(grads, totals, strict=True)]
    call("clipped_sums", dtype, float(grid), *table(own), *of_samples, into is None)
    for total in totals:
        written(total)
    return totals if noise is None else [t.to(dtype) for t in add_noise_(totals, noise)]


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    ndim: int,
    *,
    spans: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.layer_norm_backward`."""
    shape = x.shape[x.ndim - ndim :]
    operands = [dy, x, mean, rstd, x.new_ones(shape) if weight is None else weight]
    dtypes = {operand.dtype for operand in operands}
    if spans is not None or dtypes not in ({torch.float32}, {torch.float64}):
        return reference.layer_norm_backward(dy, x, mean, rstd, weight, ndim, spans=spans)
    operands = [operand.resolve_neg().contiguous() for operand in operands]
    sizes = len(x), x.shape[1 : x.ndim - ndim].numel(), shape.numel(), _threads(x.numel())
    dx, dweight, dbias = (x.new_empty(of) for of in (x.shape, *2 * [(len(x), *shape)]))
    call("layer_norm", x.dtype, *operands, *sizes, dx, dweight, dbias)
    return dx, dweight, dbias


def _are_fused(noise: Sequence[NoiseStream], factors: Tensor) -> bool:
    """Return whether the C++ kernel can add the noise: ChaCha20, std > 0, one noisy step."""
    first = noise[0]
    fit = first.std > 0 and noise_cpu.serves(factors, first)
    return fit and all(stream.release == first.release for stream in noise)


def _buffer(grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Allocate a tensor for each tensor's sum over samples; the sums are adjacent in memory."""
    shapes = [g.shape[1:] for g in grads]
    if len(shapes) == 1:  # not a view, since autograd refuses some in-place writes to views
        return [torch.empty(shapes[0], dtype=dtype, device="cpu")]
    sizes = [shape.numel() for shape in shapes]
    buffer = torch.empty(sum(sizes), dtype=dtype, device="cpu")
    return [own.view(of) for own, of in zip(buffer.split(sizes), shapes, strict=True)]


def _part(grads: Tensor, out: Tensor | None = None) -> Part:
    elements, threads = grads.shape[1:].numel(), _threads(grads.numel())
    address = None if out is None else out.data_ptr()
    return Part(grads.data_ptr(), grads.stride(0), elements, address, threads)


def _threads(elements: int) -> int:
    return min(torch.get_num_threads(), 1 + elements // _WORK_OF_A_THREAD)


def _readable(grads: Tensor) -> Tensor:
    """Convert to fp32 or fp64, and make each sample contiguous in memory."""
    grads = grads.resolve_neg()
    if grads.dtype not in (torch.float32, torch.float64):
        grads = grads.float()
    return grads if _is_readable(grads) else grads.contiguous()


def _is_readable(grads: Tensor) -> bool:
    # Not grads[0].is_contiguous(), since grads[0] would create a tensor for each parameter.
    step = 1
    for size, stride in zip(grads.shape[:0:-1], grads.stride()[:0:-1], strict=True):
        if size != 1 and stride != step:
            return 0 in grads.shape
        step *= size
    return True

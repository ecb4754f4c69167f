"""Launches the Triton per-sample gradient kernels: allocation, grids, sums of partial results.

Signatures are those of `reference.py`; `grads.py` checks the arguments.
Letters: B samples, T tokens of a sample; U samples that are spans of N tokens; I inputs,
O outputs, V rows of an embedding table, E its width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from . import grad_triton as kernels
from .attention_configs import architecture, precision
from .capture import kept_in_captures
from .grad_configs import INTERPRETED, GradConfig, Kernel, entry, table
from .layout import is_aligned, on_device
from .noise import NoiseStream, add_noise_
from .noise_triton import (
    OPTIONS,
    OpenList,
    address_of,
    bits_of,
    kind_of,
    open_list,
    settle_unless_kept,
)
from .reference import cheaper_norm, upper_bound
from .spans import (
    Spans,
    chunks,
    in_sequence,
    pairs_of_tiles,
    places,
    samples_of_tokens,
)
from .tensor_table import TYPES, alike, has_vectors, tensor_table

_INTERPRETED = not isinstance(kernels._clipped_grad_kernel, triton.JITFunction)

# Numbers of elements, tokens and columns that a program of a reduction processes at a time.
REDUCE_BLOCK = 1024
SQUARES_CHUNK = 8192
TOKEN_CHUNK = 512
TOKEN_BLOCK = 32
WIDTH_BLOCK = 128
# Steps of a Gram product that are summed before their sum is added to the total.
GRAM_STEPS = 4
# If noise starts within a group of 8 elements, 4 warps would spill registers under Triton 3.6.
OFFSET_OPTIONS = OPTIONS | {"num_warps": 8}

# Relative rounding error of an fp32 addition on tensor cores, which truncate.
_ROUNDING = 2.0**-23


def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.per_sample_grad`; squares are computed from the fp32 tiles in registers."""
    x, dy = _operands(x, dy)
    batch, tokens, inputs, outputs = _samples(x, spans), *x.shape[1:], dy.shape[2]
    grads = torch.empty((batch, outputs, inputs), dtype=torch.float32, device=x.device)
    sizes = _config("per_sample_grad", x, dy)
    tiles_i = _blocks(inputs, sizes.block_n)
    num_tiles = _blocks(outputs, sizes.block_m) * tiles_i
    parts = None
    if return_squares:
        parts = torch.empty((batch, num_tiles), dtype=torch.float64, device=x.device)
    if batch * num_tiles:
        with on_device(x):
            kernels._per_sample_grad_kernel[(batch * num_tiles,)](
                x, dy, places(spans, x.device), grads, parts, *x.stride()[:2], *dy.stride()[:2],
                tokens, inputs, outputs, tiles_i, num_tiles, SQUARES=return_squares,
                BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n, **_options(sizes),
            )  # fmt: skip
    return grads if parts is None else (grads, _sum_squares(parts, inputs * outputs))


def grad_norm(
    x: Tensor, dy: Tensor, *, form: str | None = None, spans: Spans | None = None
) -> Tensor:
    """See `reference.grad_norm`; returns an upper bound of ||H_i||^2.

    H_i is the per-sample gradient that `clipped_grad` sums. Its products and sums are in fp32
    (three TF32 products for each product of fp32 operands). So H_i differs from the exact G_i by
    the rounding of T products, at most T * 2^-20 * `grad_magnitude`.

    The form "tile" computes H_i, with the kernel of `clipped_grad`.

    The form "gram" computes ||G_i||^2 and adds bounds of two rounding errors: of H_i, and of fp32
    products of tokens (`_gram_rounding`). The second bound is relative to `grad_magnitude`
    squared. For orthogonal tokens and I + O = 2048 it is T * 8e-5 * ||G_i||^2 in 16 bits and T *
    1.2e-4 * ||G_i||^2 in 32 bits. If a sample's tokens nearly cancel, or products overflow, the
    device computes H_i instead.
    """
    x, dy = _operands(x, dy)
    if spans is not None:
        return _span_squares(x, dy, spans, form)
    if (form or cheaper_norm(x.shape[1], x, dy, fused=True)) == "gram":
        return _gram_squares(x, dy, None)
    return _tile_squares(x, dy, None)


def products_are_separate(*dy: Tensor) -> bool:
    """See `reference.products_are_separate`."""
    return True


def _span_squares(x: Tensor, dy: Tensor, spans: Spans, form: str | None) -> Tensor:
    """Return `grad_norm` of spans. Each form has a launch, with empty spans for other samples."""
    forms = [form or cheaper_norm(end - start, x, dy, fused=True) for start, end in spans]
    total = torch.zeros(len(spans), dtype=torch.float64, device=x.device)
    for each in set(forms):
        own = tuple(
            span if form_of == each else (0, 0) for span, form_of in zip(spans, forms, strict=True)
        )
        total += (_gram_squares if each == "gram" else _tile_squares)(x, dy, own)
    return total


def clipped_grad(x: Tensor, dy: Tensor, factors: Tensor, *, spans: Spans | None = None) -> Tensor:
    """See `reference.clipped_grad`; factors are applied to each sample's fp32 product."""
    x, dy = _operands(x, dy)
    out = torch.empty((dy.shape[2], x.shape[2]), dtype=torch.float32, device=x.device)
    _launch_products(x, dy, spans, factors.float().contiguous(), out)
    return out


def clip_reduce(
    grads: Tensor,
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Tensor | None = None,
    noise: NoiseStream | None = None,
) -> Tensor:
    """See `reference.clip_reduce`; waits for the GPU if there is noise without `unsettled`."""
    intos = None if into is None else [into]
    noises = None if noise is None else [noise]
    return clip_reduce_all([grads], factors, grid=grid, into=intos, noise=noises)[0]


def clip_reduce_all(
    grads: Sequence[Tensor],
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Sequence[Tensor] | None = None,
    noise: Sequence[NoiseStream] | None = None,
) -> Sequence[Tensor]:
    """See `reference.clip_reduce_all`; one launch for all tensors of a dtype."""
    grads, factors = [own.contiguous() for own in grads], factors.float().contiguous()
    dtype = torch.float32 if grid is None or noise is not None else torch.float64
    outs = into or [torch.empty(g.shape[1:], dtype=dtype, device=g.device) for g in grads]
    # Without a grid the sum is rounded to fp32 first, and noise is added afterwards.
    streams: list[NoiseStream | None] = [None] * len(grads)
    if noise is not None and grid is not None:
        streams = [stream if stream.std else None for stream in noise]
    for own in alike([kind_of(*x) for x in zip(streams, grads, outs, strict=True)]):
        used = [i for i in own if outs[i].numel()]
        if used:
            _launch_reduce(
                [grads[i] for i in used],
                [outs[i] for i in used],
                [streams[i] for i in used],
                factors,
                grid,
                is_into=into is not None,
            )
    for total in into or ():
        # Autograd must notice the change, as it does with PyTorch's own operations.
        torch.autograd.graph.increment_version(total)
    return outs if noise is None or grid is not None else add_noise_(outs, noise)


def squared_norm(*grads: Tensor, into: Tensor | None = None) -> Tensor:
    """See `reference.squared_norm`; computed in fp64, one launch for all tensors of a dtype."""
    first, is_new = grads[0], into is None
    batch = first.shape[0]
    if into is None:
        into = torch.empty(batch, dtype=torch.float64, device=first.device)
    flat = [own.contiguous() for own in grads if own.numel()]
    # If the first sample is aligned, all samples are if they have a multiple of 16 elements.
    counts = [own.numel() // batch for own in flat]
    kinds = [
        (own.dtype, own.data_ptr() % 16 == 0 and count % 16 == 0)
        for own, count in zip(flat, counts, strict=True)
    ]
    for numbers in alike(kinds):
        own, sizes = [flat[i] for i in numbers], [counts[i] for i in numbers]
        table = tensor_table(own, sizes=sizes, block=SQUARES_CHUNK)
        parts = torch.empty(batch, table.programs, dtype=torch.float64, device=first.device)
        with on_device(first):
            kernels._squares_kernel[(table.programs * batch,)](
                table.rows, table.owners, parts, table.programs, GRADS=TYPES[own[0].dtype],
                CHUNK=SQUARES_CHUNK, BLOCK=REDUCE_BLOCK, VECTORS=kinds[numbers[0]][1],
            )  # fmt: skip
        # A square is rounded once; each addition, of terms or of programs' sums, rounds once more.
        terms = min(sum(sizes), SQUARES_CHUNK + table.programs)
        _sum_squares(parts, terms, into, is_into=not is_new)
        is_new = False
    # Autograd must notice the change, as it does with PyTorch's own operations.
    torch.autograd.graph.increment_version(into)
    return into.zero_() if is_new else into


def clip_factors(
    squared_norms: Tensor, bound: float, function: str = "hard", *, keep: Tensor | None = None
) -> Tensor:
    """See `reference.clip_factors`."""
    batch = squared_norms.shape[0]
    factors = torch.empty(batch, dtype=torch.float32, device=squared_norms.device)
    if batch:
        with on_device(factors):
            kernels._clip_factors_kernel[(_blocks(batch, TOKEN_CHUNK),)](
                squared_norms.contiguous(),
                None if keep is None else keep.contiguous().view(torch.uint8), factors,
                batch, bits_of(float(bound)), HARD=function == "hard", BLOCK=TOKEN_CHUNK,
            )  # fmt: skip
    return factors


def embedding_per_sample_grad(
    indices: Tensor, dy: Tensor, num_embeddings: int, *, spans: Spans | None = None
) -> Tensor:
    """See `reference.embedding_per_sample_grad`; without atomics, so bitwise reproducible."""
    batch, width = _samples(dy, spans), dy.shape[2]
    # Each sample has its own table; tokens of no sample share another, which is not returned.
    tables = batch if spans is None else batch + 1
    rows = indices.long() + _sample_of_tokens(dy, spans) * num_embeddings
    factors = _ones(batch, dy.device)
    grads = embedding_clipped_grad(rows, dy, factors, tables * num_embeddings, spans=spans)
    return grads.view(tables, num_embeddings, width)[:batch]


def embedding_grad_norm(indices: Tensor, dy: Tensor, *, spans: Spans | None = None) -> Tensor:
    """See `reference.embedding_grad_norm`; tokens are sorted by row, with one program per row.

    The result includes the rounding errors of fp64. So it is an upper bound of the squared norm of
    the exact gradient, and of the gradient that `embedding_clipped_grad` sums.
    """
    batch, tokens, width = dy.shape
    dy = _unit_stride(dy)
    keys = indices.long()
    if spans is not None:
        # Sort by sample first, in the order of the spans; tokens of no sample come last.
        keys = keys + (_sample_of_tokens(dy, spans) << 32)
    in_order, order = torch.sort(keys, dim=1, stable=True)
    ends = torch.searchsorted(in_order, in_order, right=True)
    blocks = _blocks(width, WIDTH_BLOCK)
    squares = torch.empty((batch, tokens, blocks), dtype=torch.float64, device=dy.device)
    if squares.numel():
        with on_device(dy):
            kernels._embedding_grad_norm_kernel[(squares.numel(),)](
                dy, order.contiguous(), ends.contiguous(), squares, *dy.stride()[:2],
                tokens, width, blocks, BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
            )  # fmt: skip
    if spans is None:
        total = squares.sum((1, 2))
    else:
        lengths = tuple(end - start for start, end in spans)
        total = span_sum(squares[0], in_sequence(lengths)).sum(1)
    return upper_bound(total, tokens * width + 4)


def embedding_clipped_grad(
    indices: Tensor,
    dy: Tensor,
    factors: Tensor,
    num_embeddings: int,
    *,
    spans: Spans | None = None,
) -> Tensor:
    """See `reference.embedding_clipped_grad`; tokens are sorted by row, which avoids atomics.

    Each sample's gradient is summed separately in fp64, so `embedding_grad_norm` bounds its norm.
    """
    tokens, width = dy.shape[1:]
    dy = _unit_stride(dy)
    samples = None if spans is None else samples_of_tokens(spans, tokens, dy.device)
    rows, order = torch.sort(indices.long().flatten(), stable=True)
    ends = torch.searchsorted(rows, rows, right=True)
    out = torch.zeros((num_embeddings, width), dtype=torch.float32, device=dy.device)
    blocks = _blocks(width, WIDTH_BLOCK)
    if dy.numel():
        with on_device(dy):
            kernels._embedding_clipped_grad_kernel[(rows.numel() * blocks,)](
                dy, order, rows, ends, samples, factors.float().contiguous(), out,
                *dy.stride()[:2], len(factors), tokens, width, blocks,
                BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
            )  # fmt: skip
    return out


def span_sum(x: Tensor, spans: Spans) -> Tensor:
    """See `reference.span_sum`."""
    flat = x.reshape(1, x.shape[0], x.shape[1:].numel())
    return _span_sums(flat, spans, sums=True)[1].view(len(spans), *x.shape[1:])


def per_sample_bias_grad(dy: Tensor) -> Tensor:
    """See `reference.per_sample_bias_grad`."""
    return _token_sums(dy, None, None, None, None, True)[1].sum(1)


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
    dx = torch.ops.aten.native_layer_norm_backward(
        dy.contiguous(), x, list(shape), mean, rstd, weight, None, [True, False, False]
    )[0]
    dweight, dbias = _norm_sums(dy, x, mean, rstd, shape, spans, sums=True)
    per_sample = (_samples(x, spans), *shape)
    return dx, dweight.view(per_sample), dbias.view(per_sample)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    ndim: int,
    *,
    spans: Spans | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm_backward`."""
    shape = x.shape[x.ndim - ndim :]
    last = tuple(range(x.ndim - ndim, x.ndim))
    normed = x.float() * rstd
    dnormed = dy.float() if weight is None else dy.float() * weight
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(last, keepdim=True))
    dweight, _ = _norm_sums(dy, x, None, rstd, shape, spans)
    return dx.to(x.dtype), dweight.view(_samples(x, spans), *shape)


def _launch_products(
    x: Tensor, dy: Tensor, spans: Spans | None, factors: Tensor, out: Tensor | None
) -> Tensor:
    """Write sum_i c_i H_i to `out` or, without `out`, return each tile's part of ||H_i||^2.

    A part is written only if c_i is not 0. Calls with and without `out` have arguments of equal
    types, so both run the same compiled kernel: the norms belong to the H_i that are summed.

    Returns:
        [B, tiles], fp64; [0, tiles] with `out`.
    """
    batch, tokens, inputs, outputs = _samples(x, spans), *x.shape[1:], dy.shape[2]
    sizes = _config("clipped_grad", x, dy)
    tiles_i = _blocks(inputs, sizes.block_n)
    num_tiles = _blocks(outputs, sizes.block_m) * tiles_i
    rows = batch if out is None else 0
    parts = torch.empty((rows, num_tiles), dtype=torch.float64, device=x.device)
    programs = num_tiles if out is not None else parts.numel()
    if programs:
        with on_device(x):
            kernels._clipped_grad_kernel[(programs,)](
                x, dy, places(spans, x.device), factors, factors if out is None else out, parts,
                int(out is None), *x.stride()[:2], *dy.stride()[:2],
                batch, tokens, inputs, outputs, tiles_i, num_tiles,
                BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n, **_options(sizes),
            )  # fmt: skip
    return parts


def _tile_squares(x: Tensor, dy: Tensor, spans: Spans | None) -> Tensor:
    """Return upper bounds of ||H_i||^2, [B], computed from H_i."""
    parts = _launch_products(x, dy, spans, _ones(_samples(x, spans), x.device), None)
    return _sum_squares(parts, x.shape[2] * dy.shape[2])


def _gram_squares(x: Tensor, dy: Tensor, spans: Spans | None) -> Tensor:
    """Return upper bounds of ||H_i||^2, [B], from Gram products or, if tokens cancel, from H_i."""
    batch, tokens, inputs, outputs = *x.shape, dy.shape[2]
    sizes = _config("gram", x, dy)
    run = GRAM_STEPS * sizes.block_k
    pairs, of_samples = _pairs(_blocks(tokens, sizes.block_m), x.device), None
    if spans is not None:
        pairs, of_samples = pairs_of_tiles(spans, sizes.block_m, x.device)
    samples, where = _samples(x, spans), places(spans, x.device)
    parts = torch.empty((batch, pairs.shape[1]), dtype=torch.float64, device=x.device)
    norms = torch.empty((batch, tokens, 2), dtype=torch.float64, device=x.device)
    squares = torch.empty(samples, dtype=torch.float64, device=x.device)
    apart = torch.empty(samples, dtype=torch.float32, device=x.device)
    if not samples:
        return squares
    rounding = _gram_rounding(inputs, run, x.dtype) + _gram_rounding(outputs, run, x.dtype)
    blocks = _blocks(tokens, TOKEN_BLOCK)
    strides = *x.stride()[:2], *dy.stride()[:2]
    with on_device(x):
        if parts.numel():
            kernels._grad_norm_gram_kernel[(parts.numel(),)](
                x, dy, where, pairs, parts, *strides, tokens, inputs, outputs, pairs.shape[1],
                BLOCK_M=sizes.block_m, RUN=run, **_options(sizes),
            )  # fmt: skip
        if norms.numel():
            kernels._token_norms_kernel[(batch * blocks,)](
                x, dy, norms, *strides, tokens, inputs, outputs, blocks,
                BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
            )  # fmt: skip
        kernels._gram_bound_kernel[(samples,)](
            parts, places(of_samples, x.device), norms, where, squares, apart,
            tokens, pairs.shape[1], inputs, outputs, bits_of(rounding), BLOCK=REDUCE_BLOCK,
        )  # fmt: skip
    own = _launch_products(x, dy, spans, apart, None)
    return _sum_squares(own, inputs * outputs, squares, apart=apart)


def _sum_squares(
    parts: Tensor,
    terms: int,
    squares: Tensor | None = None,
    *,
    apart: Tensor | None = None,
    is_into: bool = False,
) -> Tensor:
    """Return upper bounds, [B], of the sums of parts [B, parts].

    Args:
        parts: partial sums of squares.
        terms: total number of squares, for the bound of the rounding error.
        squares: output; with `is_into` the bounds are added to it.
        apart: [B], fp32: samples with entry 0 keep their entry of squares.
    """
    batch, count = parts.shape
    if squares is None:
        squares = torch.empty(batch, dtype=torch.float64, device=parts.device)
    if batch:
        with on_device(parts):
            kernels._sum_squares_kernel[(batch,)](
                parts, apart, squares, count, bits_of(upper_bound(1.0, terms)),
                INTO=is_into, BLOCK=REDUCE_BLOCK,
            )  # fmt: skip
    return squares


def _gram_rounding(width: int, run: int, dtype: torch.dtype) -> float:
    """Return the error bound of a Gram kernel's product of two tokens, relative to their norms.

    Each addition rounds by at most 2^-23 of the sum so far, and a tensor core's block of four or
    more terms rounds once more. A product of fp32 operands is computed as three chains of TF32
    products, which omit 2^-21 of the product.
    """
    chains = 3 if dtype == torch.float32 else 1
    return (chains * min(width, run) * 5 / 4 + _blocks(width, run) + 8) * _ROUNDING


def _launch_reduce(
    grads: Sequence[Tensor],
    outs: Sequence[Tensor],
    streams: Sequence[NoiseStream | None],
    factors: Tensor,
    grid: float | None,
    *,
    is_into: bool,
) -> None:
    """Write the clipped sums sum_i c_i G_i to outs, in one launch; grads are contiguous.

    Without a grid the sums are computed in fp32. With a grid they are exact, and outs are fp64. If
    noise is added, outs may be fp32, to which the noisy sums are rounded.
    """
    noise = [stream for stream in streams if stream is not None]
    found = open_list(outs, noise) if noise else None
    sizes = [out.numel() for out in outs]
    table = tensor_table(grads, outs, noise or None, sizes=sizes, block=REDUCE_BLOCK)
    address = (bits_of(1.0 if grid is None else float(grid)), *(0,) * 11)
    with on_device(factors):
        kernels._clip_reduce_kernel[(table.programs,)](
            table.rows, table.owners, factors,
            None if found is None else found.entries, 0 if found is None else found.capacity,
            len(factors), *(address_of(noise[0]) if noise else address),
            GRADS=TYPES[grads[0].dtype], OUT=TYPES[outs[0].dtype], BLOCK=REDUCE_BLOCK,
            EXACT=grid is not None, INTO=is_into, VECTORS=has_vectors(grads[0], outs[0]),
            **_noise_options(found),
        )  # fmt: skip
    if found is not None:
        settle_unless_kept(found)


def _norm_sums(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    shape: torch.Size,
    spans: Spans | None,
    *,
    sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum dy * (x - mean) * rstd, and dy, over the dimensions between samples and `shape`."""
    operands = _rows(dy, shape), _rows(x, shape), mean, rstd
    if spans is None:
        products, totals = _token_sums(*operands, None, sums)
        return products.sum(1), totals.sum(1)
    each = operands[0].shape[1] // max(1, x.shape[1])  # rows per token
    own = tuple((start * each, end * each) for start, end in spans)
    return _span_sums(operands[0], own, *operands[1:], sums=sums)


def _span_sums(
    dy: Tensor,
    spans: Spans,
    x: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    *,
    sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `_token_sums` of spans, [U, E]: sum each chunk, then the chunk sums of each span."""
    parts, of_spans = chunks(spans, TOKEN_CHUNK)
    found = _token_sums(dy, x, mean, rstd, parts, sums)
    if len(parts) == len(spans):
        return found[0][0], found[1][0]
    products, totals = (
        _span_sums(part, of_spans, sums=True)[1] if part.numel() else part[0] for part in found
    )
    return products, totals


def _token_sums(
    dy: Tensor,
    x: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    spans: Spans | None,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Sum dy * (x - mean) * rstd, and dy, over chunks of tokens.

    Returns:
        Two tensors, fp32 (fp64 for fp64 dy): [B, chunks, E] or, for spans no longer than a chunk,
        [1, U, E]. Without x the first tensor is empty, without `sums` the second.
    """
    batch, tokens, width = dy.shape
    dy, x = _unit_stride(dy), None if x is None else _unit_stride(x)
    parts, blocks = _blocks(tokens, TOKEN_CHUNK), _blocks(width, WIDTH_BLOCK)
    if spans is not None:
        batch, parts = 1, len(spans)
    dtype = torch.promote_types(dy.dtype, torch.float32)
    products, totals = (
        torch.empty((batch, parts, width if made else 0), dtype=dtype, device=dy.device)
        for made in (x is not None, sums)
    )
    if batch * parts * blocks:
        with on_device(dy):
            kernels._token_sums_kernel[(batch * parts * blocks,)](
                dy, x, *(None if v is None else v.float().contiguous() for v in (mean, rstd)),
                places(spans, dy.device),
                None if x is None else products, totals if sums else None,
                *dy.stride()[:2], *(dy if x is None else x).stride()[:2],
                tokens, width, 1 if spans is not None else parts, blocks,
                CHUNK=TOKEN_CHUNK, BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
                PRODUCTS=x is not None, HAS_MEAN=mean is not None, SUMS=sums,
            )  # fmt: skip
    return products, totals


def _rows(x: Tensor, shape: torch.Size) -> Tensor:
    """Reshape a tensor [B, ..., *shape] to [B, T, E]."""
    batch, width = x.shape[0], shape.numel()
    middle = x.shape[1 : x.ndim - len(shape)].numel()
    return x.reshape(batch, middle, width)


def _operands(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and dy in their common dtype and with last stride 1, as the kernels need them."""
    dtype = torch.promote_types(x.dtype, dy.dtype)
    return _unit_stride(x.to(dtype)), _unit_stride(dy.to(dtype))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _samples(x: Tensor, spans: Spans | None) -> int:
    return x.shape[0] if spans is None else len(spans)


def _sample_of_tokens(x: Tensor, spans: Spans | None) -> Tensor:
    """Return the samples of x's tokens: [B, 1], or with spans [N], where U means no sample."""
    if spans is None:
        return torch.arange(x.shape[0], device=x.device).view(-1, 1)
    return samples_of_tokens(spans, x.shape[1], x.device)


@kept_in_captures
@functools.lru_cache(maxsize=64)
def _ones(samples: int, device: torch.device) -> Tensor:
    """Return cached ones, [B], fp32. Do not modify them."""
    return torch.ones(samples, device=device)


@kept_in_captures
@functools.lru_cache(maxsize=64)
def _pairs(tiles: int, device: torch.device) -> Tensor:
    """Return the pairs of tiles (s, t) with t >= s: [2, pairs]."""
    return torch.triu_indices(tiles, tiles, dtype=torch.int32, device=device)


def _config(kernel: Kernel, x: Tensor, dy: Tensor) -> GradConfig:
    if _INTERPRETED:
        return INTERPRETED
    sizes = table()[architecture(x.device)][entry(kernel, x.dtype)]
    # Unaligned operands get at most 128 columns: no wider tiles were tried on a GPU for them.
    return sizes if is_aligned(x, dy) else sizes._replace(block_n=min(128, sizes.block_n))


def _options(sizes: GradConfig) -> dict[str, object]:
    return {
        "BLOCK_K": sizes.block_k,
        "UPCAST": _INTERPRETED,
        "PRECISION": precision(torch.version.hip is not None),
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
        "enable_fp_fusion": True,
    }


def _noise_options(found: OpenList | None) -> dict[str, object]:
    if found is None:
        return {"NOISE": False, "ALIGNED": True, "PHILOX": False, **OPTIONS}
    stream = found.streams[0]
    aligned = stream.offset % 8 == 0
    return {
        "NOISE": True,
        "ALIGNED": aligned,
        "PHILOX": stream.generator == "philox",
        **(OPTIONS if aligned else OFFSET_OPTIONS),
    }

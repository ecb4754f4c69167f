"""Launches the Triton per-sample gradient kernels: allocation, grids, sums outside of them.

Signatures are those of `reference.py`; `grads.py` checks the arguments.
Letters: B samples, T tokens of a sample; U samples that are spans of N tokens; I inputs,
O outputs, V rows of a table, E its width.
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
    settle_or_keep,
)
from .reference import cheaper_norm, upper_bound
from .spans import (
    Spans,
    chunks,
    in_sequence,
    pairs_of_tiles,
    places,
    samples_of_tokens,
    tokens_as_samples,
)
from .tensor_table import TYPES, alike, has_vectors, tensor_table

_INTERPRETED = not isinstance(kernels._clipped_grad_kernel, triton.JITFunction)

# Elements, tokens, columns and rows that a program of a reduction takes at a time.
REDUCE_BLOCK = 1024
SQUARES_CHUNK = 8192
TOKEN_CHUNK = 512
TOKEN_BLOCK = 32
WIDTH_BLOCK = 128
# Steps of a Gram product that are added up before their sum is added to that of others.
GRAM_STEPS = 4
# Where noise starts within a block of its words, 4 warps would spill under Triton 3.6.
OFFSET_OPTIONS = OPTIONS | {"num_warps": 8}

# Relative rounding error of an fp32 addition: tensor cores truncate.
_ROUNDING = 2.0**-23
# Products below it are not normal numbers in fp32.
_LEAST_NORMAL = 2.0**-126


def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.per_sample_grad`; the squares come from the fp32 tiles, still on chip."""
    x, dy = _operands(x, dy)
    shape = (_samples(x, spans), dy.shape[2], x.shape[2])
    grads = torch.empty(shape, dtype=torch.float32, device=x.device)
    squares = _launch_per_sample(x, dy, grads, return_squares, spans)
    return grads if squares is None else (grads, squares)


def grad_norm(
    x: Tensor, dy: Tensor, *, form: str | None = None, spans: Spans | None = None
) -> Tensor:
    """See `reference.grad_norm`; an upper bound of ||H_i||^2 or ||G_i||^2, by form.

    "tile": of ||H_i||^2 for H_i = G_i as `per_sample_grad` makes it, with products and sums in
    fp32 (of fp32 operands, with three TF32 products for each). H_i differs from G_i by the
    rounding of T products, at most T 2^-20 `grad_magnitude`, which is not added here.

    "gram": of ||G_i||^2 in real arithmetic. The rounding error of fp32 in the products of tokens,
    see `_gram_rounding`, is added relative to `grad_magnitude` squared: where tokens are
    orthogonal and I + O = 2048, that is T 8e-5 of ||G_i||^2 in 16 bits and T 1.2e-4 in 32. A
    product that overflows gives a non-finite square.
    """
    x, dy = _operands(x, dy)
    if spans is not None:
        return _span_squares(x, dy, spans, form)
    if (form or cheaper_norm(x.shape[1], x, dy, fused=True)) == "gram":
        return _gram_squares(x, dy, None)
    squares = _launch_per_sample(x, dy, None, True, None)
    assert squares is not None
    return squares


def _span_squares(x: Tensor, dy: Tensor, spans: Spans, form: str | None) -> Tensor:
    """`grad_norm` of spans, each in its form: in that of the others it has no tokens."""
    forms = [form or cheaper_norm(end - start, x, dy, fused=True) for start, end in spans]
    total = torch.zeros(len(spans), dtype=torch.float64, device=x.device)
    for each in set(forms):
        own = tuple(
            span if form_of == each else (0, 0) for span, form_of in zip(spans, forms, strict=True)
        )
        found = (
            _gram_squares(x, dy, own)
            if each == "gram"
            else _launch_per_sample(x, dy, None, True, own)
        )
        assert found is not None
        total += found
    return total


def clipped_grad(x: Tensor, dy: Tensor, factors: Tensor, *, spans: Spans | None = None) -> Tensor:
    """See `reference.clipped_grad`; factors are applied to each sample's fp32 product."""
    x, dy = _operands(x, dy)
    tokens, inputs, outputs = *x.shape[1:], dy.shape[2]
    sizes = _config("clipped_grad", x, dy)
    out = torch.empty((outputs, inputs), dtype=torch.float32, device=x.device)
    tiles_i = _blocks(inputs, sizes.block_n)
    num_tiles = _blocks(outputs, sizes.block_m) * tiles_i
    if num_tiles:
        with on_device(x):
            kernels._clipped_grad_kernel[(num_tiles,)](
                x, dy, places(spans, x.device), factors.float().contiguous(), out,
                *x.stride()[:2], *dy.stride()[:2],
                _samples(x, spans), tokens, inputs, outputs, tiles_i,
                BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n, **_options(sizes),
            )  # fmt: skip
    return out


def clip_reduce(
    grads: Tensor,
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Tensor | None = None,
    noise: NoiseStream | None = None,
) -> Tensor:
    """See `reference.clip_reduce`; noise waits for the device, unless it is settled later."""
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
    # Of a sum that is not on the grid the noise is added to its fp32 value.
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
    """See `reference.squared_norm`; everything in fp64, one launch for all tensors of a dtype."""
    first = grads[0]
    if into is None:
        into = torch.zeros(first.shape[0], dtype=torch.float64, device=first.device)
    flat = [own.contiguous() for own in grads if own.numel()]
    for numbers in alike([kind_of(None, own, own[0]) for own in flat]):
        own = [flat[i] for i in numbers]
        sizes = [x[0].numel() for x in own]
        table = tensor_table(own, sizes=sizes, block=SQUARES_CHUNK)
        partial = torch.empty(len(first), table.programs, dtype=torch.float64, device=first.device)
        with on_device(first):
            kernels._squares_kernel[(table.programs * len(first),)](
                table.rows, table.owners, partial, table.programs, GRADS=TYPES[own[0].dtype],
                CHUNK=SQUARES_CHUNK, BLOCK=REDUCE_BLOCK,
                VECTORS=has_vectors(own[0], own[0][0]),
            )  # fmt: skip
        # A square is rounded, and a sum for each term of its own program and each program.
        terms = min(sum(sizes), SQUARES_CHUNK + table.programs)
        into += upper_bound(partial.sum(1), terms)
    return into


def clip_factors(squared_norms: Tensor, bound: float, function: str = "hard") -> Tensor:
    """See `reference.clip_factors`."""
    factors = torch.empty(len(squared_norms), dtype=torch.float32, device=squared_norms.device)
    if len(factors):
        with on_device(factors):
            kernels._clip_factors_kernel[(_blocks(len(factors), TOKEN_CHUNK),)](
                squared_norms.contiguous(), factors, len(factors), bits_of(float(bound)),
                HARD=function == "hard", BLOCK=TOKEN_CHUNK,
            )  # fmt: skip
    return factors


def embedding_per_sample_grad(
    indices: Tensor, dy: Tensor, num_embeddings: int, *, spans: Spans | None = None
) -> Tensor:
    """See `reference.embedding_per_sample_grad`; nothing is atomic, so its bits repeat."""
    batch, width = _samples(dy, spans), dy.shape[2]
    # Each sample has a table of its own, and so do the tokens of no sample, which is not returned.
    tables = batch if spans is None else batch + 1
    rows = indices.long() + _sample_of_tokens(dy, spans) * num_embeddings
    ones = torch.ones(batch, device=dy.device)
    grads = embedding_clipped_grad(rows, dy, ones, tables * num_embeddings, spans=spans)
    return grads.view(tables, num_embeddings, width)[:batch]


def embedding_grad_norm(indices: Tensor, dy: Tensor, *, spans: Spans | None = None) -> Tensor:
    """See `reference.embedding_grad_norm`; a sample's tokens sorted by row, a program a row.

    An upper bound of the squared norm in real arithmetic: it includes the rounding error of fp64.
    """
    batch, tokens, width = dy.shape
    dy = _unit_stride(dy)
    keys = indices.long()
    if spans is not None:
        # First by sample, in the order of the spans; those of no sample come last.
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
    """See `reference.embedding_clipped_grad`; all tokens sorted by row, so nothing is atomic."""
    if spans is not None:
        factors, indices, dy = tokens_as_samples(factors, spans, indices, dy)
    tokens, width = dy.shape[1:]
    dy = _unit_stride(dy)
    rows, order = torch.sort(indices.long().flatten(), stable=True)
    ends = torch.searchsorted(rows, rows, right=True)
    out = torch.zeros((num_embeddings, width), dtype=torch.float32, device=dy.device)
    blocks = _blocks(width, WIDTH_BLOCK)
    if dy.numel():
        with on_device(dy):
            kernels._embedding_clipped_grad_kernel[(rows.numel() * blocks,)](
                dy, order, rows, ends, factors.float().contiguous(), out, *dy.stride()[:2],
                tokens, width, blocks, BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
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


def _launch_per_sample(
    x: Tensor, dy: Tensor, grads: Tensor | None, squares: bool, spans: Spans | None
) -> Tensor | None:
    """Writes grads where given; returns bounds of their squared norms [B] where asked for."""
    tokens, inputs, outputs = *x.shape[1:], dy.shape[2]
    batch = _samples(x, spans)
    sizes = _config("per_sample_grad", x, dy)
    tiles_i = _blocks(inputs, sizes.block_n)
    num_tiles = _blocks(outputs, sizes.block_m) * tiles_i
    partial = None
    if squares:
        partial = torch.empty((batch, num_tiles), dtype=torch.float64, device=x.device)
    if batch * num_tiles:
        with on_device(x):
            kernels._per_sample_grad_kernel[(batch * num_tiles,)](
                x, dy, places(spans, x.device), grads, partial,
                *x.stride()[:2], *dy.stride()[:2],
                tokens, inputs, outputs, tiles_i, num_tiles,
                STORE=grads is not None, SQUARES=squares,
                BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n, **_options(sizes),
            )  # fmt: skip
    return None if partial is None else upper_bound(partial.sum(1), inputs * outputs)


def _gram_squares(x: Tensor, dy: Tensor, spans: Spans | None) -> Tensor:
    """||G_i||^2 [B] by pairs of token tiles, raised by the products' rounding error."""
    batch, tokens, inputs, outputs = *x.shape, dy.shape[2]
    sizes = _config("gram", x, dy)
    run = GRAM_STEPS * sizes.block_k
    if spans is None:
        pairs = _pairs(_blocks(tokens, sizes.block_m), x.device)
    else:
        pairs, of_samples = pairs_of_tiles(spans, sizes.block_m, x.device)
    partial = torch.empty((batch, pairs.shape[1]), dtype=torch.float64, device=x.device)
    if partial.numel():
        with on_device(x):
            kernels._grad_norm_gram_kernel[(partial.numel(),)](
                x, dy, places(spans, x.device), pairs, partial,
                *x.stride()[:2], *dy.stride()[:2],
                tokens, inputs, outputs, pairs.shape[1],
                BLOCK_M=sizes.block_m, RUN=run, **_options(sizes),
            )  # fmt: skip
    x_norms = torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
    dy_norms = torch.linalg.vector_norm(dy, dim=2, dtype=torch.float64)
    terms = torch.stack([x_norms * dy_norms, x_norms, dy_norms], 2)
    if (where := places(spans, x.device)) is None or spans is None:
        squares, terms = partial.sum(1), terms.sum(1)
        pairs_of_tokens: float | Tensor = tokens**2
    else:
        squares, terms = span_sum(partial[0], of_samples), span_sum(terms[0], spans)
        pairs_of_tokens = where.diff(dim=1)[:, 0].double().square()
    # Where a product of two tokens overflows, that of one of them with itself does too: NaN.
    squares = squares.clamp(min=0)
    size, x_size, dy_size = terms.square().unbind(1)
    rounding = _gram_rounding(inputs, run, x.dtype) + _gram_rounding(outputs, run, x.dtype)
    # An underflowed product of inputs multiplies the product of outputs, and vice versa.
    vanished = inputs * dy_size + outputs * x_size
    return squares + (rounding + pairs_of_tokens * 2.0**-52) * size + _LEAST_NORMAL * vanished


def _gram_rounding(width: int, run: int, dtype: torch.dtype) -> float:
    """Error bound of a Gram kernel's product of two tokens, relative to their norms.

    Each addition rounds by at most 2^-23 of the terms added up so far, and a tensor core's block
    of four or more terms by once more. A product of fp32 is three chains of TF32 products, which
    leave out 2^-21 of it.
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
    """sum_i c_i G_i of contiguous grads of one kind, with a factor for each sample.

    With a grid in fp64 and exact, with noise rounded to fp32.
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
        settle_or_keep(found)


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
    """Sums of dy (x - mean) rstd and of dy over all but samples and the normalised shape."""
    operands = _rows(dy, shape), _rows(x, shape), mean, rstd
    if spans is None:
        products, totals = _token_sums(*operands, None, sums)
        return products.sum(1), totals.sum(1)
    each = operands[0].shape[1] // max(1, x.shape[1])  # rows of a token
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
    """`_token_sums` of spans, [U, E]: of chunks of them first, and then of the chunks' sums."""
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
    """Sums over tokens of dy (x - mean) rstd and of dy, by chunks of tokens.

    Returns:
        [B, chunks, E], or for spans, none longer than a chunk, [1, U, E]; fp32, fp64 for fp64 dy.
        Without x and without `sums` empty.
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
    """[B, T, E] of a tensor [B, ..., *shape]."""
    batch, width = x.shape[0], shape.numel()
    middle = x.shape[1 : x.ndim - len(shape)].numel()
    return x.reshape(batch, middle, width)


def _operands(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Of one dtype, with the last dimension adjacent in memory."""
    dtype = torch.promote_types(x.dtype, dy.dtype)
    return _unit_stride(x.to(dtype)), _unit_stride(dy.to(dtype))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _samples(x: Tensor, spans: Spans | None) -> int:
    return x.shape[0] if spans is None else len(spans)


def _sample_of_tokens(x: Tensor, spans: Spans | None) -> Tensor:
    """The sample of each token of x [B, T, ...]: [B, 1], or for spans [N], U for none."""
    if spans is None:
        return torch.arange(x.shape[0], device=x.device).view(-1, 1)
    return samples_of_tokens(spans, x.shape[1], x.device)


@kept_in_captures
@functools.lru_cache(maxsize=64)
def _pairs(tiles: int, device: torch.device) -> Tensor:
    """[2, pairs]: the tiles (s, t) with t >= s."""
    return torch.triu_indices(tiles, tiles, dtype=torch.int32, device=device)


def _config(kernel: Kernel, x: Tensor, dy: Tensor) -> GradConfig:
    if _INTERPRETED:
        return INTERPRETED
    sizes = table()[architecture(x.device)][entry(kernel, x.dtype)]
    # Where loads are narrow, only tiles of 128 x 128 were tried on a GPU.
    return sizes if is_aligned(x, dy) else sizes._replace(block_n=min(128, sizes.block_n))


def _options(sizes: GradConfig) -> dict[str, object]:
    """Constexprs and launch options that follow from the config and the place of running."""
    return {
        "BLOCK_K": sizes.block_k,
        "UPCAST": _INTERPRETED,
        "PRECISION": precision(torch.version.hip is not None),
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
        "enable_fp_fusion": True,
    }


def _noise_options(found: OpenList | None) -> dict[str, object]:
    """Constexprs and launch options that follow from the noise."""
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

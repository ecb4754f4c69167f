"""Runs the Triton per-sample gradient kernels: allocation, grids, and what is summed outside.

Signatures are those of the plain twins in `reference.py`; arguments are checked by `grads.py`.
Letters: B samples, T tokens of a sample, I inputs, O outputs, V rows of a table, E its width.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from . import grad_triton as kernels
from .attention_configs import architecture
from .block_reference import BLOCK, block_bounds
from .grad_configs import INTERPRETED, GradConfig, Kernel, entry, table
from .noise import NoiseStream
from .noise_triton import OPTIONS, stream_words

_INTERPRETED = not isinstance(kernels._clipped_grad_kernel, triton.JITFunction)

# Elements, tokens, columns and rows that a program of a reduction takes at a time.
REDUCE_BLOCK = 1024
TOKEN_CHUNK = 512
TOKEN_BLOCK = 32
WIDTH_BLOCK = 128
TILE_ROWS = 16

# What a Gram norm's products and sums in fp32 round, relative to (sum_t ||x_t|| ||dy_t||)^2.
_GRAM_ROUNDING = 4 * 2.0**-24
# Where the square is at least this part of that, single roundings do not add up to a bias.
_HARMLESS_CANCELLATION = 2.0**12
# Products below it are not normal numbers in fp32.
_LEAST_NORMAL = 2.0**-126


def per_sample_grad(
    x: Tensor, dy: Tensor, *, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.per_sample_grad`; the squares come from the fp32 tiles, still on chip."""
    x, dy = _operands(x, dy)
    grads = torch.empty(
        (x.shape[0], dy.shape[2], x.shape[2]), dtype=torch.float32, device=x.device
    )
    squares = _launch_per_sample(x, dy, grads, return_squares)
    return grads if squares is None else (grads, squares)


def grad_norm(x: Tensor, dy: Tensor, *, form: str | None = None) -> Tensor:
    """See `reference.grad_norm`.

    The Gram form multiplies in fp32 and adds in fp64. What that rounds is added to the square
    wherever it could matter: where the tokens cancel to less than 1/64 of
    ``sum_t ||x_t|| ||dy_t||``, and where products leave fp32's normal numbers. So rounding cannot
    hide a norm. A product that overflows gives a non-finite square.
    """
    x, dy = _operands(x, dy)
    if form is None:
        tokens, inputs, outputs = x.shape[1], x.shape[2], dy.shape[2]
        # Symmetry halves the Gram form.
        form = "gram" if tokens * (inputs + outputs) < 2 * inputs * outputs else "tile"
    if form == "gram":
        return _gram_squares(x, dy)
    squares = _launch_per_sample(x, dy, None, True)
    assert squares is not None
    return squares


def clipped_grad(
    x: Tensor, dy: Tensor, factors: Tensor, *, noise: NoiseStream | None = None
) -> Tensor:
    """See `reference.clipped_grad`; factors are applied to each sample's fp32 product."""
    x, dy = _operands(x, dy)
    sizes = _config("clipped_grad", x)
    return _launch_clipped(x, dy, factors.float().contiguous(), None, sizes, False, noise)


def block_clipped_grad(
    x: Tensor,
    dy: Tensor,
    bound: float,
    *,
    block: tuple[int, int] = BLOCK,
    return_factors: bool = False,
    noise: NoiseStream | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `block_reference.block_clipped_grad`; a program owns one clipping group."""
    x, dy = _operands(x, dy)
    outputs, inputs = dy.shape[2], x.shape[2]
    bounds = block_bounds(outputs, inputs, bound, block).flatten().to(x.device)
    factors = torch.empty((x.shape[0], bounds.numel()), dtype=torch.float32, device=x.device)
    sizes = _config("block_clipped_grad", x)._replace(block_m=block[0], block_n=block[1])
    total = _launch_clipped(x, dy, factors, bounds, sizes, return_factors, noise)
    return (total, factors) if return_factors else total


def block_clip_reduce(
    grads: Tensor,
    bound: float,
    *,
    block: tuple[int, int] = BLOCK,
    return_factors: bool = False,
    noise: NoiseStream | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `block_reference.block_clip_reduce`; first the factors, then the sum."""
    batch, outputs, inputs = grads.shape
    grads = grads.contiguous()
    bounds = block_bounds(outputs, inputs, bound, block).flatten().to(grads.device)
    factors = torch.empty((batch, bounds.numel()), dtype=torch.float32, device=grads.device)
    if factors.numel():
        kernels._tile_factors_kernel[(factors.numel(),)](
            grads, bounds, factors, grads.stride(0),
            inputs, outputs, _blocks(inputs, block[1]), bounds.numel(),
            BLOCK_M=block[0], BLOCK_N=block[1], ROWS=TILE_ROWS,
        )  # fmt: skip
    total = _launch_reduce(grads, factors, 1.0, block, noise)
    return (total, factors) if return_factors else total


def clip_reduce(
    grads: Tensor, factors: Tensor, *, divisor: float = 1.0, noise: NoiseStream | None = None
) -> Tensor:
    """See `reference.clip_reduce`."""
    return _launch_reduce(
        grads.contiguous(), factors.float().contiguous(), float(divisor), None, noise
    )


def squared_norm(grads: Tensor) -> Tensor:
    """See `reference.squared_norm`; everything in fp64, without a wider copy."""
    flat = grads.reshape(grads.shape[0], grads.shape[1:].numel())
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()


def embedding_grad_norm(indices: Tensor, dy: Tensor) -> Tensor:
    """See `reference.embedding_grad_norm`; a sample's tokens sorted by row, a program a row."""
    batch, tokens, width = dy.shape
    dy = _unit_stride(dy)
    in_order, order = torch.sort(indices.long(), dim=1, stable=True)
    ends = torch.searchsorted(in_order, in_order, right=True)
    blocks = _blocks(width, WIDTH_BLOCK)
    squares = torch.empty((batch, tokens, blocks), dtype=torch.float64, device=dy.device)
    if squares.numel():
        kernels._embedding_grad_norm_kernel[(squares.numel(),)](
            dy, order.contiguous(), ends.contiguous(), squares, *dy.stride()[:2],
            tokens, width, blocks, BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
        )  # fmt: skip
    return squares.sum((1, 2))


def embedding_clipped_grad(
    indices: Tensor, dy: Tensor, factors: Tensor, num_embeddings: int
) -> Tensor:
    """See `reference.embedding_clipped_grad`; all tokens sorted by row, so nothing is atomic."""
    tokens, width = dy.shape[1:]
    dy = _unit_stride(dy)
    rows, order = torch.sort(indices.long().flatten(), stable=True)
    ends = torch.searchsorted(rows, rows, right=True)
    out = torch.zeros((num_embeddings, width), dtype=torch.float32, device=dy.device)
    blocks = _blocks(width, WIDTH_BLOCK)
    if dy.numel():
        kernels._embedding_clipped_grad_kernel[(rows.numel() * blocks,)](
            dy, order, rows, ends, factors.float().contiguous(), out, *dy.stride()[:2],
            tokens, width, rows.numel(), blocks, BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
        )  # fmt: skip
    return out


def per_sample_bias_grad(dy: Tensor) -> Tensor:
    """See `reference.per_sample_bias_grad`."""
    return _token_sums(dy, sums=True)[1]


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, ndim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.layer_norm_backward`."""
    shape = x.shape[x.ndim - ndim :]
    dx = torch.ops.aten.native_layer_norm_backward(
        dy.contiguous(), x, list(shape), mean, rstd, weight, None, [True, False, False]
    )[0]
    dweight, dbias = _token_sums(_rows(dy, shape), _rows(x, shape), mean, rstd, sums=True)
    per_sample = (x.shape[0], *shape)
    return dx, dweight.view(per_sample), dbias.view(per_sample)


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, ndim: int
) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm_backward`."""
    shape = x.shape[x.ndim - ndim :]
    last = tuple(range(x.ndim - ndim, x.ndim))
    normed = x.float() * rstd
    dnormed = dy.float() if weight is None else dy.float() * weight
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(last, keepdim=True))
    dweight, _ = _token_sums(_rows(dy, shape), _rows(x, shape), None, rstd)
    return dx.to(x.dtype), dweight.view(x.shape[0], *shape)


def precision(hip: bool) -> str:
    """How float32 products are taken: exactly, or with three TF32 products, which is as good."""
    return "ieee" if hip else "tf32x3"


def noise_width(hip: bool) -> int:
    """Columns of a tile that get their noise at a time: about one group of 8 for each thread."""
    return 32 if hip else 16


def _launch_per_sample(
    x: Tensor, dy: Tensor, grads: Tensor | None, squares: bool
) -> Tensor | None:
    """Writes grads where given; returns the squared norms [B] where asked for."""
    batch, tokens, inputs, outputs = *x.shape, dy.shape[2]
    sizes = _config("per_sample_grad", x)
    tiles_i = _blocks(inputs, sizes.block_n)
    num_tiles = _blocks(outputs, sizes.block_m) * tiles_i
    partial = None
    if squares:
        partial = torch.empty((batch, num_tiles), dtype=torch.float64, device=x.device)
    if batch * num_tiles:
        kernels._per_sample_grad_kernel[(batch * num_tiles,)](
            x, dy, grads, partial, *x.stride()[:2], *dy.stride()[:2],
            tokens, inputs, outputs, tiles_i, num_tiles,
            STORE=grads is not None, SQUARES=squares,
            BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n, **_options(sizes),
        )  # fmt: skip
    return None if partial is None else partial.sum(1)


def _gram_squares(x: Tensor, dy: Tensor) -> Tensor:
    """||G_i||^2 [B] by pairs of token tiles, raised by what the pairs' products may round."""
    batch, tokens, inputs, outputs = *x.shape, dy.shape[2]
    sizes = _config("gram", x)
    pairs = _pairs(_blocks(tokens, sizes.block_m), x.device)
    partial = torch.empty((batch, pairs.shape[1]), dtype=torch.float64, device=x.device)
    if partial.numel():
        kernels._grad_norm_gram_kernel[(partial.numel(),)](
            x, dy, pairs, partial, *x.stride()[:2], *dy.stride()[:2],
            tokens, inputs, outputs, pairs.shape[1],
            BLOCK_M=sizes.block_m, **_options(sizes),
        )  # fmt: skip
    squares = partial.sum(1).clamp(min=0)
    x_norms = torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
    dy_norms = torch.linalg.vector_norm(dy, dim=2, dtype=torch.float64)
    size = (x_norms * dy_norms).sum(1).square()
    cancelled = (size - _HARMLESS_CANCELLATION * squares).clamp(min=0)
    # A vanished product of inputs meets the product of the outputs, and the other way round.
    vanished = inputs * dy_norms.sum(1).square() + outputs * x_norms.sum(1).square()
    return squares + _GRAM_ROUNDING * cancelled + _LEAST_NORMAL * vanished


def _launch_clipped(
    x: Tensor,
    dy: Tensor,
    factors: Tensor,
    bounds: Tensor | None,
    sizes: GradConfig,
    store_factors: bool,
    noise: NoiseStream | None,
) -> Tensor:
    """sum_i c_i G_i by tiles: with given factors, or clipped to the tiles' bounds."""
    batch, tokens, inputs, outputs = *x.shape, dy.shape[2]
    out = torch.empty((outputs, inputs), dtype=torch.float32, device=x.device)
    tiles_i = _blocks(inputs, sizes.block_n)
    num_tiles = _blocks(outputs, sizes.block_m) * tiles_i
    if num_tiles:
        kernels._clipped_grad_kernel[(num_tiles,)](
            x, dy, factors, bounds, out, *x.stride()[:2], *dy.stride()[:2],
            batch, tokens, inputs, outputs, tiles_i, num_tiles, *_address(noise),
            CLIP=bounds is not None, STORE_FACTORS=store_factors,
            BLOCK_M=sizes.block_m, BLOCK_N=sizes.block_n,
            WIDTH=min(noise_width(torch.version.hip is not None), sizes.block_n),
            **(_options(sizes) | _noise_options(noise, inputs)),
        )  # fmt: skip
    return out


def _launch_reduce(
    grads: Tensor,
    factors: Tensor,
    divisor: float,
    block: tuple[int, int] | None,
    noise: NoiseStream | None,
) -> Tensor:
    """(sum_i c_i G_i + noise) / divisor, with a factor for each sample or each block of it."""
    shape = grads.shape[1:]
    out = torch.empty(shape, dtype=torch.float32, device=grads.device)
    rows, columns = block or (1, 1)
    inputs = shape[1] if block else 1
    before = 0 if noise is None else noise.offset % 8
    if out.numel():
        kernels._clip_reduce_kernel[(_blocks(before + out.numel(), REDUCE_BLOCK),)](
            grads, factors, out, out.numel(), grads.shape[0], out.numel(), divisor,
            inputs, _blocks(inputs, columns), factors[:1].numel(), *_address(noise),
            BLOCK_M=rows, BLOCK_N=columns, TILED=block is not None,
            DIVIDE=divisor != 1, BLOCK=REDUCE_BLOCK, **_noise_options(noise),
        )  # fmt: skip
    return out


def _token_sums(
    dy: Tensor,
    x: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    *,
    sums: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of dy (x - mean) rstd and of dy, [B, E] in fp32; chunks are added here."""
    batch, tokens, width = dy.shape
    dy, x = _unit_stride(dy), None if x is None else _unit_stride(x)
    chunks, blocks = _blocks(tokens, TOKEN_CHUNK), _blocks(width, WIDTH_BLOCK)
    shape = (batch, chunks, width)
    make = functools.partial(torch.empty, shape, dtype=torch.float32, device=dy.device)
    products, totals = make() if x is not None else None, make() if sums else None
    if batch * chunks * blocks:
        kernels._token_sums_kernel[(batch * chunks * blocks,)](
            dy, x, *(None if v is None else v.float().contiguous() for v in (mean, rstd)),
            products, totals, *dy.stride()[:2], *(dy if x is None else x).stride()[:2],
            tokens, width, chunks, blocks,
            CHUNK=TOKEN_CHUNK, BLOCK_T=TOKEN_BLOCK, BLOCK_E=WIDTH_BLOCK,
            PRODUCTS=x is not None, HAS_MEAN=mean is not None, SUMS=sums,
        )  # fmt: skip
    empty = dy.new_empty(0, dtype=torch.float32)
    return (
        empty if products is None else products.sum(1),
        empty if totals is None else totals.sum(1),
    )


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


@functools.lru_cache(maxsize=64)
def _pairs(tiles: int, device: torch.device) -> Tensor:
    """[2, pairs]: the tiles (s, t) with t >= s."""
    return torch.triu_indices(tiles, tiles, dtype=torch.int32, device=device)


def _config(kernel: Kernel, x: Tensor) -> GradConfig:
    if _INTERPRETED:
        return INTERPRETED
    return table()[architecture(x.device)][entry(kernel, x.dtype)]


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


def _address(noise: NoiseStream | None) -> tuple[int, ...]:
    """What kernels take from `std_bits` to `first`."""
    if noise is None:
        return (0,) * 13
    step, parameter_id = int(noise.step), int(noise.parameter_id)
    words = stream_words(float(noise.std), noise.key, step, parameter_id, noise.generator)
    return (*words, int(noise.offset))


def _noise_options(noise: NoiseStream | None, width: int = 0) -> dict[str, object]:
    """Constexprs and launch options for noise on rows of so many elements."""
    if noise is None or noise.std == 0:
        return {"NOISE": False, "ALIGNED": True, "PHILOX": False, "enable_fp_fusion": True}
    return {
        "NOISE": True,
        "ALIGNED": noise.offset % 8 == 0 and width % 8 == 0,
        "PHILOX": noise.generator == "philox",
        "enable_fp_fusion": OPTIONS["enable_fp_fusion"],
    }

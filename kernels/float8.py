"""Products of float8 matrices (e4m3), with one scale for each row of both operands.

The scale of a row is the least power of two that brings the row's largest entry into the range of
e4m3. So a scale does not depend on other rows, and division by it is exact. Rounding keeps 3 bits
of mantissa. Entries below 2^-13 of the row's largest entry keep fewer bits, and entries below
2^-17 of the largest entry become 0. Rows of zeros stay zero. A row that is not finite makes only
its own products NaN.

Letters: N rows of a, M rows of b, K entries of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_E4M3 = torch.float8_e4m3fn  # has no infinity; the greatest value is 448 = 1.75 * 2^8
_EXPONENT_OF_GREATEST = 8
_MANTISSA_BITS, _BIAS = 23, 127  # of float32
# Added to a float32's bits, this carries into the exponent if the mantissa is above 1.75.
_ABOVE_GREATEST = (1 << 21) - 1


class ScaledRows(NamedTuple):
    """A matrix in float8: row n is `values[n] * scales[n]`.

    Attributes:
        values: `[N, K]`, e4m3, contiguous.
        scales: `[N, 1]`, fp32, powers of two; NaN for a row that is not finite.
    """

    values: Tensor
    scales: Tensor


def multiplies_float8(device: torch.device) -> bool:
    """Return whether a device multiplies e4m3 matrices; otherwise products are emulated."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_rows(x: Tensor) -> ScaledRows:
    """Round x `[N, K]`, of 16 or 32 bits, to float8, each row with its own scale."""
    wide = x.float()
    greatest = _greatest(wide)
    # Computed in integers, since a logarithm would round.
    exponent = (greatest.view(torch.int32) + _ABOVE_GREATEST) >> _MANTISSA_BITS
    exponent = exponent.clamp(min=_EXPONENT_OF_GREATEST + 1) - _EXPONENT_OF_GREATEST
    scales = (exponent << _MANTISSA_BITS).view(torch.float32)
    inverse = ((2 * _BIAS - exponent) << _MANTISSA_BITS).view(torch.float32)
    values = (wide * inverse).to(_E4M3, memory_format=torch.contiguous_format)
    # Some versions of torch convert entries that are not finite to 448.
    return ScaledRows(values, torch.where(greatest.isfinite(), scales, torch.nan))


def _greatest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def scaled_product(a: Tensor, b: ScaledRows) -> Tensor:
    """Return the product of a `[..., K]`, rounded to float8, and the transpose of b `[M, K]`.

    Returns:
        `[..., M]`, in the dtype of a; accumulated in fp32.
    """
    rows = scaled_rows(a.reshape(a.shape[:-1].numel(), a.shape[-1]))
    transposed = b.values.t()
    with torch.autocast(a.device.type, enabled=False):
        if not multiplies_float8(a.device) or not a.numel():
            product = rows.values.float() @ transposed.float()
        elif a.dtype == torch.bfloat16:
            scales = rows.scales, b.scales.t()
            product = torch._scaled_mm(rows.values, transposed, *scales, out_dtype=a.dtype)
            return product.view(*a.shape[:-1], product.shape[1])
        else:  # With scales of rows, _scaled_mm returns bfloat16 only.
            one = torch.ones((), device=a.device)
            product = torch._scaled_mm(rows.values, transposed, one, one, out_dtype=torch.float32)
        product = (product * b.scales.t() * rows.scales).to(a.dtype)
    return product.view(*a.shape[:-1], product.shape[1])

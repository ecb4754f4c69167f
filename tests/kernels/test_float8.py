"""Products in float8: their definition, their edge cases, and torch's operators for them."""

import pytest
import torch

from dpflash.kernels import multiplies_float8, scaled_product, scaled_rows

GREATEST = 448.0


def defined(a, b):
    """The product of rows in float64, with scales by logarithms."""

    def rounded(x):
        x = x.double()
        amax = x.abs().amax(1, keepdim=True)
        scale = 2.0 ** torch.ceil(torch.log2(amax / GREATEST)).clamp(min=-126)
        return (x / scale).float().to(torch.float8_e4m3fn).double() * scale

    return rounded(a) @ rounded(b).T


def operands(rows=24, outputs=32, width=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-36, 30, rows)[:, None]
    if dtype == torch.float16:
        sizes = torch.logspace(-4, 3, rows)[:, None]
    a, b = (torch.randn(n, width, generator=generator) for n in (rows, outputs))
    return (a * sizes).to(dtype), b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_its_definition(dtype):
    a, b = operands(dtype=dtype)
    found, wanted = scaled_product(a, scaled_rows(b)), defined(a, b)
    assert found.dtype == dtype
    rounding = 8 * torch.finfo(dtype).eps * wanted.abs().amax(1, keepdim=True)
    assert bool(((found.double() - wanted).abs() <= rounding).all())
    halves = scaled_product(a.view(2, 12, 48), scaled_rows(b)).flatten(0, 1)
    assert torch.equal(halves, found)


def test_a_row_uses_the_whole_range_and_no_more():
    for greatest in (GREATEST, 449.0, 1.0, 1.75, 1.7500001, 3e38, 2**-126, 2**-140):
        values, scales = scaled_rows(torch.tensor([[greatest, -greatest / 3]]))
        found = float(values.float().abs().max())
        assert found <= GREATEST
        assert found > GREATEST / 2 - 1 or float(scales) == 2**-126, greatest
        assert torch.frexp(scales)[0].item() == 0.5  # a power of two
    assert not scaled_rows(torch.zeros(2, 16)).values.float().any()
    assert scaled_product(torch.zeros(0, 48), scaled_rows(operands()[1])).shape == (0, 32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_by_itself(bad):
    a, b = operands()
    before = scaled_product(a, scaled_rows(b))
    a[3, 5] = bad
    after = scaled_product(a, scaled_rows(b))
    assert bool(after[3].isnan().all())
    others = torch.arange(len(a)) != 3
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_of_torch_agree_with_the_emulation(device, dtype):
    a, b = operands(dtype=dtype)
    emulated = scaled_product(a, scaled_rows(b)).double()
    a, b = a.to(device), b.to(device)
    if device == "cuda":
        assert multiplies_float8(a.device)
        found = scaled_product(a, scaled_rows(b))
    else:
        (values, scales), (others, other_scales) = scaled_rows(a), scaled_rows(b)
        scales = scales, other_scales.t()
        found = torch._scaled_mm(values, others.t(), *scales, out_dtype=torch.float32).to(dtype)
    apart = (found.double().cpu() - emulated).abs()
    # A tensor core keeps 14 bits of a sum.
    eps = torch.finfo(dtype).eps if device == "cpu" else max(torch.finfo(dtype).eps, 2**-12)
    assert bool((apart <= 4 * eps * emulated.abs().amax(1, keepdim=True)).all())


def test_autocast_rounds_no_sum():
    a, b = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scaled_product(a, scaled_rows(b))
    assert torch.equal(found, scaled_product(a, scaled_rows(b)))

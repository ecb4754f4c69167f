"""The plain per-sample gradient operations against float64 loops over samples."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from dpflash.kernels import (
    clip_reduce,
    clipped_grad,
    embedding_clipped_grad,
    embedding_grad_inner,
    embedding_grad_norm,
    embedding_per_sample_grad,
    grad_inner,
    grad_norm,
    layer_norm_backward,
    per_sample_grad,
    rms_norm_backward,
    squared_norm,
)
from dpflash.kernels.reference import hard_clip_factors, upper_bound

few = hypothesis.settings(max_examples=40, derandomize=True)
SIZES = st.sampled_from([1, 2, 3, 5, 8, 17, 33])
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loop_grads(x, dy):
    return torch.stack([dy[i].double().t() @ x[i].double() for i in range(x.shape[0])])


def close(found, expected, relative=2e-6):
    difference = float((found.double() - expected.double()).norm())
    assert difference <= relative * float(expected.double().norm()) + 1e-30


@every_dtype
def test_linear_operations_agree_with_a_float64_loop_for_any_sizes(dtype):
    @few
    @hypothesis.given(st.integers(1, 5), SIZES, SIZES, SIZES, st.integers(0, 99))
    def check(batch, length, inputs, outputs, seed):
        x = random(batch, length, inputs, seed=seed, dtype=dtype)
        dy = random(batch, length, outputs, seed=seed + 1, dtype=dtype)
        factors = torch.rand(batch, generator=torch.Generator().manual_seed(seed))
        grads = loop_grads(x, dy)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        stored = per_sample_grad(x, dy)
        assert stored.dtype == wide and stored.shape == (batch, outputs, inputs)
        close(stored, grads)
        squares = grads.square().sum((1, 2))
        for found in (grad_norm(x, dy), squared_norm(stored)):
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, squares, rtol=1e-5, atol=1e-12)
        total = (factors.double().view(-1, 1, 1) * grads).sum(0)
        for found in (clipped_grad(x, dy, factors), clip_reduce(stored, factors)):
            assert found.dtype == wide
            # Terms of several samples may cancel; what counts is the size of the terms.
            assert float((found.double() - total).norm()) <= 2e-6 * float(squares.sum().sqrt())

    check()


@few
@hypothesis.given(st.integers(1, 4), SIZES, SIZES, SIZES, SIZES)
def test_the_inner_product_of_two_uses_is_that_of_their_gradients(batch, s, t, inputs, outputs):
    x, dy = random(batch, s, inputs), random(batch, s, outputs, seed=1)
    u, v = random(batch, t, inputs, seed=2), random(batch, t, outputs, seed=3)
    expected = (loop_grads(x, dy) * loop_grads(u, v)).sum((1, 2))
    torch.testing.assert_close(grad_inner(x, dy, u, v), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(40, 30), (4, 3)], ids=["Gram", "direct"])
def test_a_norm_is_right_where_tokens_cancel_ten_thousand_to_one(shape):
    inputs, outputs = shape
    x = random(3, 4, inputs).repeat(1, 2, 1)
    dy = random(3, 4, outputs, seed=1)
    dy = torch.cat([dy, -dy * (1 - 1e-4)], 1)
    expected = loop_grads(x, dy).square().sum((1, 2))
    terms = (x.double().norm(dim=2) * dy.double().norm(dim=2)).sum(1)
    assert bool((expected.sqrt() < 3e-4 * terms).all())
    torch.testing.assert_close(grad_norm(x, dy), expected, rtol=2e-3, atol=0)
    if shape == (40, 30):
        torch.testing.assert_close(grad_norm(x, dy), expected, rtol=1e-6, atol=0)


def test_the_gram_form_never_gives_a_negative_square():
    x = random(2, 2, 50).repeat(1, 2, 1)
    dy = random(2, 2, 50, seed=1)
    assert bool((grad_norm(x, torch.cat([dy, -dy], 1)) >= 0).all())


def test_a_squared_norm_overflows_only_where_an_element_is_not_finite():
    grads = torch.tensor([[[1e30, 1e30]], [[1.0, 2.0]], [[math.inf, 0]], [[math.nan, 0]]])
    found = squared_norm(grads)
    torch.testing.assert_close(
        found[:2], torch.tensor([2e60, 5.0], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert not bool(torch.isfinite(found[2:]).any())
    assert squared_norm(torch.tensor([3.0, -2.0])).tolist() == pytest.approx([9, 4], rel=1e-14)
    assert squared_norm(torch.zeros(0, 3)).shape == squared_norm(torch.zeros(0)).shape == (0,)
    long = random(2, 1, 40000)
    torch.testing.assert_close(squared_norm(long), long.double().square().sum((1, 2)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_factor_of_zero_removes_a_sample_of_nan_or_inf_from_every_sum(value):
    x, dy = random(4, 3, 5), random(4, 3, 2, seed=1)
    indices = torch.randint(6, (4, 3))
    x[1, 2, 0] = dy[1, 0, 1] = value
    factors = torch.tensor([1.0, 0.0, 0.5, 1.0])
    keep = [0, 2, 3]
    pairs = [
        (clipped_grad(x, dy, factors), clipped_grad(x[keep], dy[keep], factors[keep])),
        (clip_reduce(dy, factors), clip_reduce(dy[keep], factors[keep])),
        (clip_reduce(dy[:, 0, 1], factors), clip_reduce(dy[keep, 0, 1], factors[keep])),
        (
            embedding_clipped_grad(indices, dy, factors, 6),
            embedding_clipped_grad(indices[keep], dy[keep], factors[keep], 6),
        ),
    ]
    for found, expected in pairs:
        assert bool(torch.isfinite(found).all())
        torch.testing.assert_close(found, expected)


def test_an_empty_batch_sums_to_zero():
    none = torch.zeros(0)
    assert not clipped_grad(torch.zeros(0, 3, 5), torch.zeros(0, 3, 2), none).any()
    assert clip_reduce(torch.zeros(0, 3, 2), none).tolist() == [[0, 0]] * 3
    assert float(clip_reduce(none, none)) == 0
    indices = torch.zeros(0, 3, dtype=torch.int64)
    assert not embedding_clipped_grad(indices, torch.zeros(0, 3, 2), none, 4).any()
    assert grad_norm(torch.zeros(0, 3, 5), torch.zeros(0, 3, 2)).shape == (0,)
    assert grad_norm(torch.zeros(0, 2, 50), torch.zeros(0, 2, 50)).shape == (0,)
    assert embedding_grad_norm(indices, torch.zeros(0, 3, 2)).shape == (0,)


@every_dtype
def test_embedding_operations_agree_with_a_float64_loop_also_for_repeated_rows(dtype):
    @few
    @hypothesis.given(st.integers(1, 4), SIZES, SIZES, st.integers(1, 6), st.integers(0, 99))
    def check(batch, length, width, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randint(rows, (batch, length), generator=generator)
        dy = random(batch, length, width, seed=seed, dtype=dtype)
        grads = torch.zeros(batch, rows, width, dtype=torch.float64)
        for i in range(batch):
            for t in range(length):
                grads[i, indices[i, t]] += dy[i, t].double()
        scale = float(dy.double().norm())
        found = embedding_per_sample_grad(indices, dy, rows)
        assert float((found.double() - grads).norm()) <= 1e-6 * scale
        squares = grads.square().sum((1, 2))
        torch.testing.assert_close(
            embedding_grad_norm(indices, dy), squares, rtol=1e-9, atol=1e-12 * scale**2
        )
        factors = torch.rand(batch, generator=generator)
        total = (factors.double().view(-1, 1, 1) * grads).sum(0)
        found = embedding_clipped_grad(indices, dy, factors, rows)
        assert float((found.double() - total).norm()) <= 1e-6 * scale
        x, other = random(batch, 3, width, seed=7), random(batch, 3, rows, seed=8)
        torch.testing.assert_close(
            embedding_grad_inner(indices, dy, x, other),
            (grads * loop_grads(x, other)).sum((1, 2)),
            rtol=1e-9,
            atol=1e-9,
        )

    check()


@pytest.mark.parametrize("middle", [(), (3,), (2, 3), (200,)], ids=str)
@pytest.mark.parametrize("shape", [(6,), (4, 5), (256,)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_norm_backwards_give_the_gradients_of_each_sample(middle, shape, affine):
    batch = 3
    x = random(batch, *middle, *shape, dtype=torch.float64)
    dy = random(batch, *middle, *shape, seed=1, dtype=torch.float64)
    weight = random(*shape, seed=2, dtype=torch.float64) if affine else None
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, None, 1e-5)
    dx, dweight, dbias = layer_norm_backward(dy, x, mean, rstd, weight, len(shape))
    last = tuple(range(x.ndim - len(shape), x.ndim))
    rms = torch.rsqrt(x.square().mean(last, keepdim=True) + 1e-5)
    dx_rms, dweight_rms = rms_norm_backward(dy, x, rms, weight, len(shape))
    for i in range(batch):
        for layer, found in (
            (nn.LayerNorm(shape, dtype=torch.float64), (dx, dweight, dbias)),
            (nn.RMSNorm(shape, eps=1e-5, dtype=torch.float64), (dx_rms, dweight_rms)),
        ):
            if affine:
                layer.weight.data.copy_(weight)
            single = x[i : i + 1].clone().requires_grad_()
            layer(single).backward(dy[i : i + 1])
            torch.testing.assert_close(found[0][i], single.grad[0])
            torch.testing.assert_close(found[1][i], layer.weight.grad)
            if len(found) == 3:
                torch.testing.assert_close(found[2][i], layer.bias.grad)


def test_a_clipping_factor_is_rounded_down_and_0_where_a_norm_is_not_finite():
    generator = torch.Generator().manual_seed(0)
    norms = torch.exp2(40 * torch.randn(500, dtype=torch.float64, generator=generator))
    for bound in (1e-3, 1.0, 7.3):
        factors = hard_clip_factors(norms.square(), bound)
        assert factors.dtype == torch.float32
        for factor, square in zip(factors.tolist(), norms.square().tolist(), strict=True):
            assert Fraction(factor) ** 2 * Fraction(square) <= Fraction(bound) ** 2
            if factor == 0:
                assert bound / math.sqrt(square) < 2.0**-125
            else:
                nearly = min(1.0, bound / math.sqrt(square)) * (1 - 2.0**-22)
                assert 2.0**-126 <= nearly <= factor <= 1
    special = torch.tensor([math.nan, math.inf, -math.nan, 0.0], dtype=torch.float64)
    for bound in (1.0, math.inf, torch.tensor([1.0, 2.0, math.inf, 1.0]).double()):
        assert hard_clip_factors(special, bound).tolist() == [0, 0, 0, 1]


def test_a_clipped_norm_is_at_most_the_bound_in_real_arithmetic():
    """Norms of which bound / norm is next to an fp32 number, or rounds to one."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(20_000, generator=generator).double().float().double()
    for bound in (1.0, 0.3, 1.7e-9):
        squares = (bound / factors) ** 2
        for near in (squares, torch.nextafter(squares, squares * 2), squares * (1 - 2.0**-52)):
            found = hard_clip_factors(near, bound)
            assert 0.9 < float((found / factors).min())
            limit = Fraction(bound) ** 2
            for factor, square in zip(found.tolist()[:4000], near.tolist(), strict=False):
                assert Fraction(factor) ** 2 * Fraction(square) <= limit


def test_a_bound_of_a_sum_of_squares_is_not_below_it():
    for count in (2, 5, 1000, 4096):
        terms = [1.0, *[2.0**-53] * (count - 1)]  # each of which fp64 drops
        total = torch.tensor(0.0, dtype=torch.float64)
        for term in terms:
            total += term
        assert float(total) == 1.0
        assert Fraction(float(upper_bound(total, count))) >= sum(map(Fraction, terms))

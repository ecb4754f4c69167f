"""Clipping by blocks: against a float64 loop over samples and tiles, and by differencing."""

import inspect
import itertools
import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from dpflash.kernels import (
    block_clip_reduce,
    block_clipped_grad,
    clip_reduce,
    grads_cpu,
    grid_of,
    per_sample_grad,
)
from dpflash.kernels.block_reference import BLOCK, block_bounds

few = hypothesis.settings(max_examples=60, derandomize=True)
SIZES = st.sampled_from([1, 3, 16, 17, 33, 63, 65, 100, 129, 150])
BLOCKS = st.sampled_from([(16, 16), (32, 16), (16, 128), (64, 64), BLOCK])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uses(batch, tokens, inputs, outputs, seed=0, dtype=torch.float32):
    x = random(batch, tokens, inputs, seed=seed).to(dtype)
    return x, random(batch, tokens, outputs, seed=seed + 1).to(dtype)


def corners(outputs, inputs, block):
    """The tiles as pairs of slices, row by row."""
    downs, acrosses = range(0, outputs, block[0]), range(0, inputs, block[1])
    for top, left in itertools.product(downs, acrosses):
        yield slice(top, top + block[0]), slice(left, left + block[1])


def loop(x, dy, bound, block):
    """The definition, in float64: the clipped sum and the factors."""
    outputs, inputs = dy.shape[2], x.shape[2]
    total = torch.zeros(outputs, inputs, dtype=torch.float64)
    tiles = list(corners(outputs, inputs, block))
    factors = torch.zeros(x.shape[0], len(tiles), dtype=torch.float64)
    for i in range(x.shape[0]):
        grad = dy[i].double().t() @ x[i].double()
        for k, (rows, columns) in enumerate(tiles):
            tile = grad[rows, columns]
            own = bound * math.sqrt(tile.numel() / (outputs * inputs))
            norm = float(tile.norm())
            if not math.isfinite(norm):
                continue
            factors[i, k] = min(1.0, own / norm) if norm else 1.0
            total[rows, columns] += factors[i, k] * tile
    return total, factors


@few
@hypothesis.given(st.integers(1, 5), st.integers(1, 9), SIZES, SIZES, BLOCKS, DTYPES)
def test_the_reference_agrees_with_a_float64_loop_for_any_sizes(
    b, tokens, inputs, outputs, block, dtype
):
    x, dy = uses(b, tokens, inputs, outputs, seed=inputs + outputs, dtype=dtype)
    bound = 0.8 * math.sqrt(tokens * inputs * outputs)
    found, factors = block_clipped_grad(x, dy, bound, block=block, return_factors=True)
    expected, of_loop = loop(x, dy, bound, block)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert factors.shape == of_loop.shape and factors.dtype == torch.float32
    torch.testing.assert_close(factors.double(), of_loop, rtol=2e-6, atol=0)
    # Samples may cancel; each is at most the bound.
    assert float((found.double() - expected).norm()) <= 2e-6 * bound * b
    assert found.is_contiguous()


@few
@hypothesis.given(
    st.integers(0, 4),
    st.sampled_from(["huge", "tiny", "NaN", "infinite", "duplicate", "plain", "one-token"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1e-6, 0.37, 1.0, 1e4]),
    BLOCKS,
    st.integers(0, 999),
)
def test_adding_one_sample_moves_the_result_by_at_most_the_bound(
    others, kind, dtype, bound, block, seed
):
    x, dy = uses(others + 1, 7, 70, 37, seed=seed, dtype=dtype)
    if kind == "huge":
        x[-1] *= 1e18
        dy[-1] *= 1e12
    elif kind == "tiny":
        x[-1] *= 1e-18
        dy[-1] *= 1e-12
    elif kind in ("NaN", "infinite"):
        x[-1, 3, seed % 70] = math.nan if kind == "NaN" else math.inf
        dy[-1] *= 100
    elif kind == "duplicate":
        x[:], dy[:] = x[:1].clone(), dy[:1].clone()
    elif kind == "one-token":
        dy[-1, 1:] = 0
    grads, grid = per_sample_grad(x, dy), grid_of(bound)
    for options, exact in (({}, False), ({"grid": grid}, True)):
        with_it = block_clip_reduce(grads, bound, block=block, **options).double()
        without = block_clip_reduce(grads[:-1], bound, block=block, **options).double()
        assert bool(with_it.isfinite().all())
        steps = ((with_it - without) / grid).flatten().tolist()
        square = sum(Fraction(step) ** 2 for step in steps if step) * Fraction(grid) ** 2
        # Without a grid only the sum over several samples rounds, at its end.
        rounding = 2.0**-24 * float((with_it.abs() + without.abs()).norm())
        limit = Fraction(bound) + (0 if exact or not others else Fraction(rounding))
        assert square <= limit**2
        if kind in ("plain", "duplicate") and bound <= 1.0:
            assert square >= (Fraction(bound) * Fraction(1 - 1e-5)) ** 2


@pytest.mark.parametrize(
    "outputs, inputs", [(1, 1), (128, 128), (129, 500), (1000, 3), (257, 255)]
)
@pytest.mark.parametrize("bound", [1e-8, 0.1, 1.0, 3.7e6])
def test_the_bounds_of_the_tiles_make_at_most_the_whole_bound(outputs, inputs, bound):
    bounds = block_bounds(outputs, inputs, bound)
    squares = sum(Fraction(c) ** 2 for c in bounds.flatten().tolist())
    assert squares <= Fraction(bound) ** 2
    assert squares >= Fraction(bound) ** 2 * Fraction(1 - 2**-45)
    sizes = [
        g.numel()
        for g in (torch.empty(outputs, inputs)[c] for c in corners(outputs, inputs, BLOCK))
    ]
    shares = torch.tensor(sizes, dtype=torch.float64) / (outputs * inputs)
    torch.testing.assert_close(bounds.flatten(), bound * shares.sqrt())


def test_a_clipped_tile_stays_below_its_bound_in_the_arithmetic_really_used():
    x, dy = uses(200, 3, 40, 35)
    _, factors = block_clipped_grad(x, dy, 1e-3, block=(16, 16), return_factors=True)
    grads = per_sample_grad(x, dy)
    bounds = block_bounds(35, 40, 1e-3, (16, 16)).flatten()
    assert bool((factors < 1).all())
    for k, (rows, columns) in enumerate(corners(35, 40, (16, 16))):
        clipped = factors[:, k, None, None].double() * grads[:, rows, columns]
        norms = clipped.flatten(1).norm(dim=1)
        assert float(norms.max()) <= float(bounds[k])
        assert float(norms.min()) >= float(bounds[k]) * (1 - 2e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tile_that_is_not_finite_adds_nothing_and_costs_no_other_tile(value):
    x, dy = uses(3, 5, 40, 35)
    dy[1, 2, 20] = value
    found, factors = block_clipped_grad(x, dy, 1.0, block=(16, 16), return_factors=True)
    assert bool(found.isfinite().all())
    assert (factors[1].view(3, 3) == 0).tolist() == [[False] * 3, [True] * 3, [False] * 3]
    keep = [0, 2]
    without, of_others = block_clipped_grad(
        x[keep], dy[keep], 1.0, block=(16, 16), return_factors=True
    )
    assert torch.equal(factors[keep], of_others)
    torch.testing.assert_close(found[16:32], without[16:32])


def test_factors_of_a_sample_do_not_depend_on_its_batch():
    for batch, tokens, inputs, outputs in [(5, 64, 200, 300), (40, 3, 40, 30), (7, 2, 3, 2)]:
        x, dy = uses(batch, tokens, inputs, outputs)
        _, factors = block_clipped_grad(x, dy, 1.0, return_factors=True)
        for i in (0, batch - 1):
            alone = block_clipped_grad(x[i : i + 1], dy[i : i + 1], 1.0, return_factors=True)[1]
            torch.testing.assert_close(alone[0], factors[i], rtol=1e-6, atol=0)


def test_an_infinite_bound_gives_the_ordinary_gradient():
    x, dy = uses(4, 9, 140, 40)
    found, factors = block_clipped_grad(x, dy, math.inf, return_factors=True)
    assert bool((factors == 1).all())
    torch.testing.assert_close(found, clip_reduce(per_sample_grad(x, dy), torch.ones(4)))


def test_stored_gradients_are_clipped_as_their_product_is():
    x, dy = uses(5, 4, 140, 150)
    x[1] *= 1e30
    dy[2, 0, 140] = math.nan
    dy[3] *= 1e-4
    found, factors = block_clip_reduce(per_sample_grad(x, dy), 2.0, return_factors=True)
    expected, of_product = block_clipped_grad(x, dy, 2.0, return_factors=True)
    assert bool(found.isfinite().all()) and bool((factors[2] == 0).any())
    torch.testing.assert_close(factors, of_product, rtol=2e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_huge_gradients_are_clipped_and_not_dropped():
    x, dy = uses(2, 5, 40, 35)
    found, factors = block_clipped_grad(x * 1e30, dy, 1.0, return_factors=True)
    assert bool((factors > 0).all())
    torch.testing.assert_close(found, block_clipped_grad(x, dy, 1e-3) * 1e3, rtol=1e-4, atol=1e-6)


def test_only_a_few_samples_gradients_are_held_at_a_time(monkeypatch):
    made = []
    real = torch.bmm

    def counting(first, second, *, out):
        made.append(out.numel())
        return real(first, second, out=out)

    x, dy = uses(11, 2, 130, 140)
    whole = block_clipped_grad(x, dy, 1.0)
    monkeypatch.setattr(grads_cpu, "_CHUNK", 3 * 140 * 130 + 1)
    monkeypatch.setattr(torch, "bmm", counting)
    parts = block_clipped_grad(x, dy, 1.0)
    assert made == [n * 130 * 140 for n in (3, 3, 3, 2)]
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str
)
def test_an_empty_dimension_gives_zeros(shape):
    batch, tokens, inputs, outputs = shape
    x, dy = torch.zeros(batch, tokens, inputs), torch.zeros(batch, tokens, outputs)
    total, factors = block_clipped_grad(x, dy, 1.0, return_factors=True)
    assert total.shape == (outputs, inputs) and not bool(total.any())
    assert factors.shape[0] == batch and bool((factors == 1).all())


def test_the_clipping_groups_are_128_by_128_unless_someone_says_otherwise():
    assert BLOCK == (128, 128)
    assert inspect.signature(block_clipped_grad).parameters["block"].default == BLOCK
    _, factors = block_clipped_grad(*uses(1, 2, 300, 129), 1.0, return_factors=True)
    assert factors.shape == (1, 2 * 3)

"""The Triton per-sample gradient kernels against their plain references in float64.

Without a GPU they run in Triton's interpreter, at sizes of several tiles and steps.
"""

import contextlib
import math
from fractions import Fraction

import pytest
import torch

from dpflash.kernels import grid, grid_of, reference

pytest.importorskip("triton")
launch = pytest.importorskip("dpflash.kernels.grad_launch")

# numpy tells of the NaN and infinity that tests put into the interpreter.
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
# B, T, I, O
SHAPES = [(1, 1, 1, 1), (5, 1, 7, 3), (2, 70, 33, 40), (1, 17, 150, 16), (3, 31, 5, 67)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-T{}-I{}-O{}".format(*s))
RELATIVE = 2e-6


def random(*shape, seed=0, dtype=torch.float32):
    """Rows at odd places of a wider buffer whose other elements are NaN."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((*shape[:-1], shape[-1] + 5), math.nan, dtype=dtype)
    buffer[..., 2:-3] = values.to(dtype)
    return buffer.to(DEVICE)[..., 2:-3]


def uses(shape, dtype=torch.float32, seed=0):
    batch, tokens, inputs, outputs = shape
    x = random(batch, tokens, inputs, seed=seed, dtype=dtype)
    dy = random(batch, tokens, outputs, seed=seed + 1, dtype=dtype)
    return x, dy


def some_factors(batch):
    factors = torch.rand(batch, generator=torch.Generator().manual_seed(5)) + 0.1
    return factors.to(DEVICE)


def loop_grads(x, dy):
    return torch.einsum("bto,bti->boi", dy.double(), x.double())


def summed_products(x, dy):
    """[B, O, I]: each sample's product, as the clipped gradient has it."""
    one = torch.ones(1, device=DEVICE)
    pairs = zip(x.split(1), dy.split(1), strict=True)
    return torch.stack([launch.clipped_grad(*own, one) for own in pairs])


def exact_squares(grads):
    """Squared norms [B] of fp32 or narrower numbers, in real arithmetic."""
    rows = grads.flatten(1).double().cpu().tolist()
    return [sum((Fraction(value) ** 2 for value in row), Fraction(0)) for row in rows]


def assert_bounds(found, squares, above):
    """Upper bounds of exact squares, and above them by at most that part."""
    for bound, square in zip(found.tolist(), squares, strict=True):
        assert square <= Fraction(bound) <= square * (1 + Fraction(above))


def error(found, expected):
    """Distance over the norm of what was expected."""
    assert found.shape == expected.shape
    distance = float((found.double() - expected.double()).norm())
    return distance / max(float(expected.double().norm()), 1e-30)


@every_shape
@every_dtype
def test_per_sample_gradients_and_the_squares_of_their_epilogue_match_float64(shape, dtype):
    x, dy = uses(shape, dtype)
    grads, squares = launch.per_sample_grad(x, dy, return_squares=True)
    assert grads.dtype == torch.float32 and squares.dtype == torch.float64
    assert error(grads, loop_grads(x, dy)) <= RELATIVE
    assert_bounds(squares, exact_squares(grads), grads[0].numel() * 2.0**-51)
    assert torch.equal(launch.per_sample_grad(x, dy), grads)


@every_shape
@every_dtype
def test_the_gram_form_is_above_the_norm_by_no_more_than_what_it_states(shape, dtype):
    x, dy = uses(shape, dtype, seed=2)
    squares = launch.grad_norm(x, dy, form="gram")
    assert squares.dtype == torch.float64
    grads = loop_grads(x, dy)
    exact, size = grads.square().sum((1, 2)), reference.grad_magnitude(x, dy)
    stated = sum(launch._gram_rounding(width, 64, dtype) for width in shape[2:])
    gram = (exact * (1 + 1e-12) + 2 * stated * size.square()).sqrt()
    product = (shape[1] + 2) * 2.0**-20 * size
    assert bool((squares >= (exact.sqrt() + product).square() * (1 - 1e-12)).all())
    assert bool((squares <= (gram + product).square()).all())


@every_shape
@every_dtype
def test_the_tile_form_bounds_the_norm_of_the_product_itself(shape, dtype):
    x, dy = uses(shape, dtype, seed=2)
    squares = launch.grad_norm(x, dy, form="tile")
    made = summed_products(x, dy)
    assert_bounds(squares, exact_squares(made), made[0].numel() * 2.0**-51)


@pytest.mark.parametrize("are_spans", [False, True], ids=["rows", "spans"])
@pytest.mark.parametrize("form", ["gram", "tile"])
@every_dtype
def test_where_tokens_cancel_the_norm_is_that_of_the_product_that_is_summed(
    form, are_spans, dtype
):
    """What fp32 rounds differs there from its norm in real arithmetic."""
    x, dy = (t.clone() for t in uses((3, 40, 40, 36), dtype))
    x[:2, 20:], dy[:2, 20:] = x[:2, :20], -dy[:2, :20]
    dy[1, 30, :2] *= 1 + 2.0**-7
    made, numel = summed_products(x, dy), 40 * 36
    if are_spans:
        spans = ((0, 40), (40, 80), (80, 120))
        x, dy = x.reshape(1, 120, 40), dy.reshape(1, 120, 36)
        found = launch.grad_norm(x, dy, form=form, spans=spans)
    else:
        found = launch.grad_norm(x, dy, form=form)
    assert all(x >= square for x, square in zip(found.tolist(), exact_squares(made), strict=True))
    # What the Gram form states of products in float32 is no less than a cancellation of 2^6.
    if (form, dtype) != ("gram", torch.float32):
        assert_bounds(found[:2], exact_squares(made[:2]), numel * 2.0**-51)


@every_shape
@every_dtype
def test_the_clipped_gradient_matches_float64(shape, dtype):
    x, dy = uses(shape, dtype, seed=3)
    factors = some_factors(shape[0])
    expected = torch.einsum("b,boi->oi", factors.double(), loop_grads(x, dy))
    found = launch.clipped_grad(x, dy, factors)
    assert found.dtype == torch.float32
    assert error(found, expected) <= RELATIVE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_16_bit_products_are_no_worse_than_twice_what_torch_rounds(dtype):
    x, dy = uses((2, 33, 40, 35), dtype)
    expected = loop_grads(x, dy)
    plain = torch.bmm(dy.transpose(1, 2), x)
    assert error(launch.per_sample_grad(x, dy), expected) <= 2 * error(plain, expected)
    factors = some_factors(2)
    total = torch.einsum("b,boi->oi", factors.double(), expected)
    weighted = (dy * factors.to(dtype)[:, None, None]).flatten(0, 1)
    rounded = weighted.t() @ x.flatten(0, 1)
    # The factors meet the fp32 product, so their rounding to 16 bits never happens.
    assert error(launch.clipped_grad(x, dy, factors), total) <= error(rounded, total) / 100


@pytest.mark.parametrize("shape", [(3, 40, 33), (2, 1500), (4,), (1, 7)], ids=str)
@every_dtype
def test_reducing_stored_gradients_matches_float64(shape, dtype):
    grads = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    factors = some_factors(shape[0])
    expected = torch.einsum("b,b...->...", factors.double(), grads.double())
    assert error(launch.clip_reduce(grads, factors), expected) <= RELATIVE


GRID = grid_of(1.0)


def same_bits(found, expected):
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}[expected.dtype]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return torch.equal(found.view(integers), expected.view(integers))


@pytest.mark.parametrize("shape", [(3, 40, 33), (2, 1500), (4,), (1, 7), (0, 5)], ids=str)
@every_dtype
def test_exact_sums_are_the_references_bit_for_bit(shape, dtype):
    grads = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    factors = some_factors(shape[0])
    if shape[0] > 1:
        # Steps of either sign that rounding to the nearest, or down, would change.
        grads[0] *= 2.0**-28
        grads[1], factors[1] = math.nan, 0
    expected = reference.clip_reduce(grads, factors, grid=GRID)
    assert same_bits(launch.clip_reduce(grads, factors, grid=GRID), expected)
    into = grid.truncated(torch.randn(shape[1:]), GRID).to(DEVICE)
    both, version = into + expected, into._version
    assert launch.clip_reduce(grads, factors, grid=GRID, into=into) is into
    assert same_bits(into, both) and into._version > version


def test_exact_sums_do_not_depend_on_order_or_cuts():
    grads, factors = random(6, 5, 7) * 3, some_factors(6)
    whole = launch.clip_reduce(grads, factors, grid=GRID)
    assert same_bits(launch.clip_reduce(grads.flip(0), factors.flip(0), grid=GRID), whole)
    parts = torch.zeros(5, 7, dtype=torch.float64, device=DEVICE)
    for start in (4, 0, 2):
        now = slice(start, start + 2)
        launch.clip_reduce(grads[now], factors[now], grid=GRID, into=parts)
    assert same_bits(parts, whole)
    narrow = launch.clip_reduce(grads, factors)
    assert narrow.dtype == torch.float32 and not torch.equal(narrow.double(), whole)


@pytest.mark.parametrize("side", [1e-30, 1e30], ids=str)
def test_exact_sums_hold_at_the_ends_of_fp32_and_of_grids(side):
    coarse = grid_of(side * 2.0**20)
    grads, factors = random(3, 9) * side, some_factors(3) * 1e-3
    expected = reference.clip_reduce(grads, factors, grid=coarse)
    assert bool(expected.any())
    assert same_bits(launch.clip_reduce(grads, factors, grid=coarse), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_of_factor_zero_contributes_nothing_whatever_it_holds(value):
    x, dy = uses((3, 18, 20, 17))
    x[1, 17, 3] = dy[1, 0, 2] = value
    factors = torch.tensor([0.5, 0.0, 1.0], device=DEVICE)
    keep = [0, 2]
    kept = launch.clipped_grad(x[keep], dy[keep], factors[keep])
    assert torch.equal(launch.clipped_grad(x, dy, factors), kept)
    grads, squares = launch.per_sample_grad(x, dy, return_squares=True)
    assert squares.isfinite().tolist() == [True, False, True]
    for form in ("gram", "tile"):
        assert launch.grad_norm(x, dy, form=form).isfinite().tolist() == [True, False, True]
    reduced = launch.clip_reduce(grads[keep], factors[keep])
    assert torch.equal(launch.clip_reduce(grads, factors), reduced)
    indices = torch.arange(18, device=DEVICE).expand(3, -1) % 5
    table = launch.embedding_clipped_grad(indices, dy, factors, 6)
    assert torch.equal(
        table, launch.embedding_clipped_grad(indices[keep], dy[keep], factors[keep], 6)
    )


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-42], ids=["1e30", "1e-30", "denormal"])
def test_norms_of_huge_and_tiny_gradients_neither_overflow_nor_vanish(scale):
    x, dy = uses((2, 19, 20, 17))
    dy = dy * scale
    expected = loop_grads(x, dy).square().sum((1, 2))
    grads, squares = launch.per_sample_grad(x, dy, return_squares=True)
    stored = grads.double().square().sum((1, 2))
    # A GPU's tensor cores take denormals for 0.
    assert bool(((squares - stored).abs() <= 1e-12 * stored).all())
    if scale > 1e-40:
        assert float((squares / expected - 1).abs().max()) <= RELATIVE


@pytest.mark.parametrize("scales", [(1e-25, 1e28), (1e25, 1e-28), (1e-25, 1e-25), (1e30, 1.0)])
def test_the_gram_form_never_hides_a_norm_behind_fp32s_range(scales):
    x, dy = uses((2, 19, 20, 17))
    x, dy = x * scales[0], dy * scales[1]
    expected = loop_grads(x, dy).square().sum((1, 2))
    # A product that overflows is not finite: the sample is then removed, which is private too.
    found = launch.grad_norm(x, dy, form="gram")
    assert bool(((found >= expected * (1 - 1e-6)) | ~found.isfinite()).all())


def test_where_gram_products_overflow_the_gradient_itself_is_made():
    x, dy = torch.full((1, 2, 3), 1e20), torch.ones(1, 2, 3)
    x[0, 1] *= -0.5
    found = launch.grad_norm(x.to(DEVICE), dy.to(DEVICE), form="gram")
    torch.testing.assert_close(found.cpu(), torch.full((1,), 9 * 0.5e20**2, dtype=torch.float64))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 37, 9), (2, 6, 140)], ids=str)
def test_look_ups_match_the_reference_where_tokens_repeat(shape, dtype):
    dy = random(*shape, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, 4, shape[:2], generator=generator).to(DEVICE)
    indices[:, ::3] = 6
    squares = launch.embedding_grad_norm(indices, dy)
    rows = launch.embedding_per_sample_grad(indices, dy, 8)
    wide = reference.embedding_per_sample_grad(indices, dy.double(), 8)
    assert rows.dtype == torch.float32 and error(rows, wide) <= RELATIVE
    assert torch.equal(rows[-1:], launch.embedding_per_sample_grad(indices[-1:], dy[-1:], 8))
    exact = reference.embedding_grad_norm(indices, dy.double())
    assert error(squares, exact) <= 1e-12 and bool((squares >= exact).all())
    factors = some_factors(shape[0])
    expected = reference.embedding_clipped_grad(indices, dy.double(), factors, 8)
    found = launch.embedding_clipped_grad(indices, dy, factors, 8)
    assert error(found, expected) <= RELATIVE
    assert not bool(found[7].any())


@every_dtype
@pytest.mark.parametrize("tokens", [1, 37, 530])
def test_sums_over_tokens_match_float64(tokens, dtype):
    dy = random(2, tokens, 19, dtype=dtype)
    found = launch.per_sample_bias_grad(dy)
    assert found.dtype == torch.float32
    # Tokens cancel in the sum; what counts is the size of the terms.
    distance = float((found.double() - dy.double().sum(1)).norm())
    assert distance <= RELATIVE * float(dy.double().norm()) * math.sqrt(tokens)


@every_dtype
@pytest.mark.parametrize("shape", [(3, 21, 6, 5), (4, 30), (2, 3, 5, 12)], ids=str)
def test_norm_layers_match_the_reference(shape, dtype):
    x, dy = random(*shape, dtype=dtype), random(*shape, seed=1, dtype=dtype)
    ndim = 2 if shape[1] == 21 else 1
    normalised = list(shape[len(shape) - ndim :])
    weight = torch.rand(normalised, device=DEVICE).to(dtype) + 0.5
    _, mean, rstd = torch.native_layer_norm(x.float(), normalised, None, None, 1e-5)
    wide = [t.double() for t in (dy, x, mean, rstd, weight)]
    # torch's own kernel gives dx.
    found = launch.layer_norm_backward(dy.float(), x.float(), mean, rstd, weight.float(), ndim)
    for result, expected in zip(found, reference.layer_norm_backward(*wide, ndim), strict=True):
        assert error(result, expected) <= RELATIVE
    found = launch.rms_norm_backward(dy, x, rstd, weight, ndim)
    expected = reference.rms_norm_backward(wide[0], wide[1], wide[3], wide[4], ndim)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    assert error(found[0], expected[0]) <= max(RELATIVE, torch.finfo(dtype).eps)
    assert error(found[1], expected[1]) <= RELATIVE


def test_operands_may_lie_in_memory_in_any_order():
    x, dy = uses((2, 19, 20, 17))
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = dy[:1].expand(2, -1, -1)
    for first, second in ((transposed, dy), (x, expanded), (transposed, expanded)):
        found = launch.per_sample_grad(first, second)
        assert error(found, loop_grads(first, second)) <= RELATIVE
    mixed = launch.per_sample_grad(x.bfloat16(), dy)
    assert error(mixed, loop_grads(x.bfloat16(), dy)) <= RELATIVE


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5)], ids=str)
def test_an_empty_dimension_gives_zeros_of_the_right_shape(shape):
    x, dy = torch.zeros(shape[:3], device=DEVICE), torch.zeros(*shape[:2], shape[3], device=DEVICE)
    factors = torch.ones(shape[0], device=DEVICE)
    grads, squares = launch.per_sample_grad(x, dy, return_squares=True)
    assert grads.shape == (shape[0], 5, shape[2]) and not bool(grads.any())
    for found in (squares, launch.grad_norm(x, dy, form="gram"), launch.grad_norm(x, dy)):
        assert found.tolist() == [0] * shape[0]
    for total in (launch.clipped_grad(x, dy, factors), launch.clip_reduce(grads, factors)):
        assert total.shape == (5, shape[2]) and not bool(total.any())
    assert launch.per_sample_bias_grad(dy).tolist() == [[0] * 5] * shape[0]
    indices = torch.zeros(shape[:2], dtype=torch.int64, device=DEVICE)
    assert launch.embedding_grad_norm(indices, dy).tolist() == [0] * shape[0]
    assert launch.embedding_clipped_grad(indices, dy, factors, 3).tolist() == [[0] * 5] * 3


def test_tokens_that_cancel_beyond_fp64_hide_no_norm_of_a_look_up():
    dy = torch.tensor([1e30, 1.0, -1e30, 3.0], device=DEVICE).view(1, 4, 1)
    indices = torch.tensor([[5, 5, 5, 2]], device=DEVICE)
    # In fp64 the first three add up to 0; the sum is 1.
    found = float(launch.embedding_grad_norm(indices, dy))
    assert 10.0 <= found <= 10.0 + (4 * 2e30 * 2.0**-52) ** 2


def test_squared_norms_of_stored_gradients_are_bounds():
    grads = random(3, 5, 7) * torch.tensor([1, 1e30, 1e-30], device=DEVICE).view(3, 1, 1)
    for stored in (grads, grads.bfloat16()):
        assert_bounds(launch.squared_norm(stored), exact_squares(stored), 40 * 2.0**-51)


@pytest.mark.parametrize("function", ["hard", "automatic"])
def test_clipping_factors_are_the_references_bit_for_bit(function):
    generator = torch.Generator().manual_seed(0)
    squares = torch.exp(torch.randn(600, generator=generator, dtype=torch.float64) * 30)
    special = [0.0, math.inf, math.nan, 1.0, 1.0 - 2.0**-40, 1e300, 1e-300, 5e-324]
    squares = torch.cat([squares, torch.tensor(special, dtype=torch.float64)])
    for bound in (1.0, 1e-3, 1e30, *([math.inf] if function == "hard" else [])):
        expected = reference.clip_factors(squares, bound, function)
        found = launch.clip_factors(squares.to(DEVICE), bound, function).cpu()
        assert torch.equal(found, expected), bound
    assert launch.clip_factors(squares[:0].to(DEVICE), 1.0).shape == (0,)


class RecordedKernel:
    """Says which kernel was launched, and whether a device had been entered."""

    def __init__(self, name, entered, seen):
        self.name, self.entered, self.seen = name, entered, seen

    def __getitem__(self, programs):
        return lambda *arguments, **options: self.seen.append((self.name, bool(self.entered)))


def test_every_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    entered, seen = [], []

    @contextlib.contextmanager
    def on_device(tensor):
        entered.append(tensor.device)
        yield
        entered.pop()

    monkeypatch.setattr(launch, "on_device", on_device)
    names = [name for name in vars(launch.kernels) if name.endswith("_kernel")]
    for name in names:
        monkeypatch.setattr(launch.kernels, name, RecordedKernel(name, entered, seen))
    x, dy = uses((2, 3, 4, 5))
    indices, factors = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE), some_factors(2)
    grads = torch.zeros(2, 5, 4, device=DEVICE)
    launch.per_sample_grad(x, dy, return_squares=True)
    launch.grad_norm(x, dy, form="gram")
    launch.clipped_grad(x, dy, factors)
    launch.clip_reduce(grads, factors)
    launch.clip_factors(launch.squared_norm(grads), 1.0)
    launch.embedding_grad_norm(indices, dy)
    launch.embedding_clipped_grad(indices, dy, factors, 3)
    launch.per_sample_bias_grad(dy)
    assert {name for name, _ in seen} == set(names)
    assert all(inside for _, inside in seen)


def test_a_sample_alone_gives_the_bits_it_gives_in_company():
    x, dy = uses((3, 19, 17, 33))
    for form in ("gram", "tile"):
        alone = [launch.grad_norm(x[i : i + 1], dy[i : i + 1], form=form) for i in range(3)]
        assert torch.equal(torch.cat(alone), launch.grad_norm(x, dy, form=form))


@pytest.mark.gpu
@every_dtype
def test_kernels_of_the_table_match_float64_on_the_gpu(dtype):
    x, dy = uses((3, 333, 520, 264), dtype)
    expected = loop_grads(x, dy)
    squares = expected.square().sum((1, 2))
    factors = some_factors(3)
    total = torch.einsum("b,boi->oi", factors.double(), expected)
    for _ in range(2):
        assert error(launch.per_sample_grad(x, dy), expected) <= 1e-5
        assert error(launch.clipped_grad(x, dy, factors), total) <= 1e-5
        assert error(launch.grad_norm(x, dy, form="tile"), squares) <= 1e-5
        gram = launch.grad_norm(x, dy, form="gram")
        assert bool(((gram >= squares) & (gram <= 1.05 * squares)).all())
        stored = launch.per_sample_grad(x, dy)
        for into in (None, torch.zeros_like(total)):
            exact = launch.clip_reduce(stored, factors, grid=GRID, into=into)
            assert same_bits(exact, reference.clip_reduce(stored, factors, grid=GRID))


@pytest.mark.gpu
def test_results_repeat_bit_for_bit_on_the_gpu():
    x, dy = uses((4, 700, 260, 300), torch.bfloat16)
    indices = torch.randint(0, 50, (4, 700), device=DEVICE)
    factors = some_factors(4)
    calls = [
        lambda: launch.per_sample_grad(x, dy),
        lambda: launch.grad_norm(x, dy, form="gram"),
        lambda: launch.grad_norm(x, dy, form="tile"),
        lambda: launch.clipped_grad(x, dy, factors),
        lambda: launch.embedding_grad_norm(indices, dy),
        lambda: launch.embedding_clipped_grad(indices, dy, factors, 50),
        lambda: launch.embedding_per_sample_grad(indices, dy, 50),
        lambda: launch.per_sample_bias_grad(dy),
    ]
    for call in calls:
        first = call()
        assert all(torch.equal(first, call()) for _ in range(5))

"""Norms, clipped sums and noise in C++: against the reference implementation bit for bit.

All on every width of vectors that this machine has.
"""

import ctypes
import functools
import itertools
import math
import multiprocessing
import os
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from dpflash import kernels
from dpflash.kernels import (
    NoiseStream,
    grads_cpu,
    grid_of,
    noise_cpu,
    reference,
)
from dpflash.kernels import native as cpp
from dpflash.kernels.grid import is_on_grid, truncated
from dpflash.kernels.noise import keystream

KEY = bytes(range(32))
GRID = 2.0**-30
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Around a run of words (2048), a group (64) and every width of vectors.
SIZES = [1, 7, 8, 9, 31, 63, 65, 2047, 2048, 2049, 4099]


@pytest.fixture
def every_thread_count(monkeypatch):
    """Calls a function with 1, 2 and 3 threads; the machine need not have as many."""
    monkeypatch.setattr(grads_cpu, "_WORK_OF_A_THREAD", 100)
    monkeypatch.setattr(noise_cpu, "_WORK_OF_A_THREAD", 100)

    def results(function):
        found = []
        for threads in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found.append(function())
        return found

    return results


def without_library(function, *args, **named):
    """The result of the plain torch path of noise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "library", lambda: None)
        return function(*args, **named)


def stream(scale=1.5 * 2**30, grid=GRID, **changed):
    address = {"key": KEY, "step": 2**40 + 7, "parameter_id": 2**31 + 5}
    return NoiseStream(**{"std": scale * grid, "grid": grid, **address, **changed})


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_all_sizes(*shape, seed=0, dtype=torch.float32):
    """Numbers from the least subnormal one to nearly the greatest, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 127, shape, generator=generator).double()
    numbers = random(*shape, seed=seed).double() * torch.exp2(exponents)
    return numbers.clamp(-3e38, 3e38).to(dtype)


def factors_for(batch, seed=0):
    """From the least normal number to 1; every third is 0."""
    factors = torch.rand(batch, generator=torch.Generator().manual_seed(seed))
    factors[::4] = 1.0
    factors[1::3] = 0.0
    factors[2::5] = torch.finfo(torch.float32).tiny
    return factors


def same_bits(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_clipped_sum_has_the_bits_of_the_reference_implementation(dtype, processor):
    for elements, batch in itertools.product(SIZES, (0, 1, 3, 9)):
        grads = random(batch, elements, seed=batch, dtype=dtype)
        factors = factors_for(batch)
        grads[factors == 0] = math.nan
        into = truncated(random(elements, seed=5) * 3, GRID)
        expected = reference.clip_reduce(grads, factors, grid=GRID)
        same_bits(grads_cpu.clip_reduce(grads, factors, grid=GRID), expected)
        assert is_on_grid(expected, GRID)
        found = grads_cpu.clip_reduce(grads, factors, grid=GRID, into=(own := into.clone()))
        assert found is own
        same_bits(found, reference.clip_reduce(grads, factors, grid=GRID, into=into))


def of_a_gate(batch, dtype):
    """Per-sample gradients of all kinds: of all sizes, strided, transposed, empty, scalar."""
    wide = random(batch, 40, 6, seed=1, dtype=dtype)
    return [
        *(random(batch, size, seed=size, dtype=dtype) for size in SIZES),
        wide[:, 7:30],
        wide[:, :, 2],
        random(batch, 0, 3, dtype=dtype),
        random(batch, dtype=dtype),
    ]


@pytest.mark.parametrize("dtypes", [*zip(DTYPES), DTYPES[::2]], ids=str)
def test_a_call_for_all_parameters_of_a_gate_has_the_bits_of_a_call_for_each(
    dtypes, processor, every_thread_count
):
    grads = [g for dtype in dtypes for g in of_a_gate(5, dtype)]
    factors = factors_for(5)
    noise = [stream(parameter_id=i, offset=i % 3 * 2047) for i in range(len(grads))]
    into = [truncated(random(1, *g.shape[1:], seed=5)[0] * 3, GRID) for g in grads]
    of_each = functools.partial(reference.clip_reduce, grid=GRID)
    expected = [
        [of_each(g, factors) for g in grads],
        [of_each(g, factors, into=t.clone()) for g, t in zip(grads, into, strict=True)],
        [without_library(of_each, g, factors, noise=n) for g, n in zip(grads, noise, strict=True)],
    ]

    def found():
        to = [t.clone() for t in into]
        extended = kernels.clip_reduce_all(grads, factors, grid=GRID, into=to)
        assert all(a is b for a, b in zip(extended, to, strict=True))
        return [
            kernels.clip_reduce_all(grads, factors, grid=GRID),
            extended,
            kernels.clip_reduce_all(grads, factors, grid=GRID, noise=noise),
        ]

    for kinds in every_thread_count(found):
        for own, wanted in zip(kinds, expected, strict=True):
            for a, b in zip(own, wanted, strict=True):
                same_bits(a, b)
    totals = [t.clone() for t in into]
    kernels.add_noise_(totals, noise)
    for total, before, own in zip(totals, into, noise, strict=True):
        same_bits(total, without_library(own.add_to_, before.clone()))
    mixed = [stream(step=i % 2, std=1.0 + i % 3, parameter_id=i) for i in range(len(grads))]
    for own, g, n in zip(
        kernels.clip_reduce_all(grads, factors, grid=GRID, noise=mixed), grads, mixed, strict=True
    ):
        same_bits(own, without_library(of_each, g, factors, noise=n))
    kernels.add_noise_(totals := [t.clone() for t in into], mixed)
    for total, before, own in zip(totals, into, mixed, strict=True):
        same_bits(total, without_library(own.add_to_, before.clone()))
    squares = random(5).double()
    one_by_one = squares.clone()
    for g in grads:
        kernels.squared_norm(g, into=one_by_one)
    if len(dtypes) == 1:
        same_bits(kernels.squared_norm(*grads, into=squares), one_by_one)


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
    st.integers(0, 7),
    st.integers(0, 70),
    st.sampled_from([-500, -149, -75, -30, 0, 40, 127, 500]),
    st.sampled_from(DTYPES[:2]),
    st.integers(0, 999),
)
def test_numbers_of_all_sizes_and_grids_of_all_sizes_have_the_same_bits(
    batch, elements, exponent, dtype, seed
):
    grads = of_all_sizes(batch, elements, seed=seed, dtype=dtype)
    factors, grid = factors_for(batch, seed), 2.0**exponent
    expected = reference.clip_reduce(grads, factors, grid=grid)
    same_bits(grads_cpu.clip_reduce(grads, factors, grid=grid), expected)
    noise = stream(grid=grid, offset=seed)
    found = grads_cpu.clip_reduce(grads, factors, grid=grid, noise=noise)
    same_bits(
        found, without_library(reference.clip_reduce, grads, factors, grid=grid, noise=noise)
    )


def next_to_the_grid(count):
    """fp32 numbers whose products with 1 or a factor lie right beside multiples of the grid."""
    whole = torch.arange(1, count + 1) * GRID
    above = torch.nextafter(whole, torch.tensor(math.inf))
    below = torch.nextafter(whole, torch.tensor(0.0))
    return torch.cat([whole, above, below, -whole, -above, -below, whole * 2**20 + GRID / 2])


def check_truncation(clip_reduce):
    """No element becomes longer, changes its sign, or loses a whole step, in real arithmetic."""
    grads = torch.stack([next_to_the_grid(50), random(350), of_all_sizes(350).clamp(-1e3, 1e3)])
    for factor in (1.0, 0.7310585, float(torch.finfo(torch.float32).tiny), 1 - 2**-24):
        factors = torch.tensor([factor])
        for row in grads:
            found = clip_reduce(row.unsqueeze(0), factors, grid=GRID)
            for x, y in zip(row.tolist(), found.tolist(), strict=True):
                product = Fraction(x) * Fraction(float(factors[0]))
                assert abs(Fraction(y)) <= abs(product) < abs(Fraction(y)) + Fraction(GRID)
                assert y * x >= 0


def test_truncation_never_lengthens_in_real_arithmetic(processor):
    check_truncation(kernels.clip_reduce)


def test_rounding_to_the_grid_instead_would_be_noticed():
    def rounding(grads, factors, *, grid):
        return ((grads.double() * factors.double().view(-1, 1)).sum(0) / grid).round() * grid

    with pytest.raises(AssertionError):
        check_truncation(rounding)


@pytest.mark.parametrize("others", [0, 5])
def test_one_sample_moves_the_sum_by_at_most_its_bound_in_real_arithmetic(others, processor):
    for bound in (1e-3, 0.37, 1.0, 12.0):
        grads = random(others + 1, 333, seed=others)
        factors = reference.hard_clip_factors(kernels.squared_norm(grads), bound)
        grid = grid_of(bound)
        whole = kernels.clip_reduce(grads, factors, grid=grid)
        rest = kernels.clip_reduce(grads[:-1], factors[:-1], grid=grid)
        moved = [
            Fraction(a) - Fraction(b) for a, b in zip(whole.tolist(), rest.tolist(), strict=True)
        ]
        square = sum(x * x for x in moved)
        assert square <= Fraction(bound) ** 2
        norm = float(grads[-1].double().norm())
        assert square >= Fraction(min(bound, norm)) ** 2 * Fraction(1 - 1e-6)


@pytest.mark.parametrize("offset", [0, 1, 13, 2040, 2**35 - 5000])
def test_noise_has_the_bits_of_the_reference_implementation(offset, processor):
    noise = stream(offset=offset)
    all_integers = without_library(lambda: torch.cat([part for _, part in noise.integers(4099)]))
    for elements, dtype in itertools.product(SIZES, DTYPES[:2]):
        integers = all_integers[:elements]
        start = random(elements, dtype=dtype) * 3
        start[::5] = 0.5 * GRID  # a tie
        start[3::7] = -0.0
        expected = (((start.double() / GRID).round() + integers) * GRID).to(dtype)
        same_bits(noise.add_to_(start.clone()), expected)
        grads, factors = random(3, elements, dtype=dtype), factors_for(3)
        found = grads_cpu.clip_reduce(grads, factors, grid=GRID, noise=noise)
        total = reference.clip_reduce(grads, factors, grid=GRID)
        same_bits(found, ((total / GRID + integers) * GRID).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_what_is_not_finite_or_leaves_fp32_takes_noise_as_in_the_reference(dtype, processor):
    special = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0, -0.0, 2.0**23 + 1])
    for exponent in (-500, -149, -30, 100, 500):
        noise = stream(grid=2.0**exponent)
        start = special.to(dtype)
        same_bits(noise.add_to_(start.clone()), without_library(noise.add_to_, start.clone()))
    assert bool(stream().add_to_(torch.full((3,), math.nan)).isnan().all())


@hypothesis.settings(max_examples=30, derandomize=True)
@hypothesis.given(st.lists(st.integers(0, 6000), max_size=4), st.integers(0, 5000))
def test_a_parameter_cut_anywhere_has_the_bits_of_the_whole(cuts, offset):
    grads, factors = random(2, 6000), torch.tensor([1.0, 0.5])
    whole = kernels.clip_reduce(grads, factors, grid=GRID, noise=stream(offset=offset))
    borders = sorted({0, 6000, *cuts})
    for begin, end in zip(borders, borders[1:], strict=False):
        noise = stream(offset=offset + begin)
        part = kernels.clip_reduce(grads[:, begin:end], factors, grid=GRID, noise=noise)
        assert torch.equal(part, whole[begin:end])


def test_elements_that_need_further_words_get_them(processor):
    """On a scale of nearly 2^45 some of 10^5 words hold a border; else they would be NaN."""
    count, noise = 100_000, stream(scale=2.0**45 * (1 - 2**-50), grid=1.0, offset=3)
    address = {"first": noise.step, "second": noise.parameter_id, "block": 0}
    words = torch.frombuffer(keystream(KEY, count=count + 3, **address), dtype=torch.int64)[3:]
    expected, undecided = noise_cpu.rounded_normals(words, noise.scale)
    places = undecided.nonzero().flatten().tolist()
    assert 1 <= len(places) <= 20
    for place in places:
        expected[place] = noise.settled(place, int(words[place]))
    # What is settled depends on the further words, which depend on the place.
    assert len({noise.settled(place, int(words[places[0]])) for place in range(30)}) > 1
    start = torch.arange(count).double()
    assert torch.equal(noise.add_to_(start.clone()), start + expected)
    begin = max(0, places[0] - 50)
    grads, factors = start[begin : begin + 100].unsqueeze(0), torch.ones(1, dtype=torch.float64)
    part = stream(scale=noise.scale, grid=1.0, offset=3 + begin)
    found = kernels.clip_reduce(grads, factors, grid=1.0, noise=part)
    assert torch.equal(found, (start + expected)[begin : begin + 100])


def test_an_interrupted_call_leaves_no_element_without_noise(monkeypatch):
    noise = stream(scale=2.0**45 * (1 - 2**-50), grid=1.0, offset=3)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(NoiseStream, "settled", interrupted)
    out = torch.zeros(100_000)
    with pytest.raises(KeyboardInterrupt):
        noise.add_to_(out)
    # A draw of 0 has the chance 2^-46.
    assert bool(out.isnan().any()) and bool((out != 0).all())


def test_no_bit_depends_on_the_number_of_threads(every_thread_count, processor):
    grads, factors, noise = random(6, 5000), factors_for(6), stream(offset=77)

    def all_results():
        return [
            kernels.squared_norm(grads),
            kernels.clip_reduce(grads, factors, grid=GRID),
            kernels.clip_reduce(grads, factors, grid=GRID, noise=noise),
            noise.add_to_(grads[0].clone()),
        ]

    first, *others = every_thread_count(all_results)
    for other in others:
        for found, expected in zip(other, first, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(150, 33), (1, 5), (64, 128)], ids=str)
def test_layer_norms_take_each_sample_alone(sizes, dtype, every_thread_count, processor):
    x = 3 * random(4, sizes[0], 1, sizes[1], dtype=dtype) + 2
    x[1], x[2, :1] = math.nan, math.inf
    dy, weight = torch._neg_view(x.cos()), random(sizes[1], dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, sizes[1:], weight, None, 1e-5)

    def found(i=slice(None), weight=weight):
        return kernels.layer_norm_backward(dy[i], x[i], mean[i], rstd[i], weight, 1)

    first, *others = every_thread_count(found)
    others.append(map(torch.cat, zip(*(found([i]) for i in range(4)), strict=True)))
    for own, expected in ((o, e) for each in others for o, e in zip(each, first, strict=True)):
        assert torch.equal(own.nan_to_num(), expected.nan_to_num())
    for scale in (weight, None):
        expected = reference.layer_norm_backward(dy, x, mean, rstd, scale, 1)
        for own, other in zip(found(weight=scale), expected, strict=True):
            torch.testing.assert_close(own, other, equal_nan=True)


def exact_square(row):
    return sum(Fraction(x) ** 2 for x in row.double().flatten().tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_squared_norm_is_a_bound_that_is_nearly_reached(dtype, processor):
    for elements in (0, 1, 2, 3, 31, 33, 70, 4097):
        make = of_all_sizes if dtype == torch.float32 and elements < 100 else random
        grads = make(1 if elements > 100 else 5, elements, dtype=dtype)
        if dtype == torch.float32:
            grads = torch.cat([grads, random(1, elements) * 2.0**-140])  # subnormal
        for row, found in zip(grads, kernels.squared_norm(grads).tolist(), strict=True):
            square = exact_square(row)
            assert square <= Fraction(found) <= square * (1 + (elements + 1) * Fraction(2) ** -51)


def test_the_bits_of_a_norm_do_not_depend_on_batch_place_strides_or_vectors(processor):
    library = cpp.load(("-march=native",))
    grads = random(7, 10_001) * torch.exp2(random(7, 10_001, seed=1) * 4)
    found = kernels.squared_norm(grads)
    shuffled = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    assert torch.equal(kernels.squared_norm(grads[shuffled]), found[shuffled])
    assert torch.equal(kernels.squared_norm(grads.t().contiguous().t()), found)
    for i in range(7):
        assert torch.equal(kernels.squared_norm(grads[i : i + 1]), found[i : i + 1])
        assert torch.equal(kernels.squared_norm(grads[i].expand(3, -1)), found[i].expand(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "library", lambda: library)
        assert torch.equal(kernels.squared_norm(grads), found)


def views():
    """Tensors of [5, 6, 7] that lie in memory in all kinds of ways."""
    whole = random(5, 6, 7)
    content = whole.numpy().tobytes()
    yield "transposed", random(5, 7, 6).transpose(1, 2)
    yield "batch last", random(6, 7, 5).permute(2, 0, 1)
    yield "every second", random(10, 6, 7)[::2]
    yield "part of rows", random(5, 6, 9)[:, :, 1:8]
    yield "shared by all samples", whole[:1].expand(5, 6, 7)
    yield "one number a row", random(5, 6, 1).expand(5, 6, 7)
    yield "negated lazily", torch.complex(whole, whole).conj().imag
    yield "read-only", torch.frombuffer(content, dtype=torch.float32).view(5, 6, 7)
    yield "differentiable", whole.clone().requires_grad_()


VIEWS = [
    *("transposed", "batch last", "every second", "part of rows", "shared by all samples"),
    *("one number a row", "negated lazily", "read-only", "differentiable"),
]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("kind", VIEWS)
def test_gradients_may_lie_in_memory_in_any_way(kind):
    grads = dict(views())[kind]
    plain, factors = grads.detach().clone(memory_format=torch.contiguous_format), factors_for(5)
    noise = stream()
    for operation in (
        kernels.squared_norm,
        lambda g: kernels.clip_reduce(g, factors, grid=GRID),
        lambda g: kernels.clip_reduce(g, factors, grid=GRID, noise=noise),
    ):
        found = operation(grads)
        assert torch.equal(found, operation(plain)) and not found.requires_grad


def test_autograd_learns_of_what_is_written_in_place():
    for write in (
        lambda x: stream().add_to_(x),
        lambda x: kernels.clip_reduce(random(2, 4), torch.ones(2), grid=GRID, into=x),
    ):
        x, leaf = torch.ones(4, dtype=torch.float64), torch.ones(4).double().requires_grad_()
        y = (leaf * x).sum()
        write(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with torch.inference_mode():
        assert bool(stream().add_to_(torch.zeros(4)).any())


def test_a_caller_who_flushes_subnormals_gets_the_same_bits_and_keeps_its_mode(processor):
    grads, factors = of_all_sizes(4, 500), torch.ones(4)
    tiny, half = torch.tensor([1e-40]), torch.tensor([0.5])
    expected = kernels.clip_reduce(grads, factors, grid=2.0**-149), kernels.squared_norm(grads)
    assert torch.set_flush_denormal(True)
    try:
        found = kernels.clip_reduce(grads, factors, grid=2.0**-149), kernels.squared_norm(grads)
        flushed = float(tiny * half)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0 and float(tiny * half) > 0
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def _in_a_fork(expected, noise):
    if not torch.equal(noise.add_to_(torch.zeros(5000)), expected):
        os._exit(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_draws_with_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(noise_cpu, "_WORK_OF_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = stream().add_to_(torch.zeros(5000))
    child = multiprocessing.get_context("fork").Process(
        target=_in_a_fork, args=(expected, stream())
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_norms_of_products_are_those_of_the_stored_gradients():
    for tokens, inputs, outputs in ((1, 40, 50), (9, 8, 7), (3, 50, 60)):
        x, dy = random(4, tokens, inputs), random(4, tokens, outputs, seed=1)
        grads, squares = kernels.per_sample_grad(x, dy, return_squares=True)
        assert torch.equal(squares, kernels.squared_norm(grads))
        for form in (None, "gram", "tile"):
            found, expected = (m.grad_norm(x, dy, form=form) for m in (kernels, reference))
            assert bool(((found / squares - 1).abs() <= 1e-5).all())
            assert bool(((found / expected - 1).abs() <= 1e-12).all())


def test_without_the_library_the_reference_implementation_runs(monkeypatch):
    grads, factors, noise = random(3, 50), torch.ones(3), stream()
    expected = [
        kernels.clip_reduce(grads, factors, grid=GRID, noise=noise),
        noise.add_to_(grads[0].clone()),
    ]
    monkeypatch.setattr(cpp, "library", lambda: None)
    monkeypatch.setattr(noise_cpu, "call", lambda *_: pytest.fail("there is no library"))
    monkeypatch.setattr(grads_cpu, "call", lambda *_: pytest.fail("there is no library"))
    assert torch.equal(kernels.clip_reduce(grads, factors, grid=GRID, noise=noise), expected[0])
    assert torch.equal(noise.add_to_(grads[0].clone()), expected[1])
    assert torch.equal(kernels.squared_norm(grads), reference.squared_norm(grads))


def test_nothing_is_clipped_where_there_is_nothing():
    for shape in ((0, 5), (3, 0), (0, 0), (0,), (3,)):
        grads, factors = torch.ones(shape), torch.ones(shape[0])
        total = kernels.clip_reduce(grads, factors, grid=GRID)
        assert total.shape == shape[1:] and float(total.sum()) == shape[0] * math.prod(shape[1:])
        noised = kernels.clip_reduce(grads, factors, grid=GRID, noise=stream())
        assert noised.shape == shape[1:] and noised.dtype == torch.float32
        assert kernels.squared_norm(grads).shape == shape[:1]
    for shape in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        x, ones = torch.ones(shape), torch.ones(*shape[:2], 1)
        dx, *found = kernels.layer_norm_backward(x, x, ones, ones, None, 1)
        assert dx.shape == x.shape and all(torch.equal(y, 0 * x.sum(1)) for y in found)


def test_python_and_c_mean_a_noise_of_the_same_size():
    assert cpp.load().noise_bytes() == ctypes.sizeof(noise_cpu._Noise)


@pytest.mark.parametrize("bound", [2.0**-100, 1e-3, 0.3, 1.0, 1e30, math.inf])
def test_clipping_factors_have_the_bits_of_the_reference_implementation(bound, processor):
    squares = of_all_sizes(20_000, dtype=torch.float64).abs()
    special = torch.tensor([0.0, -1.0, math.inf, math.nan, 2.0**-1070], dtype=torch.float64)
    near = min(bound, 1e6) ** 2 * (1 + 1e-12 * random(500, dtype=torch.float64))
    for norms in (squares, special, near, squares[:0], squares.view(2, -1).t()[:, 1]):
        assert torch.equal(
            kernels.clip_factors(norms, bound), reference.clip_factors(norms, bound)
        )


def test_a_squared_norm_is_added_to_others(processor):
    grads, others = random(5, 3, 4099), random(5, dtype=torch.float64).abs()
    expected = others + kernels.squared_norm(grads)
    assert kernels.squared_norm(grads, into=others) is others
    assert torch.equal(others, expected)
    for wrong in (others.float(), others[:4], others.repeat(2)[::2]):
        with pytest.raises(ValueError, match="into has shape"):
            kernels.squared_norm(grads, into=wrong)

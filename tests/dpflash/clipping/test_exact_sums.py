"""Exact release: sums are integers times a public grid, and noise is added before any rounding."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from dpflash import PrivateRefusal
from dpflash.clipping.deferred import DeferredGradients, Share, shares, squared_norms
from dpflash.clipping.groups import per_layer_groups
from dpflash.kernels import NoiseStream, clip_factors, grid_of
from dpflash.kernels.grid import is_on_grid
from dpflash.step import BatchNoise
from dpflash.step import noise as noise_module
from dpflash.step import sums as sums_module

EXACT = [
    {"grad_sample_mode": "instantiate"},
    {"clipping": "per_layer", "exact": True},
]
ROUNDED = [
    {"grad_sample_mode": "book_keeping"},
    {"grad_sample_mode": "ghost"},
    {"grad_sample_mode": "instantiate", "exact": False},
]


def names(kinds):
    return ["-".join(map(str, kind.values())) for kind in kinds]


exact_kind = pytest.mark.parametrize("kind", EXACT, ids=names(EXACT))
every_kind = pytest.mark.parametrize("kind", EXACT + ROUNDED, ids=names(EXACT + ROUNDED))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def losses_of(module, x):
    return module(x).square().mean((1, 2))


def data(count=12):
    torch.manual_seed(1)
    return torch.randn(count, 7, 5)


def integer_losses(module, x):
    """Per-sample gradients of a `Linear` that are exact in fp32, whatever the batch."""
    return (module(x) * torch.tensor([1.0, -2.0, 4.0])).sum(1)


def integer_data(count=12):
    torch.manual_seed(1)
    return torch.randint(-8, 9, (count, 5)).float()


def steps_in_grid(total, grid):
    """A total as integers, in exact arithmetic."""
    found = [Fraction(value) / Fraction(grid) for value in total.double().flatten().tolist()]
    assert all(value.denominator == 1 for value in found)
    return [int(value) for value in found]


@exact_kind
@pytest.mark.parametrize("bound", [0.3, 1.0, 2.0**0.5, 1e-6, 1e4])
def test_one_sample_is_an_integer_vector_no_longer_than_the_bound(bound, kind, private, sums):
    grid = grid_of(bound)
    engine, made, _, _ = private(model(), data(), max_grad_norm=bound, **kind)
    engine.backward(losses_of(made, data()[:1]) * 1e9)
    square = 0
    for total in sums(engine, made).values():
        square += sum(value * value for value in steps_in_grid(total, grid))
    assert square <= (Fraction(bound) / Fraction(grid)) ** 2
    assert square >= (Fraction(bound) / Fraction(grid)) ** 2 * Fraction(1, 4)
    assert engine.rounded_sums == ()


@exact_kind
def test_the_sum_of_a_batch_is_the_sum_of_its_parts_in_every_order(kind, private, sums):
    def of(rows):
        engine, made, _, _ = private(model(), data(), max_grad_norm=0.05, **kind)
        total = {}
        for row in rows:
            engine._step.tracker.backward_done = False
            engine.backward(losses_of(made, data()[row : row + 1]))
            total = sums(engine, made)
        return total

    first, second = of(range(9)), of(reversed(range(9)))
    for name in first:
        assert first[name].dtype == torch.float64
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.3])
@exact_kind
def test_microbatches_change_no_bit_of_a_release(noise_multiplier, kind, private):
    released = []
    for size in (1, 2, 5, None):
        torch.manual_seed(0)
        engine, made, optimizer, loader = private(
            nn.Linear(5, 3),
            integer_data(),
            batch_size=8,
            physical_batch_size=size,
            noise_multiplier=noise_multiplier,
            max_grad_norm=3.0,
            **kind,
        )
        for (x,) in loader:
            engine.backward(integer_losses(made, x))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.releases == 2
        released.append(torch.cat([p.detach().flatten() for p in made.parameters()]))
    for other in released[1:]:
        assert torch.equal(other, released[0])


@every_kind
def test_what_leaves_is_a_function_of_grid_sum_plus_noise(kind, private, monkeypatch):
    """Without noise the sum, rounded to the grid; with noise that plus integers, rounded once."""
    bound, runs = 0.7, []
    for noise_multiplier in (0.0, 1.5):
        torch.manual_seed(0)
        runs.append(
            private(
                model(),
                data(),
                batch_size=6,
                physical_batch_size=2,
                max_grad_norm=bound,
                noise_multiplier=noise_multiplier,
                **kind,
            )
        )
    (quiet, still, _, still_loader), (engine, made, optimizer, loader) = runs
    for run in runs:
        run[0]._step.options.set_expected_batch_size(1.0)
    for (x,), (y,) in zip(still_loader, loader, strict=True):
        quiet.backward(losses_of(still, x))
        engine.backward(losses_of(made, y))
        if engine._step.tracker.current.last:
            break
        optimizer.step()
    grid = grid_of(bound)
    std = math.nextafter(1.5 * bound, math.inf)
    for number, (one, other) in enumerate(zip(still.parameters(), made.parameters(), strict=True)):
        total = (quiet._step.sums[one].double() / grid).round() * grid
        stream = NoiseStream(
            std=std, grid=grid, key=engine._keys.noise, step=0, parameter_id=number
        )
        noisy = stream.add_to_(total.clone().contiguous())
        assert is_on_grid(noisy, grid)
        assert torch.equal(other.grad, noisy.float())


@pytest.mark.parametrize("kind", ROUNDED, ids=names(ROUNDED))
def test_rounded_sums_are_named(kind, private):
    engine, made, _, _ = private(model(), data(), **kind)
    engine.backward(losses_of(made, data()[:4]))
    assert "0.weight" in engine.rounded_sums
    assert any(not use.exact for use in engine.plan())
    assert "rounded" in str(engine.plan())


def test_exact_sums_are_named_in_the_plan(private):
    engine, made, _, _ = private(model(), data(), exact=True)
    engine.backward(losses_of(made, data()[:4]))
    assert all(use.exact and use.grad_sample_mode == "instantiate" for use in engine.plan())
    table = str(engine.plan()).partition("\nmode: ")[0]  # without its legend
    assert "exact" in table and "rounded" not in table


@pytest.mark.parametrize(
    "options, message",
    [
        ({"exact": "yes"}, "exact='yes'"),
        ({"exact": 1}, "exact=1"),
        ({"exact": True, "grad_sample_mode": "book_keeping"}, "grad_sample_mode='book_keeping'"),
        ({"exact": True, "max_grad_norm": math.inf}, "max_grad_norm=inf"),
        ({"noise_multiplier": 2.0**14}, "noise_multiplier=16384"),
        ({"batch_size": 3_000_000}, "batch_size"),
    ],
    ids=["yes", "one", "grad_sample_mode", "inf", "noise", "batch"],
)
def test_what_cannot_be_exact_is_refused(options, message, private):
    big = torch.zeros(3_000_000, 1) if "batch_size" in options else data()
    with pytest.raises(ValueError, match=message):
        private(model(), big, **options)


def test_noise_is_never_rounded_down_and_has_the_grid_of_the_sums():
    parameter = nn.Parameter(torch.zeros(3))
    narrow = np.float16(1.1), np.float16(0.3)
    for sigma, bound in ((1.1, 0.3), (1 / 3, 1e-5), (3.0, 7.7), narrow):
        made = BatchNoise(sigma, bound, key=bytes(32), step=0, parameter_ids={parameter: 0})
        stream = made.stream(parameter)
        assert Fraction(stream.std) >= Fraction(float(sigma)) * Fraction(float(bound))
        assert stream.grid == grid_of(float(bound))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_numbers_of_numpy_that_a_scheduler_sets_are_taken_in_float64(
    clipping, private, monkeypatch
):
    engine, made, optimizer, _ = private(model(), data(), noise_multiplier=1.0, clipping=clipping)
    optimizer.max_grad_norm, optimizer.noise_multiplier = np.float16(0.7), np.float16(1.1)
    engine.backward(losses_of(made, data()[:4]))
    bounds = [group.share * engine._step.sums.bound for group in engine._run.backward.groups]
    assert all(type(bound) is float for bound in bounds)
    drawn = []
    monkeypatch.setattr(noise_module, "BatchNoise", lambda *values, **_: drawn.append(values))
    engine._step._charge(signalled=False)
    ((noise, bound),) = drawn
    assert type(noise) is type(bound) is float
    assert (noise, bound) == (float(np.float16(1.1)), float(np.float16(0.7)))
    assert type(engine.accountant.events[-1][0].noise_multiplier) is float


def test_a_batch_of_ones_own_whose_sum_would_be_rounded_is_refused(private, monkeypatch):
    """Of a bound just below 2 a batch of 2^22 such samples leaves what float64 holds exactly."""
    engine, made, _, _ = private(
        nn.Linear(1, 1), torch.zeros(16, 1), grad_sample_mode="instantiate"
    )
    monkeypatch.setattr(sums_module, "exact_slots", lambda grid, bound: 5)
    engine.backward(made(torch.ones(5, 1)).flatten())
    assert engine._step.sums
    engine._step.tracker.backward_done = False
    with pytest.raises(PrivateRefusal, match="a batch has more than 5 samples"):
        engine.backward(made(torch.ones(6, 1)).flatten())
    assert not engine._step.sums


@exact_kind
def test_noise_that_the_step_adds_meets_the_sum_before_anything_is_rounded(kind, private):
    engine, made, optimizer, _ = private(
        model(), data(), noise_multiplier=1.5, max_grad_norm=0.7, **kind
    )
    engine.backward(losses_of(made, data()[:6]))
    totals = [
        engine._step.sums[p].clone(memory_format=torch.contiguous_format)
        for p in made.parameters()
    ]
    optimizer.step()
    std, key = math.nextafter(1.5 * 0.7, math.inf), engine._keys.noise
    for number, (parameter, total) in enumerate(zip(made.parameters(), totals, strict=True)):
        assert total.dtype == torch.float64
        stream = NoiseStream(std=std, grid=grid_of(0.7), key=key, step=0, parameter_id=number)
        expected = stream.add_to_(total).float() / optimizer.expected_batch_size
        assert torch.equal(parameter.grad, expected)


def test_a_parameter_that_a_later_microbatch_reaches_first_leaves_the_other_sums_in_place():
    first, later = (nn.Parameter(torch.zeros(size)) for size in (50, 3))
    sums = sums_module.ClippedSums([first, later], names={first: "first", later: "later"})
    sums.begin(1.0)
    grads, factors = [torch.full((2, 50), 0.25), torch.full((2, 3), 0.5)], torch.ones(2)
    sums.add_clipped([first], grads[:1], factors)
    held = sums[first]
    sums.add_clipped([first, later], grads, factors)
    assert sums[first] is held and bool((held == 1).all()) and bool((sums[later] == 1).all())
    assert sums[later].untyped_storage().nbytes() == 3 * 8


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 10, 49, 121])
def test_the_shares_of_layers_are_together_at_most_the_bound(count):
    parameters = [nn.Parameter(torch.zeros(i % 5 + 1)) for i in range(count)]
    groups = per_layer_groups([(str(i), [p]) for i, p in enumerate(parameters)])
    total = sum(Fraction(group.share) ** 2 for group in groups)
    assert len(groups) == count and 1 - Fraction(1, 10**9) < total <= 1


def test_what_kept_and_other_uses_of_a_weight_round_together_is_in_the_norm():
    """Uses that cancel, of which one keeps (x, dy) and the other its own gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, 8, generator=generator)
    dy = torch.randn(3, 64, 8, generator=generator)
    kept = DeferredGradients(8, linear=[(x, dy)])
    other = -kept.dense() * (1 - 2.0**-8)
    exact = torch.einsum("bto,bti->boi", dy.double(), x.double()) + other.double()
    norms, bounds = exact.flatten(1).norm(dim=1), kept.bound_with(other).sqrt()
    sizes = dy.double().norm(dim=2).mul(x.double().norm(dim=2)).sum(1)
    assert bool((bounds >= norms + 64 * 2.0**-24 * sizes).all())
    assert bool((bounds <= norms + 80 * 2.0**-24 * (sizes + other.flatten(1).norm(dim=1))).all())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("part", [0.0, 2.0**-10, 0.5, 2.0], ids=str)
def test_the_norm_of_a_tied_table_bounds_what_kernels_sum_where_its_uses_cancel(
    part, device, request
):
    """The head's gradient is nearly minus that of the look-ups; its own tokens cancel too."""
    if device == "gpu":
        request.getfixturevalue("kernels_of_a_gpu")
    generator = torch.Generator().manual_seed(0)
    rows, tokens, width = 24, 40, 16
    x, dy = (torch.randn(3, tokens, n, generator=generator) for n in (width, rows))
    x[:, 20:], dy[:, 20:] = x[:, :20], -dy[:, :20] * (1 - 2.0**-4)
    head = DeferredGradients(rows, linear=[(x, dy)])
    looked_up = torch.arange(rows).expand(3, -1)
    tied = DeferredGradients(
        rows, linear=[(x, dy)], embedding=[(looked_up, (part - 1) * head.dense())]
    )
    assert head.is_separate == tied.is_separate == (device == "gpu")
    one = torch.ones(1)
    (bounds,) = squared_norms([tied])
    for i, bound in enumerate(bounds.tolist()):
        own = tied._sample(i).clipped(Share(one, one, []))
        square = float(own.double().square().sum())
        # The two norms of a sum whose parts cancel no further say no more.
        alone = float(head.squares()[i])
        assert square <= bound <= square + 0.02 * alone


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "tokens",
    [[4.8e18] * 16 + [-4.8e18] * 16, [1.7e19] * 4, [7e18] * 2],
    ids=["cancel", "overflow", "nearly"],
)
def test_terms_that_overflow_in_float32_alone_add_nothing(tokens, device, request):
    if device == "gpu":
        request.getfixturevalue("kernels_of_a_gpu")
    x, dy = torch.randn(2, 2, len(tokens), 64, generator=torch.Generator().manual_seed(0))
    x[1], dy[1] = 0, 0
    x[1, :, 0], dy[1, :, 0] = torch.tensor(tokens).abs(), torch.tensor(tokens)
    kept = DeferredGradients(64, linear=[(x, dy)])
    (squares,) = squared_norms([kept])
    factors = clip_factors(squares, 20.0)
    (share,) = shares([kept], factors, 20.0)
    assert kept.clipped(share).isfinite().all()
    (bound,) = squared_norms([kept], [torch.zeros(2, 64, 64)])
    assert factors[0] > 0 and bound[1] == math.inf


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_a_sample_with_the_norm_of_its_own_product_is_summed_by_itself(mode, private, monkeypatch):
    """Tokens that cancel to less than the bound, with terms of more."""
    summed, clipped = [], DeferredGradients.clipped

    def noted(uses, share):
        summed.append(share.apart)
        return clipped(uses, share)

    monkeypatch.setattr(DeferredGradients, "clipped", noted)
    data = torch.ones(4, 2, 8)
    engine, model, optimizer, loader = private(
        nn.Linear(8, 4, bias=False), data, data, batch_size=4, max_grad_norm=4.0,
        grad_sample_mode=mode, sampling="fixed_size", verify_first_batch=False,
    )  # fmt: skip
    weights = torch.tensor([[1.0, 1.0], [1.0, 2.0**-12 - 1], [0.0, 0.0], [0.5, -0.25]])
    for x, _ in loader:
        engine.backward((model(x).sum(2) * weights).sum(1))
        break
    assert summed == [[1]]


def test_weights_without_elements_and_bounds_of_numpy_are_taken(private):
    for kind in (
        {"grad_sample_mode": "ghost"},
        {"clipping": "per_layer"},
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 4)).bfloat16()
        engine, model, optimizer, loader = private(
            model,
            torch.randn(16, 3).bfloat16(),
            noise_multiplier=np.float16(1.0),
            max_grad_norm=np.float16(0.3),
            **kind,
        )
        for (x,) in loader:
            engine.backward(model(x).float().square().mean(1))
            optimizer.step()
            optimizer.zero_grad()
        assert engine.get_epsilon(1e-5) > 0

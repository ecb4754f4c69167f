"""Random allocation: brute force, limits, moments, the peer's intervals, and who refuses it."""

import json
import math
from pathlib import Path

import numpy as np
import opacus.accountants
import pytest
from scipy.special import ndtr

from dpflash.accounting import (
    ContourAccountant,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    RandomAllocationGaussian,
    allocation,
    create_accountant,
    gaussian_delta,
    gaussian_epsilon,
    get_noise_multiplier,
    noise_multiplier_for,
    remaining_steps,
)
from dpflash.accounting.allocation import law_of, losses_of
from dpflash.accounting.dp_events import to_dp_event
from dpflash.accounting.pairs import Pair
from dpflash.accounting.pld_loss import optimistic, pessimistic

ROOT = Path(__file__).resolve().parents[2]
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "random_allocation.json").read_text())

# Of PLD_accounting 2.0 (arXiv 2602.17284), gaussian_allocation_epsilon_range at its defaults.
PEER = json.loads(Path(__file__).with_name("allocation_peer.json").read_text())


def event(noise, steps, participations=1, **other):
    return RandomAllocationGaussian(
        noise_multiplier=noise, steps=steps, participations=participations, **other
    )


def spent(*events, kind=ContourAccountant):
    accountant = kind()
    for each in events:
        accountant.compose(each)
    return accountant


def products(noise, steps, nodes):
    """The likelihood ratios of all steps at the nodes of a product grid, and their weights."""
    x, width = np.linspace(-9.5 * noise, 1 + 9.5 * noise, nodes, retstep=True)
    density = np.exp(-((x / noise) ** 2) / 2) * width / (noise * math.sqrt(2 * math.pi))
    ratios = np.meshgrid(*[np.exp((2 * x - 1) / (2 * noise**2))] * steps, sparse=True)
    return ratios, math.prod(np.meshgrid(*[density] * steps, sparse=True))


def deltas(ratio, weights, epsilon):
    """Of a removal and of an addition."""
    rise = math.exp(epsilon)
    return (
        float((weights * np.maximum(ratio - rise, 0)).sum()),
        float((weights * np.maximum(1 - rise * ratio, 0)).sum()),
    )


def calls(noise, steps, level):
    """E (A - level)_+: the last step in closed form, the others by quadrature."""
    ratios, weights = products(noise, steps - 1, 401)
    rest = sum(ratios) / steps
    strike = np.maximum((level - rest) * steps, 1e-300)
    d = 0.5 / noise - np.log(strike) * noise
    call = (ndtr(d) - strike * ndtr(d - 1 / noise)) / steps
    return float((weights * np.where(rest < level, call, rest + 1 / steps - level)).sum())


@pytest.mark.parametrize(("noise", "steps"), [(0.5, 2), (3.0, 2), (1.0, 3)])
def test_two_and_three_steps_lie_between_the_ends_in_both_directions(noise, steps):
    pair = Pair(noise, 1 / steps, steps=steps)
    for epsilon in (0.05, 0.5, 2.0):
        truths = (
            calls(noise, steps, math.exp(epsilon)),
            # A call and a put differ by E A - level.
            math.exp(epsilon) * (calls(noise, steps, math.exp(-epsilon)) + math.expm1(-epsilon)),
        )
        for sign, truth in zip((1, -1), truths, strict=True):
            if truth < 1e-9:
                continue
            ends = []
            for is_upper in (False, True):
                losses, masses, _, infinite = losses_of(pair, sign, is_upper)
                ends.append(infinite + masses @ np.maximum(0, -np.expm1(epsilon - losses)))
            assert ends[0] <= truth <= ends[1] <= 1.01 * ends[0]
        if max(truths) > 1e-9:  # Below it the quadrature rounds.
            found = spent(event(noise, steps)).get_delta(epsilon, interval=True)
            assert found.lower <= max(truths) <= found.upper


def test_two_of_three_steps_without_blocks_cost_at_most_as_much():
    ratios, weights = products(1.0, 3, 81)
    a, b, c = ratios
    together = (a * b + a * c + b * c) / 3
    for epsilon in (0.1, 1.0, 3.0):
        truth = max(deltas(together, weights, epsilon))
        assert truth < spent(event(1.0, 3, 2)).get_delta(epsilon)


@pytest.mark.parametrize("noise", [0.5, 1.0, 20.0])
@pytest.mark.parametrize("steps", [7, 100])
def test_moments_of_the_two_laws_lie_around_the_exact_ones(noise, steps):
    greater, lesser = law_of(noise, steps, True), law_of(noise, steps, False)
    assert greater.mass.sum() + greater.zero == pytest.approx(1, abs=1e-11)
    assert greater.moment.sum() + greater.infinite == pytest.approx(1, abs=1e-11)
    assert lesser.mass.sum() == pytest.approx(1, abs=1e-11)
    exact = math.expm1(noise**-2) / steps
    squares = [law.moment @ (law.moment / law.mass) - 1 for law in (lesser, greater)]
    assert 0.99 * exact < squares[0] < exact < squares[1] < 1.01 * exact


def test_what_is_cut_off_a_law_is_counted(monkeypatch):
    monkeypatch.setattr(allocation, "_TAIL", 1e-4)
    # Not the cached one.
    law = law_of.__wrapped__(1.0, 6, True)
    assert law.infinite > 1e-5 and law.zero > 0
    # Both of two means may be 0, which counts twice.
    assert law.mass.sum() + law.zero == pytest.approx(1, abs=1e-8)
    assert law.moment.sum() + law.infinite == pytest.approx(1, abs=1e-8)
    law = law_of.__wrapped__(1.0, 6, False)
    assert law.mass.sum() < 1 - 1e-5 and law.moment.sum() < 1 - 1e-5


# At 6 standard deviations of six estimates the false-alarm rate is 6 * 2e-9.
@pytest.mark.parametrize(("noise", "steps"), [(0.7, 40), (1.0, 100), (3.0, 25)])
def test_samples_agree(noise, steps):
    rng = np.random.default_rng(7)
    x = noise * rng.standard_normal((60_000, steps))
    for shift in (1.0, 0.0):
        x[:, 0] += shift - (x[:, 0] > 1e9)
        mean = np.exp((2 * x - 1) / (2 * noise**2)).mean(axis=1)
        x[:, 0] -= shift
        sign = 1 if shift else -1
        losses, masses, _, infinite = losses_of(Pair(noise, 1 / steps, steps=steps), sign, True)
        epsilon = float(losses[np.searchsorted(np.cumsum(masses), 0.8)])
        values = np.maximum(0, -np.expm1(epsilon - sign * np.log(mean)))
        upper = infinite + masses @ np.maximum(0, -np.expm1(epsilon - losses))
        error = values.std() / math.sqrt(len(values))
        assert abs(values.mean() - upper) < 6 * error + 0.01 * upper


@pytest.mark.parametrize("row", PEER, ids=lambda row: "s{}-T{}-k{}".format(*row[:3]))
def test_intervals_meet_those_of_the_peer(row):
    noise, steps, participations, delta, upper, lower = row
    found = spent(event(noise, steps, participations)).get_epsilon(delta, interval=True)
    assert found.lower <= upper and lower <= found.upper
    assert found.upper <= 1.01 * found.lower


def test_one_step_and_all_steps_are_gaussians():
    assert spent(event(2.0, 1)).get_epsilon(1e-6) == gaussian_epsilon(
        delta=1e-6, noise_multiplier=2.0
    )
    every = spent(event(2.0, 5, 5)).get_epsilon(1e-6)
    assert every == gaussian_epsilon(delta=1e-6, noise_multiplier=2.0, steps=5)
    assert spent(event(0.0, 5)).get_epsilon(1e-6) == math.inf
    assert spent(event(math.inf, 5)).get_epsilon(1e-6) == 0.0


def test_more_steps_to_hide_in_cost_less_and_hiding_never_costs():
    found = [spent(event(0.8, steps)).get_epsilon(1e-5, interval=True) for steps in (8, 9, 64)]
    assert found[1].upper < found[0].lower and found[2].upper < found[1].lower
    assert found[0].upper < gaussian_epsilon(delta=1e-5, noise_multiplier=0.8)
    # The total variation of 64 steps is not a 64th of that of one.
    assert spent(event(0.8, 64)).get_epsilon(0.02) > 0.1
    # Noise below what is computed costs what it costs without hiding.
    assert spent(event(0.05, 8)).get_epsilon(1e-5) == gaussian_epsilon(
        delta=1e-5, noise_multiplier=0.05
    )
    assert spent(event(30.0, 8)).get_delta(0.0) <= gaussian_delta(
        epsilon=0.0, noise_multiplier=30.0
    )


def test_an_added_sample_has_no_greatest_loss():
    pair = Pair(1.0, 1 / 5, steps=5)
    assert pair.log_absence == -math.inf
    # The losses of an addition exceed those of one step of rate 1 / 5.
    losses, masses, _, _ = losses_of(pair, -1, False)
    assert masses[losses > -math.log1p(-1 / 5)].sum() > 0.1


def test_the_upper_end_keeps_what_is_lost_to_the_grid():
    pair, spacing = Pair(1.0, 1 / 5, steps=5), 0.25
    for sign in (1, -1):
        losses, masses, of_q, infinite = losses_of(pair, sign, True)
        atoms = pessimistic(pair, sign, spacing, (-2.2, 3.1))
        grid = spacing * np.arange(atoms.first, atoms.first + len(atoms.masses))
        assert atoms.masses.sum() + atoms.infinite == pytest.approx(masses.sum() + infinite)
        for epsilon in (0.0, 0.7, 1.5, 2.9):
            exact = infinite + masses @ np.maximum(0, -np.expm1(epsilon - losses))
            found = atoms.infinite + atoms.masses @ np.maximum(0, -np.expm1(epsilon - grid))
            assert exact * (1 - 1e-9) <= found <= 1.5 * exact + 1e-4
        lower = optimistic(pair, sign, spacing, (-2.2, 3.1), 1.0)
        grid = lower.offset + spacing * np.arange(lower.first, lower.first + len(lower.masses))
        for epsilon in (0.0, 0.7, 1.5):
            exact = infinite + masses @ np.maximum(0, -np.expm1(epsilon - losses))
            assert lower.masses @ np.maximum(0, -np.expm1(epsilon - grid)) <= exact


def test_blocks_are_composed_and_differ_by_at_most_one_step():
    assert event(1.0, 23, 4).pairs() == [
        (Pair(1.0, 1 / 5, steps=5), 1),
        (Pair(1.0, 1 / 6, steps=6), 3),
    ]
    blocks = spent(event(1.0, 40, 4)).get_epsilon(1e-6)
    assert blocks == spent(*[event(1.0, 10)] * 4).get_epsilon(1e-6)
    assert event(1.0, 40, 4, relation="zero_out").pairs() == event(1.0, 40, 4).pairs()


@pytest.mark.parametrize("kind", [ContourAccountant, PLDAccountant])
def test_it_composes_with_other_events(kind):
    others = (
        PoissonGaussian(noise_multiplier=1.0, sample_rate=0.05),
        Gaussian(noise_multiplier=4),
    )
    alone = spent(event(1.0, 50), kind=kind).get_epsilon(1e-6, interval=True)
    found = spent(event(1.0, 50), *others, kind=kind).get_epsilon(1e-6, interval=True)
    rest = spent(*others, kind=kind).get_epsilon(1e-6)
    assert max(alone.upper, rest) < found.lower
    assert found.upper < 1.01 * found.lower
    # All of them at once are no worse than with the random step known.
    known = spent(Gaussian(noise_multiplier=1.0), *others, kind=kind).get_epsilon(1e-6)
    assert found.upper < known


def test_calibration_meets_the_target_and_a_little_less_would_not():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    noise = noise_multiplier_for(lambda sigma: event(sigma, 16), 2, **target)
    assert spent(*[event(noise, 16)] * 2).get_epsilon(1e-5) <= 1.0
    assert spent(*[event(noise * 0.999, 16)] * 2).get_epsilon(1e-5) > 1.0
    # Not proven to hold everywhere.
    assert noise < get_noise_multiplier(**target, sample_rate=1 / 16, steps=32)
    used = spent(event(noise, 16))
    assert remaining_steps(used, event(noise, 16), **target) == 1


def test_a_saved_state_has_the_event():
    accountant = spent(event(1.5, 60, 3))
    other = ContourAccountant()
    other.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert other.events == accountant.events


@pytest.mark.parametrize("name", ["rdp", "gdp", "gaussian", "prv"])
def test_accountants_without_a_bound_refuse_it_by_name(name):
    accountant = create_accountant(name)
    accountant.compose(event(1.0, 10))
    with pytest.raises(ValueError, match=f"{name}.*RandomAllocationGaussian.*contour"):
        accountant.get_epsilon(1e-5)


def test_what_cannot_express_it_refuses_it():
    with pytest.raises(ValueError, match=r"RDPAccountant.*random_allocation sampler"):
        remaining_steps(
            opacus.accountants.RDPAccountant(), event(1.0, 9), target_epsilon=1, target_delta=1e-5
        )
    with pytest.raises(ValueError, match="RandomAllocationGaussian has no DpEvent"):
        to_dp_event(event(1.0, 10))
    with pytest.raises(ValueError, match="relation='replace_one'"):
        event(1.0, 10, relation="replace_one")
    with pytest.raises(ValueError, match="participations=11: expected at most steps=10"):
        event(1.0, 10, 11)


@pytest.mark.parametrize("index", [2, 17])
def test_noise_at_equal_epsilon_is_reproduced(index):
    row = FIGURES[index]
    accountant = ContourAccountant()
    given = {"noise_multiplier": row["noise_multiplier"], "steps": row["steps_per_epoch"]}
    accountant.compose(RandomAllocationGaussian(**given), row["epochs"])
    found = accountant.get_epsilon(row["delta"])
    assert 0.999 * row["epsilon"] < found <= row["epsilon"] < row["epsilon_of_poisson"]


def test_documented_figures_are_those_of_the_script():
    page = (ROOT / "docs" / "accounting.md").read_text()
    for run in range(0, len(FIGURES), 4):
        rows = FIGURES[run : run + 4]
        assert [row["epsilon"] for row in rows] == [0.5, 1.0, 3.0, 8.0]
        ratios = " | ".join(f"{row['ratio']:.2f}" for row in rows)
        assert f"| {rows[0]['steps_per_epoch']} | {rows[0]['epochs']} | {ratios} |" in page
    assert len(FIGURES) == 24 and max(row["ratio"] for row in FIGURES) < 1

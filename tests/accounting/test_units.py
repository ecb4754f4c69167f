"""Units of several examples: the oracle's table, closed forms, and what must hold anywhere."""

import json
import math

import numpy as np
import opacus.accountants
import pytest
import unit_oracle as oracle
from dp_accounting.pld import PLDAccountant as PeerPLDAccountant
from mpmath import mp, mpf
from scipy.special import log_ndtr, logsumexp

from dpflash.accounting import (
    ContourAccountant,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    RDPAccountant,
    UnitPoissonGaussian,
    create_accountant,
    gaussian_epsilon,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
    remaining_steps,
)
from dpflash.accounting import contour as contour_module
from dpflash.accounting.contour_integral import ADD, REMOVE
from dpflash.accounting.cumulant import log_mgf
from dpflash.accounting.dp_events import to_dp_event
from dpflash.accounting.mixture import Mixture, mixture_of, quantile
from dpflash.accounting.pairs import Pair
from dpflash.accounting.pld_loss import LossDistribution

ROWS = json.loads(oracle.TRUTH.read_text())
SIDES = {REMOVE: oracle.REMOVE, ADD: oracle.ADD}


def event(noise, rate, examples):
    return UnitPoissonGaussian(
        noise_multiplier=noise, sample_rate=rate, examples_per_unit=examples
    )


def event_of(row):
    return event(row["noise_multiplier"], row["sample_rate"], row["examples_per_unit"])


def spent(*events, kind=ContourAccountant):
    accountant = kind()
    for step, count in events:
        accountant.compose(step, count)
    return accountant


def name(row):
    return "k{examples_per_unit}-q{sample_rate:g}-s{noise_multiplier:g}-T{steps}".format(**row)


# The table.


def setting(row):
    return tuple(row[key] for key in ("examples_per_unit", "sample_rate", "noise_multiplier"))


@pytest.mark.parametrize("row", [row for row in ROWS if row["steps"] == 1], ids=name)
def test_rows_of_one_step_have_their_delta_in_closed_form(row):
    with mp.workdps(40):
        deltas = [
            oracle.one_step_delta(mpf(row["epsilon"]), *setting(row), side)
            for side in (oracle.REMOVE, oracle.ADD)
        ]
        assert max(deltas) == deltas[0] == pytest.approx(mpf(row["delta"]), rel=1e-17)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row["steps"] > 100 and 0.05 <= row["sample_rate"] < 0.2],
    ids=name,
)
def test_rows_of_many_steps_have_their_delta_on_another_line(row):
    with mp.workdps(40):
        inversion = oracle.Inversion(*setting(row), row["steps"], oracle.REMOVE, 0.5, 1.2)
        inversion.draw(mpf(row["epsilon"]))
        value, slope = inversion.delta(mpf(row["epsilon"]))
        assert abs(value - mpf(row["delta"])) <= 1e-14 * abs(slope) * mpf(row["epsilon"])


@pytest.mark.cases(0)
@pytest.mark.parametrize("side", [oracle.REMOVE, oracle.ADD])
@pytest.mark.parametrize(("steps", "examples", "noise"), [(1, 20, 6.0), (2, 4, 3.0)])
def test_the_inversion_is_the_closed_form_and_the_quadrature_over_an_output(
    steps, examples, noise, side
):
    epsilon = 1.0
    with mp.workdps(28):
        inversion = oracle.Inversion(examples, 0.4, noise, steps, side, fineness=1.5)
        inversion.draw(mpf(epsilon))
        if steps == 1:
            truth = oracle.one_step_delta(epsilon, examples, 0.4, noise, side)
        else:
            truth = oracle.two_steps_delta(epsilon, examples, 0.4, noise, side, 3)
        assert float(inversion.delta(mpf(epsilon))[0]) == pytest.approx(float(truth), rel=1e-12)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_truth_lies_within_the_interval_of_the_contour(row):
    accountant, truth = spent((event_of(row), row["steps"])), mpf(row["epsilon"])
    lower, upper = accountant.get_epsilon(row["delta"], interval=True)
    slack = mpf("1e-14") * truth
    assert lower <= truth + slack and truth - slack <= upper
    assert upper - lower <= 1e-3 * upper
    lower, upper = accountant.get_delta(float(truth), interval=True)
    assert lower <= row["delta"] * (1 + 1e-9) and row["delta"] * (1 - 1e-9) <= upper


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_truth_lies_within_the_interval_of_pld_and_below_rdp(row):
    truth = float(row["epsilon"])
    step = (event_of(row), row["steps"])
    lower, upper = spent(step, kind=PLDAccountant).get_epsilon(row["delta"], interval=True)
    assert lower <= truth * (1 + 1e-12) and truth * (1 - 1e-12) <= upper
    rdp = spent(step, kind=RDPAccountant).get_epsilon(row["delta"])
    assert truth <= rdp * (1 + 1e-12)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_dp_accountings_pessimistic_value_is_not_below_the_lower_end(row):
    truth = float(row["epsilon"])
    step = event_of(row)
    # They search for each point of the grid; on a coarser one they are more pessimistic.
    reach = (step.examples_per_unit + 12 * step.noise_multiplier) / step.noise_multiplier**2
    interval = max(1e-4, 5e-4 * step.examples_per_unit * reach, 1e-6 * truth)
    peer = PeerPLDAccountant(value_discretization_interval=interval)
    peer.compose(to_dp_event(step), row["steps"])
    theirs = peer.get_epsilon(row["delta"])
    lower = spent((step, row["steps"])).get_epsilon(row["delta"], interval=True).lower
    assert lower <= theirs * (1 + 1e-9)


# Special cases.


@pytest.mark.parametrize("kind", [ContourAccountant, PLDAccountant, RDPAccountant])
def test_a_unit_of_one_example_is_a_sample(kind):
    unit = spent((event(1.3, 0.02, 1), 500), kind=kind)
    plain = spent((PoissonGaussian(noise_multiplier=1.3, sample_rate=0.02), 500), kind=kind)
    assert unit.get_epsilon(1e-6, interval=True) == plain.get_epsilon(1e-6, interval=True)
    assert unit.get_delta(0.7, interval=True) == plain.get_delta(0.7, interval=True)


@pytest.mark.parametrize(("noise", "rate"), [(1.3, 0.02), (0.5, 1e-4), (6.0, 0.7)])
def test_the_mixture_of_one_example_is_the_subsampled_gaussian(noise, rate):
    mixture, t = Mixture(noise, rate, 1), np.linspace(-8 * noise, 40 * noise, 300)
    for sign in (1, -1):
        one, other = (
            LossDistribution(noise, rate, sign),
            LossDistribution(noise, rate, sign, mixture),
        )
        losses = one.loss(sign * t)
        assert other.loss(sign * t) == pytest.approx(losses, rel=1e-13, abs=1e-18)
        assert other.density(sign * t) == pytest.approx(one.density(sign * t), rel=1e-12)
        assert other.slope(sign * t) == pytest.approx(one.slope(sign * t), rel=1e-13)
        # Left of this the loss has hardly any slope.
        steep = t > 0
        places = other.place(losses[steep])
        assert places == pytest.approx(sign * t[steep], rel=1e-9, abs=1e-9)
        assert other.edge() == one.edge()
        for x in (-3 * noise, 0.4, 1 + 5 * noise):
            for above in (True, False):
                expected = one.log_tails(sign * x, above)
                assert other.log_tails(sign * x, above) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [ContourAccountant, PLDAccountant, RDPAccountant])
def test_units_of_which_all_is_drawn_are_a_gaussian_of_the_whole_unit(kind):
    unit = spent((event(30.0, 1.0, 6), 40), kind=kind)
    whole = spent((Gaussian(noise_multiplier=5.0), 40), kind=kind)
    assert unit.get_epsilon(1e-7, interval=True) == whole.get_epsilon(1e-7, interval=True)
    truth = gaussian_epsilon(delta=1e-7, noise_multiplier=5.0, steps=40)
    assert unit.get_epsilon(1e-7) >= truth * (1 - 1e-12)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("noise", "rate", "examples", "epsilon"),
    [(2.0, 0.05, 8, 0.7), (5.0, 0.5, 16, 3.0), (8.0, 0.01, 64, 0.1), (1.5, 0.3, 2, 0.4)],
)
def test_the_contour_itself_has_the_closed_form_of_one_step(noise, rate, examples, epsilon, side):
    with mp.workdps(40):
        truth = float(oracle.one_step_delta(epsilon, examples, rate, noise, SIDES[side]))
    pairs = ((Pair(noise, rate, examples=examples), 1),)
    lower, upper = contour_module._delta_of(pairs, side, epsilon)
    assert lower <= truth * (1 + 1e-11)
    assert truth * (1 - 1e-11) <= upper
    whole = spent((event(noise, rate, examples), 1)).get_delta(epsilon, interval=True)
    pld = spent((event(noise, rate, examples), 1), kind=PLDAccountant)
    assert truth <= whole.upper and truth <= pld.get_delta(epsilon)
    if side == REMOVE:
        assert whole.lower <= truth <= whole.upper <= truth * (1 + 1e-3)


def excess_by_quadrature(pair, order, panels):
    """M(a) - 1 by Gauss-Legendre over short panels, 80 bits, without `mixture`."""
    s, a = np.longdouble(pair.noise), np.clongdouble(order)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    top = pair.examples * max(1.0, a.real) + 14 * s
    edges = np.linspace(-14 * s, top, panels + 1, dtype=np.longdouble)
    wide = (edges[1:] - edges[:-1])[:, None] / 2
    x = (edges[1:] + edges[:-1])[:, None] / 2 + wide * nodes
    ratio = np.zeros_like(x)
    for j in range(pair.examples + 1):
        p = math.comb(pair.examples, j) * np.longdouble(pair.rate) ** j
        p *= (1 - np.longdouble(pair.rate)) ** (pair.examples - j)
        ratio += p * np.exp((2 * j * x - j * j) / (2 * s * s))
    density = np.exp(-((x / s) ** 2) / 2) / (s * np.sqrt(2 * np.longdouble(math.pi)))
    return ((np.exp(a * np.log(ratio)) - 1) * density * wide * weights).sum()


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="long double is float64 here")
@pytest.mark.parametrize("enough", [0.0, 1e-12])
@pytest.mark.parametrize(
    ("noise", "rate", "examples"),
    [(2.0, 0.05, 8), (5.0, 0.5, 16), (1.0, 0.01, 3), (9.0, 0.02, 64)],
)
def test_moments_are_those_of_quadrature_within_the_claimed_error(noise, rate, examples, enough):
    pair = Pair(noise, rate, examples=examples)
    for order in (1.5, 2.5, 2 + 1j, 1.3 + 4j, 1.3 + 6j, -0.5, -2.0, -0.3 + 2j, -1 + 5j):
        log, error = log_mgf(pair, np.array([complex(order)]), cut=None, enough=enough)
        truth = 1 + excess_by_quadrature(pair, order, 400)
        other = 1 + excess_by_quadrature(pair, order, 700)
        largest = float((1 + excess_by_quadrature(pair, complex(order).real, 400)).real)
        apart = abs(np.exp(np.clongdouble(log[0])) - truth)
        allowed = 2 * error[0] * abs(truth) + abs(truth - other) + 1e-17 * largest
        assert error[0] * abs(truth) <= 1e-11 * largest
        assert apart <= allowed + 1e-15 * abs(np.log(truth) * truth)


# What must hold anywhere.


@pytest.mark.parametrize(
    ("noise", "rate", "examples", "steps", "delta"),
    [
        (4.0, 0.02, 8, 1000, 1e-6),
        (9.0, 0.001, 64, 300, 1e-9),
        (2.0, 0.5, 2, 10, 1e-5),
        (5.0, 0.1, 30, 1, 1e-7),
        (0.7, 0.001, 4, 2000, 1e-6),
        (0.5, 0.05, 16, 10, 1e-12),
    ],
)
def test_epsilon_rises_with_the_examples_up_to_that_of_one_sample_of_all_of_them(
    noise, rate, examples, steps, delta
):
    # Binom(k - 1, q) is stochastically below Binom(k, q), and that below k Binom(1, 1-(1-q)^k).
    def epsilon(count):
        return spent((event(noise, rate, count), steps)).get_epsilon(delta, interval=True)

    found, fewer = epsilon(examples), epsilon(examples - 1)
    assert fewer.lower <= found.upper * (1 + 1e-9)
    assert fewer.upper <= found.upper * (1 + 1e-3)
    present = -math.expm1(examples * math.log1p(-rate))
    at_once = PoissonGaussian(noise_multiplier=noise / examples, sample_rate=present)
    assert found.lower <= spent((at_once, steps)).get_epsilon(delta) * (1 + 1e-9)
    assert found.lower >= spent(
        (PoissonGaussian(noise_multiplier=noise, sample_rate=rate), steps)
    ).get_epsilon(delta, interval=True).lower * (1 - 1e-3)


@pytest.mark.parametrize("gradients", [(0, 0), (0, 90), (0, 180), (0, 120, 240), (10, 20, 50)])
def test_a_unit_whose_gradients_point_anywhere_is_dominated(gradients):
    # The true pair in the plane, by its density on a grid, in both directions.
    noise, rate = 1.0, 0.4
    angles, k = np.radians(gradients), len(gradients)
    axis = np.linspace(-11, 11, 1101)
    x, y = np.meshgrid(axis, axis)
    plain = np.exp(-(x**2 + y**2) / 2)
    mixed = np.zeros_like(plain)
    for drawn in range(1 << k):
        inside = np.array([drawn >> i & 1 for i in range(k)], float)
        p = rate ** inside.sum() * (1 - rate) ** (k - inside.sum())
        at = inside @ np.cos(angles), inside @ np.sin(angles)
        mixed += p * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / 2)
    area = (axis[1] - axis[0]) ** 2 / (2 * math.pi)
    for epsilon in (0.0, 0.3, 1.0, 2.5):
        for direction, (p, q) in (("remove", (mixed, plain)), ("add", (plain, mixed))):
            true = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * area)
            ours = float(oracle.one_step_delta(epsilon, k, rate, noise, direction))
            assert true <= ours + 1e-5
            if gradients == (0, 0):
                assert true == pytest.approx(ours, abs=1e-4)


def test_a_unit_with_fewer_examples_or_shorter_gradients_is_dominated_at_every_threshold():
    for k, fewer, rate, noise in ((8, 3, 0.1, 1.0), (5, 4, 0.6, 2.0)):
        full, less = Mixture(noise, rate, k), Mixture(noise, rate, fewer)
        for epsilon in (0.01, 0.5, 2.0):
            for sign in (1, -1):
                found = []
                for mixture in (full, less):
                    x = float(mixture.place(np.array([sign * epsilon]))[0])
                    if not math.isfinite(x):
                        found.append(0.0)
                        continue
                    mixed, plain = (math.exp(t) for t in mixture.log_tails(x, sign == 1))
                    p, q = (mixed, plain) if sign == 1 else (plain, mixed)
                    found.append(p - math.exp(epsilon) * q)
                assert found[1] <= found[0] + 1e-15


@pytest.mark.parametrize("kind", [ContourAccountant, PLDAccountant])
def test_unlike_steps_compose(kind):
    parts = [
        (event(4.0, 0.02, 8), 300),
        (PoissonGaussian(noise_multiplier=1.2, sample_rate=0.01), 200),
        (Gaussian(noise_multiplier=20.0), 3),
        (event(6.0, 0.05, 3), 50),
    ]
    whole = spent(*parts, kind=kind).get_epsilon(1e-6, interval=True)
    assert whole == spent(*reversed(parts), kind=kind).get_epsilon(1e-6, interval=True)
    other = PLDAccountant if kind is ContourAccountant else ContourAccountant
    peer = spent(*parts, kind=other).get_epsilon(1e-6, interval=True)
    assert whole.lower <= peer.upper * (1 + 1e-9) and peer.lower <= whole.upper * (1 + 1e-9)
    alone = [spent(part).get_epsilon(1e-6) for part in parts]
    assert max(alone) < whole.upper < sum(spent(p).get_epsilon(2.5e-7) for p in parts)


def test_no_addition_tells_more_than_that_nothing_was_drawn():
    pairs = ((Pair(1.0, 1e-3, examples=10), 5),)
    most = -50 * math.log1p(-1e-3)
    assert contour_module._largest_added_loss(pairs) == pytest.approx(most, rel=1e-12)
    assert contour_module._delta_of(pairs, ADD, most * 1.0001) == (0.0, 0.0)
    with mp.workdps(30):
        assert oracle.one_step_delta(most / 5 * 1.0001, 10, 1e-3, 1.0, oracle.ADD) == 0
        assert oracle.one_step_delta(most / 5 * 0.9999, 10, 1e-3, 1.0, oracle.ADD) > 0


def test_what_a_cut_leaves_out_is_as_rare_as_it_says():
    for pair in (Pair(2.0, 0.1, examples=8), Pair(0.5, 1e-3, examples=64)):
        for deviations in (8.0, 12.0):
            x = quantile(pair, deviations)
            mixed, _ = mixture_of(pair).log_tails(x, above=True)
            assert log_ndtr(-deviations) - 1 < mixed <= log_ndtr(-deviations)


def test_rdp_at_whole_orders_is_the_sum_over_draws_in_both_directions():
    noise, rate, k = 3.0, 0.1, 4
    p = [math.comb(k, j) * rate**j * (1 - rate) ** (k - j) for j in range(k + 1)]
    j = np.arange(k + 1)
    two = logsumexp(np.log(np.outer(p, p)) + np.outer(j, j) / noise**2)
    a, b, c = np.meshgrid(j, j, j)
    weights = np.log(p)[a] + np.log(p)[b] + np.log(p)[c]
    three = logsumexp(weights + (a * b + a * c + b * c) / noise**2)
    pair = Pair(noise, rate, examples=k)
    logs, errors = log_mgf(pair, np.array([2.0 + 0j, 3.0 + 0j]), cut=None, enough=0.0)
    assert logs.real == pytest.approx([two, three], rel=1e-12)
    assert np.all(errors < 1e-13)
    accountant = spent((event(noise, rate, k), 1), kind=RDPAccountant)
    for order, log in ((2.0, two), (3.0, three)):
        bound = log / (order - 1) + math.log1p(-1 / order)
        bound -= (math.log(1e-5) + math.log(order)) / (order - 1)
        assert accountant.get_epsilon(1e-5) <= bound * (1 + 1e-12)
    # The direction of an addition is asked too: its truth is below.
    with mp.workdps(30):
        added = solve_added(noise, rate, k, 1e-5)
    assert added <= accountant.get_epsilon(1e-5)


def solve_added(noise, rate, k, delta):
    low, high = 0.0, 4.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        rare = oracle.one_step_delta(middle, k, rate, noise, oracle.ADD) <= delta
        low, high = (low, middle) if rare else (middle, high)
    return low


# Calibration and refusals.


def test_calibration_meets_the_target_for_units_and_a_little_less_would_not():
    target = {"target_epsilon": 2.0, "target_delta": 1e-6, "examples_per_unit": 8}

    def epsilon(noise, rate, steps):
        return spent((event(noise, rate, 8), steps)).get_epsilon(1e-6)

    noise = get_noise_multiplier(**target, sample_rate=0.02, steps=2000)
    assert epsilon(noise, 0.02, 2000) <= 2.0 < epsilon(noise * (1 - 2e-4), 0.02, 2000)
    rate = get_sample_rate(**target, noise_multiplier=8.0, steps=2000)
    assert epsilon(8.0, rate, 2000) <= 2.0 < epsilon(8.0, rate * (1 + 2e-4), 2000)
    steps = get_steps(**target, noise_multiplier=8.0, sample_rate=0.02)
    assert epsilon(8.0, 0.02, steps) <= 2.0 < epsilon(8.0, 0.02, steps + 1)


def test_calibration_is_for_the_relation_of_the_accountant_that_is_passed():
    target = {"target_epsilon": 2.0, "target_delta": 1e-6, "examples_per_unit": 8}
    accountant = ContourAccountant(neighboring_relation="zero_out")
    run = {"sample_rate": 0.02, "steps": 2000}
    same = get_noise_multiplier(**target, **run)
    assert get_noise_multiplier(**target, **run, accountant=accountant) == same
    accountant = ContourAccountant(neighboring_relation="replace_one")
    with pytest.raises(ValueError, match="^relation='replace_one': UnitPoissonGaussian has no"):
        get_noise_multiplier(**target, **run, accountant=accountant)
    with pytest.raises(ValueError, match="^examples_per_unit=True: expected an integer"):
        get_noise_multiplier(**{**target, "examples_per_unit": True}, **run)


@pytest.mark.filterwarnings("ignore:accountant='gdp'")
@pytest.mark.parametrize("accountant", ["gdp", "prv"])
def test_accountants_of_samples_refuse_units(accountant):
    spender = create_accountant(accountant)
    spender.compose(event(2.0, 0.1, 4), 10)
    message = f"^examples_per_unit=4: accountant='{accountant}' .* use accountant='contour'"
    with pytest.raises(ValueError, match=message):
        spender.get_epsilon(1e-5)
    with pytest.raises(ValueError, match=message):
        spender.get_delta(1.0)


def test_the_closed_form_and_opacus_refuse_units():
    spender = create_accountant("gaussian")
    spender.compose(event(2.0, 0.1, 4), 10)
    with pytest.raises(ValueError, match="use accountant='contour'"):
        spender.get_epsilon(1e-5)
    target = {"target_epsilon": 2.0, "target_delta": 1e-6}
    theirs = opacus.accountants.RDPAccountant()
    with pytest.raises(ValueError, match="it supports units of one example only"):
        remaining_steps(theirs, event(4.0, 0.01, 4), **target)
    assert remaining_steps(theirs, event(4.0, 0.01, 1), **target) > 0


def test_more_examples_than_accountants_add_up_are_refused_with_the_way_out():
    assert event(1.0, 0.1, 1000).examples_per_unit == 1000
    with pytest.raises(ValueError, match="^examples_per_unit=1001: expected at most 1000; pass"):
        event(1.0, 0.1, 1001)
    lower, upper = spent((event(20.0, 1e-3, 1000), 100)).get_epsilon(1e-6, interval=True)
    assert 0 < upper * (1 - 1e-3) <= lower <= upper


@pytest.mark.parametrize(
    ("noise", "rate", "examples", "steps"), [(0.15, 0.5, 24, 1), (0.02, 0.3, 4, 100)]
)
def test_small_noise_has_an_interval_too(noise, rate, examples, steps):
    # Contours would need more nodes than are allowed.
    found = spent((event(noise, rate, examples), steps)).get_epsilon(1e-6, interval=True)
    assert 0 < found.upper * (1 - 1e-3) <= found.lower <= found.upper
    whole = gaussian_epsilon(delta=1e-6, noise_multiplier=noise / examples, steps=steps)
    assert found.upper <= whole

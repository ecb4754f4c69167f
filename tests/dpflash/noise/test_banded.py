"""The sensitivity, the cost and the value of banded noise."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import dpflash
from dpflash.accounting import (
    Composed,
    ContourAccountant,
    Gaussian,
    PoissonGaussian,
    SelfComposed,
    create_accountant,
)
from dpflash.noise import Banded


def _random(rng, most=6):
    """Any admissible mechanism: falling coefficients, now and then equal ones or zeros."""
    bands = int(rng.integers(1, most + 1))
    falling = np.sort(rng.random(bands - 1) ** rng.choice([0.1, 1, 4]))[::-1]
    if rng.random() < 0.2:
        falling = np.round(falling)
    return Banded(bands=bands, coefficients=(1.0, *falling.tolist()))


def _matrix(coefficients, steps):
    zeros = [0] * steps
    row = [*coefficients, *zeros][:steps]
    return [[row[t - i] if i <= t else 0 for i in range(steps)] for t in range(steps)]


def _patterns(steps, separation, most, first=0):
    """All sets of steps that far apart, of `most` at most, the longest only."""
    found = False
    for step in range(first, steps if most else 0):
        found = True
        for rest in _patterns(steps, separation, most - 1, step + separation):
            yield (step, *rest)
    if not found:
        yield ()


def test_sensitivity_is_that_of_all_participation_patterns():
    rng, patterns = np.random.default_rng(1), 0
    for _ in range(200):
        noise = _random(rng)
        steps = int(rng.integers(1, 15))
        separation = noise.bands + int(rng.integers(0, 3))
        participations = None if rng.random() < 0.5 else int(rng.integers(1, 5))
        matrix = np.array(_matrix(noise.integers, steps), dtype=object)
        most = 0
        for pattern in _patterns(steps, separation, participations or steps):
            patterns += 1
            gram = matrix[:, pattern].T @ matrix[:, pattern]
            # Columns are orthogonal, so signs and directions of the contributions do not matter.
            assert not (gram - np.diag(np.diag(gram))).any()
            most = max(most, int(np.trace(gram)))
        found = noise.sensitivity(
            steps=steps, participations=participations, separation=separation
        )
        square = Fraction(most, 2**16)
        below = Fraction(math.nextafter(found, 0.0))
        assert below**2 < square <= Fraction(found) ** 2
    assert 1000 < patterns < 10**6


def test_contributions_closer_than_the_bands_are_refused():
    with pytest.raises(ValueError, match="separation=3: expected at least bands=4"):
        Banded(bands=4).sensitivity(steps=9, separation=3)
    close = np.array(_matrix([1, 0.5], 2)).sum(1)
    assert np.linalg.norm(close) > Banded(bands=2, coefficients=(1, 0.5)).sensitivity(steps=2)


def test_one_band_is_independent_noise():
    noise = Banded(bands=1)
    assert noise == Banded.optimized(bands=1, steps=50)
    assert noise.integers == (2**8,) and noise.noise_scale() == 1
    assert noise.sensitivity(steps=9) == 3
    step = PoissonGaussian(noise_multiplier=0.7, sample_rate=0.01)
    event = noise.event(noise_multiplier=0.7, sample_rate=0.01, steps=30)
    assert event == SelfComposed(event=step, count=30)
    assert noise.expected_error(steps=7) == math.sqrt(np.mean(np.arange(1, 8)))


def test_event_is_a_subsampled_gaussian_a_round_and_the_last_column_is_cut():
    noise = Banded(bands=4, coefficients=(1, 0.75, 0.5, 0.25))
    step = PoissonGaussian(noise_multiplier=2.0, sample_rate=0.2)
    event = noise.event(noise_multiplier=2.0, sample_rate=0.05, steps=12)
    assert event == SelfComposed(event=step, count=3)
    event = noise.event(noise_multiplier=2.0, sample_rate=0.05, steps=10)
    assert isinstance(event, Composed)
    assert event.events[0] == SelfComposed(event=step, count=2)
    last = event.events[1].noise_multiplier
    # Two rows are left of the column that begins at the ninth step.
    exact = Fraction(4) * Fraction(1 * 16 + 9 + 4 + 1, 16) / Fraction(25, 16)
    assert 0 < exact - Fraction(last) ** 2 < 1e-13
    assert noise.event(noise_multiplier=2.0, sample_rate=0.05, steps=2) == event.events[1]


@pytest.mark.parametrize("steps", [1, 7, 8, 30])
def test_without_sampling_an_event_costs_the_gaussian_of_the_sensitivity(steps):
    noise = Banded.optimized(bands=4, steps=30)
    accountants = ContourAccountant(), create_accountant("gaussian")
    event = noise.event(noise_multiplier=3.0, sample_rate=0.25, steps=steps)
    joint = 3.0 * noise.noise_scale() / noise.sensitivity(steps=steps)
    accountants[0].compose(event)
    accountants[1].compose(Gaussian(noise_multiplier=joint))
    found, exact = (accountant.get_epsilon(1e-5) for accountant in accountants)
    assert found == pytest.approx(exact, rel=1e-9)


def test_a_part_smaller_than_a_batch_is_refused_up_to_rounding():
    noise = Banded(bands=10)
    assert noise.rate_of_part(0.1) == 1 == Banded(bands=3).rate_of_part(1 / 3)
    with pytest.raises(ValueError, match="sample_rate=0.11: bands=10"):
        noise.event(noise_multiplier=1.0, sample_rate=0.11, steps=20)


@pytest.mark.parametrize(
    "coefficients, match",
    [
        ((1, 0.5), "2 with bands=3"),
        ((0.5, 0.4, 0.3), "expected 1 first"),
        ((1, 0.5, 0.6), "none above"),
        ((1, 0.5, -0.1), "none below 0"),
        ((1, math.nan, 0), r"coefficients\[1\]=nan"),
    ],
)
def test_coefficients_that_are_not_admissible_are_refused(coefficients, match):
    with pytest.raises(ValueError, match=match):
        Banded(bands=3, coefficients=coefficients)


def test_noise_is_a_frozen_value_on_the_grid_of_coefficients():
    noise = Banded(bands=12)
    assert noise == dpflash.noise.Banded(bands=12) and len({noise, Banded(bands=12)}) == 1
    assert all((c * 2**8).is_integer() for c in noise.coefficients)
    assert noise.coefficients[:4] == (1.0, 0.5, 0.375, 0.3125)
    assert repr(noise) == "Banded(bands=12, coefficients=(1, 0.5, 0.375, 0.3125, ..., 0.16797))"
    short = Banded(bands=2, coefficients=(1, 0.75))
    assert eval(repr(short)) == short and eval(repr(Banded(bands=1))) == Banded(bands=1)
    with pytest.raises(AttributeError):
        noise.bands = 3


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = Banded(bands=4).plot(tmp_path / "noise.png", steps=40)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_patterns_are_all_there():
    every = {p for n in range(4) for p in itertools.combinations(range(6), n)}
    apart = {p for p in every if all(y - x >= 2 for x, y in itertools.pairwise(p))}
    longest = set(_patterns(6, 2, 3))
    assert longest <= apart and {p[:n] for p in longest for n in range(4)} <= apart
    assert {p for p in apart if len(p) == 3} <= longest

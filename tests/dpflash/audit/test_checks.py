"""Named checks, on numbers of which is known whether they are honest."""

import numpy as np
import pytest
from scipy.stats import kstest

from dpflash.audit.checks import (
    Drawn,
    check_contributions,
    check_inclusions,
    check_lattice,
    check_noise_correlation,
    check_noise_lags,
    check_noise_scale,
    check_repeats,
    check_same,
)

STEPS = 2.0**30


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def p_of(check):
    return float(check.found.split("p ")[1].split(" ")[0])


def inclusions(included, rate, rng):
    return check_inclusions("", Drawn.of(included), rate, rng)


@pytest.mark.parametrize("rate", [0.5, 0.125, 0.01])
def test_poisson_inclusions_pass_and_their_p_values_are_not_too_small(rng, rate):
    values = [
        p_of(inclusions((rng.random((64, 200)) < rate).astype(int), rate, rng)) for _ in range(40)
    ]
    # Four tests share a rate, so that values are bounded by uniform ones from below.
    assert kstest(values, "uniform", alternative="greater").pvalue > 1e-4


def shuffled(rng, releases, units, parts):
    rows = []
    for _ in range(releases // parts):
        part = rng.permutation(units) % parts
        rows += [part == number for number in range(parts)]
    return np.array(rows).astype(int)


def clumped(rng, releases, units, rate):
    """Either all units or none: each has the right rate, batches do not."""
    return np.repeat(rng.random((releases, 1)) < rate, units, axis=1).astype(int)


def of_some(rng, releases, units, rate):
    """Half of the units at twice the rate."""
    included = rng.random((releases, units)) < 2 * rate
    included[:, units // 2 :] = False
    return included.astype(int)


@pytest.mark.parametrize(
    "included",
    {
        "shuffled": lambda rng: shuffled(rng, 64, 128, 8),
        "same draw again": lambda rng: np.tile(rng.random((1, 128)) < 1 / 8, (64, 1)).astype(int),
        "clumped": lambda rng: clumped(rng, 64, 128, 1 / 8),
        "of some": lambda rng: of_some(rng, 64, 128, 1 / 8),
        "higher rate": lambda rng: (rng.random((64, 128)) < 1 / 6).astype(int),
        "one unit always": lambda rng: np.insert(
            rng.random((64, 127)) < 1 / 8, 0, True, axis=1
        ).astype(int),
        "one unit twice": lambda rng: np.where(
            np.arange(128) == 7, 2, 1
        )[None] * (rng.random((64, 128)) < 1 / 8),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_other_samplers_fail(rng, included):
    assert not inclusions(included[1](rng), 1 / 8, rng).ok


def test_without_subsampling_every_unit_is_in_every_release(rng):
    everyone = np.ones((4, 5), dtype=int)
    assert inclusions(everyone, 1.0, rng).ok
    everyone[2, 3] = 0
    assert not inclusions(everyone, 1.0, rng).ok


def test_honest_noise_passes_and_its_p_values_are_not_too_small(rng):
    values = {"scale": [], "correlation": [], "lags": [], "lattice": []}
    for _ in range(40):
        vectors = rng.standard_normal((8, 1000))
        values["scale"].append(p_of(check_noise_scale("scale", vectors)))
        values["correlation"].append(p_of(check_noise_correlation("steps", vectors)))
        values["lags"].append(p_of(check_noise_lags("steps", vectors)))
        values["lattice"].append(p_of(check_lattice(np.rint(vectors * STEPS), STEPS)))
    for found in values.values():
        assert kstest(found, "uniform", alternative="greater").pvalue > 1e-4


def test_repeats_of_honest_noise_are_as_many_as_expected(rng):
    few = 2.0**20  # grid steps, so that some repeat: 86 of 16,000 numbers are expected
    vectors = np.rint(rng.standard_normal((8, 2000)) * few) / few
    check = check_repeats(vectors, few)
    assert check.ok and 40 < int(check.found.split()[0]) < 140


def test_a_small_correlation_of_all_steps_fails(rng):
    vectors = rng.standard_normal((32, 2000))
    vectors[4:] += 0.03 * vectors[:-4]
    assert check_noise_correlation("steps", vectors).ok
    check = check_noise_lags("steps", vectors)
    assert not check.ok and "at lag 4;" in check.found


def test_rounds_have_each_unit_in_one_part(rng):
    parts = rng.integers(4, size=128)
    draws = (parts == np.arange(320)[:, None] % 4) & (rng.random((320, 128)) < 1 / 4)
    assert check_inclusions("", Drawn.of(draws.astype(int), 4), 1 / 4, rng).ok
    # Its next draw would be one draw later.
    draws[7, np.flatnonzero(parts == 0)[0]] = draws[8, np.flatnonzero(parts == 0)[0]] = True
    check = check_inclusions("", Drawn.of(draws.astype(int), 4), 1 / 4, rng)
    assert not check.ok and "units in draws of several parts" in check.found


@pytest.mark.parametrize("part", [0.5, 0.97])
def test_less_noise_fails(rng, part):
    assert not check_noise_scale("scale", part * rng.standard_normal((32, 2000))).ok
    assert check_noise_scale("scale", 1.2 * rng.standard_normal((32, 2000))).ok


def test_noise_that_is_used_again_fails(rng):
    vectors = rng.standard_normal((8, 2000))
    again = vectors.copy()
    again[5] = -again[2]
    assert not check_noise_correlation("steps", again).ok
    assert not check_repeats(again, STEPS).ok
    half = vectors.copy()
    half[5] = 0.5 * half[2] + 0.75**0.5 * half[5]
    assert not check_noise_correlation("steps", half).ok
    # At other elements only the values tell.
    moved = vectors.copy()
    moved[5] = np.roll(moved[2], 17)
    assert check_noise_correlation("steps", moved).ok
    assert not check_repeats(moved, STEPS).ok


def test_values_off_the_grid_or_with_low_bits_of_zero_fail(rng):
    multiples = np.rint(rng.standard_normal((8, 2000)) * STEPS)
    assert check_lattice(multiples, STEPS).ok
    one_off = multiples.copy()
    one_off[3, 4] += 0.5
    assert not check_lattice(one_off, STEPS).ok
    single = rng.standard_normal((8, 2000)).astype(np.float32).astype(np.float64)
    assert not check_lattice(single * STEPS, STEPS).ok
    assert not check_lattice(np.rint(single * STEPS), STEPS).ok


def test_contributions_are_those_drawn(rng):
    drawn = (rng.random((50, 20)) < 0.2).astype(int)
    noise = 0.02 * rng.standard_normal(drawn.shape)
    assert check_contributions("units", drawn + noise, drawn, 0.02).ok
    for wrong in (drawn * 2**0.5, drawn * 0.7, drawn + (drawn == 0) * (rng.random() < 2)):
        assert not check_contributions("units", wrong + noise, drawn, 0.02).ok
    assert check_contributions("units", drawn + noise, drawn, 0.02).false_alarm_rate < 1e-30
    assert check_contributions("units", drawn + noise, drawn, 0.2).false_alarm_rate > 0.5


def test_ranks_that_hold_other_bits_fail(rng):
    held = rng.standard_normal(9)
    assert check_same("ranks", held, held.copy()).ok
    assert not check_same("ranks", held, np.nextafter(held, 9)).ok

"""The oracle's methods against each other, and its table against them."""

import math

import mpmath
import numpy as np
import oracle
import pytest
from mpmath import mp, mpf
from oracle import ADD, DIRECTIONS, REMOVE, Contour, name, phases_of

extended = pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 1e-18, reason="long double has no more digits than float64 here"
)
pytestmark = extended
LINE = ((76.0, 1 / 90),)

# What each row's truth is known to be from elsewhere, to its last digit.
KNOWN = {
    (0.01, 1, 1, 1e-5): "0.19945",
    (256 / 60_000, 1.1, 14_062, 1e-5): "2.38160",
    (0.01, 1, 1000, 1e-5): "1.82824",
    (0.01, 1, 10_000, 1e-5): "6.18771",
    (1024 / 42_061, 0.8, 410, 1e-5): "5.20625",
    (1e-3, 0.6, 100_000, 1.1e-10): "10.12240",
    (1, 10, 100, 1e-5): "4.3771781",
    (0.5, 5, 500, 1e-5): "11.64395",
    (1e-4, 5, 1000, 1e-6): "0.001663",
    (1e-3, 0.3, 1000, 1e-6): "21.67795",
    (0.01, 1, 1000, 1e-15): "4.85454",
}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with np.errstate(all="ignore"), mp.workdps(25):
        yield


def precise(value):
    return mpf(str(value))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("rate", "noise", "epsilon"),
    [(0.01, 1, 0.008), (0.5, 1, 0.3), (0.1, 5, 0.03), (1e-6, 2, 5e-7)],
)
def test_one_step_by_contour_is_the_closed_form(rate, noise, epsilon, direction):
    value, lost = Contour([(noise, rate, 1)], direction, lines=LINE).at(epsilon)
    truth = oracle.one_step_delta(epsilon, noise, rate, direction)
    assert precise(value) == pytest.approx(truth, rel=1e-12)
    assert lost < 1e-12 * value


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("rate", "noise", "epsilon", "direction"),
    [
        (1e-5, 0.8, 0.0115, REMOVE),
        (0.9, 1, 0.2, ADD),
    ],
)
def test_two_steps_by_contour_are_the_quadrature_over_x(rate, noise, epsilon, direction):
    value, _ = Contour([(noise, rate, 2)], direction).at(epsilon)
    coarse, fine = (
        oracle.few_steps_delta(epsilon, noise, rate, 2, direction, degree) for degree in (12, 16)
    )
    assert coarse == pytest.approx(fine, rel=1e-13)
    assert precise(value) == pytest.approx(fine, rel=1e-13)


def test_full_batches_by_contour_are_the_gaussian():
    value, _ = Contour([(10.0, 1.0, 60), (5.0, 1.0, 10)], REMOVE, lines=LINE).at(4.0)
    assert precise(value) == pytest.approx(oracle.gaussian_delta(4, 1), rel=1e-13)


@pytest.mark.parametrize("key", KNOWN, ids=str)
def test_the_table_has_the_known_values(key):
    columns = ("sample_rate", "noise_multiplier", "steps", "delta")
    rows = [row for row in oracle.read() if tuple(row.get(c) for c in columns) == key]
    (row,) = rows
    digits = len(KNOWN[key].split(".")[1])
    assert abs(float(row["epsilon"]) - float(KNOWN[key])) <= 0.51 * 10**-digits


def closed(row):
    return row["method"] == "closed form"


@pytest.mark.parametrize("row", list(filter(closed, oracle.read())), ids=name)
def test_closed_rows_are_those_of_the_closed_forms(row):
    ((noise, rate, steps),) = phases_of(row)
    epsilon = mpf(row["epsilon"])
    if rate == 1:
        deltas = [oracle.gaussian_delta(epsilon, mpmath.sqrt(steps) / mpf(noise))]
    else:
        deltas = [oracle.one_step_delta(epsilon, noise, rate, d) for d in DIRECTIONS]
    if epsilon == 0:
        assert max(deltas) <= row["delta"]
    else:
        assert deltas[0] == max(deltas) == pytest.approx(mpf(row["delta"]), rel=1e-18)


def quick(row):
    """Rows whose lines take well below a second."""
    return not closed(row) and all(s >= 0.8 and q > 1e-4 for s, q, _ in phases_of(row))


@pytest.mark.parametrize("row", list(filter(quick, oracle.read()))[::6], ids=name)
def test_rows_have_their_delta_on_a_line_of_their_own(row):
    if row["epsilon"] == "0.0":
        pytest.skip("no epsilon is needed")
    epsilon = np.longdouble(row["epsilon"])
    contour = Contour(phases_of(row), REMOVE, lines=((83.0, 1 / 130),), nats=52.0)
    value, lost = contour.at(epsilon)
    slope = contour.delta(epsilon)[1]
    error = abs(value - np.longdouble(row["delta"])) / abs(slope * epsilon)
    assert error < 1e-10
    assert math.isfinite(lost)

"""The cumulant and its claimed error against quadrature in many digits."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.accounting.cumulant import log_mgf, rough_log_mgf
from dpflash.accounting.pairs import Pair

pytestmark = pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 1e-18, reason="long double has no more digits than float64 here"
)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)
few = settings(max_examples=30, derandomize=True, deadline=None)


def excess_by_quadrature(pair, order, cut=None, panels=400):
    """M(a) - 1 = E_Q (e^(a l) - 1), x ~ N(0, s^2), by Gauss-Legendre over short panels, 80 bits.

    Of a symmetric pair P has the mixture's density at the loss l > 0 and the plain one at -l.
    """
    s, q, a = np.longdouble(pair.noise), np.longdouble(pair.rate), np.clongdouble(order)
    half = np.longdouble(0.5)
    low = half if pair.symmetric else -14 * s
    top = 1 + (14 * s + max(0.0, a.real, 1 - a.real) if cut is None else cut * s)
    edges = np.linspace(low, top, panels + 1, dtype=np.longdouble)
    wide = (edges[1:] - edges[:-1])[:, None] / 2
    x = (edges[1:] + edges[:-1])[:, None] / 2 + wide * NODES
    loss = np.log1p(q * np.expm1((x - half) / s**2))
    density = np.exp(-((x / s) ** 2) / 2) / (s * np.sqrt(2 * np.longdouble(math.pi)))
    terms = expm1(a * loss)
    if pair.symmetric:
        terms = terms + expm1((1 - a) * loss) - expm1(loss + 0j)
    return (terms * density * wide * WEIGHTS).sum()


def expm1(w):
    series = w * (1 + w / 2 * (1 + w / 3 * (1 + w / 4 * (1 + w / 5 * (1 + w / 6)))))
    return np.where(np.abs(w) < 1e-3, series, np.exp(w) - 1)


def check(pair, orders, cut=None):
    for enough in (0.0, 1e-12):
        logs, errors = log_mgf(pair, np.array(orders, complex), cut=cut, enough=enough)
        for order, log, error in zip(orders, logs, errors, strict=True):
            truth = 1 + excess_by_quadrature(pair, order, cut)
            other = 1 + excess_by_quadrature(pair, order, cut, panels=700)
            largest = 1 + excess_by_quadrature(pair, complex(order).real, cut)
            assert math.isfinite(error)
            apart = abs(np.exp(np.clongdouble(log)) - truth)
            allowed = 2 * error * abs(np.exp(np.clongdouble(log))) + abs(truth - other)
            allowed += 1e-17 * largest.real + 1e-15 * abs(np.log(truth) * truth)
            # Powers of M are composed, so that what is far below its peak may be wrong.
            assert apart <= allowed or apart * abs(truth) <= 1e-16 * largest.real**2
            assert apart <= 1e-8 * largest.real


@pytest.mark.parametrize(
    ("noise", "rate"), [(1.0, 0.01), (0.6, 0.3), (5.0, 0.5), (2.0, 1e-4), (1.0, 0.95)]
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_moments_are_those_of_mpmath_within_the_claimed_error(noise, rate, symmetric):
    orders = [1.5, 3.0, 6.5, 2 + 1j, 3 + 10j, 1.2 + 40j]
    if not symmetric:  # of which nothing is asked to the left of 1
        orders += [-0.5, -3.0, -0.3 + 2j, -1 + 15j]
    check(Pair(noise, rate, symmetric), orders)
    for order in orders:
        check(Pair(noise, rate, symmetric), [order])


@pytest.mark.parametrize("order", [1.3 + 10j, 1.5 + 12j])
@pytest.mark.parametrize(("noise", "rate"), [(2.0, 0.9), (1.0, 0.95)])
def test_moments_that_almost_vanish_are_within_the_claimed_error(noise, rate, order):
    # A single step beside other ones is no power that would hide its error.
    pair = Pair(noise, rate)
    truth = 1 + excess_by_quadrature(pair, order)
    assert abs(truth) < 1e-5
    for enough in (0.0, 1e-12):
        log, error = log_mgf(pair, np.array([order]), cut=None, enough=enough)
        assert abs(np.exp(np.clongdouble(log[0])) - truth) <= error[0] * abs(truth)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_cut_leaves_out_what_lies_beyond_it(symmetric):
    for cut in (8.0, 12.0):
        check(Pair(4.0, 0.1, symmetric), [2.0, 4 + 3j], cut)


@pytest.mark.parametrize("order", [2.0, 1.5, 2 + 3j])
@pytest.mark.parametrize("rate", [1e-7, 1e-9])
def test_tiny_cumulants_keep_their_digits(order, rate):
    value, error = log_mgf(Pair(1.0, rate), np.array([order + 0j]), cut=None, enough=0.0)
    # The first term of the series in the rate; at order 2 it is all of it.
    truth = order * (order - 1) / 2 * rate**2 * math.expm1(1)
    digits = 1e-12 if order == 2 else 100 * rate
    assert abs(value[0] - truth) <= digits * abs(truth)
    assert error[0] <= 1e-10 * abs(truth)


@given(
    st.floats(0.3, 30),
    st.floats(-6, -0.01).map(lambda x: 10**x),
    st.integers(2, 40),
)
@few
def test_moments_of_whole_order_are_the_binomial_sum(noise, rate, a):
    with mpmath.workdps(40):
        s, q = mpmath.mpf(noise), mpmath.mpf(rate)
        terms = [
            mpmath.binomial(a, k)
            * (1 - q) ** (a - k)
            * q**k
            * mpmath.exp(k * (k - 1) / (2 * s**2))
            for k in range(a + 1)
        ]
        truth = float(mpmath.log(mpmath.fsum(terms)))
    value, error = log_mgf(Pair(noise, rate), np.array([a + 0j]), cut=None, enough=0.0)
    if truth < 600:
        assert value[0].real == pytest.approx(truth, rel=1e-10)
        assert abs(value[0].real - truth) <= 2 * error[0] + 1e-15 * truth
        rough = rough_log_mgf(Pair(noise, rate), float(a), None)
        assert rough == math.inf or rough == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("symmetric", [False, True])
def test_at_orders_0_and_1_nothing_is_told(symmetric):
    for noise, rate in ((1.0, 0.1), (0.3, 1e-6), (100.0, 0.7)):
        value, error = log_mgf(
            Pair(noise, rate, symmetric), np.array([0j, 1 + 0j]), cut=None, enough=0.0
        )
        assert np.all(np.abs(value) <= 4 * error + 1e-30)
        assert np.all(error <= 1e-13)


@pytest.mark.parametrize("rate", [1e-4, 0.2, 0.9])
def test_a_symmetric_pair_does_not_change_when_it_is_exchanged(rate):
    orders = np.array([1.5 + 0j, 3 + 2j, 2.5 + 9j])
    pair = Pair(1.0, rate, True)
    there, _ = log_mgf(pair, orders, cut=None, enough=0.0)
    back, _ = log_mgf(pair, np.conj(1 - orders), cut=None, enough=0.0)
    assert np.exp(back) == pytest.approx(np.exp(np.conj(there)), rel=1e-11)


def test_at_rate_1_the_cumulant_is_that_of_the_gaussian():
    orders = np.array([2 + 0j, -1 + 3j, 4 + 100j])
    value, error = log_mgf(Pair(3.0, 1.0), orders, cut=None, enough=0.0)
    assert value == pytest.approx(orders * (orders - 1) / 18, rel=1e-15)
    assert np.all(error <= 1e-14 * np.abs(value))


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0, 1e4])
@pytest.mark.parametrize("rate", [1e-9, 0.01, 0.999])
@pytest.mark.parametrize("symmetric", [False, True])
def test_beyond_float64_there_is_no_number_rather_than_a_wrong_one(noise, rate, symmetric):
    pair = Pair(noise, rate, symmetric)
    for a in (1.0001, 2.0, 1e3, 1e8, 1e20, -1e-3, -50.0, -1e6):
        value, error = log_mgf(pair, np.array([a + 0j]), cut=None, enough=0.0)
        rough = rough_log_mgf(pair, a, None)
        assert rough >= 0 or abs(rough) < 1e-14
        if math.isfinite(error[0]):
            assert value[0].real >= -2 * error[0]
            # A subsample is never less private than the whole.
            limit = abs(a * (a - 1)) / (2 * noise**2)
            assert value[0].real <= limit * (1 + 1e-9) + 2 * error[0]

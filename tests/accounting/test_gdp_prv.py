"""The estimate by the central limit theorem, and Opacus' accountant behind our interface."""

import builtins
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.accounting import FixedSizeGaussian, gaussian_delta, gaussian_epsilon
from dpflash.accounting.gdp import GDPAccountant
from dpflash.accounting.pairs import Pair
from dpflash.accounting.prv import PRVAccountant


def gdp(history):
    accountant = GDPAccountant()
    accountant.history = history
    return accountant


def prv(history):
    accountant = PRVAccountant()
    accountant.history = history
    return accountant


@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_gdp_is_exact_without_subsampling():
    accountant = gdp([(3.0, 1.0, 50)])
    truth = gaussian_epsilon(delta=1e-5, noise_multiplier=3.0, steps=50)
    assert accountant.get_epsilon(1e-5) == pytest.approx(truth, rel=1e-9)
    truth = gaussian_delta(epsilon=2.0, noise_multiplier=3.0, steps=50)
    assert accountant.get_delta(2.0) == pytest.approx(truth, rel=1e-9)


def test_gdp_says_that_it_is_no_bound_once():
    accountant = gdp([(0.6, 1e-3, 100)])
    assert not GDPAccountant.is_bound
    with pytest.warns(UserWarning, match="no bound"):
        estimate = accountant.get_epsilon(1e-5, interval=True)
    assert estimate.lower is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accountant.get_epsilon(1e-6)
    with pytest.warns(UserWarning, match="contour"):
        gdp([(1.0, 0.1, 1)]).get_delta(1.0)


@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_gdp_is_below_the_truth_of_few_steps():
    # One step, closed form: delta(e) = q delta_gaussian(log(1 + (exp(e) - 1) / q)).
    estimate = gdp([(0.5, 1e-3, 1)]).get_epsilon(1e-6)
    apart = math.log1p(math.expm1(estimate) / 1e-3)
    assert 1e-3 * gaussian_delta(epsilon=apart, noise_multiplier=0.5) > 1e-5


@given(st.floats(-300, 300), st.floats(-300, 0), st.integers(1, 10**9), st.floats(-30, -0.01))
@settings(max_examples=100, derandomize=True, deadline=None)
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_gdp_never_overflows(log_noise, log_rate, steps, log_delta):
    accountant = gdp([(10**log_noise, 10**log_rate, steps)])
    assert accountant.get_epsilon(10**log_delta) >= 0
    assert 0 <= accountant.get_delta(1.0) <= 1


@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_gdp_is_infinite_where_the_exponential_overflows():
    assert gdp([(0.01, 0.01, 1)]).get_epsilon(1e-5) == math.inf
    assert gdp([(0.01, 0.01, 1)]).get_delta(1.0) == 1
    pairs = ((Pair(1.0, 0.1, True), 5),)
    assert GDPAccountant()._epsilon(pairs, 1e-5) == gdp([(1.0, 0.1, 5)])._epsilon_interval(1e-5)


def test_prv_reports_opacus_interval():
    lower, upper = prv([(1.0, 0.01, 1000)]).get_epsilon(1e-5, interval=True)
    assert lower < 1.82824 < upper < 1.9


def test_prv_delta_has_its_epsilon():
    accountant = prv([(2.0, 0.05, 20)])
    delta = accountant.get_delta(0.5)
    assert accountant.get_epsilon(delta) <= 0.5
    assert 0 < delta < 1e-3


@pytest.mark.cases(0)
def test_prv_upper_end_is_below_the_truth_at_tiny_delta():
    assert prv([(0.6, 1e-3, 100_000)]).get_epsilon(1.1e-10) < 10.1223


def test_prv_failure_names_delta_and_the_way_out():
    with pytest.raises(ValueError, match=r"delta=1e-15.*accountant='contour'"):
        prv([(1.0, 0.01, 1000)]).get_epsilon(1e-15)


def test_prv_refuses_what_opacus_does_not_know():
    accountant = PRVAccountant(neighboring_relation="replace_one")
    accountant.compose(FixedSizeGaussian(noise_multiplier=2.0, batch_size=10, num_samples=100))
    with pytest.raises(ValueError, match=r"fixed-size.*accountant='contour'"):
        accountant.get_epsilon(1e-5)


def test_prv_without_opacus_says_how_to_get_it(monkeypatch):
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("opacus"):
            raise ImportError(name)
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    accountant = prv([(1.0, 0.01, 10)])
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install opacus"):
        accountant.get_epsilon(1e-5)

"""The benchmark of accountants at small sizes; no test depends on time."""

import math
import sys

import pytest

from dpflash.bench import accounting
from dpflash.bench.suite import Request, Unsupported

QUERY = {"device": "cpu", "seed": 0, "noise": 1.0, "steps": 100}


@pytest.mark.parametrize("provider", ["contour", "rdp", "opacus rdp", "google rdp"])
def test_a_query_gives_an_epsilon_that_is_not_below_the_certified_bound(provider):
    subject = accounting.query(provider=provider, **QUERY)
    assert subject.error() <= subject.tolerance
    assert subject.figures["epsilon"] >= subject.figures["lower_end"] > 0
    first, second = subject.step(), subject.step()
    # Each call has a little more noise than the one before.
    expected = accounting.epsilon(provider, 1.0, 100)
    assert first == pytest.approx(expected)
    assert second < first


@pytest.mark.parametrize("provider", ["contour", "rdp", "opacus prv"])
def test_an_epsilon_below_the_certified_bound_is_wrong_by_its_shortfall(provider, monkeypatch):
    right = accounting.query(provider=provider, **QUERY).figures["lower_end"]
    monkeypatch.setattr(accounting, "epsilon", lambda *_: 0.9 * right)
    subject = accounting.query(provider=provider, **QUERY)
    assert subject.error() == pytest.approx(0.1) and subject.error() > subject.tolerance


def test_an_infinite_epsilon_is_right_only_where_the_truth_is(monkeypatch):
    assert accounting._shortfall(math.inf, 1.0) == math.inf
    assert accounting._shortfall(math.inf, 0.0) == math.inf
    assert accounting._shortfall(math.inf, math.inf) == 0.0
    assert accounting._shortfall(1.0, math.inf) == 1.0
    monkeypatch.setattr(accounting, "epsilon", lambda *_: math.inf)
    subject = accounting.query(provider="rdp", **QUERY)
    assert not subject.error() <= subject.tolerance


def test_no_accountant_is_judged_by_its_own_lower_end(monkeypatch):
    asked = []
    real = accounting.lower_end
    monkeypatch.setattr(
        accounting, "lower_end", lambda name, *a: asked.append(name) or real(name, *a)
    )
    for provider in ("contour", "pld", "rdp"):
        accounting.query(provider=provider, **QUERY)
    assert asked == ["pld", "contour", "contour"]


@pytest.mark.parametrize("module", ["opacus", "dp_accounting"])
def test_a_peer_that_is_not_installed_is_asked_for(module, monkeypatch):
    provider = {"opacus": "opacus rdp", "dp_accounting": "google pld"}[module]
    loaded = [name for name in sys.modules if name.split(".")[0] == module]
    for name in {module, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match="pip install"):
        accounting.query(provider=provider, **QUERY)


def test_every_provider_has_a_row_of_every_query():
    for request in (Request(quick=True, threads=1), Request(threads=1)):
        comparisons = list(accounting.SUITE.plan(request))
        names = [m.name for c in comparisons for m in c.measurements]
        assert len(set(names)) == len(names)
        for comparison in comparisons:
            assert [m.config["provider"] for m in comparison.measurements] == list(
                accounting.PROVIDERS
            )
            assert comparison.baseline in names
            peers = [m.config["provider"] for m in comparison.measurements if "peer" in m.columns]
            assert peers == list(accounting.PEERS)
    assert len(comparisons) == len(accounting.QUERIES)

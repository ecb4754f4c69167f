"""The benchmark of accountants at small sizes; no test depends on time."""

import math
import sys

import pytest

from dpflash import accounting as accountants
from dpflash.bench import accounting
from dpflash.bench.suite import Comparison, Request, Unsupported, wrong_rows

SMALL = {"device": "cpu", "seed": 0, "limit_s": 60.0}
QUERY = {**SMALL, "noise": 1.0, "steps": 100}
QUICK = Request(quick=True, threads=1, has_progress=False)


@pytest.mark.parametrize("provider", ["contour", "rdp", "opacus rdp", "google rdp"])
def test_a_query_gives_an_epsilon_that_is_not_below_the_certified_bound(provider):
    subject = accounting.query(provider=provider, **QUERY)
    assert subject.error() <= subject.tolerance
    assert subject.figures["epsilon"] >= subject.figures["lower_end"] > 0
    first, second = subject.step(), subject.step()
    # Each call has a little more noise than the one before.
    expected = accounting.epsilon(provider, [(1.0, 0.01, 100)], 1e-5)
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


@pytest.mark.parametrize("provider", ["contour", "rdp", "opacus rdp", "google rdp"])
def test_the_noise_found_for_a_target_keeps_it(provider):
    arguments = {**SMALL, "target_epsilon": 2.0, "sample_rate": 0.01, "steps": 50}
    subject = accounting.calibration(provider=provider, **arguments)
    assert subject.error() <= subject.tolerance
    phases = [(subject.figures["noise_multiplier"], 0.01, 50)]
    assert accounting.epsilon("contour", phases, 1e-5) <= 2.0 * (1 + 1e-6)
    assert subject.step() == pytest.approx(subject.figures["noise_multiplier"], rel=1e-2)


def test_too_little_noise_for_a_target_is_wrong(monkeypatch):
    monkeypatch.setattr(accounting, "calibrated", lambda *_: 0.5)
    arguments = {**SMALL, "target_epsilon": 0.1, "sample_rate": 0.01, "steps": 50}
    for provider in ("contour", "rdp"):
        subject = accounting.calibration(provider=provider, **arguments)
        assert subject.error() > 0.5


def test_the_epsilon_of_a_schedule_is_that_of_its_phases():
    subject = accounting.query(provider="pld", phases=2, steps=10, **SMALL)
    made = accountants.create_accountant("pld")
    made.history = [(1.0, 0.01, 10), (1.5, 0.01, 10)]
    assert subject.figures["epsilon"] == made.get_epsilon(1e-5)
    assert subject.error() <= subject.tolerance


@pytest.mark.parametrize("module", ["opacus", "dp_accounting"])
def test_a_peer_that_is_not_installed_is_asked_for(module, monkeypatch):
    provider = {"opacus": "opacus rdp", "dp_accounting": "google pld"}[module]
    loaded = [name for name in sys.modules if name.split(".")[0] == module]
    for name in {module, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match="pip install"):
        accounting.query(provider=provider, **QUERY)
    with pytest.raises(Unsupported, match="pip install"):
        accounting.calibration(
            provider=provider, target_epsilon=1.0, sample_rate=0.01, steps=5, **SMALL
        )


def test_a_peer_that_takes_too_long_or_refuses_has_a_reason(monkeypatch):
    def endless(*_):
        while True:
            pass

    def refuse(*_):
        raise ValueError("the budget\nis too low")

    monkeypatch.setattr(accounting, "epsilon", endless)
    with pytest.raises(Unsupported, match=r"took longer than 0\.05 s"):
        accounting.query(provider="opacus prv", **{**QUERY, "limit_s": 0.05})
    monkeypatch.setattr(accounting, "epsilon", refuse)
    with pytest.raises(Unsupported, match="ValueError: the budget is too low"):
        accounting.query(provider="opacus prv", **QUERY)
    with pytest.raises(ValueError, match="budget"):
        accounting.query(provider="contour", **QUERY)


def test_the_summary_of_a_table_counts_epsilons_below_the_truth():
    answers = [1.0, 1.1, 0.8, math.inf, "more time: ...", "another setting: ..."]
    found = accounting.summary(answers, [1.0] * 6)
    counted = ("answers", "infinite_or_nan", "late", "refused", "below_truth")
    assert [found[key] for key in counted] == [3, 1, 1, 1, 1]
    assert found["correct"] is False and found["error"] == math.inf
    assert found["greatest_error"] == pytest.approx(0.2)
    assert found["median_error"] == pytest.approx(0.1)
    assert accounting.summary([1.0, 0.8], [1.0, 1.0])["error"] == pytest.approx(0.2)
    assert accounting.summary([1.0, math.inf], [1.0, 1.0])["correct"] is False
    assert accounting.summary([1.0, math.inf], [1.0, math.inf])["correct"] is True
    assert accounting.summary([math.nan], [1.0])["correct"] is False
    assert accounting.summary(["more memory"], [1.0])["correct"] is None


def test_the_table_of_truths_holds_for_our_accountants(monkeypatch):
    monkeypatch.setattr(accounting, "PROVIDERS", ("contour", "rdp"))
    rows = list(accounting.truth_rows(QUICK))
    assert [row["name"] for row in rows] == ["truth/contour", "truth/rdp"]
    for row in rows:
        assert row["correct"] is True and row["answers"] == row["config"]["settings"] > 3
    contour, rdp = rows
    assert contour["greatest_error"] < 1e-3 < rdp["greatest_error"]


def test_without_a_checkout_the_table_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(accounting, "TRUTH", tmp_path / "truth.json")
    for row in accounting.truth_rows(QUICK):
        assert "truth.json" in row["needs"] and row["correct"] is None


def test_every_provider_has_a_row_in_every_part():
    for request in (QUICK, Request(threads=1)):
        comparisons = [c for c in accounting.SUITE.plan(request) if isinstance(c, Comparison)]
        names = [m.name for c in comparisons for m in c.measurements]
        assert len(set(names)) == len(names)
        for comparison in comparisons:
            assert [m.config["provider"] for m in comparison.measurements] == list(
                accounting.PROVIDERS
            )
            assert comparison.baseline in names
            peers = [m.config["provider"] for m in comparison.measurements if "peer" in m.columns]
            assert peers == list(accounting.PEERS)
    assert len(comparisons) == 1 + len(accounting.TARGETS) + len(accounting.SCHEDULES)


def test_warnings_of_a_peer_are_in_its_row_and_are_not_printed(monkeypatch, capfd):
    monkeypatch.setattr(accounting, "PROVIDERS", ("rdp", "opacus rdp"))
    own, peer = accounting.truth_rows(QUICK)
    assert "warnings" not in own and "peer" not in own
    assert peer["peer"] and any("Optimal order" in text for text in peer["warnings"])
    assert "Optimal order" not in capfd.readouterr().err


def test_a_peer_that_is_wrong_in_the_table_of_truths_is_no_failure_of_the_run(monkeypatch):
    def wrong(function, *, provider, settings, **_):
        return [0.5 * epsilon for epsilon in (1.0,) * len(settings)], []

    monkeypatch.setattr(accounting, "run_isolated", wrong)
    monkeypatch.setattr(accounting, "PROVIDERS", ("contour", "google pld"))
    monkeypatch.setattr(accounting, "_settings", lambda every: [([], 1e-5, 1.0)])
    found = {"rows": list(accounting.truth_rows(QUICK))}
    assert wrong_rows(found) == ["truth/contour"]
    assert wrong_rows(found, peers=True) == ["truth/google pld"]

"""Audits of the real engine: honest ones, ones with seeded bugs, engine.audit and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import seeded_bugs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash.accounting import get_noise_multiplier
from dpflash.audit.bounds import assess
from dpflash.audit.checks import MOST_FALSE_ALARMS, Check, check_charges, check_contributions
from dpflash.audit.packed import PackedRun
from dpflash.audit.probes import (
    Prober,
    Probes,
)
from dpflash.audit.ranks import Audited
from dpflash.audit.releases import Run
from dpflash.audit.report import SCORE_FALSE_ALARMS
from dpflash.audit.run import auditable, named_checks, run_audit
from dpflash.audit.scores import plan_for, score
from dpflash.cli import main
from dpflash.config import PerformanceConfig, PrivacyConfig
from dpflash.engine import PrivacyEngine
from dpflash.noise import Banded
from dpflash.privacy.spending import Spending

DELTA = 1e-5
BANDED = {"sampling": "cyclic_poisson", "noise_mechanism": Banded(bands=3)}


def settings(rate=0.125, steps=16, noise=1.0, **changes):
    privacy = PrivacyConfig(**({"max_grad_norm": 1.5, "noise_multiplier": noise} | changes))
    return auditable(privacy, PerformanceConfig(), sample_rate=rate, steps=steps)


def new_engine(**more):
    return PrivacyEngine(seed=0, **more)


def scores_refute(asked, canaries=400):
    rng = np.random.default_rng(0)
    found = score(
        new_engine, *asked, canaries=canaries, delta=DELTA, confidence=0.95, rng=rng
    )  # fmt: skip
    plan = plan_for(asked[0], len(found.scores), delta=DELTA, confidence=0.95, rng=rng)
    return found, assess(
        found.scores, found.included, plan, found.claim,
        confidence=0.95, false_alarm_rate=SCORE_FALSE_ALARMS,
    )  # fmt: skip


def few(units, rate):
    return Prober(new_engine, *settings()).contributions(units, rate, 24)


def drawn():
    return Prober(new_engine, *settings()).sampler(64, 1 / 4, 2400)


def failed(probes, bands=1):
    return {c.name for c in named_checks(probes, np.random.default_rng(0), bands) if not c.ok}


@pytest.fixture(scope="module")
def honest():
    return Probes(
        inclusions=few(64, 1 / 4),
        padding=few(32, 1 / 8),
        divisor=few(64, 1 / 4),
        packed=Prober(new_engine, *settings()).packed(),
        users=Prober(new_engine, *settings()).users(),
        sampler=drawn(),
        layers=Prober(new_engine, *settings()).layers(),
        noise=Prober(new_engine, *settings()).noise(),
        empty=Prober(new_engine, *settings()).empty(),
    )


def test_named_checks_pass_on_the_library_as_it_is_and_share_their_false_alarms(honest):
    assert failed(honest) == set()
    checks = named_checks(honest, np.random.default_rng(0))
    # Three more are of two ranks.
    assert sum(check.false_alarm_rate for check in checks) <= MOST_FALSE_ALARMS - 3e-4
    # Two rows in a microbatch, so that an odd draw has a padding row.
    assert (honest.padding.drawn.sum(1) % 2 == 1).any()
    assert honest.users.drawn.max() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"exact": True},
        {"grad_sample_mode": "ghost"},
        {"clipping": "per_layer"},
        {"exact": False},
        {"grad_sample_mode": "book_keeping"},
    ],
    ids=lambda changes: "-".join(map(str, *changes.items())),
)
def test_packed_documents_and_users_contribute_once_in_every_kind_of_clipping(changes):
    mode = changes.get("grad_sample_mode", "auto")
    changes = {name: value for name, value in changes.items() if name != "grad_sample_mode"}
    privacy, performance = settings(**changes)
    prober = Prober(new_engine, privacy, replace(performance, grad_sample_mode=mode))
    for found in (prober.packed(), prober.users()):
        assert check_contributions("", found.units, found.drawn, found.std).ok


def test_a_document_in_the_data_or_not_leaves_its_packed_neighbors_as_they_are():
    """With a seed the noise is the same, and without document 4 the others are packed anew."""
    asked = settings(rate=1.0, steps=1)
    released = []
    for numbers in (np.arange(1, 12), np.delete(np.arange(1, 12), 3)):
        run = PackedRun(new_engine(), *asked, canaries=12, numbers=numbers)
        (release,) = run.releases()
        np.testing.assert_array_equal(np.flatnonzero(release.drawn), numbers)
        released.append(release.sums)
    difference = released[0] - released[1]
    np.testing.assert_allclose(np.delete(difference, 4, axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(difference[:, 4], run.bounds, rtol=1e-6)


@pytest.mark.parametrize(
    ("rate", "canaries", "bugs"),
    [
        (1.0, 300, ("noise halved", "noise / 5", "one layer unclipped")),
        (0.25, 1000, ("noise / 5",)),
    ],
    ids=["no subsampling", "Poisson"],
)
def test_scores_refute_seeded_bugs(rate, canaries, bugs):
    asked = settings(rate=rate, steps=6, noise=0.8)
    assert not scores_refute(asked, canaries)[1].refuted
    for bug in bugs:
        with pytest.MonkeyPatch.context() as patch:
            seeded_bugs.BUGS[bug](patch.setattr)
            assert scores_refute(asked, canaries)[1].refuted, bug


@pytest.mark.parametrize(
    ("bug", "part", "check"),
    [
        ("noise halved", "noise", "noise scale"),
        ("a draw used twice", "noise", "noise across steps and parameters"),
        ("a draw used twice", "noise", "noise drawn once"),
        ("one draw for all parameters", "noise", "noise across steps and parameters"),
        ("float lattice", "noise", "lattice of the release"),
        ("coarse noise on the grid", "noise", "lattice of the release"),
        ("divisor by the drawn size", "divisor", "divisor under a background sum"),
        ("padding contributes", "padding", "canaries in padding rows"),
        ("a sample counted in two documents", "packed", "canaries in packed neighbors"),
        ("a document with the next one", "packed", "canaries in packed neighbors"),
        ("a document with the padding behind it", "packed", "canaries in packed neighbors"),
        ("entries clipped one by one", "users", "canaries of two entries"),
        ("shuffling", "inclusions", "inclusion counts"),
        ("sampling rate 1.1 times the claimed", "sampler", "draws of the sampler"),
        ("biases unclipped", "layers", "canaries in weights and biases"),
        ("a norm unclipped", "layers", "canaries in weights and biases"),
        ("empty draws without noise", "empty", "noise of empty draws"),
    ],
)  # fmt: skip
def test_a_named_check_fails_with_a_seeded_bug(bug, part, check, honest, monkeypatch):
    seeded_bugs.BUGS[bug](monkeypatch.setattr)
    with_bug = {
        "noise": lambda: Prober(new_engine, *settings()).noise(),
        "divisor": lambda: few(64, 1 / 4),
        "padding": lambda: few(32, 1 / 8),
        "packed": lambda: Prober(new_engine, *settings()).packed(),
        "users": lambda: Prober(new_engine, *settings()).users(),
        "inclusions": lambda: few(64, 1 / 4),
        "sampler": drawn,
        "layers": lambda: Prober(new_engine, *settings()).layers(),
        "empty": lambda: Prober(new_engine, *settings()).empty(),
    }[part]()
    probes = Probes(**({**vars(honest)} | {part: with_bug}))
    assert check in failed(probes)


def test_noise_of_bands_passes(honest):
    assert failed_with_banded_noise(honest, seed=0) == set()


@pytest.mark.cases(0)
def test_every_check_passes_with_banded_noise():
    prober = Prober(new_engine, *settings(rate=1 / 24, **BANDED))
    assert failed(prober.read(), bands=3) == set()


@pytest.mark.cases(0)
@pytest.mark.parametrize(("rate", "scores"), [(1 / 3, 5 * 300), (1 / 12, 300)])
def test_scores_of_banded_noise_are_as_tight(rate, scores):
    asked = settings(rate=rate, steps=3 * 5 - 1, **BANDED)
    found, assessment = scores_refute(asked, 300)
    assert not assessment.refuted and len(found.scores) == scores
    # Releases behind the last round complete it for the other parts.
    assert check_charges(found.charged, found.due).ok and found.due < 1.2 * found.charged
    assert 0.4 < found.epsilon_lower / found.claim.epsilon < 1
    with pytest.MonkeyPatch.context() as patch:
        seeded_bugs.BUGS["noise / 5"](patch.setattr)
        assert scores_refute(asked, 300)[1].refuted


CAUGHT_BY = {
    "state not applied": "noise across steps and parameters",
    "coefficients shifted": "noise of steps apart",
    "norm of the column forgotten": "noise scale",
    "draws closer than the bands": "draws of the sampler",
    "z replayed": "noise across steps and parameters",
}


def failed_with_banded_noise(honest, seed):
    prober = Prober(lambda: PrivacyEngine(seed=seed), *settings(**BANDED))
    read = {"noise": prober.noise(), "sampler": prober.sampler(64, 1 / 4, 2400)}
    return failed(Probes(**vars(honest) | read))


@pytest.mark.parametrize("bug", seeded_bugs.BANDED_BUGS)
def test_a_named_check_fails_with_a_seeded_bug_of_banded_noise(bug, honest, monkeypatch):
    seeded_bugs.BANDED_BUGS[bug](monkeypatch.setattr)
    assert CAUGHT_BY[bug] in failed_with_banded_noise(honest, seed=0)


def test_a_release_that_is_not_charged_fails(monkeypatch):
    original, calls = Spending.charge, []

    def charge(self, *arguments, **keywords):
        calls.append(0)
        if len(calls) != 3:
            original(self, *arguments, **keywords)

    found, _ = scores_refute(settings(steps=4), canaries=16)
    assert check_charges(found.charged, found.due).ok
    assert found.due == pytest.approx(found.claim.epsilon)
    monkeypatch.setattr(Spending, "charge", charge)
    found, _ = scores_refute(settings(steps=4), canaries=16)
    assert not check_charges(found.charged, found.due).ok


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_canary_contributes_its_whole_bound_and_no_other_canary_sees_it(clipping):
    """With a seed the noise is the same, so all else is equal bit for bit."""
    asked = settings(rate=1.0, steps=2, clipping=clipping)
    released = []
    for inside in (True, False):
        run = Run(new_engine(), *asked, canaries=8)
        included = np.ones(8, dtype=bool)
        included[3] = inside
        run.dataset.include(included)
        released.append(np.stack([release.sums for release in run.releases()]))
    difference = released[0] - released[1]
    np.testing.assert_array_equal(np.delete(difference, 3, axis=2), 0)
    contribution = difference[:, :, 3]
    np.testing.assert_allclose(contribution, np.tile(run.bounds, (2, 1)), rtol=1e-6)
    norm = float(np.linalg.norm(contribution[0]))
    assert 1.5 * (1 - 1e-5) <= norm <= 1.5


def test_audited_claim_of_a_subsampled_run_is_what_the_engine_has_spent():
    found, _ = scores_refute(settings(rate=0.25, steps=6), canaries=32)
    assert found.claim.epsilon == pytest.approx(found.charged)
    assert len(found.scores) == 32
    anew, _ = scores_refute(settings(rate=1.0, steps=6), canaries=32)
    assert len(anew.scores) == 6 * 32
    assert anew.claim.epsilon < anew.charged / 2
    assert 34 < anew.included.sum() < 158  # 96 +- 9 standard deviations


def test_units_of_several_entries_are_audited_as_units_of_one():
    found, _ = scores_refute(settings(steps=2, unit_of=[0, 0, 1], examples_per_unit=2), 16)
    assert found.claim.mechanism.endswith("Poisson sampling at rate 0.125")


def test_settings_of_other_mechanisms_are_refused():
    for changes, word in (
        ({"sampling": "shuffled"}, "sampling='shuffled'"),
        ({"max_batch_size": 9}, "max_batch_size=9"),
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"),
        (
            {"unit_of": [0, 0, 1], "examples_per_unit": 2, "unit_sampling": "example"},
            "unit_sampling='example'",
        ),
    ):
        with pytest.raises(ValueError, match=word):
            settings(**changes)


# engine.audit


def private(clipping="flat", **changes):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    engine = PrivacyEngine()
    arguments = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=10),
        "noise_multiplier": 0.9,
        "max_grad_norm": 0.7,
        "clipping": clipping,
    }
    return engine, engine.make_private(**(arguments | changes))


FAILED = (Check("a check", ok=False, found="", false_alarm_rate=0.0),)


def test_engine_audit_tests_the_engines_settings_and_changes_nothing():
    engine, (model, optimizer, _) = private(
        "per_layer",
        loss_reduction="sum",
        physical_batch_size=8,
        example=[torch.randn(6, 3)],
    )
    optimizer.noise_multiplier = 1.1
    before = [p.clone() for p in model.parameters()]
    report = engine.audit(steps=6, canaries=100, seed=0, ranks=False)
    assert report.ok, report
    assert report.steps == 6 and report.canaries == report.scores == 100
    assert "noise multiplier 1.1, Poisson sampling at rate 0.25" in report.claim
    above = replace(report, epsilon_lower_gaussian=1.01 * report.claimed_epsilon)
    assert above.ok and "A bound is above the claim, which does not refute it" in str(above)
    assert report.note == "" and "A bound is above" not in str(replace(above, checks=FAILED))
    assert optimizer.releases == 0 and engine.get_epsilon(DELTA) == 0
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_engine_audit_says_what_it_needs():
    with pytest.raises(ValueError, match="audit: this engine has no private model"):
        PrivacyEngine().audit()
    engine, _ = private()
    for arguments, word in (
        ({"scores": [1.0]}, "scores and included come together"),
        ({"scores": [1.0] * 4, "included": [1, 0, 1, 0]}, "expected bool"),
        ({"scores": [1.0] * 3, "included": [True] * 2}, r"scores has shape \(3,\)"),
        ({"scores": [], "included": np.zeros(0, bool)}, "0 of 0 canaries .* at least 240"),
        ({"scores": [0.0, 9.0] * 50, "included": [False, True] * 50}, "50 of 100 canaries were"),
        ({"scores": np.arange(400), "included": [True] * 400}, "400 of 400 canaries were"),
        ({"scores": np.arange(400), "included": [False] * 400}, "0 of 400 canaries were"),
        ({"scores": [1.0] * 3 + [np.nan], "included": [True] * 4}, "not finite"),
        ({"canaries": 0}, "canaries=0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"confidence": 0.0}, "confidence=0.0"),
        ({"steps": 0}, "steps=0"),
    ):
        with pytest.raises(ValueError, match=word):
            engine.audit(**arguments, ranks=False)


def test_losses_of_canary_documents_refute_a_run_only_where_they_show_too_much():
    engine, (model, optimizer, loader) = private(noise_multiplier=2.0)
    for (x,) in loader:
        engine.backward(model(x).sum(1))
        optimizer.step()
        optimizer.zero_grad()
    rng = np.random.default_rng(0)
    included = rng.random(400) < 0.5
    honest = engine.audit(scores=rng.standard_normal(400), included=included, seed=0)
    assert honest.ok and honest.mode == "black_box" and honest.checks == ()
    assert honest.claimed_epsilon == pytest.approx(engine.get_epsilon(DELTA))
    leaking = engine.audit(scores=included + 0.1 * rng.random(400), included=included, seed=0)
    assert not leaking.ok and leaking.epsilon_lower > leaking.claimed_epsilon
    assert leaking.scores == 200  # the other half chose the guesses
    with pytest.warns(UserWarning, match="scores of canaries that were in .* pass minus the loss"):
        engine.audit(scores=-2.0 * included, included=included, seed=0)


# The command


COMMAND = ["audit", "--noise-multiplier", "1", "--steps", "6", "--canaries", "100", "--no-ranks"]


def test_command_prints_json_and_a_plot(honest, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Prober, "read", lambda prober: honest)
    plot = tmp_path / "audit.png"
    sizes = ["--batch-size", "25", "--num-samples", "100"]  # a rate of 0.25
    assert main([*COMMAND, *sizes, "--json", "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["mode"] == "white_box" and found["confidence"] == 0.95
    assert found["canaries"] == 100 and found["steps"] == 6
    assert 0 <= found["epsilon_lower"] <= found["claimed_epsilon"]
    assert found["epsilon_lower_gaussian"] <= 1.2 * found["claimed_epsilon"]
    assert all(check["ok"] and check["false_alarm_rate"] <= 1e-4 for check in found["checks"])
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert main(
        ["epsilon", "--noise-multiplier", "1", "--steps", "6", "--sample-rate", "0.25"]
        + ["--delta", "1e-5", "--json"]
    ) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["epsilon"] == found["claimed_epsilon"]


@pytest.mark.cases(0)
def test_command_audits_banded_noise(capsys):
    assert main([*COMMAND, "--sample-rate", "0.25", "--bands", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "noise of steps apart" in [check["name"] for check in found["checks"]]
    words = ["epsilon", "--sampler", "cyclic_poisson", "--bands", "3", "--noise-multiplier", "1"]
    assert main([*words, *"--steps 6 --sample-rate 0.25 --delta 1e-5 --json".split()]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == found["claimed_epsilon"]


def test_black_box_command_scores_losses_of_documents(capsys):
    words = ["--black-box", "--canaries", "240", "--steps", "4", "--noise-multiplier", "1"]
    assert main(["audit", *words, "--sample-rate", "0.5", "--seed", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mode"] == "black_box" and found["checks"] == [] and found["seeded"]
    assert found["canaries"] == 240 and found["scores"] == 120
    assert found["assessment"]["guesses"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no --noise-multiplier"),
        (["--noise-multiplier", "0"], "--noise-multiplier 0.0"),
        (["--noise-multiplier", "1", "--sample-rate", "1.5"], "--sample-rate 1.5"),
        (["--noise-multiplier", "1", "--steps", "0"], "--steps 0"),
        (["--noise-multiplier", "1", "--canaries", "0"], "--canaries 0"),
        (["--noise-multiplier", "1", "--canaries", "239", "--black-box"], "--canaries 239"),
        (["--noise-multiplier", "1", "--confidence", "2"], "--confidence 2.0"),
        (["--noise-multiplier", "1", "--clipping", "soft"], "--clipping 'soft'"),
        (["--noise-multiplier", "1", "--plot", "audit.pdf"], "expected a PNG file"),
        (["--noise-multiplier", "1", "--accountant", "prv"], "--accountant 'prv'"),
        (["--run", "/nowhere"], "has no report.json"),
        (["--run", "/nowhere", "--steps", "3"], "--steps 3 with --run"),
        (["--noise-multiplier", "1", "--batch-size", "8"], "no --num-samples"),
        (["--run", "/nowhere", "--bands", "3"], "--bands 3 with --run"),
        (["--noise-multiplier", "1", "--bands", "0"], "--bands 0"),
        (["--noise-multiplier", "1", "--bands", "3"], "bands"),
    ],
)  # fmt: skip
def test_command_refuses_options_by_name(words, message, capsys):
    assert main(["audit", *words]) == 2
    assert message in capsys.readouterr().err


def test_audit_of_a_run_uses_its_settings_and_exits_with_1_where_they_are_refuted(
    honest, capsys, tmp_path, monkeypatch
):
    def read(prober):
        return Probes(**vars(honest) | {"noise": prober.noise()})

    monkeypatch.setattr(Prober, "read", read)
    report = {
        "noise_multiplier": 1.3,
        "sample_rate": 0.5,
        "steps": 3,
        "lost_steps": 1,
        "delta": 1e-6,
        "max_grad_norm": 0.2,
        "clipping": "per_layer",
        "accountant": "contour",
        "privacy_unit": "user: patient",
        "noise_coefficients": [1.0],
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    seeded_bugs.BUGS["noise / 5"](monkeypatch.setattr)
    assert main(["audit", "--run", str(tmp_path), "--canaries", "500", "--no-ranks"]) == 1
    printed, shown = capsys.readouterr()
    assert "audit, named checks: " in shown  # the bar, also where stderr is no terminal
    assert "4 releases, noise multiplier 1.3" in printed and "of this run alone" in printed
    assert "user: patient" in printed
    assert "REFUTED: at the cut" in printed and "failed: noise scale" in printed
    written = json.loads((tmp_path / "audit.json").read_text())
    assert not written["ok"] and written["delta"] == 1e-6
    assert written["settings"]["steps"] == 4 and written["settings"]["clipping"] == "per_layer"


# Experiments: the false-alarm rates that the audit states, and its power


@pytest.mark.cases(0)
@pytest.mark.parametrize("bug", seeded_bugs.BUGS)
def test_a_seeded_bug_is_caught_in_19_of_20_runs(bug, monkeypatch):
    seeded_bugs.BUGS[bug](monkeypatch.setattr)
    caught = 0
    for seed in range(20):
        audited = Audited(PrivacyEngine, {"seed": seed}, *settings(rate=0.125, steps=32))
        caught += not run_audit(audited, canaries=500, delta=DELTA, seed=seed, ranks=False).ok
    assert caught >= 19


@pytest.mark.cases(0)
@pytest.mark.parametrize("bug", seeded_bugs.BANDED_BUGS)
def test_a_seeded_bug_of_banded_noise_is_caught_in_19_of_20_runs(bug, honest, monkeypatch):
    """By what two of an audit's probes read."""
    seeded_bugs.BANDED_BUGS[bug](monkeypatch.setattr)
    caught = sum(CAUGHT_BY[bug] in failed_with_banded_noise(honest, seed) for seed in range(20))
    assert caught >= 19


@pytest.mark.cases(0)
def test_no_honest_run_of_20_with_banded_noise_is_accused():
    """At the stated rate of 0.002 a run, one is accused with probability 0.04."""
    for seed in range(20):
        rate, steps = (1 / 3, 9) if seed % 2 else (1 / 24, 36)
        asked = settings(rate=rate, steps=steps, **BANDED)
        audited = Audited(PrivacyEngine, {"seed": seed}, *asked)
        report = run_audit(audited, canaries=200, delta=DELTA, seed=seed, ranks=False)
        assert report.ok, report


@pytest.mark.cases(0)
def test_at_most_one_honest_run_of_100_is_accused():
    """At the stated rate of 0.0015 a run, two accusations have probability 0.01."""
    accused = 0
    for seed in range(100):
        rate, steps = (1.0, 8) if seed % 2 else (0.125, 32)
        audited = Audited(PrivacyEngine, {"seed": seed}, *settings(rate=rate, steps=steps))
        accused += not run_audit(audited, canaries=500, delta=DELTA, seed=seed, ranks=False).ok
    assert accused <= 1


@pytest.mark.cases(0)
@pytest.mark.parametrize("rate", [1.0, 0.125])
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_bounds_of_an_honest_engine_are_as_tight_as_promised(epsilon, rate):
    """With Poisson sampling 4,000 canaries, which takes up to 60 s on one core."""
    steps = 1 if rate == 1 else 64
    noise = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=rate, steps=steps
    )
    asked = settings(rate=rate, steps=max(steps, 25), noise=noise)
    audited = Audited(PrivacyEngine, {"seed": 1}, *asked)
    report = run_audit(audited, canaries=4000, delta=DELTA, seed=1, ranks=False)
    assert report.ok and report.epsilon_lower_gaussian >= 0.8 * epsilon
    assert report.scores == (100_000 if rate == 1 else 4000)
    if rate == 1:
        assert report.epsilon_lower >= 0.45 * epsilon

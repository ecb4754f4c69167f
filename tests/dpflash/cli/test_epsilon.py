"""`dpflash epsilon` and `dpflash calibrate`."""

import errno
import itertools
import json
import math
import os
import sys
import warnings

import numpy as np
import pytest

from dpflash.accounting import (
    FixedSizeGaussian,
    PoissonGaussian,
    RandomAllocationGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    create_accountant,
)
from dpflash.cli import _figures, main

RUN = ["--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5"]
NOISY = ["epsilon", "--noise-multiplier", "1.1"]
TARGET = ["calibrate", "--target-epsilon", "3", "--delta", "1e-5"]

FIXED = ["--sampler", "fixed_size", "--batch-size", "10", "--num-samples", "1000"]
TRUNCATED = ["--sampler", "truncated_poisson", "--num-samples", "10000", "--max-batch-size", "200"]
SHUFFLED = ["--sampler", "shuffled"]
ALLOCATION = ["--sampler", "random_allocation", "--batch-size", "10"]

# words of the sampler, words of the length, the event, how often, sampler, its own relation.
SAMPLERS = {
    "poisson": (
        ["--sample-rate", "0.01"], ["--steps", "300"],
        lambda s: PoissonGaussian(noise_multiplier=s, sample_rate=0.01), 300,
        "poisson", "add_remove",
    ),
    "poisson-by-counts": (
        ["--batch-size", "10", "--num-samples", "1000"], ["--steps", "300"],
        lambda s: PoissonGaussian(noise_multiplier=s, sample_rate=0.01), 300,
        "poisson", "add_remove",
    ),
    "poisson-of-units": (
        ["--sample-rate", "0.01", "--examples-per-unit", "4"], ["--steps", "300"],
        lambda s: UnitPoissonGaussian(noise_multiplier=s, sample_rate=0.01, examples_per_unit=4),
        300, "poisson", "add_remove",
    ),
    "fixed_size": (
        FIXED, ["--steps", "300"],
        lambda s: FixedSizeGaussian(noise_multiplier=s, batch_size=10, num_samples=1000),
        300, "fixed_size", "replace_one",
    ),
    "shuffled": (
        SHUFFLED, ["--epochs", "3"], lambda s: ShuffledGaussian(noise_multiplier=s), 3,
        "shuffled", "zero_out",
    ),
    "random_allocation": (
        [*ALLOCATION, "--num-samples", "999"], ["--epochs", "3"],
        lambda s: RandomAllocationGaussian(noise_multiplier=s, steps=100), 3,
        "random_allocation", "add_remove",
    ),
    "truncated_poisson": (
        [*TRUNCATED, "--batch-size", "100"], ["--steps", "300"],
        lambda s: TruncatedPoissonGaussian(
            noise_multiplier=s, sample_rate=0.01, num_samples=10000, max_batch_size=200
        ),
        300, "truncated_poisson", "add_remove",
    ),
}  # fmt: skip
# What `--json` reports of NOISY and RUN beside epsilon and the advantage.
RUN_OF_POISSON = {
    **{"delta": 1e-5, "noise_multiplier": 1.1, "sample_rate": 0.01, "batch_size": None},
    **{"num_samples": None, "max_batch_size": None, "examples_per_unit": None, "steps": 1000},
    **{
        "bands": None,
        "epochs": None,
        "accountant": "contour",
        "is_bound": True,
        "sampler": "poisson",
    },
    "neighboring_relation": "add_remove",
}
KEYS = {"epsilon", "epsilon_lower", "advantage", *RUN_OF_POISSON}


def spent(event, count, accountant="contour", relation=None):
    meter = create_accountant(accountant)
    meter.convert(relation or event.relation)
    meter.compose(event.convert(meter.neighboring_relation), count)
    return meter


def poisson(noise_multiplier, accountant="contour", count=1000):
    return spent(
        PoissonGaussian(noise_multiplier=noise_multiplier, sample_rate=0.01), count, accountant
    )


def refuse_constant(constant):
    raise AssertionError(f"{constant} is not JSON")


def report_of(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse_constant)


def rows_of(capsys, *words):
    assert main([*words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {label: value.strip() for label, value in (line.split("  ", 1) for line in lines)}


def refusal_of(capsys, *words):
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dpflash: error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("dpflash: error: ")


# epsilon


def test_epsilon_json_is_the_accountants_answer(capsys):
    meter = poisson(1.1)
    interval = meter.get_epsilon(1e-5, interval=True)
    ends = {"epsilon": interval.upper, "epsilon_lower": interval.lower}
    advantage = {"advantage": meter.get_advantage()}
    assert report_of(capsys, *NOISY, *RUN) == {**ends, **advantage, **RUN_OF_POISSON}


@pytest.mark.parametrize("accountant", ["contour", "pld", "rdp", "gdp"])
def test_every_accountant_answers_by_its_name(accountant, capsys):
    report = report_of(capsys, *NOISY, *RUN, "--accountant", accountant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interval = poisson(1.1, accountant).get_epsilon(1e-5, interval=True)
    assert report["accountant"] == accountant
    assert (report["epsilon"], report["epsilon_lower"]) == (interval.upper, interval.lower)
    assert report["is_bound"] is (accountant != "gdp")


@pytest.mark.parametrize("case", SAMPLERS)
def test_every_sampler_is_accounted_for_by_its_own_event_and_relation(case, capsys):
    words, length, event, count, sampler, relation = SAMPLERS[case]
    report = report_of(
        capsys, "epsilon", "--noise-multiplier", "2", "--delta", "1e-5", *words, *length
    )
    assert set(report) == KEYS
    assert report["epsilon"] == spent(event(2.0), count).get_epsilon(1e-5)
    assert report["sampler"] == sampler and report["neighboring_relation"] == relation
    has_epochs = "--epochs" in length
    assert report["steps"] == (None if has_epochs else count)
    assert report["epochs"] == (count if has_epochs else None)
    assert report["sample_rate"] == (None if sampler == "shuffled" else 0.01)


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize("case", SAMPLERS)
def test_a_relation_is_answered_for_or_refused_by_name(case, relation, capsys):
    words, length, event, count, sampler, _ = SAMPLERS[case]
    words = ["epsilon", "--noise-multiplier", "2", "--delta", "1e-5", *words, *length]
    words += ["--neighboring-relation", relation]
    if (relation, sampler) in (("add_remove", "shuffled"), ("add_remove", "fixed_size")) or (
        relation == "replace_one" and case in ("poisson-of-units", "random_allocation")
    ):
        message = refusal_of(capsys, *words)
        assert message.startswith(f"--neighboring-relation {relation!r}: the {sampler} sampler")
        assert "pass one of" in message
        return
    report = report_of(capsys, *words)
    assert report["neighboring_relation"] == relation
    assert report["epsilon"] == spent(event(2.0), count, relation=relation).get_epsilon(1e-5)


def test_a_cap_that_cuts_too_often_leaves_no_finite_epsilon_and_is_named(capsys):
    words = [*NOISY, "--sample-rate", "0.05", *TRUNCATED, "--steps", "10", "--delta", "1e-5"]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out, parse_constant=refuse_constant)["epsilon"] is None
    assert captured.err.startswith("dpflash: warning: max_batch_size=200: batches exceed it")
    assert captured.err.count("\n") == 1 and "raise --max-batch-size" in captured.err


@pytest.mark.parametrize("noise_multiplier", ["0.4", "0.7", "1.1", "3", "40", "1e5"])
@pytest.mark.parametrize("accountant", ["contour", "pld", "rdp"])
def test_rounding_in_the_table_is_to_the_safe_side(accountant, noise_multiplier, capsys):
    words = ["epsilon", "--noise-multiplier", noise_multiplier, *RUN, "--accountant", accountant]
    report, rows = report_of(capsys, *words), rows_of(capsys, *words)
    for key, label in (
        ("epsilon", "epsilon (upper bound)"),
        ("advantage", "membership inference advantage (upper bound)"),
    ):
        shown = float(rows[label])
        assert report[key] <= shown <= report[key] * (1 + 1e-5)
    if accountant == "rdp":
        assert "epsilon (lower bound)" not in rows
    else:
        lower = report["epsilon_lower"]
        assert lower * (1 - 1e-5) <= float(rows["epsilon (lower bound)"]) <= lower


def test_gdp_is_called_no_bound_in_the_table_and_warns_of_nothing_else(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = rows_of(capsys, *NOISY, *RUN, "--accountant", "gdp")
    assert rows["accountant"] == "gdp, no bound (approximation)"
    assert "epsilon, no bound (approximation)" in rows
    assert not [label for label in rows if "upper bound" in label or "lower bound" in label]


def test_an_infinite_epsilon_is_still_json_and_an_honest_table(capsys):
    words = ["epsilon", "--noise-multiplier", "0", *RUN]
    report = report_of(capsys, *words)
    assert report["epsilon"] is None and report["epsilon_lower"] is None
    assert not capsys.readouterr().err
    assert report["advantage"] == 1
    assert rows_of(capsys, *words)["epsilon (upper bound)"] == "Infinity"


def test_prv_tells_no_advantage_and_refuses_the_other_relations(capsys):
    pytest.importorskip("opacus")
    words = [*NOISY, *RUN, "--accountant", "prv"]
    report = report_of(capsys, *words)
    assert report["advantage"] is None
    assert abs(report["epsilon"] - poisson(1.1).get_epsilon(1e-5)) < 0.02
    assert "use --accountant 'contour'" in refusal_of(
        capsys, *words, "--neighboring-relation", "replace_one"
    )
    assert refusal_of(capsys, *words, "--plot", "p.png").startswith(
        "--plot 'p.png': --accountant "
    )


def test_without_opacus_prv_is_refused_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    assert "pip install opacus" in refusal_of(capsys, *NOISY, *RUN, "--accountant", "prv")


# calibrate


@pytest.mark.parametrize("target_epsilon", [0.005, 1.0, 3.0, 50.0])
def test_calibrated_noise_typed_again_keeps_the_target(target_epsilon, capsys):
    rows = rows_of(capsys, "calibrate", "--target-epsilon", str(target_epsilon), *RUN)
    noise_multiplier = rows["mechanism"].removeprefix("Gaussian, noise multiplier ")
    report = report_of(capsys, "epsilon", "--noise-multiplier", noise_multiplier, *RUN)
    assert 0.999 * target_epsilon < report["epsilon"] <= target_epsilon


@pytest.mark.parametrize("accountant", ["contour", "pld", "rdp", "gdp"])
def test_calibrate_json_holds_the_noise_and_its_epsilon(accountant, capsys):
    report = report_of(
        capsys, *TARGET, "--sample-rate", "0.01", "--steps", "1000", "--accountant", accountant
    )
    assert set(report) == KEYS | {"target_epsilon", "epsilon_one_more_epoch"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter = poisson(report["noise_multiplier"], accountant)
        assert 2.999 < report["epsilon"] == meter.get_epsilon(1e-5) <= 3.0
        more = poisson(report["noise_multiplier"], accountant, 1100).get_epsilon(1e-5)
    assert report["epsilon_one_more_epoch"] == more > 3.0
    assert report["target_epsilon"] == 3.0 and report["accountant"] == accountant
    assert (report["sample_rate"], report["steps"], report["delta"]) == (0.01, 1000, 1e-5)
    assert (report["sampler"], report["neighboring_relation"]) == ("poisson", "add_remove")


@pytest.mark.parametrize("case", [case for case in SAMPLERS if case != "poisson-of-units"])
def test_every_sampler_is_calibrated_for_noise_and_for_its_length(case, capsys):
    calibrates(case, capsys)


@pytest.mark.cases(0)
@pytest.mark.parametrize("case", ["poisson-of-units"])
def test_units_are_calibrated_for_noise_and_for_their_length(case, capsys):
    calibrates(case, capsys)


def calibrates(case, capsys):
    words, length, event, count, _, _ = SAMPLERS[case]
    report = report_of(capsys, *TARGET, *words, *length)
    found = event(report["noise_multiplier"])
    assert 2.99 < report["epsilon"] == spent(found, count).get_epsilon(1e-5) <= 3.0
    noise = str(1.01 * report["noise_multiplier"])
    report = report_of(capsys, *TARGET, *words, "--noise-multiplier", noise)
    most = report["epochs"] if "--epochs" in length else report["steps"]
    assert most >= count
    step = event(float(noise))
    assert spent(step, most).get_epsilon(1e-5) <= 3.0 < spent(step, most + 1).get_epsilon(1e-5)
    epoch = 1 if "--epochs" in length else 100
    assert report["epsilon_one_more_epoch"] == spent(step, most + epoch).get_epsilon(1e-5)


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
def test_the_greatest_sample_rate_is_found_under_each_relation(relation, capsys):
    words = [*TARGET, "--noise-multiplier", "2", "--steps", "1000"]
    words += ["--neighboring-relation", relation]
    rate = report_of(capsys, *words)["sample_rate"]
    assert rows_of(capsys, *words)["sample rate"] == str(rate)

    def epsilon(rate):
        event = PoissonGaussian(noise_multiplier=2.0, sample_rate=rate, relation=relation)
        return spent(event, 1000).get_epsilon(1e-5)

    assert epsilon(rate) <= 3.0 < epsilon(1.001 * rate)


def test_the_greatest_sample_rate_of_units_meets_the_target_and_is_said_with_their_bound(capsys):
    words = [*TARGET, "--noise-multiplier", "6", "--steps", "1000", "--examples-per-unit", "5"]
    report = report_of(capsys, *words)
    assert report["examples_per_unit"] == 5
    assert rows_of(capsys, *words)["samples of a unit, at most"] == "5"

    def epsilon(rate):
        event = UnitPoissonGaussian(noise_multiplier=6.0, sample_rate=rate, examples_per_unit=5)
        return spent(event, 1000).get_epsilon(1e-5)

    rate = report["sample_rate"]
    assert epsilon(rate) == report["epsilon"] <= 3.0 < epsilon(1.001 * rate)


def test_one_more_epoch_is_a_whole_number_of_steps_rounded_up(capsys):
    report = report_of(capsys, *TARGET, "--sample-rate", "0.3", "--steps", "10")
    event = PoissonGaussian(noise_multiplier=report["noise_multiplier"], sample_rate=0.3)
    assert report["epsilon_one_more_epoch"] == spent(event, 14).get_epsilon(1e-5)


# refusals

WORDS = {"NOISY": NOISY, "RUN": RUN, "PART": [*NOISY, "--delta", "1e-5"], "TARGET": TARGET}
WORDS |= {"FIXED": FIXED, "SHUFFLED": SHUFFLED, "CAPPED": TRUNCATED[:4], "ALLOCATION": ALLOCATION}
REFUSED = {
    "epsilon --noise-multiplier -1 RUN": "--noise-multiplier -1.0: expected",
    "NOISY RUN --delta 0": "--delta 0.0: expected",
    "NOISY RUN --steps -5": "--steps -5: expected",
    "NOISY RUN --sample-rate 7": "--sample-rate 7.0: expected",
    "NOISY RUN --accountant none": "--accountant 'none': expected",
    "NOISY RUN --sampler none": "--sampler 'none': expected",
    "NOISY RUN --neighboring-relation x": "--neighboring-relation 'x': expected",
    "PART --steps 5": "no --sample-rate: the poisson sampler",
    "PART --sample-rate 0.1": "no --steps: the poisson sampler",
    "PART SHUFFLED": "no --epochs: the shuffled sampler",
    "NOISY RUN --epochs 2": "--epochs 2: the poisson sampler does not use it; pass --steps 200",
    "NOISY RUN SHUFFLED": "--sample-rate 0.01: the shuffled sampler does not use it",
    "PART --steps 3 SHUFFLED": "--steps 3: the shuffled sampler does not use it; pass the number",
    "NOISY RUN FIXED": "--sample-rate 0.01: the fixed_size sampler does not use it",
    "PART ALLOCATION --epochs 3": "no --num-samples: the random_allocation sampler needs it",
    "PART ALLOCATION --num-samples 99": "no --epochs: the random_allocation sampler needs it",
    "NOISY RUN ALLOCATION": "--sample-rate 0.01: the random_allocation sampler does not use it",
    "NOISY RUN --max-batch-size 9": "--max-batch-size 9: the poisson sampler does",
    "PART SHUFFLED --epochs 2 --examples-per-unit 9": "--examples-per-unit 9: the shuffled",
    "NOISY RUN --examples-per-unit 0": "--examples-per-unit 0: expected",
    "NOISY RUN --examples-per-unit 1001": "--examples-per-unit 1001: expected at m",
    "NOISY RUN --examples-per-unit 2 --accountant gdp": "--examples-per-unit 2: --accountant '",
    "NOISY RUN --batch-size 9": "--sample-rate 0.01, --batch-size 9: expected one",
    "NOISY RUN --num-samples 9": "--sample-rate 0.01, --num-samples 9: the sample rate suffices",
    "PART --steps 5 --batch-size 9": "no --num-samples: the poisson sampler needs it with",
    "PART --steps 5 --num-samples 9": "--num-samples 9: --num-samples needs --batch-size",
    "PART --steps 5 --batch-size 9 --num-samples 8": "--batch-size 9: expected at most --num",
    "PART --steps 5 FIXED --batch-size 2000": "--batch-size 2000: expected at most --num-",
    "PART --steps 5 --sampler fixed_size --batch-size 10": "no --num-samples: the fixed",
    "PART --steps 5 --sampler fixed_size --num-samples 9": "no --batch-size: the fixed_size",
    "PART --steps 5 CAPPED --max-batch-size 200": "no --batch-size: the truncated_poisson",
    "NOISY RUN CAPPED": "no --max-batch-size: the truncated_poisson sampler",
    "NOISY RUN --sampler truncated_poisson --max-batch-size 200": "no --num-samples: the",
    "calibrate --target-epsilon 0 RUN": "--target-epsilon 0.0: expected",
    "TARGET RUN --steps 0": "--steps 0: expected",
    "TARGET RUN --sample-rate 0": "--sample-rate 0.0: expected",
    "TARGET --sample-rate 0.1 --noise-multiplier 0": "--noise-multiplier 0.0: expected",
    "TARGET RUN --noise-multiplier 1": "--noise-multiplier 1.0, --steps 1000, --sample-",
    "TARGET --steps 10": "no --noise-multiplier, --steps 10, no --sample-rate: expected all but",
    "TARGET SHUFFLED": "no --noise-multiplier, no --epochs: expected all but one, to",
    "TARGET SHUFFLED --epochs 2 --noise-multiplier 3": "--noise-multiplier 3.0, --epochs 2: exp",
    "TARGET --sample-rate 1 --noise-multiplier 0.1": "--target-epsilon 3.0: not even one step",
    "TARGET SHUFFLED --noise-multiplier 0.1": "--target-epsilon 3.0: not even one epoch",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_bad_argument_is_one_line_with_its_name_value_and_way_out(words, capsys):
    words_of = (WORDS.get(word, [word]) for word in words.split())
    found = refusal_of(capsys, *itertools.chain(*words_of))
    assert found.startswith(REFUSED[words])
    way_out = ("pass ", "drop ", "use ", "raise ", "look for ")
    assert any(word in found for word in way_out)


# pictures


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_the_plot_shows_epsilon_over_steps_and_the_tradeoff(command, figures, tmp_path, capsys):
    picture = tmp_path / "p.PNG"
    words = NOISY if command == "epsilon" else TARGET
    report = report_of(capsys, *words, *RUN, "--plot", str(picture))
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    assert [path.name for path in tmp_path.iterdir()] == ["p.PNG"]
    (figure,) = figures
    left, right = figure.axes
    curve = lines_of(left)["contour"]
    steps, epsilons = curve.get_data()
    assert 50 <= len(steps) <= 61 and steps[0] == 0 and steps[-1] == 1000
    assert all(a < b for a, b in itertools.pairwise(epsilons))
    assert epsilons[0] == 0 and epsilons[-1] == report["epsilon"]
    noise = report["noise_multiplier"]
    assert epsilons[30] == poisson(noise, count=int(steps[30])).get_epsilon(1e-5)
    thin = lines_of(left)["rdp"]
    assert thin.get_linewidth() < curve.get_linewidth()
    assert thin.get_ydata()[-1] == poisson(noise, "rdp").get_epsilon(1e-5)
    assert left.get_ylabel() == "epsilon at delta = 1e-05" and left.get_xlabel() == "step"
    assert ("target" in lines_of(left)) == (command == "calibrate")
    assert lines_of(right)["chance"].get_xydata().tolist() == [[0, 1], [1, 0]]
    assert len(lines_of(right)["contour"].get_xdata()) > 100
    assert right.get_xlabel().startswith("type I error")
    assert right.get_ylabel() == "least type II error"


def test_only_one_curve_is_drawn_for_rdp_and_passes_are_called_so(figures, tmp_path):
    picture = str(tmp_path / "p.png")
    words = [*NOISY, "--delta", "1e-5", *SHUFFLED, "--epochs", "5", "--accountant", "rdp"]
    assert main([*words, "--plot", picture]) == 0
    left, _ = figures[0].axes
    assert list(lines_of(left)) == ["rdp"] and left.get_xlabel() == "epoch"
    assert lines_of(left)["rdp"].get_xdata().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "event",
    [
        PoissonGaussian(noise_multiplier=1.1, sample_rate=0.01),
        PoissonGaussian(noise_multiplier=0.5, sample_rate=0.05),
        PoissonGaussian(noise_multiplier=50.0, sample_rate=0.001),
        FixedSizeGaussian(noise_multiplier=2.0, batch_size=10, num_samples=1000),
    ],
    ids=lambda event: f"{event.sampler}-{event.noise_multiplier:g}",
)
@pytest.mark.parametrize("accountant", ["contour", "rdp"])
def test_the_drawn_tradeoff_is_that_of_get_beta_and_never_above_it(event, accountant):
    meter = spent(event, 500, accountant)
    tradeoff = _figures.tradeoff_of(meter)
    alphas, betas = np.array(tradeoff.alphas), np.array(tradeoff.betas)
    assert (alphas[0], alphas[-1]) == (0, 1) and (betas <= 1 - alphas).all()
    assert (np.diff(betas) <= 0).all() and (betas >= 0).all()
    for i in (0, 1, 20, 100, 200, 380, 400):
        beta = meter.get_beta(float(alphas[i]))
        assert beta - 5e-3 < betas[i] <= beta + 1e-4


@pytest.mark.parametrize("count", [1, 2, 59, 60, 61, 10**12])
def test_the_grid_of_steps_begins_at_zero_rises_and_ends_at_the_run(count):
    event = PoissonGaussian(noise_multiplier=1.0, sample_rate=1e-6)
    steps = _figures.epsilon_curve("rdp", event, count, 1e-5).steps
    assert steps[0] == 0 and steps[-1] == count and len(steps) <= 61
    assert all(a < b for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p.pdf", "expected a PNG file; pass"),
        ("p", "expected a PNG file; pass"),
        ("none/p.png", "there is no directory"),
        ("folder.png", "it is a directory; pass"),
    ],
)
@pytest.mark.parametrize("words", [[*NOISY, *RUN], [*TARGET, *RUN]], ids=lambda words: words[0])
def test_a_picture_that_cannot_be_written_is_refused_at_once(
    words, name, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_figures, "draw", lambda *a, **k: pytest.fail("it was drawn"))
    (tmp_path / "folder.png").mkdir()
    path = str(tmp_path / name)
    found = refusal_of(capsys, *words, "--plot", path)
    assert found.startswith(f"--plot {path!r}: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib_the_plot_is_refused_with_the_way_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = str(tmp_path / "p.png")
    assert "pip install 'dpflash[plot]'" in refusal_of(capsys, *NOISY, *RUN, "--plot", path)
    assert not math.isnan(report_of(capsys, *NOISY, *RUN)["epsilon"])


def test_a_failed_write_leaves_the_old_picture_and_nothing_half_written(
    tmp_path, monkeypatch, capsys
):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"old")

    def fail(source, target):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        found = refusal_of(capsys, *NOISY, *RUN, "--plot", str(picture))
    assert found.startswith(f"--plot {str(picture)!r}: it could not be written (no space")
    assert picture.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [picture]
    assert main([*NOISY, *RUN, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, hint",
    [
        (["epsilom"], "COMMAND='epsilom': expected one of train, evaluate"),
        (["epsilom"], "did you mean 'epsilon'?"),
        (["budget", "ledger", "--delta", "1e-5", "--jsn"], "did you mean '--json'?"),
        (
            ["epsilon", *"--noise-multiplier 1 --delta 1e-5 --sample-rat 0.1".split()],
            "did you mean '--sample-rate'",
        ),
    ],
)
def test_a_misspelt_or_shortened_word_is_refused_with_what_was_meant(words, hint, capsys):
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2 and hint in capsys.readouterr().err


@pytest.mark.parametrize("words", [NOISY, TARGET[:3]], ids=lambda words: words[0])
def test_a_delta_not_below_one_over_the_samples_is_warned_about(words, capsys):
    words = [*words, "--batch-size", "10", "--num-samples", "1000", "--steps", "9"]
    words += ["--accountant", "rdp", "--delta"]
    for delta, warned in (("1e-3", True), ("9e-4", False)):
        assert main([*words, delta]) == 0
        assert (
            "dpflash: warning: delta=0.001: not below 1 / 1000 samples"
            in (capsys.readouterr().err)
        ) == warned

"""`dpflash calibrate --for quality`, and runs with banded noise."""

import json

import pytest

from dpflash.accounting import CyclicPoissonGaussian, create_accountant
from dpflash.cli import main
from dpflash.noise import compare_bands

RUN = ["--target-epsilon", "3", "--delta", "1e-4", "--num-samples", "1000"]
QUALITY = ["calibrate", "--for", "quality", *RUN]
CYCLIC = ["--sampler", "cyclic_poisson", "--batch-size", "50", "--num-samples", "1000"]
CYCLIC += ["--bands", "4", "--delta", "1e-4"]


def report_of(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal_of(capsys, *words):
    assert main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("dpflash: error: ")
    return captured.err.removeprefix("dpflash: error: ")


def spent(noise_multiplier, rounds):
    accountant = create_accountant("contour")
    event = CyclicPoissonGaussian(noise_multiplier=noise_multiplier, sample_rate=0.2, bands=4)
    accountant.compose(event, rounds)
    return accountant.get_epsilon(1e-4)


# cyclic_poisson


def test_epsilon_of_bands_is_that_of_rounds_at_the_rate_of_a_part(capsys):
    words = ["epsilon", "--noise-multiplier", "2", *CYCLIC]
    for steps, rounds in ((40, 10), (41, 11)):
        report = report_of(capsys, *words, "--steps", str(steps))
        assert report["epsilon"] == spent(2.0, rounds)
        assert (report["steps"], report["bands"], report["sample_rate"]) == (steps, 4, 0.05)


def test_bands_are_calibrated_for_noise_and_for_steps(capsys):
    words = ["calibrate", "--target-epsilon", "3", *CYCLIC]
    found = report_of(capsys, *words, "--steps", "38")
    assert 2.99 < found["epsilon"] == spent(found["noise_multiplier"], 10) <= 3
    assert found["epsilon_one_more_epoch"] == spent(found["noise_multiplier"], 15)
    found = report_of(capsys, *words, "--noise-multiplier", "2")
    rounds = found["steps"] // 4
    assert found["steps"] % 4 == 0
    assert spent(2.0, rounds) <= 3 < spent(2.0, rounds + 1)


# --for quality


@pytest.mark.cases(0)
def test_quality_compares_half_the_batch_the_same_and_double(capsys):
    report = report_of(capsys, *QUALITY, "--batch-size", "50", "--epochs", "2")
    runs = report["runs"]
    assert sorted({run["batch_size"] for run in runs}) == [25, 50, 100]
    assert [r["bands"] for r in runs if r["batch_size"] == 50] == [1, 2, 4, 8, 16]
    expected = compare_bands(
        num_samples=1000,
        batch_size=[25, 50, 100],
        epochs=2,
        target_epsilon=3,
        target_delta=1e-4,
    )
    best, first = report["best"], expected[0]
    assert best == min(runs, key=lambda run: run["scaled_error"])
    assert (best["batch_size"], best["bands"]) == (first.batch_size, first.noise.bands)
    assert best["noise_multiplier"] == first.noise_multiplier
    assert best["sampler"] == ("poisson" if best["bands"] == 1 else "cyclic_poisson")
    for run in runs:
        (one,) = (r for r in runs if r["bands"] == 1 and r["batch_size"] == run["batch_size"])
        ratio = run["expected_error"] / one["expected_error"]
        assert run["over_independent"] == pytest.approx(ratio)
    # What it says of the best holds when it is asked for.
    words = [*CYCLIC[:2], "--batch-size", str(best["batch_size"]), *RUN[2:]]
    words += ["--bands", str(best["bands"]), "--steps", str(best["steps"])]
    words += ["--noise-multiplier", repr(best["noise_multiplier"])]
    assert 2.99 < report_of(capsys, "epsilon", *words)["epsilon"] <= 3


def test_lists_are_compared_as_given_and_always_with_independent_noise(capsys):
    words = [*QUALITY, "--batch-size", "40", "80", "--epochs", "0.5", "2", "--bands", "4", "64"]
    assert main([*words, "--parameters", "1000", "--max-memory", "30000", "--json"]) == 0
    captured = capsys.readouterr()
    runs = json.loads(captured.out)["runs"]
    found = [(run["batch_size"], run["epochs"], run["bands"]) for run in runs]
    assert found == [(b, e, n) for b in (40, 80) for e in (0.5, 2) for n in (1, 4)]
    assert {run["bands"]: run["state_bytes"] for run in runs} == {1: 0, 4: 24_000}
    assert captured.err.startswith("dpflash: warning: bands=[64]: left out")
    assert main([*words, "--parameters", "1000", "--max-memory", "23999"]) == 0
    captured = capsys.readouterr()
    assert "bands=[4, 64]: left out" in captured.err
    header, *rows = captured.out.splitlines()
    assert "over independent" in header and "bytes of states" in header
    assert sum(row.startswith("best") for row in rows[:4]) == 1


def test_quality_plots_the_errors(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "errors.png"
    words = [*QUALITY, "--batch-size", "50", "100", "--epochs", "1", "--bands", "2"]
    assert main([*words, "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--for", "speed"], "--for 'speed': expected one of 'quality'"),
        (["--for", "quality"], "no --num-samples: --for quality needs it"),
        (["--for", "quality", *RUN[4:], "--epochs", "1"], "no --batch-size: --for quality needs"),
        (["--for", "quality", *RUN[4:], "--batch-size", "5"], "no --epochs: --for quality needs"),
        (["--for", "quality", "--steps", "4"], "--steps 4: --for quality does not use it; drop"),
        (["--for", "quality", "--sampler", "shuffled"], "--sampler 'shuffled': --for quality"),
        (["--batch-size", "5", "6"], "--batch-size [5, 6]: pass one, or --for quality"),
        (["--max-memory", "5"], "--max-memory 5: drop it, or pass --for quality"),
        (["--bands", "4", "--steps", "4"], "--bands 4: the poisson sampler does not use it"),
        (CYCLIC[:6], "no --bands: the cyclic_poisson sampler needs it; pass --bands N"),
        ([*CYCLIC[:6], "--bands", "21"], "--sample-rate 0.05: --bands 21 times it is above 1"),
        (
            ["--for", "quality", *RUN[4:], "--batch-size", "2000", "--epochs", "1"],
            "--batch-size 2000: expected at most --num-samples 1000",
        ),
    ],
)
def test_what_is_missing_or_unused_is_refused_with_the_way_out(words, message, capsys):
    assert message in refusal_of(capsys, "calibrate", *RUN[:4], *words)

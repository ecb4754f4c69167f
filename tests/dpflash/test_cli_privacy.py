"""`dpflash epsilon` and `dpflash calibrate`."""

import json

import pytest

from dpflash.accounting import RDPAccountant
from dpflash.cli import main

RUN = ["--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5"]


def epsilon_of(noise_multiplier: float) -> float:
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, 0.01, 1000)]
    return accountant.get_epsilon(1e-5)


def test_epsilon_json_is_the_accountants_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilon", "--noise-multiplier", "1.1", *RUN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "epsilon": epsilon_of(1.1),
        "epsilon_lower": None,
        "delta": 1e-5,
        "noise_multiplier": 1.1,
        "sample_rate": 0.01,
        "steps": 1000,
        "accountant": "rdp",
        "sampler": "poisson",
        "neighboring_relation": "add_remove",
    }


def test_epsilon_table_is_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilon", "--noise-multiplier", "1.1", *RUN]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict(line.rsplit(maxsplit=1) for line in lines)
    shown = float(rows["epsilon (upper bound)"])
    assert epsilon_of(1.1) <= shown < epsilon_of(1.1) + 1e-5
    assert rows["noise multiplier"] == "1.1"
    assert rows["sampler"] == "poisson"
    assert rows["neighboring relation"] == "add_remove"
    assert "epsilon (lower bound)" not in rows


def test_an_infinite_epsilon_is_still_json(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert main(["epsilon", "--noise-multiplier", "0", *RUN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert report["epsilon"] is None
    assert main(["epsilon", "--noise-multiplier", "0", *RUN]) == 0
    assert "Infinity" in capsys.readouterr().out


@pytest.mark.parametrize("target_epsilon", [0.005, 1.0, 3.0, 50.0])
def test_calibrated_noise_typed_again_keeps_the_target(
    target_epsilon: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--target-epsilon", str(target_epsilon), *RUN]) == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    noise_multiplier = rows["noise multiplier"]
    assert main(["epsilon", "--noise-multiplier", noise_multiplier, *RUN, "--json"]) == 0
    epsilon = json.loads(capsys.readouterr().out)["epsilon"]
    assert 0.999 * target_epsilon < epsilon <= target_epsilon


def test_calibrate_json_holds_the_noise_and_its_epsilon(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["calibrate", "--target-epsilon", "3", *RUN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"] == epsilon_of(report["noise_multiplier"]) <= 3.0
    assert report["target_epsilon"] == 3.0
    assert report["accountant"] == "rdp"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["epsilon", "--noise-multiplier", "-1", *RUN], "noise_multiplier=-1.0"),
        (["epsilon", "--noise-multiplier", "1", *RUN, "--delta", "0"], "delta=0.0"),
        (["epsilon", "--noise-multiplier", "1", *RUN, "--steps", "-5"], "steps=-5"),
        (["epsilon", "--noise-multiplier", "1", *RUN, "--sample-rate", "7"], "sample_rate=7.0"),
        (
            ["epsilon", "--noise-multiplier", "1", *RUN, "--accountant", "none"],
            "accountant='none'",
        ),
        (["calibrate", "--target-epsilon", "0", *RUN], "target_epsilon=0.0"),
        (["calibrate", "--target-epsilon", "1", *RUN, "--steps", "0"], "steps=0"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dpflash: error: {message}: expected")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_help_names_the_assumptions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Poisson sampling" in words
    assert "one added or removed sample" in words

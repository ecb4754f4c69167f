"""`dpflash budget`: a ledger read back, composed and compared with a budget."""

import json
import shutil

import pytest

from dpflash.accounting import (
    ContourAccountant,
    FixedSizeGaussian,
    PoissonGaussian,
    RandomAllocationGaussian,
    RDPAccountant,
    ShuffledGaussian,
)
from dpflash.cli import main
from dpflash.privacy.ledger import Ledger

POISSON = PoissonGaussian(noise_multiplier=1.25, sample_rate=0.01)
SHUFFLED = ShuffledGaussian(noise_multiplier=4.0)
FIXED = FixedSizeGaussian(noise_multiplier=3.0, batch_size=5, num_samples=200)
RDP = ["--delta", "1e-5", "--accountant", "rdp"]


def epsilon_of(*events, relation="add_remove"):
    accountant = RDPAccountant(neighboring_relation=relation)
    for event, count in events:
        accountant.compose(event.convert(relation), count)
    return accountant.get_epsilon(1e-5)


@pytest.fixture
def ledger(tmp_path):
    """Two runs: 300 Poisson steps, then two passes of ten batches over a shuffled loader."""
    written = Ledger(tmp_path / "ledger.jsonl")
    written.append(run="first", event=POISSON, accountant="rdp", count=299)
    written.append(run="first", event=POISSON, accountant="rdp")
    for _ in range(2):
        written.append(run="second", event=SHUFFLED, accountant="rdp")
        written.append(run="second", event=None, accountant="rdp", count=9)
    return written.path


def report_of(capsys, *words, status=0):
    assert main(["budget", *map(str, words), *RDP, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_json_holds_the_composed_epsilon_and_what_it_rests_on(ledger, capsys):
    before = ledger.read_bytes()
    expected = epsilon_of((POISSON, 300), (SHUFFLED, 2), relation="zero_out")
    assert report_of(capsys, ledger) == {
        "epsilon": expected,
        "epsilon_lower": None,
        "delta": 1e-5,
        "steps": 320,
        "private_refusals": 0,
        "runs": [
            {
                "run": "first",
                "name": None,
                "steps": 300,
                "sampler": "poisson",
                "noise_multiplier": 1.25,
                "sample_rate": 0.01,
                "neighboring_relation": "add_remove",
            },
            {
                "run": "second",
                "name": None,
                "steps": 20,
                "sampler": "shuffled",
                "noise_multiplier": 4.0,
                "sample_rate": None,
                "neighboring_relation": "zero_out",
            },
        ],
        "accountant": "rdp",
        "neighboring_relation": "zero_out",
        "privacy_unit": "sample",
        "earlier_names": [],
        "remaining_steps": None,
    }
    assert ledger.read_bytes() == before


def test_the_table_names_what_a_paper_needs_and_rounds_epsilon_up(ledger, capsys):
    assert main(["budget", str(ledger), *RDP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["run", "steps"]
    assert lines[1].split() == ["first", "300", "poisson", "1.25", "0.01", "add_remove"]
    assert lines[2].split() == ["second", "20", "shuffled", "4", "-", "zero_out"]
    rows = dict(line.split("  ", 1) for line in lines[4:])
    rows = {key: value.strip() for key, value in rows.items()}
    assert "Gaussian" in rows["mechanism"] and rows["sampler"] == "poisson, shuffled"
    assert rows["neighboring relation"] == "zero_out" and rows["accountant"] == "rdp"
    assert rows["delta"] == "1e-05" and rows["steps"] == "320"
    assert rows["privacy unit"] == "sample"
    exact = epsilon_of((POISSON, 300), (SHUFFLED, 2), relation="zero_out")
    assert exact <= float(rows["epsilon (upper bound)"]) < exact + 1e-4
    assert "remaining steps" not in rows and "epsilon (lower bound)" not in rows


def test_the_table_drops_no_digit_of_a_noise_or_a_rate(tmp_path, capsys):
    written = Ledger(tmp_path / "l")
    event = PoissonGaussian(noise_multiplier=1.23456789, sample_rate=1 / 3)
    written.append(run="a", event=event, accountant="rdp")
    assert main(["budget", str(written.path), *RDP]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[3:5] == ["1.23456789", str(1 / 3)]


def test_with_a_budget_it_tells_how_many_events_of_the_last_kind_remain(ledger, capsys):
    history = [(POISSON, 300), (SHUFFLED, 2)]
    limit = epsilon_of(*history, (SHUFFLED, 7), relation="zero_out")
    assert report_of(capsys, ledger, "--epsilon", repr(limit))["remaining_steps"] == 7
    spent = epsilon_of(*history, relation="zero_out")
    assert (
        report_of(capsys, ledger, "--epsilon", repr(spent / 2), status=1)["remaining_steps"] == 0
    )
    assert main(["budget", str(ledger), *RDP, "--epsilon", repr(limit)]) == 0
    shown = capsys.readouterr().out.splitlines()[-1].split()
    assert shown == ["remaining", "epochs", "7"]


def test_fixed_size_runs_have_their_sample_rate_and_relation(tmp_path, capsys):
    written = Ledger(tmp_path / "l")
    written.append(run="a", event=FIXED, accountant="rdp", count=40, unit="user: patient")
    report = report_of(capsys, written.path, "--epsilon", "50")
    assert report["privacy_unit"] == "user: patient"
    assert report["neighboring_relation"] == "replace_one"
    assert report["runs"][0]["sample_rate"] == 5 / 200
    assert report["epsilon"] == epsilon_of((FIXED, 40), relation="replace_one")
    assert epsilon_of((FIXED, 40 + report["remaining_steps"]), relation="replace_one") <= 50
    assert epsilon_of((FIXED, 41 + report["remaining_steps"]), relation="replace_one") > 50


def test_a_run_without_noise_has_no_epsilon_and_nothing_remains(ledger, capsys):
    Ledger(ledger).append(
        run="third",
        event=PoissonGaussian(noise_multiplier=0.0, sample_rate=0.01),
        accountant="rdp",
    )
    report = report_of(capsys, ledger, "--epsilon", "50", status=1)
    assert report["epsilon"] is None and report["remaining_steps"] == 0
    assert main(["budget", str(ledger), *RDP]) == 0
    assert "Infinity" in capsys.readouterr().out


def test_an_empty_ledger_has_spent_nothing(tmp_path, capsys):
    (tmp_path / "l").touch()
    report = report_of(capsys, tmp_path / "l", "--epsilon", "1")
    assert report["epsilon"] == 0 and report["runs"] == [] and report["steps"] == 0
    assert report["remaining_steps"] is None
    assert main(["budget", str(tmp_path / "l"), *RDP]) == 0


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_the_plot_shows_epsilon_after_each_step_and_is_written(ledger, tmp_path, figures):
    picture = tmp_path / "p.png"
    words = ["budget", str(ledger), *RDP, "--plot", str(picture), "--epsilon", "9"]
    assert main(words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert {path.name for path in tmp_path.iterdir()} <= {
        "p.png",
        ledger.name,
        f"{ledger.name}.guard",
    }
    left, _ = figures[0].axes
    assert list(lines_of(left)) == ["rdp", "target"]
    assert set(lines_of(left)["target"].get_ydata()) == {9.0}
    steps, epsilons = (list(values) for values in lines_of(left)["rdp"].get_data())
    assert steps[0] == 0 and steps[-1] == 320 and epsilons == sorted(epsilons)
    for step, epsilon in zip(steps, epsilons, strict=True):
        passes = 0 if step <= 300 else 1 if step <= 310 else 2
        events = [(POISSON, min(step, 300)), (SHUFFLED, passes)]
        assert epsilon == epsilon_of(*events, relation="zero_out")


@pytest.mark.cases(0)
def test_the_plot_shows_the_tradeoff_of_the_whole_ledger(ledger, tmp_path, figures):
    words = ["budget", str(ledger), "--delta", "1e-5", "--plot", str(tmp_path / "p.png")]
    assert main(words) == 0
    _, right = figures[0].axes
    alphas, betas = lines_of(right)["contour"].get_data()
    meter = ContourAccountant(neighboring_relation="zero_out")
    meter.compose(POISSON.convert("zero_out"), 300)
    meter.compose(SHUFFLED, 2)
    for i in (0, 40, 200):
        beta = meter.get_beta(float(alphas[i]))
        assert beta - 5e-3 < betas[i] <= beta + 1e-4
    assert lines_of(right)["chance"].get_xydata().tolist() == [[0, 1], [1, 0]]


def test_a_delta_that_would_permit_publishing_a_unit_is_warned_of(tmp_path, capsys):
    written = Ledger(tmp_path / "l")
    written.append(run="a", event=POISSON, accountant="rdp", about={"dataset_size": 5000})
    for delta, words in (("2e-4", "--delta 0.0002: not below 1 / 5000 units"), ("1e-5", "")):
        assert main(["budget", str(written.path), "--delta", delta, "--accountant", "rdp"]) == 0
        assert words.replace("--delta ", "delta=") in (shown := capsys.readouterr().err)
        assert bool(words) == bool(shown)


def test_a_release_without_noise_is_drawn_as_no_privacy(tmp_path, figures):
    written = Ledger(tmp_path / "l")
    noiseless = PoissonGaussian(noise_multiplier=0.0, sample_rate=0.01)
    written.append(run="a", event=noiseless, accountant="rdp", count=3)
    assert main(["budget", str(written.path), *RDP, "--plot", str(tmp_path / "p.png")]) == 0
    left, right = figures[0].axes
    assert [text.get_text() for text in left.texts] == ["no finite epsilon"]
    assert set(lines_of(right)["rdp"].get_ydata()) == {0.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--delta", "0"], "--delta 0.0"),
        (["--delta", "nan"], "--delta nan"),
        (["--epsilon", "0"], "--epsilon 0.0"),
        (["--epsilon", "inf"], "--epsilon inf"),
        (["--accountant", "none"], "--accountant 'none'"),
        (["--plot", "p.pdf"], "--plot 'p.pdf': expected a PNG file"),
        (["--plot", "no/such/p.png"], "--plot 'no/such/p.png': there is no directory"),
        (["--plot", "p.png", "--accountant", "prv"], "--plot 'p.png': --accountant 'prv'"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_exit_code_2(words, message, ledger, capsys):
    assert main(["budget", str(ledger), *RDP, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"dpflash: error: {message}")
    assert captured.err.count("\n") == 1


def test_a_damaged_or_missing_ledger_is_exit_code_2_with_the_line_named(ledger, capsys):
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:1] + lines[2:]))
    assert main(["budget", str(ledger), *RDP]) == 2
    error = capsys.readouterr().err
    assert f"ledger {ledger} is damaged at line 2" in error and "expected 300" in error
    assert main(["budget", str(ledger) + ".none", *RDP]) == 2
    assert "no such file" in capsys.readouterr().err
    assert not ledger.with_name(ledger.name + ".none").exists()
    ledger.unlink()
    assert main(["budget", str(ledger), *RDP]) == 2
    assert f"{ledger}.guard with step 320: the ledger was removed" in capsys.readouterr().err
    assert main(["budget", str(ledger.parent), *RDP]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_ledgers_of_the_same_units_add_up(ledger, tmp_path, capsys):
    other = Ledger(tmp_path / "other.jsonl")
    other.append(run="third", event=POISSON, accountant="rdp", count=200)
    total = report_of(capsys, ledger, other.path)
    assert total["epsilon"] == epsilon_of((POISSON, 500), (SHUFFLED, 2), relation="zero_out")
    assert total["steps"] == 520
    assert [run["run"] for run in total["runs"]] == ["first", "second", "third"]


def test_ledgers_of_other_units_and_one_ledger_twice_are_refused(ledger, tmp_path, capsys):
    patients = Ledger(tmp_path / "patients.jsonl")
    patients.append(run="third", event=POISSON, accountant="rdp", unit="user: patient")
    for other, message in (
        (patients.path, "'sample' and 'user: patient', and one"),
        (ledger, "given twice"),
    ):
        assert main(["budget", str(ledger), str(other), *RDP]) == 2
        shown = capsys.readouterr().err
        assert message in shown and "rename" not in shown


def test_what_ledgers_have_in_common_counts_once(tmp_path, capsys):
    """A folder that was copied, of which all copies went on; one of them was copied again."""
    event = PoissonGaussian(noise_multiplier=1.0, sample_rate=0.1)
    paths = [tmp_path / name for name in "abc"]

    def go_on(path, steps, **line):
        ledger = Ledger(path)
        for _ in range(steps):
            ledger.append(run="5" * 64, event=event, accountant="rdp", **line)

    def copy(source, target):
        for suffix in ("", ".guard"):
            shutil.copy(f"{source}{suffix}", f"{target}{suffix}")

    go_on(paths[0], 20)
    copy(paths[0], paths[1])
    go_on(paths[0], 10)  # the run that wrote the checkpoint, and one that loaded it
    go_on(paths[1], 5, branch="b")
    copy(paths[1], paths[2])
    go_on(paths[1], 5, branch="b")
    go_on(paths[2], 7, branch="c")
    for chosen, steps in (("ab", 40), ("ba", 40), ("bc", 37), ("cab", 47)):
        report = report_of(capsys, *(tmp_path / name for name in chosen))
        assert report["epsilon"] == pytest.approx(epsilon_of((event, steps)), rel=1e-12)
        assert report["steps"] == sum(run["steps"] for run in report["runs"]) == steps
    # Releases that were appended by hand may look alike and be two.
    for path in (tmp_path / "d", tmp_path / "e"):
        Ledger(path).append(run="class counts", event=event, accountant="rdp")
    assert report_of(capsys, tmp_path / "d", tmp_path / "e")["steps"] == 2


def test_a_branch_pays_for_its_own_shuffled_epoch(ledger):
    with pytest.raises(ValueError, match="no earlier line of the same run covers its epoch"):
        Ledger(ledger).append(run="second", event=None, accountant="rdp", branch="b")


def test_epochs_of_random_allocation_are_counted(tmp_path, capsys):
    event = RandomAllocationGaussian(noise_multiplier=1.0, steps=8)
    written = Ledger(tmp_path / "ledger.jsonl")
    for later in (7, 2):  # the second was left early
        written.append(run="a", event=event, accountant="contour")
        written.append(run="a", event=None, accountant="contour", count=later)
    accountant = ContourAccountant()
    accountant.compose(event, 2)
    spent = accountant.get_epsilon(1e-5)
    accountant.compose(event, 3)
    limit = repr(accountant.get_epsilon(1e-5))
    words = ["budget", str(written.path), "--delta", "1e-5", "--epsilon", limit]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["epsilon"], report["steps"], report["remaining_steps"]) == (spent, 11, 3)
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["remaining", "epochs", "3"]

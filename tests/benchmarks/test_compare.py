"""What counts as a regression, on made-up samples with fixed seeds; nothing here is timed."""

import copy
import json
import math
import re

import numpy as np
import pytest

from dpflash.bench.compare import Unusable, compare, run_compare
from dpflash.bench.output import row
from dpflash.bench.timing import summarize
from dpflash.cli import main

DEVICE = {"suite": "toy", "device": "CPU", "threads": 1, "clock": "process time", "quick": False}


def timed(name, samples_ms, config=None, **columns):
    figures = summarize([ms / 1e3 for ms in samples_ms]).as_row()
    columns = {"correct": True, "samples_ms": list(samples_ms), **columns}
    return row(name, config or {"size": 1}, **{**figures, **columns})


def drawn(seed, median=20.0, trials=20, noise=0.02):
    generator = np.random.default_rng(seed)
    return list(median * np.exp(noise * generator.standard_normal(trials)))


SAME = timed("same", [1.0, 1.1, 1.2])


def file(*rows, **environment):
    return {"environment": {**DEVICE, **environment}, "complete": True, "rows": list(rows)}


def turns(old, new, launches=6):
    """Two files whose trials took turns."""
    versus = {"versus": {"run": "r", "launches": launches, "rounds": len(old) // launches}}
    return file(timed("a", old), **versus), file(timed("a", new), **versus)


def drifting(seed, slowdown, launches=6, rounds=8):
    """Trials on a machine whose speed doubles and halves, the same for both."""
    generator = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(generator.normal(0, 0.1, launches * rounds)))
    bias = np.repeat(generator.normal(0, 0.01, launches), rounds)
    old, new = 20 * drift * np.exp(generator.normal(0, 0.03, (2, launches * rounds)))
    return turns(list(old), list(new * np.exp(bias) * (1 + slowdown)), launches)


def verdict(report, name="a"):
    return next(line for line in report.lines if line.name == name)


def test_trials_in_turns_tell_ten_percent_from_none_though_the_machine_drifts():
    # The estimate has a standard deviation of 0.7%: a false verdict is beyond 6 of them.
    for seed in range(40):
        same, slower = compare(*drifting(seed, 0.0)), compare(*drifting(seed, 0.1))
        assert same.paired and same.exit_code == 0 and verdict(same).verdict == "unchanged"
        assert slower.exit_code == 1 and verdict(slower).verdict == "slower"
        assert verdict(slower).ratio == pytest.approx(1.1, abs=0.04)
        low, high = verdict(slower).interval
        assert 1 < low < verdict(slower).ratio < high


def test_less_than_the_threshold_is_no_regression_however_certain():
    files = turns(drawn(0, noise=1e-3, trials=48), drawn(1, 20.8, noise=1e-3, trials=48))
    report = compare(*files)
    assert report.exit_code == 0 and verdict(report).verdict == "unchanged"
    assert verdict(report).p < 1e-6
    assert compare(*files, threshold=0.03).exit_code == 1


def test_significance_is_corrected_for_the_number_of_rows():
    old, new = drawn(0, trials=16, noise=0.2), drawn(1, median=24.0, trials=16, noise=0.2)
    turns = {"versus": {"run": "r", "launches": 8, "rounds": 2}}

    def of(rows):
        names = [f"row {k}" for k in range(rows)]
        made = (file(*(timed(name, ms) for name in names), **turns) for ms in (old, new))
        return compare(*made)

    one, many = of(1), of(20)
    assert 0 < one.lines[0].p < 0.05
    assert many.lines[0].p == pytest.approx(min(1.0, 20 * one.lines[0].p))


def test_launches_and_not_rounds_are_what_counts():
    # One launch of four is off by 60%: forty rounds would call that significant.
    new = [20.0] * 30 + [32.0] * 10
    jitter = np.exp(0.001 * np.random.default_rng(0).standard_normal(40))
    launches = compare(*turns([20.0] * 40, list(new * jitter), launches=4))
    rounds = compare(*turns([20.0] * 40, list(new * jitter), launches=1))
    assert launches.exit_code == 0 and rounds.exit_code == 1


@pytest.mark.parametrize("make", [turns, lambda a, b: (file(timed("a", a)), file(timed("a", b)))])
def test_a_speed_up_is_listed_and_passes(make):
    old = drawn(1, trials=24)
    report = compare(*make(old, drawn(2, median=10.0, trials=24)))
    assert verdict(report).verdict == "faster" and report.exit_code == 0


def test_separate_runs_are_compared_by_the_intervals_of_their_medians():
    old = file(timed("a", drawn(1)), timed("b", drawn(2)), load_average=1.5)
    new = file(timed("a", drawn(3, median=23.0)), timed("b", drawn(4)), load_average=2.5)
    report = compare(old, new)
    assert not report.paired and "separate runs: in CI take `versus`" in report.summary
    assert verdict(report).verdict == "slower" and verdict(report, "b").verdict == "unchanged"
    low, high = verdict(report).interval
    assert low < 1.15 < high and low > 1.05 and verdict(report).p is None


@pytest.mark.parametrize(
    ("loads", "decides"),
    [
        ((4.9, 10.7), False),
        ((10.7, 4.9), False),
        ((0.0, 1.1), False),
        ((0.2, 1.1), True),
        ((4.9, 9.7), True),
        ((None, 9.0), True),
    ],
    ids=str,
)
def test_separate_runs_under_unlike_loads_decide_on_no_time_but_on_all_else(loads, decides):
    def under(load, *rows):
        return file(timed("a", drawn(1)), *rows, load_average=load)

    right = timed("b", drawn(1), peak_memory_mb=10.0)
    now = under(loads[1], {**right, "peak_memory_mb": 50.0})
    now["rows"][0] = timed("a", drawn(2, median=40.0))
    report = compare(under(loads[0], right), now)
    assert verdict(report).verdict == ("slower" if decides else "undecided")
    assert decides or verdict(report).note == "unlike loads"
    assert verdict(report, "b").verdict == "more memory" and report.exit_code == 1
    assert verdict(compare(under(loads[0], right), under(loads[1])), "b").verdict == "fails"


def test_trials_in_turns_decide_under_any_load():
    old, new = turns(drawn(1, trials=24), drawn(2, median=30.0, trials=24))
    old["environment"]["load_average"], new["environment"]["load_average"] = 1.0, 9.0
    assert compare(old, new).exit_code == 1


@pytest.mark.parametrize("make", [turns, lambda a, b: (file(timed("a", a)), file(timed("a", b)))])
def test_what_is_not_unchanged_in_one_direction_is_not_in_the_other(make):
    # Most trials are twice as fast, the others slower: it may be chance.
    old, new = [20.0 + 0.01 * k for k in range(24)], [11.0] * 15 + [25.0] * 9
    for pair in ((old, new), (new, old)):
        report = compare(*make(*pair))
        assert abs(math.log(verdict(report).ratio)) > 0.1
        assert verdict(report).verdict == "undecided" and report.exit_code == 0


def test_files_of_two_versus_runs_are_separate_runs():
    old, new = turns(drawn(1, trials=24), drawn(2, trials=24))
    new["environment"]["versus"] = {**new["environment"]["versus"], "run": "another"}
    assert not compare(old, new).paired


def test_quick_runs_decide_on_no_time_in_either_direction():
    # Runs of one code under unlike loads were apart by 46% of the median, and in all trials.
    for old, new in ((20.0, 20.0), (20.0, 40.0), (40.0, 20.0)):
        files = (file(timed("a", drawn(k, ms, trials=5))) for k, ms in enumerate((old, new)))
        report = compare(*files)
        assert report.exit_code == 0 and verdict(report).p is None
        assert (verdict(report).verdict, verdict(report).note) == ("undecided", "too few trials")
        assert "1 compared" in report.summary


@pytest.mark.parametrize(
    ("new", "expected", "note"),
    [
        ([], "fails", "missing"),
        ([row("a", {"size": 1}, needs="a GPU")], "fails", "a GPU"),
        ([row("a", {"size": 1}, correct=True)], "fails", "no figures"),
        ([row("a", {"size": 1})], "fails", "not checked"),
        ([row("a", {"size": 1}, correct=False)], "fails", "wrong"),
        ([row("a", {"size": 1}, correct=False, failure="a bug")], "fails", "a bug"),
        ([{**timed("a", drawn(2)), "samples_ms": []}], "fails", ""),
    ],
    ids=["missing", "needs", "untimed", "empty", "wrong", "raises", "no-trials"],
)
def test_a_row_that_had_figures_and_lost_them_fails(new, expected, note):
    report = compare(file(timed("a", drawn(1)), SAME), file(*new, SAME))
    assert verdict(report).verdict == expected and report.exit_code == 1
    assert note in verdict(report).note


def test_rows_that_follow_from_others_are_left_out():
    derived = [
        row("exponents/T", {}, exponent=2.0),
        row("insights/fastest", {}, median_ms=20.0, text="the fastest takes 20 ms"),
    ]
    less = [row("exponents/T", {}, needs="three sizes"), *derived[1:]]
    for other in (derived, less, []):
        report = compare(file(timed("a", drawn(1)), *derived), file(timed("a", drawn(2)), *other))
        assert [line.name for line in report.lines] == ["a"] and report.exit_code == 0


def test_the_summary_counts_what_was_compared_failed_and_slower():
    samples, right = drawn(1), row("right", {}, correct=True)
    old = file(
        *(timed(name, samples) for name in ("same", "slow", "gone", "wrong")),
        timed("both", samples, peak_memory_mb=100.0),
        timed("more", samples, peak_memory_mb=100.0),
        right,
    )
    new = file(
        timed("same", drawn(2)),
        timed("slow", drawn(3, median=30.0)),
        timed("wrong", samples, correct=False),
        timed("both", drawn(4, median=30.0), peak_memory_mb=200.0),
        timed("more", samples, peak_memory_mb=200.0),
        timed("added", samples),
        right,
    )
    report = compare(old, new)
    assert report.summary == (
        "4 compared, 2 slower, 1 more memory, 2 fails, 2 unchanged, 1 not comparable "
        "(threshold 0.05, separate runs: in CI take `versus`)"
    )
    failed = {line.name for line in report.lines if line.is_regression}
    assert failed == {"slow", "gone", "wrong", "both", "more"}


def test_a_row_whose_config_changed_fails_and_hides_behind_no_other():
    old = file(*(timed(name, drawn(1)) for name in "abcde"))
    slow = [timed(name, drawn(2, median=60.0), config={"size": 2}) for name in "bcde"]
    report = compare(old, file(timed("a", drawn(2)), *slow))
    assert report.summary.startswith("1 compared, 0 slower, 4 fails") and report.exit_code == 1
    assert {line.note for line in report.lines if line.is_regression} == {"its config differs"}


def test_a_row_that_is_right_without_times_fails_when_it_becomes_wrong():
    right, wrong = (file(row("a", {}, correct=correct)) for correct in (True, False))
    assert compare(right, wrong).exit_code == 1
    assert compare(right, right).exit_code == 0


def test_what_had_no_figures_is_not_compared():
    slow = timed("a", drawn(1, median=40.0))
    for old in (
        row("a", {"size": 2}, needs="a GPU"),
        row("a", {"size": 1}, needs="a GPU"),
        row("a", {"size": 1}, correct=False),
    ):
        report = compare(file(old, SAME), file(slow, SAME))
        assert verdict(report).verdict == "not comparable" and report.exit_code == 0
        assert verdict(report).note
    report = compare(file(SAME), file(slow, SAME))
    assert verdict(report).verdict == "not comparable" and report.exit_code == 0


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (100.0, 112.0, "more memory"),
        (0.0, 5000.0, "more memory"),
        (100.0, 107.0, "unchanged"),
        (0.0, 4.0, "unchanged"),
        (1000.0, 1040.0, "unchanged"),
        (100.0, 50.0, "unchanged"),
        (10.0, None, "fails"),
    ],
)
def test_memory_is_flagged_beyond_a_share_and_an_amount(before, now, expected):
    old, new = (file(timed("a", drawn(1), peak_memory_mb=peak)) for peak in (before, now))
    report = compare(old, new)
    assert verdict(report).verdict == expected
    assert report.exit_code == (expected != "unchanged")


@pytest.mark.parametrize("key", sorted(DEVICE))
def test_another_way_of_measuring_is_refused(key):
    old, new = file(timed("a", drawn(1))), file(timed("a", drawn(1)), **{key: "other"})
    with pytest.raises(Unusable, match=f"{key} is .* measure both alike"):
        compare(old, new)


def test_the_command_prints_a_table_writes_json_and_returns_the_verdict(tmp_path, capsys):
    old, new = turns(drawn(1, trials=24), drawn(2, median=24.0, trials=24))
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, found in zip(paths, (old, new), strict=True):
        path.write_text(json.dumps(found))
    assert run_compare(*paths, threshold=0.05, json_path=tmp_path / "out.json") == 1
    printed = capsys.readouterr().out
    assert "| a | 20" in printed and "SLOWER" in printed and "p (adjusted)" in printed
    assert "1 compared, 1 slower (threshold 0.05, trials took turns)" in printed
    held = json.loads((tmp_path / "out.json").read_text())
    assert held["exit_code"] == 1 and held["lines"][0]["verdict"] == "slower"
    assert run_compare(paths[0], paths[0]) == 0


def test_files_that_cannot_be_compared_end_with_two(tmp_path, capsys):
    good, bad, other = (tmp_path / name for name in ("good.json", "bad.json", "other.json"))
    good.write_text(json.dumps(file(timed("a", drawn(1)))))
    bad.write_text("{")
    other.write_text(json.dumps(file(timed("a", drawn(1)), device="another")))
    assert run_compare(good, bad) == 2
    assert run_compare(tmp_path / "missing.json", good) == 2
    assert run_compare(good, other) == 2
    told = capsys.readouterr().err
    assert "device is 'CPU' in OLD and 'another' in NEW" in told
    assert f"{tmp_path / 'missing.json'}: No such file" in told and "pass the JSON" in told


def test_trials_that_do_not_pair_are_refused():
    old, new = turns(drawn(1, trials=24), drawn(2, trials=24))
    shorter = copy.deepcopy(new)
    shorter["rows"][0]["samples_ms"].pop()
    with pytest.raises(Unusable, match="do not pair"):
        compare(old, shorter)


def test_a_wrong_row_fails_though_its_config_changed_or_it_is_new():
    wrong = timed("a", drawn(1), config={"size": 2}, correct=False)
    for old in (file(timed("a", drawn(1))), file(SAME)):
        report = compare(old, file(wrong, SAME))
        assert verdict(report).verdict == "fails" and report.exit_code == 1
        assert "wrong" in verdict(report).note
    still = compare(file(timed("a", drawn(1), correct=False), SAME), file(wrong, SAME))
    assert verdict(still).verdict == "not comparable"


@pytest.mark.parametrize(
    "figures",
    [
        {"median_ms": math.nan},
        {"median_ms": math.inf},
        {"median_ms": 0.0, "samples_ms": []},
        {"samples_ms": [math.nan] * 20},
        {"samples_ms": [math.nan, *drawn(1, trials=19)]},
        {"samples_ms": [0.0] * 20},
        {"peak_memory_mb": math.nan},
        {"peak_memory_mb": -1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("which", ["old", "new"])
def test_figures_that_cannot_be_measurements_fail(figures, which):
    good, bad = timed("a", drawn(1)), {**timed("a", drawn(2)), **figures}
    pair = (bad, good) if which == "old" else (good, bad)
    report = compare(*map(file, pair))
    assert verdict(report).verdict == "fails" and report.exit_code == 1
    assert f"of the {which} file is no measurement" in verdict(report).note
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_run_that_was_broken_off_is_refused():
    whole = file(timed("a", drawn(1)))
    broken = {**whole, "complete": False}
    for pair in ((whole, broken), (broken, whole)):
        with pytest.raises(Unusable, match="a run was broken off"):
            compare(*pair)


def test_files_without_a_row_that_can_be_compared_are_refused():
    timed_one, needed = timed("a", drawn(1)), row("a", {"size": 1}, needs="a GPU")
    peer = timed("peer", drawn(1), peer=True)
    of_ours = (([], []), ([], [timed_one]), ([needed], [needed]), ([needed], [timed_one]))
    for old, new in (*of_ours, ([peer], [peer]), ([peer], [peer, timed_one])):
        with pytest.raises(Unusable, match="no row of dpflash can be compared"):
            compare(file(*old), file(*new))


def test_one_launch_of_one_round_is_refused():
    with pytest.raises(Unusable, match="row 'a': 1 and 1 trials in 1 launches do not pair"):
        compare(*turns([20.0], [40.0], launches=1))
    assert compare(*turns([20.0, 20.1], [40.0, 40.1], launches=1)).exit_code == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it has no environment"),
        ({"environment": DEVICE}, "it has no environment and rows"),
        ({**file(SAME), "schema": 1}, "schema=1"),
    ],
)
@pytest.mark.parametrize("is_old", [True, False])
def test_a_malformed_file_ends_with_two_and_says_where(content, message, is_old, tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(file(SAME)))
    bad.write_text(json.dumps(content))
    assert run_compare(*((bad, good) if is_old else (good, bad))) == 2
    told = capsys.readouterr().err
    assert re.search(f"{re.escape(str(bad))}: .*{message}", told), told


def test_verdicts_that_cannot_be_written_end_with_two(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(file(SAME)))
    assert run_compare(path, path, json_path=tmp_path / "none" / "x.json") == 2
    assert "pass --json another file" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "meant"), [("heds", "heads"), ("zzz", None)])
def test_a_benchmark_that_does_not_exist_is_refused_and_a_near_one_asked_back(name, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--out", "out"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and f"NAME={name!r}: expected one of variants, " in told
    assert (f"did you mean {meant!r}?" in told) == ("did you mean" in told) == bool(meant)

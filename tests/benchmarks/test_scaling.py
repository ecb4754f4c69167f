"""The suites "scaling" and "ranks" at toy sizes; nothing here depends on how long calls take."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from dpflash.bench import isolated, output, scaling, scaling_tasks
from dpflash.bench import ranks as ranks_suite
from dpflash.bench.document import markdown
from dpflash.bench.isolated import Failed, Place, run_ranks
from dpflash.bench.picture import draw
from dpflash.bench.ranks import fill, sample_rows, training_row
from dpflash.bench.scaling import scaling_suite
from dpflash.bench.scaling_tasks import TrainingCase
from dpflash.bench.suite import Request, run_suite, wrong_rows
from dpflash.bench.timing import Effort
from dpflash.cli import main
from dpflash.clipping.device_speed import Ceilings

CASE = TrainingCase("replicated", 4, 64, vocab=32, width=32, layers=1, heads=2)
CPU = torch.device("cpu")
REQUEST = Request(device="cpu", effort=Effort(1, 2), quick=True, has_progress=False)
TINY = scaling.Sizes(
    attention={"dilated": 2048, "dense causal": 130, "sliding window": 130},
    memory={"dense causal": 512, "dilated": 1024},
    reported=((2, 2048),),
    training=[CASE, replace(CASE, scheme="fsdp2"), replace(CASE, scheme="context", batch=1)],
)


@pytest.fixture(autouse=True)
def roofs(monkeypatch):
    """Measuring them takes seconds."""
    ceilings = Ceilings({"float32": 1e9}, 1e9)
    monkeypatch.setattr("dpflash.bench.suite.measured_roofs", lambda *_, **__: ceilings)


@pytest.mark.cases(0)
def test_a_run_with_one_and_two_ranks_is_right_in_every_section(tmp_path, monkeypatch):
    # One test, since it starts some twenty processes.
    spreads = (("dilated", "contiguous"), ("dense causal", "zigzag"))
    monkeypatch.setattr(scaling, "SPREADS", spreads)
    found = run_suite(scaling_suite((1, 2), TINY), REQUEST, tmp_path)
    rows = found["rows"]
    assert found["complete"] and wrong_rows(found) == []
    assert len({row["name"] for row in rows}) == len(rows)
    environment = found["environment"]
    assert (environment["clock"], environment["threads"]) == ("wall", 1)
    by_section = {section: [] for section in ("attention", "memory", "reported", "training")}
    for row in rows:
        assert set(output.COLUMNS) <= set(row)
        by_section[row["section"]].append(row)
    timed = [row for name in ("attention", "reported", "training") for row in by_section[name]]
    for row in timed:
        assert row["correct"] is True and row["error"] < 1e-4
        is_varied = row["section"] == "training" and row["config"]["scheme"] != "context"
        assert row["trials"] == (6 if is_varied else 2)
        assert (row["ranks"] == 1) == (row["alone"] is None) and row["efficiency"] > 0
    attention = by_section["attention"]
    assert {row["config"]["mode"] for row in attention} == {"ring", "all_gather", "ulysses"}
    weak = [row for row in attention if row["config"]["scaling"] == "weak" and row["ranks"] == 2]
    assert {row["config"]["tokens"] for row in weak} == {130, 2048}
    # A token of dense attention has more pairs as T grows, one of whole segments has as many.
    more = {r["config"]["pattern"]: r["work_efficiency"] / r["efficiency"] for r in weak}
    assert more["dense causal"] == pytest.approx(131 / 66) and more["dilated"] == 1.0
    reported = [row["config"] for row in by_section["reported"]]
    assert {(config["batch"], config["backward"]) for config in reported} == {(2, False)}
    assert len(by_section["memory"]) == 2 + 2 + 2
    assert all(row["median_ms"] is None for row in by_section["memory"])
    training = {row["name"].removeprefix("training/"): row for row in by_section["training"]}
    shapes = ("strong/{0}/B4/T64", "weak/{0}/B{1}/T64", "strong/context/B1/T64")
    assert set(training) == {
        f"{shape.format(scheme, ranks)}/P{ranks}"
        for shape in shapes
        for scheme, ranks in (("replicated", 1), ("replicated", 2), ("fsdp2", 2))
    }
    for name, row in training.items():
        low, high = row["cpu_overhead_ci95"]
        assert 0 < low <= row["cpu_overhead"] <= high and row["overhead"] > 0
        if name.endswith("P1"):
            assert row["collectives"] == row["sent_bytes"] == row["plain_sent_bytes"] == 0
    weights = 4 * sum(
        weight.numel() for weight in scaling_tasks._task(CASE, CPU).build().parameters()
    )
    plain = [training[f"strong/{shape}/P2"] for shape in ("replicated/B4/T64", "context/B1/T64")]
    # By DDP one all-reduce; a context also exchanges keys, values and lengths.
    assert [row["plain_collectives"] for row in plain] == [1, 9]
    assert plain[0]["plain_sent_bytes"] == weights < plain[1]["plain_sent_bytes"]
    assert all(row["collectives"] > row["plain_collectives"] for row in plain)


def returned(seconds, alone=None, *, correct=True, error=1e-6, gain=1, **more):
    """The result of a function for a row on one rank."""
    found = {"error": error, "correct": correct}
    if correct:
        found |= {"seconds": seconds, "peak_memory_mb": 3.0, "tokens": 64 * gain}
        found |= {"tokens_alone": 64}
    return {**found, **({"alone_seconds": alone} if alone else {}), **more}


def row_of(*ranks, **options):
    row = output.row("a", {}, section="training", ranks=len(ranks))
    fill(row, ranks, **options)
    return row


def test_efficiency_is_throughput_over_that_of_as_many_single_ranks():
    row = row_of(returned([1.0, 2.0], [6.0, 6.0]), *[returned([2.0, 1.5])] * 3)
    # The slowest rank counts: 2 and 2 seconds, beside 6 of one rank.
    assert row["median_ms"] == 2000 and row["efficiency"] == 0.75 and row["speedup"] == 3.0
    assert row["efficiency_ci95"] == [0.75, 0.75] and row["tokens_per_s"] == 32
    # In weak scaling both ranks together have twice the tokens.
    weak = row_of(returned([2.0, 2.0], [1.6, 1.6], gain=2), returned([2.0, 2.0], gain=2))
    assert weak["efficiency"] == pytest.approx(0.8)
    alone = row_of(returned([1.0, 1.0]))
    assert alone["efficiency"] == 1.0 and alone.get("efficiency_ci95") is None


def test_efficiency_of_work_counts_pairs_and_the_median_is_over_the_rounds():
    edges = {"edges": 528 + 1552, "edges_alone": 528}
    row = row_of(
        returned([2.0, 1.0, 8.0], [4.0, 4.0, 4.0], gain=2, **edges),
        returned([1.0, 3.0, 4.0], gain=2, **edges),
    )
    # The slowest takes 2, 3 and 8 seconds: 3/4 of one rank alone, which had half of the tokens.
    assert row["efficiency"] == pytest.approx(2 / 0.75 / 2)
    assert row["work_efficiency"] == pytest.approx((528 + 1552) / 528 / 0.75 / 2)


def test_a_private_step_is_compared_with_the_plain_one_of_the_same_ranks():
    def rank(seconds, plain, sent):
        more = {"plain_seconds": plain, "plain_cpu_seconds": [0.5, 0.5], "plain_collectives": 1}
        more |= {"cpu_seconds": [sent, sent], "sent_bytes": sent, "plain_sent_bytes": 2}
        return returned(seconds, collectives=3, **more)

    ranks = (rank([4.0, 4.0], [1.0, 1.0], 0.5), rank([1.0, 1.0], [2.0, 2.0], 2.5))
    row = row_of(*ranks)
    # The slowest rank's 4 seconds over 2; 0.5 and 2.5 of the processor over 0.5 twice.
    assert row["overhead"] == 2.0 and row["overhead_ci95"] == [2.0, 2.0]
    assert row["cpu_overhead"] == 3.0 and row["cpu_overhead_ci95"] == [3.0, 3.0]
    assert (row["plain_ms"], row["cpu_ms"], row["plain_cpu_ms"]) == (2000, 1500, 500)
    row["sent_bytes"], row["plain_sent_bytes"] = 3 * 2**20, 2**19
    cells = [cell(row) for _, cell in ranks_suite.OVER_PLAIN]
    assert cells == ["2.00 [2.00, 2.00]", "3.00 [3.00, 3.00]", "3 (1)", "3.00 (0.50)"]
    assert "cpu_overhead" not in row_of(*ranks, is_short=True)


def test_data_parallel_ranks_without_a_sample_are_not_launched(monkeypatch):
    monkeypatch.setattr(ranks_suite, "usable_cores", lambda: 8)
    row = training_row("private_training", CASE, CASE, 8, REQUEST, REQUEST.calls)
    assert row["needs"].startswith("8 samples") and row["correct"] is None


def test_few_calls_have_a_range_and_no_interval():
    row = row_of(returned([1.0, 2.0, 6.0], [4.0, 4.0, 4.0]), is_short=True)
    assert row["range_ms"] == [1000, 6000] and row["median_ms"] == 2000 and row["trials"] == 3
    assert row["ci95_ms"] is None and row.get("efficiency_ci95") is None and row["efficiency"]


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_ranks_whose_sum_is_wrong_have_no_figures(error, tmp_path):
    row = row_of(returned([1.0]), returned(None, correct=False, error=error))
    assert row["correct"] is False and row["error"] == (0.5 if error == 0.5 else math.inf)
    assert row["median_ms"] is None and "efficiency" not in row
    row["config"] = {"scheme": "fsdp2", "scaling": "weak", "batch": 1, "tokens": 8}
    found = {"environment": {"quick": True, "device": "CPU", "date": ""}, "rows": [row]}
    found["complete"] = True
    suite = scaling_suite()
    assert "| NO |" in markdown(suite, found)
    output.write_picture(tmp_path / "x.png", draw(suite, found))


def test_noise_does_not_carry_a_timed_model_off(monkeypatch):
    """Weights that grew made each step slower than the one before, by half in 7 steps."""
    trained = []

    def timed(steps, **_):
        trained.append(steps[""].__self__)
        return {name: [(1.0, 1.0)] for name in steps}

    monkeypatch.setattr(scaling_tasks, "time_steps", timed)
    for check in ("_training_error", "_plain_error"):
        monkeypatch.setattr(scaling_tasks, check, lambda place, case: 0.0)
    monkeypatch.setattr(Place, "all_true", lambda self, value: value)
    monkeypatch.setattr(Place, "barrier", lambda self: None)
    torch.manual_seed(0)
    place = Place(0, 1, torch.device("cpu"))
    (figures,) = scaling_tasks.measure_training(place, CASE, CASE, Effort(1, 2))
    assert figures["correct"]
    before = scaling_tasks._task(CASE, place.device).build().parameters()
    moved = [
        float((x - y).detach().abs().max())
        for x, y in zip(before, trained[0].model.parameters(), strict=True)
    ]
    assert 0 < max(moved) < 0.1


def test_a_wrong_plain_step_leaves_a_row_without_figures(monkeypatch):
    monkeypatch.setattr(scaling_tasks, "_training_error", lambda place, case: 0.0)
    monkeypatch.setattr(scaling_tasks, "_plain_error", lambda place, case: 0.5)
    monkeypatch.setattr(Place, "all_true", lambda self, value: value)
    found = scaling_tasks.measure_training(Place(0, 1, CPU), CASE, CASE, Effort(1, 2))
    assert found == [{"error": 0.5, "correct": False}]


def test_the_check_of_a_training_step_finds_a_wrong_bound(monkeypatch):
    place = Place(0, 1, torch.device("cpu"))
    assert scaling_tasks._training_error(place, CASE) < scaling_tasks._TOLERANCE
    monkeypatch.setattr(scaling_tasks, "MAX_GRAD_NORM", 1.01 * scaling_tasks.MAX_GRAD_NORM)
    # The other side of the comparison has the bound of `private`.
    assert scaling_tasks._training_error(place, CASE) == pytest.approx(0.01, rel=0.01)


def test_the_ranks_suite_never_shares_cores(monkeypatch):
    asked = []

    def run(function, ranks, **given):
        asked.append(ranks)
        return [[returned([2.0, 2.0], [6.0, 6.0])]] * ranks

    monkeypatch.setattr(ranks_suite, "usable_cores", lambda: 3)
    monkeypatch.setattr(ranks_suite, "run_ranks", run)
    more = training_row("private_training", CASE, CASE, 4, REQUEST, REQUEST.calls)
    assert more["needs"] == "4 cores: this machine has 3" and not asked
    row = training_row("private_training", CASE, CASE, 3, REQUEST, REQUEST.calls)
    assert asked == [3] and row["tasks_per_s"] == 0.5 and not row["oversubscribed"]
    assert ranks_suite.step_seconds(CASE, REQUEST) == 2.0


def test_a_launch_that_fails_is_a_row_and_the_others_are_measured(monkeypatch):
    def run(function, ranks, **given):
        if ranks == 2:
            raise Failed("rank 1 of 2 failed")
        return [[returned([1.0, 1.0])]] * ranks

    monkeypatch.setattr(ranks_suite, "run_ranks", run)
    *_, part = scaling_suite((1, 2, 3), TINY).plan(REQUEST)
    rows = list(part(REQUEST))
    failed = {row["failure"] for row in rows if row["ranks"] == 2}
    assert failed == {"dpflash.bench.isolated.Failed: rank 1 of 2 failed"}
    assert all(row["correct"] for row in rows if row["ranks"] != 2) and len(rows) == 3 + 5 + 5


@pytest.mark.parametrize(
    ("seconds", "effort"), [(0.1, Effort(2, 5)), (2.0, Effort(1, 4)), (4.0, None)], ids=str
)
def test_slow_steps_are_timed_with_fewer_calls_or_not_at_all(monkeypatch, seconds, effort):
    efforts = []

    def measure(section, case, alone, ranks, request, effort):
        efforts.append(effort)
        return ranks_suite.blank_row(section, f"B{case.batch}/T{case.tokens}", case, ranks)

    monkeypatch.setattr(ranks_suite, "step_seconds", lambda case, request: seconds)
    monkeypatch.setattr(ranks_suite, "training_row", measure)
    rows = list(sample_rows(Request(device="cpu", effort=Effort(2, 5), max_seconds=10.0)))
    assert len(rows) == 2 * 5 and len({row["name"] for row in rows}) == 10
    assert efforts == ([] if effort is None else [effort] * 10)
    if effort is None:
        assert all(" step takes 4 s, " in row["needs"] for row in rows)


TASKS = """
import os, threading

def fail(place, plus):
    if place.rank == 1:
        raise ArithmeticError("one sample too many")
    place.barrier()

def die(place, plus):
    if place.rank == 1:
        os._exit(7)
    place.barrier()

def hang(place, plus):
    if place.rank == 1:
        threading.Event().wait()

def rank(place, plus):
    return place.rank + plus, place.all_true(place.rank == 0)
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Functions that other processes can import."""
    (tmp_path / "scaling_test_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scaling_test_tasks", raising=False)
    import scaling_test_tasks

    return scaling_test_tasks


@pytest.mark.cases(0)
def test_a_rank_that_fails_is_named_and_nobody_stays_behind(tasks, monkeypatch):
    given = {"device": "cpu", "plus": 5}
    before = set(torch.multiprocessing.active_children())
    assert run_ranks(tasks.rank, 2, timeout=60.0, **given) == [(5, False), (6, False)]
    for function, timeout, message in (
        (tasks.fail, 60.0, "rank 1 of 2 failed(.|\n)*one sample too many"),
        (tasks.die, 60.0, "rank 1 of 2 failed: its process ended with exit code 7"),
        (tasks.hang, 0.5, "did not end within timeout=0.5 seconds"),
    ):
        if function is tasks.hang:
            monkeypatch.setattr(isolated, "_SECONDS_TO_START", 0.5)
        with pytest.raises(Failed, match=message):
            run_ranks(function, 2, timeout=timeout, **given)
    assert set(torch.multiprocessing.active_children()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: expected an integer >= 1"),
        (["--ranks", "1,-2"], "--ranks -2"),
        (["--ranks", "1,100000"], "--ranks 100000: this machine has"),
        (["--ranks", "two"], "--ranks 'two': expected numbers between commas"),
        (["--sections", "train"], "--sections 'train'"),
        (["--device", "tpu"], "--device 'tpu'"),
    ],
)
def test_the_command_refuses_by_name_and_writes_nothing(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["bench", "scaling", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_the_command_asks_for_what_its_arguments_say(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        ranks_suite, "run_ranks", lambda *given, **more: asked.append(given[1]) or [[]] * given[1]
    )
    monkeypatch.setattr(scaling, "FULL_SIZES", TINY)
    monkeypatch.setattr(scaling, "QUICK_SIZES", TINY)
    options = ["--quick", "--ranks", "2,1,2"]
    assert main(["bench", "scaling", "--out", str(tmp_path), "--device", "cpu", *options]) == 1
    assert asked[:2] == [2, 1] and set(asked) == {1, 2}
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"attention", "memory", "reported", "training"}
    assert "memory/strong/dense causal, zigzag/ring/T512/P2" in capsys.readouterr().err
    asked.clear()
    options = ["--quick", "--ranks", "2", "--sections", "reported", "--device", "cpu"]
    main(["bench", "scaling", "--out", str(tmp_path), *options])
    rows = json.loads((tmp_path / "scaling-reported.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"reported"} and set(asked) == {2}

"""The workers benchmark, at sizes of a toy; nothing here depends on how long anything takes."""

import math
from dataclasses import replace

import pytest
import torch

from dpflash.bench import output as results
from dpflash.bench import scaling_tasks, workers_suite
from dpflash.bench.document import key_insights
from dpflash.bench.reported import reported_rows
from dpflash.bench.reports import DP_FLASH_ATTENTION, TORCHBRIDGE
from dpflash.bench.scaling_tasks import TrainingCase
from dpflash.bench.suite import Request
from dpflash.bench.timing import Effort
from dpflash.bench.workers import Place
from dpflash.bench.workers_suite import SUITE, Task, sample_rows, sample_tasks, task_row

CASE = TrainingCase("replicated", 4, 64, vocab=32, width=32, layers=1, heads=2)
REQUEST = Request(device="cpu", effort=Effort(1, 2), has_progress=False)


def said(seconds, alone=None, correct=True, error=1e-6):
    told = {"error": error, "correct": correct}
    if correct:
        told.update(seconds=seconds, peak_memory_mb=3.0, parameters=7)
    return {**told, **({"alone_seconds": alone} if alone else {})}


def test_efficiency_is_throughput_over_that_of_as_many_single_workers():
    task = Task("private_training", CASE, CASE)
    row = task_row(task, 4, [said([1.0, 2.0], [6.0, 6.0]), *[said([2.0, 1.5])] * 3])
    # The slowest worker counts: 2 and 2 seconds, beside 6 of one worker.
    assert row["median_ms"] == 2000 and row["efficiency"] == 0.75
    assert row["efficiency_ci95"] == [0.75, 0.75] and row["speedup"] == 3.0
    assert row["tasks_per_s"] == 0.5 and row["tokens_per_s"] == 128


def test_weak_scaling_counts_the_tokens_of_all_workers():
    task = Task("context", replace(CASE, tokens=128), CASE)
    row = task_row(task, 2, [said([2.0, 2.0], [1.6, 1.6]), said([2.0, 2.0])])
    assert row["efficiency"] == pytest.approx(0.8)


def test_one_worker_is_what_the_others_are_compared_with():
    row = task_row(Task("private_training", CASE, CASE), 1, [said([1.0, 1.0])])
    assert row["efficiency"] == 1.0 and row["efficiency_ci95"] is None


def test_further_workers_are_told_of_in_the_document():
    task = Task("private_training", CASE, CASE)
    rows = [
        task_row(task, 1, [said([6.0, 6.0])]),
        task_row(task, 4, [said([2.0, 2.0], [6.0, 6.0]), *[said([2.0, 1.5])] * 3]),
    ]
    # Neither has a baseline, and only their own insights may follow from them.
    assert key_insights(rows) == ["2 rows were timed."]
    assert key_insights([*rows, *SUITE.derive(rows)])[0] == (
        "4 workers with B = 4, T = 64 train 3.00 [3.00, 3.00] times the tokens/s of one, "
        "75% of 4 times."
    )


def test_noise_does_not_carry_a_timed_model_off(monkeypatch):
    """Weights that grew made each step slower than the one before, by half in 7 steps."""
    trained = []

    def timed(steps, **_):
        trained.append(steps["step"].__self__)
        for _ in range(25):
            steps["step"]()
        return {name: [1.0] for name in steps}

    monkeypatch.setattr(scaling_tasks, "time_steps", timed)
    torch.manual_seed(0)
    monkeypatch.setattr(Place, "all_say", lambda self, said: said)
    monkeypatch.setattr(Place, "barrier", lambda self: None)
    place = Place(0, 1, torch.device("cpu"))
    assert scaling_tasks.measure_training(place, CASE, CASE, Effort(1, 2))["correct"]
    before = scaling_tasks.build_model(CASE).parameters()
    moved = [
        float((x - y).detach().abs().max())
        for x, y in zip(before, trained[0].model.parameters(), strict=True)
    ]
    assert 0 < max(moved) < 0.1


def test_workers_whose_sum_is_wrong_have_no_figures():
    told = [said(None, correct=False, error=0.5), said(None, correct=False, error=1e-6)]
    row = task_row(Task("private_training", CASE, CASE), 2, told)
    assert row["correct"] is False and row["error"] == 0.5
    assert row["median_ms"] is None and "efficiency" not in row


def test_workers_whose_error_is_no_number_are_infinitely_wrong():
    told = [said([1.0, 1.0]), said(None, correct=False, error=math.nan)]
    row = task_row(Task("private_training", CASE, CASE), 2, told)
    assert row["correct"] is False and row["error"] == math.inf


def test_cores_are_never_shared(monkeypatch):
    def never(*_, **__):
        raise AssertionError("workers were started")

    monkeypatch.setattr(workers_suite, "usable_cores", lambda: 3)
    monkeypatch.setattr(workers_suite, "run_workers", never)
    row = workers_suite._measured(Task("private_training", CASE, CASE), 4, REQUEST)
    assert row["needs"] == "4 cores: this machine has 3" and row["median_ms"] is None
    with pytest.raises(AssertionError):
        workers_suite._measured(Task("private_training", CASE, CASE), 3, REQUEST)


def test_what_takes_too_long_is_neither_measured_nor_tried_in_a_larger_task(monkeypatch):
    tried, measured = [], []

    def seconds_of(case, request):
        tried.append((case.batch, case.tokens))
        return case.batch * case.tokens / 2048

    def measure(task, workers, request):
        measured.append((task.case.batch, task.case.tokens, workers))
        return task.row(workers)

    monkeypatch.setattr(workers_suite, "_measured", measure)
    request = replace(REQUEST, max_seconds=3.0)  # Of three calls.
    rows = list(sample_rows(request, seconds_of))
    assert tried == [(8, 256), (8, 512), (16, 256)]
    assert measured == [(8, 256, workers) for workers in (1, 2, 4, 8, 16)]
    assert len(rows) == 9 * 5 and len({row["name"] for row in rows}) == 45
    reasons = [row["needs"] for row in rows if row.get("needs")]
    assert len(reasons) == 40
    assert sum("of B 8, T 512 already" in reason for reason in reasons) == 25
    assert all(" takes 2 s, " in reason for reason in reasons)


def test_the_tasks_are_those_of_the_report():
    tasks = sample_tasks(REQUEST)
    assert {case.batch for case in tasks} == {8, 16, 32} and len(tasks) == 9
    assert all(case.heads == 12 and case.width == 12 * 64 for case in tasks)


def test_every_row_of_the_reports_has_one_of_ours(monkeypatch):
    monkeypatch.setattr(workers_suite, "_measured", lambda task, workers, _: task.row(workers))
    plan = SUITE.plan(REQUEST)
    rows = [
        row
        for part in plan
        for row in (sample_rows(REQUEST, lambda *_: 0.0) if part is sample_rows else part(REQUEST))
    ]
    answers = [
        answer
        for _, reported in reported_rows([DP_FLASH_ATTENTION, TORCHBRIDGE])
        for answer in reported.answers
        if answer.suite == SUITE.name
    ]
    assert len(answers) >= 13
    for answer in answers:
        assert any(answer.fits(row["config"], row) for row in rows), answer
    for table in SUITE.tables:
        (row, *_) = [row for row in rows if row["section"] == table.section]
        assert all(results.shown(cell(row)) for _, cell in table.columns)


@pytest.mark.slow
def test_two_workers_make_the_sum_of_one(monkeypatch):
    monkeypatch.setattr(workers_suite, "usable_cores", lambda: 2)
    row = workers_suite._measured(Task("private_training", CASE, CASE), 2, REQUEST)
    assert row["correct"] and row["error"] < 1e-4 and row["trials"] == 2
    assert row["efficiency"] > 0 and row["workers"] == 2
    assert workers_suite.step_seconds(CASE, REQUEST) > 0

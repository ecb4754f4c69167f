"""The scaling benchmark, at sizes of a toy; nothing here depends on how long anything takes."""

import json
import math
import sys

import pytest
import scipy.stats
import torch

from dpflash.bench import (
    environment,
    memory,
    results,
    scaling,
    scaling_document,
    scaling_picture,
    timing,
)
from dpflash.bench.scaling_model import LINKS, Link, Load, link_of, load_of, step_time
from dpflash.bench.scaling_tasks import PATTERNS, TrainingCase
from dpflash.bench.suite import wrong_rows
from dpflash.bench.workers import TaskError, run_workers
from dpflash.cli import main
from dpflash.distributed import edges_per_rank, sent_bytes
from dpflash.patterns import Dense, Dilated, SlidingWindow

TINY = scaling.Sizes(
    heads=4,
    head_dim=16,
    strong={"dense causal": 130, "dilated": 2048},
    weak={"sliding window": 96},
    memory=(("dense causal", "zigzag", ("ring",), 512),),
    reported=((1024, 2),),
    checked_tokens=67,
    training=TrainingCase("replicated", 4, 64, vocab=32, width=32, layers=1, heads=2),
    training_part=2,
    modelled={"weak": 1024, "strong": 16384},
    modelled_workers=(8, 16),
)


@pytest.mark.slow
def test_a_run_with_one_and_two_workers_is_right_in_every_part(tmp_path):
    # One test, since one run takes half a minute.
    path = tmp_path / "scaling.json"
    request = scaling.Request.quick(
        workers=(1, 2),
        effort=timing.Effort(1, 2),
        sizes=TINY,
        flops=(1e14,),
        timeout=120.0,
        has_progress=False,
    )
    measured = scaling.run_scaling(request, path), path
    assert wrong_rows(measured[0]) == []
    check_that_a_run_leaves_json_markdown_and_a_picture(measured)
    check_that_every_row_has_the_columns_and_every_configuration_was_checked(measured)
    check_that_counted_bytes_are_the_predicted_ones(measured)
    check_that_what_autograd_keeps_falls_with_the_number_of_workers(measured)
    check_that_the_model_is_marked_and_the_reports_say_what_is_wrong(measured)


def rows_of(measured, section):
    return [row for row in measured[0]["rows"] if row["section"] == section]


def check_that_a_run_leaves_json_markdown_and_a_picture(measured):
    found, path = measured
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    assert found["complete"]
    keys = {"date", "device", "cores", "threads", "torch", "dpflash", "commit", "trials"}
    assert keys <= set(found["environment"])
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    text = path.with_suffix(".md").read_text()
    for title in ("strong scaling", "weak scaling", "Memory", "Model, not a measurement"):
        assert title in text
    for assumption in found["assumptions"]:
        assert assumption in text


def check_that_every_row_has_the_columns_and_every_configuration_was_checked(measured):
    rows = measured[0]["rows"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert set(results.COLUMNS) <= set(row)
        if row["kind"] == "measurement":
            assert row["correct"] is True and row["error"] < 1e-4
            assert row["peak_memory_mb"] is None or row["peak_memory_mb"] >= 0
    for row in rows_of(measured, "attention") + rows_of(measured, "training"):
        low, high = row["ci95_ms"]
        assert 0 < low <= row["median_ms"] <= high
        assert row["trials"] == 2
        assert row["efficiency"] > 0
        assert row["workers"] == 2 or (row["efficiency"] == 1 and row["alone"] is None)
        assert row["workers"] == 1 or row["alone"]["trials"] == 2


def check_that_counted_bytes_are_the_predicted_ones(measured):
    sections = ("attention", "reported", "training")
    rows = [row for section in sections for row in rows_of(measured, section)]
    assert all(row["bytes_equal"] for row in rows)
    assert all(row["bytes_counted"] == row["bytes_predicted"] for row in rows)
    modes = {row["config"]["mode"] for row in rows_of(measured, "attention")}
    assert modes == {"ring", "all_gather", "ulysses"}
    dense = [r for r in rows_of(measured, "attention") if r["what"] == "dense causal, zigzag"]
    assert all(sum(map(sum, row["bytes_counted"])) > 0 for row in dense if row["workers"] == 2)
    # Shards that hold whole segments need nothing of each other.
    dilated = [r for r in rows_of(measured, "attention") if r["what"] == "dilated"]
    ring = [r for r in dilated if r["config"]["mode"] == "ring" and r["workers"] == 2]
    assert [row["bytes_counted"] for row in ring] == [[[0, 0], [0, 0]]]
    for row in rows_of(measured, "training"):
        assert (sum(row["bytes_counted"]) > 0) == (row["workers"] == 2)
        assert sum(row["bytes_by_purpose"].values()) == row["bytes_counted"][0]


def check_that_what_autograd_keeps_falls_with_the_number_of_workers(measured):
    saved = {row["workers"]: row["saved_mb"] for row in rows_of(measured, "memory")}
    expected = (4 * 512 * 4 * 16 + 512 * 4) * 4 / 2**20  # q, k, v, o and lse, float32
    assert saved == pytest.approx({1: expected, 2: expected / 2})


def check_that_the_model_is_marked_and_the_reports_say_what_is_wrong(measured):
    found, path = measured
    model = rows_of(measured, "model")
    assert {row["kind"] for row in model} == {"model"}
    assert {row["workers"] for row in model} == {8, 16}
    assert all(row["median_ms"] is None and row["trials"] == 0 for row in model)
    assert all(0 < row["efficiency"] <= row["efficiency_overlapped"] <= 1 for row in model)
    given = [row["config"] for row in model if row["config"]["flops_source"].startswith("given")]
    assert {(config["flops"], config["dtype"]) for config in given} == {(1e14, "bfloat16")}
    theirs = [row for row in found["reported"] if "tokens" in row]
    assert [row["memory_mb"] for row in theirs] == [113, 340, 518, 816, 1038]
    assert "the batch is 2 in the first two rows" in path.with_suffix(".md").read_text()


def test_what_is_wrong_has_no_figures_and_does_not_spoil_the_document(tmp_path):
    case = scaling.AttentionCase("dilated", 64, 2, 8)
    said = [{"error": 0.5, "correct": False}, {"error": 1e-7, "correct": False}]
    row = scaling._attention_row("attention", "strong", "dilated", case, 2, 64, said)
    assert row["correct"] is False and row["median_ms"] is None and row["error"] == 0.5
    assert "tokens_per_s" not in row and "bytes_counted" not in row
    (job,) = scaling._memory_jobs(scaling.Request(sizes=TINY), 1)
    (remembered,) = job.rows(said[:1])
    assert remembered["peak_memory_mb"] is None
    told = environment.environment("cpu", 1) | {"quick": True, "trials": 2}
    found = {"environment": told, "rows": [row, remembered], "reported": [], "assumptions": []}
    assert wrong_rows(found) == [row["name"], remembered["name"]]
    assert scaling_document.markdown(found).count("| NO |") == 2
    results.write_picture(tmp_path / "x.png", scaling_picture.draw(found))


def test_efficiency_is_the_median_of_ratios_to_one_worker_in_the_same_round():
    case = scaling.AttentionCase("dense causal", 64, 2, 8)
    common = {"error": 0.0, "correct": True, "peak_memory_mb": 1.0}
    common |= {"counted": [1, 2], "predicted": [1, 2]}
    said = [
        {**common, "seconds": [2.0, 1.0, 8.0], "alone_seconds": [4.0, 4.0, 4.0]},
        {**common, "seconds": [1.0, 3.0, 4.0]},
    ]
    # The slowest takes 2, 3 and 8 seconds: 3/4 of one worker alone, which had half of the tokens.
    row = scaling._attention_row("attention", "weak", "dense causal", case, 2, 32, said)
    assert row["efficiency"] == pytest.approx(2 / 0.75 / 2)
    edges = 64 * 65 / (32 * 33)
    assert row["work_efficiency"] == pytest.approx(edges / 0.75 / 2)
    assert row["median_ms"] == pytest.approx(3e3)
    assert row["tokens_per_s"] == pytest.approx(64 / 3)


def test_the_time_of_a_step_by_hand():
    load = Load(greatest=1000, mean=800.0, sent=1_000_000, messages=4)
    taken = step_time(load, 2, 28e3, Link("test", bandwidth=1e6, latency=0.25))
    assert taken == pytest.approx((1.0, 2.0, 3.0, 2.0, 0.8))


def test_the_load_of_dense_causal_attention_by_hand():
    load = load_of(Dense(causal=True), 4, 1, 1, torch.float32, 2, "contiguous")
    # Worker 0 has 1 + 2 pairs, worker 1 has 3 + 4; keys and values of 2 tokens go twice from 0 to
    # 1, their gradients come back.
    assert load == Load(greatest=7, mean=5.0, sent=2 * (2 * 2 * 4), messages=2)


@pytest.mark.parametrize(
    ("pattern", "tokens", "workers", "sharding"),
    [
        (Dense(causal=True), 1024, 4, "contiguous"),
        (Dense(causal=True), 768, 3, "zigzag"),
        (SlidingWindow(window=40, causal=True), 512, 16, "contiguous"),
        (Dilated(segment_lengths=(32, 128), dilation_rates=(1, 2)), 512, 16, "contiguous"),
        (Dilated(segment_lengths=(32, 128), dilation_rates=(1, 2)), 2048, 16, "contiguous"),
    ],
    ids=["dense", "zigzag", "window", "dilated across", "dilated within"],
)
def test_the_load_of_many_workers_is_what_the_library_counts(pattern, tokens, workers, sharding):
    load = load_of(pattern, tokens, 2, 8, torch.bfloat16, workers, sharding)
    edges = edges_per_rank(pattern, tokens, 2, workers, sharding)
    sent = [
        sum(
            sent_bytes(
                pattern,
                tokens,
                2,
                head_dim=8,
                dtype=torch.bfloat16,
                world_size=workers,
                sharding=sharding,
                rank=rank,
            )
        )
        for rank in range(workers)
    ]
    assert load[:3] == (max(edges), pytest.approx(sum(edges) / workers), max(sent))


def test_the_model_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="tokens=10 over 4 workers"):
        load_of(Dense(causal=True), 10, 1, 1, torch.float32, 4, "contiguous")
    with pytest.raises(ValueError, match="the model knows"):
        load_of(Dense(), 8, 1, 1, torch.float32, 4, "contiguous")
    with pytest.raises(ValueError, match="segments of 512 tokens over shards of 300"):
        load_of(PATTERNS["dilated"], 1200, 1, 1, torch.float32, 4, "contiguous")


def test_links_have_the_speeds_that_are_asked_for():
    assert link_of(None, None, None) == list(LINKS.values())
    (link,) = link_of("infiniband", None, 3.0)
    assert (link.bandwidth, link.latency) == (50e9, 3e-6)
    (link,) = link_of(None, 25.0, None)
    assert (link.bandwidth, link.latency) == (25e9, 5e-6)


def test_statistics_are_those_of_scipy_without_the_outlier():
    milliseconds = [float(value) for value in range(100, 120)]
    found = timing.summarize([value / 1e3 for value in (*milliseconds, 1e4)])
    assert (found.trials, found.outliers) == (21, 1)
    assert found.median_ms == pytest.approx(109.5)
    # The interval of the median by order statistics, from the binomial law.
    k = int(scipy.stats.binom.ppf(0.025, 20, 0.5))
    assert found.ci95_ms == pytest.approx((milliseconds[k - 1], milliseconds[20 - k]))
    assert found.cv == pytest.approx(scipy.stats.variation(milliseconds, ddof=1))
    assert not found.high_variance
    assert timing.summarize([1e-3, 2e-3, 3e-3]).high_variance


def test_few_trials_have_their_range_for_an_interval():
    found = timing.summarize([0.001, 0.003, 0.002])
    assert found.ci95_ms == pytest.approx((1.0, 3.0)) and found.median_ms == pytest.approx(2.0)
    assert timing.summarize([0.001]).cv is None
    with pytest.raises(ValueError, match="at least one trial"):
        timing.summarize([])


def test_calls_take_turns_and_warm_ups_do_not_count():
    called = []
    steps = {name: lambda name=name: called.append(name) for name in "ab"}
    stopwatch = timing.Stopwatch(torch.device("cpu"), wall=True)
    seconds = timing.time_steps(
        steps,
        effort=timing.Effort(1, 2),
        stopwatch=stopwatch,
        before=lambda: called.append("-"),
    )
    assert "".join(called) == "-a-b" + "-b-a" + "-a-b"
    assert [len(seconds[name]) for name in "ab"] == [2, 2]


def test_memory_of_a_call_and_of_what_autograd_keeps():
    x = torch.ones(2**20, requires_grad=True)
    assert memory.saved_bytes(lambda: x.exp().exp()) == 2 * 4 * 2**20
    found = memory.peak_growth(lambda: torch.ones(2**24), torch.device("cpu"))
    if found is not None:
        assert 60 < found < 100


def test_json_is_whole_and_has_no_number_that_is_none(tmp_path):
    path = tmp_path / "x.json"
    entry = results.row("a", {"n": 1}, cv=math.nan)
    results.write_json(path, {"environment": {}, "rows": [entry]})
    assert json.loads(path.read_text())["rows"][0]["cv"] is None
    with pytest.raises(ValueError, match="lacks"):
        results.write_json(path, {"environment": {}, "rows": [{"name": "a"}]})
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_the_environment_is_told():
    found = environment.environment("cpu", 3)
    assert found["threads"] == 3 and found["cores"] >= 1 and found["device"].startswith("CPU")


TASKS = """
import os, threading

def fail(place):
    if place.rank == 1:
        raise ArithmeticError("one sample too many")
    place.barrier()

def die(place):
    if place.rank == 1:
        os._exit(7)
    place.barrier()

def hang(place):
    if place.rank == 1:
        threading.Event().wait()

def rank(place, plus):
    return place.rank + plus
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Functions that other processes can import."""
    (tmp_path / "scaling_test_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scaling_test_tasks", raising=False)
    import scaling_test_tasks

    return scaling_test_tasks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timeout", "said"),
    [
        ("fail", 60.0, "worker 1 of 2 failed(.|\n)*one sample too many"),
        ("die", 60.0, "worker 1 of 2 died with exit code 7"),
        ("hang", 0.5, r"task 2 of 2 did not end within timeout=0.5 seconds on workers \[1\]"),
    ],
)
def test_a_worker_that_fails_is_named_and_nobody_stays_behind(tasks, name, timeout, said):
    work = [(tasks.rank, {"plus": 5}), (getattr(tasks, name), {})]
    told = run_workers(work, 2, device="cpu", timeout=timeout)
    found = []
    with pytest.raises(TaskError, match=said):
        found += told
    # The failure may be known before what the other worker did before it.
    assert found in ([], [[5, 6]])
    children = [c for c in torch.multiprocessing.active_children() if c.name.startswith("Spawn")]
    assert not children


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "workers=0: expected an integer >= 1"),
        (["--workers", "1,-2"], "workers=-2"),
        (["--workers", "1,100000"], "workers=100000: this machine has"),
        (["--workers", "two"], "workers='two': expected numbers between commas"),
        (["--link", "wire"], "link='wire': expected one of"),
        (["--link-gbps", "0"], "link_gbps=0.0"),
        (["--link-latency-us", "-1"], "link_latency_us=-1.0"),
        (["--flops", "nan"], "flops=nan"),
        (["--sections", "memory,speed"], "sections='speed'"),
        (["--device", "tpu"], "device='tpu'"),
        (["--timeout", "0"], "timeout=0.0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, said, tmp_path, capsys):
    status = main(["bench", "scaling", "--out", str(tmp_path / "out"), *arguments])
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_workers_without_a_gpu_of_their_own_are_refused(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--device", "cuda"]
    assert main(["bench", "scaling", *out]) == 2
    assert "workers=4 on 0 GPUs" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "scaling", "--out", str(tmp_path / "file")]) == 2
    assert "it cannot be a folder" in capsys.readouterr().err


def test_the_command_asks_for_what_its_arguments_say(tmp_path, monkeypatch):
    asked = []
    nothing = {"rows": []}
    monkeypatch.setattr(scaling, "run_scaling", lambda *given: asked.append(given) or nothing)
    options = ["--quick", "--workers", "2,1,2", "--flops", "1e15", "--sections", "memory,model"]
    assert main(["bench", "scaling", "--out", str(tmp_path / "a"), *options]) == 0
    ((request, path),) = asked
    assert request.workers == (2, 1) and request.effort == timing.QUICK
    assert request.flops == (1e15,) and request.sections == ["memory", "model"]
    assert path == tmp_path / "a" / "scaling.json"


def test_a_failure_is_shown_with_status_1(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise TaskError("worker 1 of 2 failed")

    monkeypatch.setattr(scaling, "run_scaling", fail)
    assert main(["bench", "scaling", "--out", str(tmp_path)]) == 1
    assert "worker 1 of 2 failed" in capsys.readouterr().err

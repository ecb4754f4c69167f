"""The attention benchmark: its definitions and its check are right, and its scripts run."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _attention_cases

    return _attention_cases


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _attention_timing

    return _attention_timing


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_attention

    return bench_attention


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tune_attention

    return tune_attention


def run_script(name, *arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)


def make_case(cases, pattern, causal, tokens=320, batch=2, heads=3):
    return cases.Case(pattern, causal, tokens, batch, heads, 16, "fp32", "cpu")


FIXED = ["dense", "sliding_window", "documents", "dilated", "block_sparse", "hierarchical"]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", [*FIXED, "million"])
def test_the_elementwise_definition_is_the_mask_of_the_pattern(cases, pattern, causal):
    if pattern == "million":
        tokens, heads = 2600, 2
    else:
        tokens, heads = (1280, 3) if pattern == "block_sparse" else (2600, 3)
    case = make_case(cases, pattern, causal, tokens, heads=heads)
    seen, per_head = cases.multiplicity(case)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    masks = case.definition.mask(tokens, heads)
    for head in range(heads):
        assert torch.equal(seen(head, i, j).float(), masks[head])
    if not per_head:
        assert all(torch.equal(masks[0], mask) for mask in masks)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", [*FIXED, "adaptive"])
def test_the_reference_agrees_with_the_library_in_float32(cases, pattern, causal):
    case = make_case(cases, pattern, causal)
    inputs = case.inputs()
    reference = cases.reference(case, *inputs, True)
    errors = cases.check(case, cases.build("dpflash", case), inputs, reference)
    assert set(errors) == {"o", "dq", "dk", "dv"}
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("pattern", ["dense", "dilated", "adaptive"])
def test_a_subset_of_rows_suffices_for_all_gradients(cases, monkeypatch, pattern):
    monkeypatch.setattr(cases, "CHECKED_TOKENS", 0)
    case = make_case(cases, pattern, True)
    assert len(case.checked_rows()) == 64
    inputs = case.inputs()
    reference = cases.reference(case, *inputs, True)
    assert reference.expected["dk"][0].shape == (320, 16)
    errors = cases.check(case, cases.build("dpflash", case), inputs, reference)
    assert max(errors.values()) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", FIXED)
def test_flexattention_is_given_the_same_multiplicities(cases, pattern, causal):
    case = make_case(cases, pattern, causal, 256)
    q, k, v, do = (x.detach() for x in case.inputs())
    reference = cases.reference(case, q, k, v, do, False)
    run = cases.flex(case, compiled=False)
    assert cases.check(case, run, (q, k, v), reference)["o"] < 1e-5


def test_a_wrong_row_or_nan_is_an_error_of_the_check(cases, bench):
    expected = torch.randn(4096, 16, dtype=torch.float64)
    # Rows that shrink, as those of causal attention do: the late ones must not vanish.
    expected *= torch.linspace(1, 0.02, 4096).unsqueeze(1)
    assert cases.band_error(expected.float(), expected) < 1e-6
    late = expected.clone()
    late[4000:] = 0
    assert cases.band_error(late, expected) > 0.1
    late[4000] = math.nan
    assert cases.band_error(late, expected) == math.inf
    assert not bench.acceptable({"o": 1e-7, "dq": math.inf}, "fp32")
    assert not bench.acceptable({"o": math.nan, "dq": 1e-7}, "fp32")


def test_a_provider_that_is_wrong_gets_no_figures(cases, bench, monkeypatch):
    args = bench.parse(["--quick", "--device", "cpu", "--providers", "dpflash", "sdpa-flash"])
    args.no_memory = True
    case = make_case(cases, "dense", True, 64)
    build = cases.build

    def build_wrong(provider, case):
        run = build(provider, case)
        return run if provider == "dpflash" else lambda q, k, v: run(q, k, v) * 1.01

    monkeypatch.setattr(cases, "build", build_wrong)
    rows = bench.Bench(args).measure(case)
    assert [row["status"] for row in rows] == ["ok", "failed", "ok", "failed"]
    assert all("ms" not in row and row["errors"] for row in rows if row["status"] == "failed")
    assert all(row["speedup_over"] == {} for row in rows if row["status"] == "ok")


def test_a_case_that_would_take_too_long_is_skipped_with_the_reason(cases, bench):
    args = bench.parse(["--quick", "--device", "cpu", "--providers", "dpflash"])
    args.no_memory = True
    measured = bench.Bench(args)
    measured.measure(make_case(cases, "dense", True, 64))
    (row, _) = measured.measure(make_case(cases, "dense", True, 2**20))
    assert row["status"] == "skipped"
    assert "--max-seconds" in row["reason"]


def test_work_counts_real_edges_only(cases):
    case = make_case(cases, "dense", True, 64)
    assert case.flops("forward") == 4 * 16 * 2 * 3 * (64 * 65 // 2)
    assert case.flops("backward") == 2.5 * case.flops("forward")
    assert case.flops("both") == 3.5 * case.flops("forward")


def test_documents_fill_the_sequence_and_are_the_same_each_time(cases):
    borders = cases.document_borders(100_000)
    assert borders == cases.document_borders(100_000)
    lengths = [end - begin for begin, end in zip(borders, borders[1:], strict=False)]
    assert borders[0] == 0 and borders[-1] == 100_000
    assert all(128 <= length <= 4096 for length in lengths[:-1])


def test_the_interval_of_a_median_covers_it_in_95_of_100_samples(timing):
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(2000):
        low, high = timing.median_interval(torch.randn(12, generator=generator).tolist())
        covered += low <= 0 <= high
    # P(covered) is 0.961 for 12 values; 5 standard deviations: false alarms below 1e-6.
    assert abs(covered / 2000 - 0.961) < 5 * math.sqrt(0.961 * 0.039 / 2000)
    assert timing.median_interval([3.0, 1.0, 2.0]) == [1.0, 3.0]


def test_rounds_are_cut_to_the_time_there_is(timing):
    assert timing.planned_rounds(1e-3, 2, 20, 60) == 20
    assert timing.planned_rounds(1.0, 2, 20, 60) == 27 - 7
    assert timing.planned_rounds(2.0, 2, 20, 60) == 12
    assert timing.planned_rounds(9.0, 1, 20, 60) == 0


def test_memory_of_the_cpu_is_that_of_the_call(cases, timing):
    case = cases.Case("dense", False, 4096, 1, 4, 64, "fp32", "cpu")
    output = 4096 * 4 * 64 * 4 / 2**20
    # o and lse; the flash operation needs no T x T. The kernel counts pages to some tens of them,
    # and small buffers may lie in pages the process had already.
    assert output / 2 < timing.peak_on_cpu(case, "sdpa-flash", "forward") < 6 * output


def test_the_table_is_written_as_it_lies_there(tune, tmp_path):
    text = tune.TABLE.read_text()
    assert tune.format_table(json.loads(text)) == text
    path = tmp_path / "configs.json"
    tune.write_table(path, "sm_90", {"dq/64/16": tune.Config(1, 2, 3, 4)})
    before, after = json.loads(text), json.loads(path.read_text())
    assert after["sm_90"]["dq/64/16"] == [1, 2, 3, 4]
    before["sm_90"]["dq/64/16"] = [1, 2, 3, 4]
    assert after == before


def test_every_entry_of_the_table_is_tuned_with_its_old_sizes_first(tune):
    keys = tune.entries(tune.HEAD_DIMS, [16, 32])
    table = tune.table()["sm_90"]
    assert {tune.name_of(*key) for key in keys} == set(table)
    for key in keys:
        old = table[tune.name_of(*key)]
        jobs = tune.jobs_of(key, old)
        tried = [config for *_, configs in jobs for config in configs]
        assert tried[0] == old
        assert len(tried) == len(set(tried)) > 3


def test_old_sizes_stay_unless_others_are_clearly_faster(tune):
    old, new = tune.Config(64, 64, 4, 2), tune.Config(128, 64, 4, 2)
    assert tune.choose(old, {old: [1.0, 2.0], new: [0.999, 2.0]}, 0.01) == old
    assert tune.choose(old, {old: [1.0, 2.0], new: [0.9, 2.0]}, 0.01) == new
    assert tune.choose(old, {new: [9.0, 9.0]}, 0.01) == new


def test_candidates_survive_a_process_that_breaks_down(tune, monkeypatch):
    outputs = iter(['{"config": [1, 1, 1, 1], "reason": null}\n', "", "Killed\n"])

    def broken(command, **_):
        return argparse.Namespace(stdout=next(outputs), returncode=-9)

    monkeypatch.setattr(tune.subprocess, "run", broken)
    configs = [tune.Config(n, n, n, n) for n in (1, 2, 3)]
    lines = tune.try_apart(("dq", 64, 16, configs))
    assert [line["config"][0] for line in lines] == [1, 2, 3]
    assert lines[0]["reason"] is None
    assert "-9" in lines[1]["reason"] and "-9" in lines[2]["reason"]


def test_trials_begin_with_each_entry_s_old_sizes_and_end_with_the_time(tune, monkeypatch):
    tried = []

    def record(job):
        tried.append(job)
        return [{"config": list(config), "reason": None} for config in job[3]]

    monkeypatch.setattr(tune, "try_apart", record)
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    keys = tune.entries([64], [16])
    args = argparse.Namespace(stages=[2], try_seconds=math.inf, jobs=1)
    lines = tune.try_all(keys, args)
    assert [job[:3] for job in tried[:3]] == keys
    assert all(len(lines[key]) >= 5 for key in keys)
    args.try_seconds = -1.0
    assert all("not tried" in line["reason"] for line in tune.try_all(keys, args)[keys[0]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_tuning_without_a_gpu_changes_nothing_and_says_so(tmp_path):
    path = tmp_path / "configs.json"
    done = run_script("tune_attention.py", "--write", str(path), cwd=tmp_path)
    assert done.returncode == 1
    assert "GPU" in done.stderr
    assert not path.exists()


@pytest.mark.slow
def test_the_quick_run_leaves_a_row_for_each_provider_and_direction(tmp_path):
    path = tmp_path / "rows.json"
    patterns = ["dense", "dilated", "adaptive"]
    arguments = ["--quick", "--device", "cpu", "--causal", "yes", "--json", str(path)]
    done = run_script("bench_attention.py", *arguments, "--patterns", *patterns, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert {"date", "device", "torch", "dpflash", "commit"} <= set(found["environment"])
    rows = found["rows"]
    assert len(rows) == 3 * 2 * 5
    for row in rows:
        if row["provider"] == "dpflash" or (row["provider"], row["pattern"]) == (
            "sdpa-flash",
            "dense",
        ):
            assert row["status"] == "ok" and row["ms"] > 0 and row["peak_mb"] >= 0
            assert max(row["errors"].values()) < 1e-4
        else:
            assert row["status"] == "skipped" and row["reason"]
            assert "ms" not in row
        assert f"| {row['pattern']} | yes | {row['direction']} | 256 |" in done.stdout

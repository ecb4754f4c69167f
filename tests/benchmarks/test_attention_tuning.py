"""Tuning the attention kernels, and the script that does it on a GPU."""

import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import dpflash
from dpflash.bench.isolated import Failed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "scripts"
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tune_attention

    return tune_attention


def run_script(name, *arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)


def test_the_table_is_written_as_it_lies_there(tune, tmp_path):
    text, path = tune.TABLE.read_text(), tmp_path / "configs.json"
    tune.write_table(path, tune.table())
    assert path.read_text() == text
    tune.write_table(path, {"sm_90": {"dq/64/16": tune.Config(1, 2, 3, 4)}})
    assert json.loads(path.read_text()) == {"sm_90": {"dq/64/16": [1, 2, 3, 4]}}


def test_every_entry_of_the_table_is_tuned_with_its_old_sizes_first(tune, monkeypatch):
    keys = list(itertools.product(tune.KERNELS, tune.HEAD_DIMS, [16, 32]))
    for arch, rows in tune.table().items():
        monkeypatch.setattr(tune, "architecture", lambda device, arch=arch: arch)
        assert {tune.entry_of(key)[1] for key in keys} == set(rows)
        for key in keys:
            tried = tune.candidates(key)
            assert tried[0] == rows[tune.entry_of(key)[1]]
            assert len(tried) == len(set(tried)) > 3
            assert min(min(config[:2]) for config in tried) >= 16


def test_old_sizes_stay_unless_others_are_clearly_faster(tune):
    old, new = tune.Config(64, 64, 4, 2), tune.Config(128, 64, 4, 2)
    assert tune.choose(old, {old: [1.0, 2.0], new: [0.999, 2.0]}) == old
    assert tune.choose(old, {old: [1.0, 2.0], new: [0.9, 2.0]}) == new
    assert tune.choose(old, {new: [9.0, 9.0]}) == new


def test_candidates_are_tried_alone_the_old_sizes_first_and_end_with_the_time(tune, monkeypatch):
    tried = []

    def isolated(function, *, timeout, key, config):
        tried.append((key, config))
        if config == tune.Config(128, 128, 8, 2):
            raise Failed("its process ended with exit code -9")
        return "wrong" if config == tune.Config(64, 64, 8, 2) else None

    monkeypatch.setattr(tune, "run_isolated", isolated)
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    keys = [(kernel, 64, 16) for kernel in tune.KERNELS]
    found = tune.try_all(keys, 1, math.inf)
    old = [(key, rows[name]) for key in keys for rows, name in [tune.entry_of(key)]]
    assert tried[:3] == old and all(len(found[key]) >= 5 for key in keys)
    reasons = found[keys[0]]
    assert "exit code -9" in reasons[128, 128, 8, 2] and reasons[64, 64, 8, 2] == "wrong"
    assert reasons[128, 32, 8, 2] is None
    late = tune.try_all(keys, 1, -1.0)
    assert all("not tried" in reason for reason in late[keys[0]].values())


def test_a_wrong_result_is_a_reason_against_a_candidate(tune, monkeypatch):
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tune, "CHECKED", ((tune.CAUSAL, 17, 1),))
    monkeypatch.setattr(tune, "TIMED", ())
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "DRY", True)
    key = ("dq", 64, 32)
    rows, name = tune.entry_of(key)
    monkeypatch.setitem(rows, name, rows[name])
    assert tune.try_here(key, rows[name]) is None
    make = tune.case_subject
    monkeypatch.setattr(
        tune, "case_subject", lambda *a, **k: dataclasses.replace(make(*a, **k), tolerance=-1.0)
    )
    assert "wrong" in tune.try_here(key, rows[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_tuning_without_a_gpu_changes_nothing_and_says_so(tune, tmp_path, monkeypatch):
    path = tmp_path / "configs.json"
    monkeypatch.setattr(sys, "argv", ["tune_attention.py", "--write", str(path)])
    with pytest.raises(SystemExit, match="measures on a GPU, and torch sees none"):
        tune.main()
    assert not path.exists()


def run_gpu_script(tmp_path, stage, fails, **environment):
    """`gpu.sh` with a Python that runs nothing, and fails where `fails` is in its arguments."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"\ncase "$*" in *{fails}*) exit 3 ;; esac\n')
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(BENCHMARKS.parent / "gpu.sh"), stage],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("stage", "fails", "files"),
    [
        ("right", "test_grads_triton", ["test_noise_triton", "private_steps.py", "train"]),
        ("time", "attention", ["gpu_time.py flex", "gpu_time.py steps"]),
        ("tune", "tune_attention", ["gpu_time.py long"]),
    ],
)
def test_a_part_of_the_gpu_script_fails_alone(tmp_path, stage, fails, files):
    done = run_gpu_script(tmp_path, stage, fails, PATH=f"/nowhere:{os.environ['PATH']}")
    assert done.returncode == 1, done.stderr
    table = (tmp_path / f"{stage}.txt").read_text()
    assert table in done.stdout
    (broken,) = [line for line in table.splitlines() if fails in line]
    assert broken.split()[1] == "3"
    for name in files:
        (line,) = [line for line in table.splitlines() if name in line]
        assert line.split()[1] == "0"
    with tarfile.open(tmp_path / f"{stage}.tar.xz") as archive:
        names = archive.getnames()
    assert f"{stage}/logs/{broken.split()[0]}.txt" in names


def test_the_gpu_script_ends_with_its_time_and_runs_parts_that_exist(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    done = run_gpu_script(tmp_path, "time", "nothing", LIMIT_S="0")
    assert done.returncode == 1 and "no time" in done.stdout
    assert run_gpu_script(tmp_path, "fast", "nothing").returncode == 2
    text = (BENCHMARKS.parent / "gpu.sh").read_text()
    measured = [name for line in re.findall(r"measure \d+ (.*)", text) for name in line.split()]
    import gpu_time

    assert sorted(measured) == sorted(gpu_time.PARTS)
    for path in re.findall(r"(?:tests|benchmarks)/\w+/?\w*\.py", text):
        assert (BENCHMARKS.parents[1] / path).exists(), path


def test_the_scripts_pass_make_private_arguments_that_it_has(monkeypatch):
    for folder in (BENCHMARKS, TESTS / "attacks", TESTS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    import attacked
    import private_steps

    tables = [*private_steps.CASES.values()]
    tables += [view.options for view in attacked.VIEWS.values()]
    used = {name for options in tables for name in options}
    assert used <= inspect.signature(dpflash.PrivacyEngine.make_private).parameters.keys()
    modes = {options["grad_sample_mode"] for options in tables if "grad_sample_mode" in options}
    assert modes <= {"instantiate", "book_keeping", "ghost"}

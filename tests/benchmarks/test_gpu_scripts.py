"""The scripts that run on a GPU."""

import inspect
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

import dpflash

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "scripts"
TESTS = Path(__file__).resolve().parents[1]


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

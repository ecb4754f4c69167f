"""`dpflash doctor`, and what every subcommand shares."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpflash
from dpflash.cli import doctor, main
from dpflash.kernels import attention_vendor, native

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def report():
    return doctor.machine_report()


def _make_every_run_raise(monkeypatch, error):
    def raising_run(args):
        raise error

    monkeypatch.setattr(doctor, "_run", raising_run)


def test_doctor_prints_the_version_and_every_section(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"dpflash {dpflash.__version__}\n")
    for title in ("machine", "libraries", "devices", "what will run", "optional packages"):
        assert f"\n{title}\n" in out
    assert f"torch              {torch.__version__} for" in out


def test_doctor_json_is_the_report(capsys, report):
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == report.keys()
    assert printed["torch"] == report["torch"]
    of_trainers = {"transformers", "peft", "accelerate", "trl", "lightning"}
    assert printed["optional"].keys() == {"matplotlib", "opacus", *of_trainers}


def test_doctor_names_the_paths_that_run_without_a_gpu(report, monkeypatch):
    monkeypatch.setattr(doctor, "_devices", list)
    bits = 8 * native.library().vector_bytes()
    assert native.describe() == f"C++ kernels, vectors of {bits} bits"
    assert doctor.machine_report()["paths"] == {
        "attention": f"{native.describe()}, {native.library()._name}",
        "private_gradients": f"C++ kernels, {native.library()._name}",
        "noise": "ChaCha20 (C++, CPU)",
    }


@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
def test_doctor_says_why_there_are_no_kernels(tmp_path, monkeypatch, capsys):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'error: out of paper' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_load_once", functools.cache(native._load_once.__wrapped__))
    assert main(["doctor"]) == 0
    assert "error: out of paper; let CXX name a C++ compiler" in capsys.readouterr().out


def test_doctor_says_why_kernels_are_not_kept(tmp_path, monkeypatch, capsys):
    functions = "long long problem_bytes() { return 0; } long long vector_bytes() { return 16; }"
    (tmp_path / "tiny.cpp").write_text(f'extern "C" {{ {functions} }}')
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_SOURCES", ("tiny.cpp",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tiny.cpp"))
    monkeypatch.setattr(native, "_load_once", functools.cache(native._load_once.__wrapped__))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "bits, compiled for this process: the cache folder is not used: " in out


def test_doctor_shows_a_gpu_and_its_path(report, monkeypatch):
    h100 = attention_vendor.Machine((9, 0), 91600)
    monkeypatch.setattr(attention_vendor, "machine", lambda device: h100)
    device = {"index": 0, "name": "GPU X", "memory": 80 * 1024**3, "capability": "9.0"}
    with_gpu = {**report, "devices": [{**device, "problem": None}]}
    with_gpu["torch"] = {**report["torch"], "built_for": "CUDA 13.0"}
    with_gpu["paths"] = doctor._paths(with_gpu)
    text = doctor._as_text(with_gpu)
    assert "GPU X, 80.0 GiB, capability 9.0" in text
    assert with_gpu["paths"]["attention_on_cpu"].startswith("C++ kernels")
    assert with_gpu["paths"]["attention"] == "Triton kernels"
    assert "forward by cuDNN, backward by dpflash's kernels" in with_gpu["paths"]["gpu_0"]
    without_triton = {**with_gpu, "triton": {"version": None, "why_not": "not installed"}}
    assert doctor._paths(without_triton)["attention"] == "none: triton not installed"


def test_doctor_says_which_devices_cannot_be_trained_on(report, monkeypatch):
    mps = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: mps)
    found = {**report, "devices": doctor._devices()}
    assert "gpu 0              mps\n" in doctor._as_text(found)
    assert "gpu 0: device mps: dpflash has kernels for" in "".join(doctor._warnings(found))
    assert "attention_on_cpu" not in doctor._paths(found)


def test_doctor_says_why_triton_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    found = doctor._triton()
    assert found["version"] is None
    assert "GPU builds of PyTorch bring it" in str(found["why_not"])


def test_healthy_machine_has_no_warnings(report):
    healthy = {**report, "devices": [], "cryptography": {"version": "1", "chacha20": True}}
    healthy["cpu"] = {"model": "x", "usable_cores": 4}
    healthy["torch"] = {"version": "2.13.0+cpu", "built_for": "CPU", "threads": 4}
    assert doctor._warnings(healthy) == []


@pytest.mark.parametrize(
    ("part", "changed", "expected"),
    [
        ("torch", {"version": "2.8.1"}, "torch 2.8.1 is too old: dpflash needs 2.9 or newer"),
        ("torch", {"version": "1.13.0a0+git12"}, "too old"),
        ("torch", {"built_for": "CUDA 13.0"}, "finds no device"),
        ("torch", {"threads": 9}, "9 threads on 4 usable cores: set OMP_NUM_THREADS=4"),
        ("cryptography", {"chacha20": False}, "no secure noise"),
        ("torch", {"version": "2.99.0a1+cpu"}, ": torch 2.99.0a1+cpu (tested up to 2."),
        ("triton", {"version": "3.99.1"}, ": triton 3.99.1 (tested up to 3."),
        ("optional", {"transformers": "6.0.0"}, ": transformers 6.0.0 (tested up to 5."),
    ],
    ids=["old-torch", "ancient-torch", "gpu-build-without-gpu", "too-many-threads", "no-chacha20"]
    + ["new-torch", "new-triton", "new-transformers"],
)
def test_doctor_warns(report, part, changed, expected):
    sick = {**report, "devices": [], "cryptography": {"version": "1", "chacha20": True}}
    sick["cpu"] = {"model": "x", "usable_cores": 4}
    sick["torch"] = {"version": "2.13.0+cpu", "built_for": "CPU", "threads": 4}
    sick[part] = {**sick[part], **changed}
    (warning,) = doctor._warnings(sick)
    assert expected in warning


def test_doctor_asks_for_the_torch_that_the_project_requires():
    required = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert required is not None
    assert required[1] == ".".join(map(str, doctor._OLDEST_TORCH))


@pytest.mark.parametrize("name", doctor._NEWEST_TESTED)
def test_doctor_knows_the_release_that_the_tests_run_with(name):
    pinned = re.search(rf"^{name}==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert tuple(map(int, pinned.groups())) <= doctor._NEWEST_TESTED[name]


def test_an_error_names_the_options_that_were_typed(capsys):
    assert main(["train", "--label-field", "label"]) == 2
    assert "error: --label-field 'label' with no --labels: a" in capsys.readouterr().err
    assert (
        main(["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--batch-size", "9"]) == 2
    )
    assert "error: no --num-samples: the poisson sampler needs it" in capsys.readouterr().err


def test_value_error_becomes_one_line_and_exit_status_2(monkeypatch, capsys):
    _make_every_run_raise(monkeypatch, ValueError("delta must lie in (0, 1),\n  got 2"))
    assert main(["doctor"]) == 2
    assert capsys.readouterr() == ("", "dpflash: error: delta must lie in (0, 1), got 2\n")


def test_interrupt_becomes_exit_status_130(monkeypatch):
    _make_every_run_raise(monkeypatch, KeyboardInterrupt())
    assert main(["doctor"]) == 130


def test_a_reader_that_ends_first_is_no_error():
    words = ["epsilon", "--noise-multiplier", "1", "--sample-rate", "0.01", "--steps", "9"]
    with subprocess.Popen(
        [sys.executable, "-m", "dpflash", *words, "--delta", "1e-5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_fault_of_dpflash_itself_is_not_hidden(monkeypatch):
    _make_every_run_raise(monkeypatch, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        main(["doctor"])

"""Ceilings of devices: measured and filed, read back, or by class of device."""

import json
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch

from dpflash.clipping import device_speed as ceilings
from dpflash.clipping import measure_speed as measure
from dpflash.clipping.device_speed import (
    CPU_RULE,
    cache_path,
    ceilings_for,
    device_name,
    save_measured,
)
from dpflash.kernels import native

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
ENTRY = {"flops": {"float32": 3e11, "bfloat16": 1e12}, "bandwidth": 4e10, "date": "2026-01-02"}
QUICK = measure.Effort(
    copied_bytes=1 << 12,
    largest_matrix=16,
    product_seconds=0.0,
    noised_elements=64,
    trials=4,
    warm_up=1,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file of ceilings, which does not exist yet."""
    native.library()  # from the tests' cache, before another one is named
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceilings.forget()
    yield tmp_path / "dpflash" / "ceilings.json"
    ceilings.forget()


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name): torch sees a GPU of this name."""

    def named(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return named


def written(cache, content):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_file_stands_in_the_users_cache_folder(cache, monkeypatch):
    assert cache_path() == cache
    for unusable in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_path() == Path.home() / ".cache" / "dpflash" / "ceilings.json"


def test_a_cpu_that_was_not_measured_keeps_the_nominal_rule():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ceilings_for(CPU) is CPU_RULE


def test_measured_ceilings_are_read_back():
    save_measured({device_name(CPU): ENTRY})
    found = ceilings_for(CPU)
    assert (found.flops, found.bandwidth) == (ENTRY["flops"], 4e10)
    assert found.source == "measured 2026-01-02"
    assert found.device == "cpu"


def test_figures_of_another_device_are_left_alone():
    save_measured({"another machine": ENTRY})
    save_measured({device_name(CPU): {**ENTRY, "bandwidth": 1e9}})
    assert ceilings_for(CPU).bandwidth == 1e9
    assert json.loads(cache_path().read_text())["devices"]["another machine"] == ENTRY


def test_a_file_of_other_devices_alone_changes_nothing():
    save_measured({"another machine": ENTRY})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ceilings_for(CPU) is CPU_RULE


def test_figures_of_a_cpu_belong_to_a_number_of_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    save_measured({device_name(CPU): ENTRY})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert ceilings_for(CPU) is CPU_RULE


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "\x00\xff",
        {"format": 99, "devices": {}},
        {"devices": {}},
        {"format": 1},
        {"format": 1, "devices": {"x": 3}},
        {"format": 1, "devices": {"x": {"flops": {}, "bandwidth": 1e9, "date": "d"}}},
        {"format": 1, "devices": {"x": {**ENTRY, "bandwidth": 0}}},
        {"format": 1, "devices": {"x": {**ENTRY, "bandwidth": "fast"}}},
        {"format": 1, "devices": {"x": {**ENTRY, "flops": {"float32": float("inf")}}}},
        {"format": 1, "devices": {"x": {**ENTRY, "flops": {"float32": True}}}},
        {"format": 1, "devices": {"x": {k: v for k, v in ENTRY.items() if k != "date"}}},
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_file_of_no_use_is_ignored_with_one_warning_that_names_it(cache, content):
    written(cache, content)
    with pytest.warns(UserWarning, match="ignored") as caught:
        assert ceilings_for(CPU) is CPU_RULE
        assert ceilings_for(torch.device("cpu", 0)) is CPU_RULE
    assert len(caught) == 1
    assert str(cache) in str(caught[0].message)


def test_a_file_that_cannot_be_read_is_ignored(cache):
    cache.mkdir(parents=True)
    with pytest.warns(UserWarning, match="ignored"):
        assert ceilings_for(CPU) is CPU_RULE


@pytest.mark.skipif(os.name != "posix", reason="files have no modes")
def test_a_new_folder_is_one_in_which_compiled_kernels_are_cached(cache):
    old = os.umask(0)
    try:
        save_measured({device_name(CPU): ENTRY})
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_measuring_replaces_a_broken_file(cache):
    written(cache, "{")
    with pytest.warns(UserWarning, match="ignored"):
        save_measured({device_name(CPU): ENTRY})
    assert ceilings_for(CPU).bandwidth == 4e10
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_the_file_is_read_once_in_a_process(cache):
    assert ceilings_for(CPU) is CPU_RULE
    written(cache, {"format": 1, "devices": {device_name(CPU): ENTRY}})
    assert ceilings_for(CPU) is CPU_RULE


@pytest.mark.parametrize(
    ("name", "sheet", "bandwidth"),
    [
        ("NVIDIA H200", "H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", "H100", 3.35e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 2.0e12),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100-PCIE-40GB", "A100", 1.555e12),
        ("NVIDIA GeForce RTX 9999", "A10", 6.0e11),
    ],
    ids=lambda value: str(value),
)
def test_a_gpu_that_was_not_measured_has_its_data_sheets_figures(name, sheet, bandwidth, gpu):
    gpu(name)
    found = ceilings_for(CUDA)
    assert (found.bandwidth, found.device, found.name) == (bandwidth, "cuda", name)
    assert found.source == f"not measured; {sheet} data sheet"
    assert found.rate("bfloat16") > found.rate("tf32") > found.rate("float32")


def test_a_measured_gpu_has_its_own_figures(gpu):
    gpu("NVIDIA H200")
    save_measured({"NVIDIA H200": ENTRY})
    assert ceilings_for(CUDA).bandwidth == 4e10


def test_measuring_gives_what_can_be_filed():
    lines = []
    before = torch.get_float32_matmul_precision()
    found = measure.measure(CPU, QUICK, lines.append)
    assert torch.get_float32_matmul_precision() == before
    assert {"float32", "bfloat16"} <= found["flops"].keys()
    assert "tf32" not in found["flops"]
    assert found["noise"] > 0
    assert found["spread"].keys() == {"copy", "noise", *found["flops"]}
    assert len(lines) == len(found["spread"])
    save_measured({device_name(CPU): found})
    assert ceilings_for(CPU).flops == found["flops"]


def test_what_a_device_cannot_do_is_left_out(monkeypatch):
    def refuse(*_, **__):
        raise ImportError("no triton")

    multiply = torch.mm

    def no_half(left, right, out):
        if left.dtype == torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return multiply(left, right, out=out)

    monkeypatch.setattr(measure, "gaussian_noise_", refuse)
    monkeypatch.setattr(torch, "mm", no_half)
    found = measure.measure(CPU, QUICK, lambda line: None)
    assert found["noise"] is None
    assert "float16" not in found["flops"]

"""The planner's constants: nominal figures of a CPU, data sheets of GPUs."""

import pytest
import torch

from dpflash.clipping.device_speed import CPU_RULE, ceilings_for


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
def test_a_gpu_has_its_data_sheets_figures(name, sheet, bandwidth, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = ceilings_for(torch.device("cuda", 0))
    assert (found.bandwidth, found.device, found.name) == (bandwidth, "cuda", name)
    assert found.source == f"{sheet} data sheet"
    assert found.rate("bfloat16") > found.rate("tf32") > found.rate("float32")


def test_a_cpu_has_nominal_figures_whatever_its_threads():
    assert ceilings_for(torch.device("cpu", 0)) is CPU_RULE

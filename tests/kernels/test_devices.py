"""Which devices are refused, and which configs a GPU gets, by what torch answers about it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.kernels import attention_configs
from dpflash.kernels.devices import problem_with


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("capability", "needs"),
    [((6, 1), "capability 6.1, and Triton"), ((7, 5), "capability 7.5"), ((8, 0), None)],
)
def test_gpus_that_triton_does_not_compile_for_are_refused(monkeypatch, capability, needs):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    found = problem_with(torch.device("cuda:1"))
    assert (found is None) == (needs is None)
    if needs is not None:
        assert needs in found and "cuda:1: GPU X has" in found and "train on the CPU" in found


def test_amd_has_no_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert problem_with(torch.device("cuda:0")) is None


@pytest.mark.cases(5)
@pytest.mark.parametrize("device", ["cpu", "mps", "xpu:1", "meta"])
def test_other_devices_than_cpus_and_gpus_of_cuda_and_rocm_are_refused(device):
    found = problem_with(torch.device(device))
    assert (found is None) == (device == "cpu")
    assert found is None or found.startswith(f"device {device}: ")


def test_a_model_there_is_refused_before_anything_is_changed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, device="meta"))
    with pytest.raises(ValueError, match=r"^module has parameters on device meta: .* the CPU"):
        dpflash.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert type(model[0]) is nn.Linear


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("capability", "column"),
    [
        ((8, 9), "sm_86"),
        ((12, 0), "sm_86"),
        ((8, 0), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
    ],
)
def test_gpus_with_little_shared_memory_have_a_column_of_their_own(
    monkeypatch, capability, column
):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    architecture = attention_configs.architecture.__wrapped__
    assert architecture(torch.device("cuda:0")) == column

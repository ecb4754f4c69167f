"""What a run should hear of its arguments: more epochs, large batches, too little memory."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash

DATA = TensorDataset(torch.randn(24, 3), torch.randint(0, 2, (24,)))


def made(model, *, batch_size=12, epochs=2, **options):
    engine = dpflash.PrivacyEngine(seed=0, accountant="rdp")
    return engine, *engine.make_private_with_epsilon(
        **{"module": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        **{"data_loader": DataLoader(DATA, batch_size=batch_size), "epochs": epochs},
        **{"target_epsilon": 3.0, "target_delta": 1e-3, "max_grad_norm": 1.0, **options},
    )


def trained(engine, model, optimizer, loader, epochs):
    for _ in range(epochs):
        for x, y in loader:
            engine.backward(dpflash.losses.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("planned", [{"epochs": 2}, {"epochs": None, "steps": 4}])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_the_first_release_beyond_the_calibrated_ones_says_so_once(planned, sampling):
    parts = made(nn.Linear(3, 2), sampling=sampling, **planned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(*parts, epochs=2)
    assert parts[0].get_epsilon(1e-3) <= 3.0
    with pytest.warns(UserWarning, match=r"release 5: .* calibrated for 4 .*=3\.0") as caught:
        trained(*parts, epochs=2)
    assert len(caught) == 1 and parts[0].get_epsilon(1e-3) > 3.0


@pytest.mark.parametrize("units", [None, [i // 2 for i in range(24)]])
def test_a_batch_size_above_the_number_of_units_is_said(units):
    options = {} if units is None else {"unit_of": units, "examples_per_unit": 2}
    with pytest.warns(UserWarning, match=rf"batch_size=25 above the {24 if not units else 12} "):
        made(nn.Linear(3, 2), batch_size=25, **options)


class Fails(torch.autograd.Function):
    """The identity; its forward or its backward runs out of memory."""

    @staticmethod
    def forward(ctx, x, error, in_backward):
        ctx.error = error
        if not in_backward:
            raise error
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise ctx.error


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
def test_an_error_of_memory_names_the_rows_and_the_argument(error, in_backward):
    class Layer(nn.Module):
        def forward(self, x):
            return Fails.apply(x, error, in_backward)

    engine, model, _, loader = made(nn.Sequential(nn.Linear(3, 2), Layer()))
    with pytest.raises(torch.OutOfMemoryError, match="(?s)memory.*physical_batch_size=") as caught:
        for x, y in loader:
            engine.backward(dpflash.losses.cross_entropy(model(x), y))
    assert f"has {loader.slots} rows" in str(caught.value)

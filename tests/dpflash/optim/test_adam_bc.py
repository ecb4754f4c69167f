"""AdamBC: the noise that it subtracts is that of the releases, and nothing where there is none."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.noise import Banded
from dpflash.optim import AdamBC

BANDED = Banded(bands=3, coefficients=(1.0, 0.75, 0.3))


def parameter():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(4, 3))


def trained(optimizer_class, gradients, **options):
    own = parameter()
    optimizer = optimizer_class([own], **options)
    for grad in gradients:
        own.grad = grad
        optimizer.step()
    return own


@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.99), st.floats(0.5, 0.999), st.floats(0.0, 0.5))
def test_without_noise_it_is_adamw(lr, beta1, beta2, weight_decay):
    options = {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay}
    gradients = list(torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1)))
    expected = trained(torch.optim.AdamW, gradients, **options)
    torch.testing.assert_close(trained(AdamBC, gradients, **options), expected)


def test_second_moment_is_that_of_the_gradients_without_noise():
    """Of 10,000 coordinates; the average of their corrected moments has a deviation of 0.4%."""
    own = nn.Parameter(torch.zeros(10_000))
    optimizer = AdamBC([own], lr=1.0, betas=(0.0, 0.99), eps=0.0, floor=1e-9)
    draw = torch.Generator().manual_seed(0)
    for step in range(300):
        std = 0.5 + 0.5 * (step % 2)
        own.grad = 1.0 + std * torch.randn(10_000, generator=draw)
        own.data.zero_()
        optimizer.step(noise_std=std)
    moments = (own.grad / own.detach()).square()
    assert float(moments.mean()) == pytest.approx(1.0, abs=0.02)


def test_floor_bounds_a_step():
    """A squared gradient below its noise's variance; 1 / sqrt(floor) standard deviations."""
    own = nn.Parameter(torch.zeros(3))
    own.grad = torch.tensor([0.01, -0.1, 0.0])
    AdamBC([own], lr=1.0, eps=0.0, floor=0.25).step(noise_std=2.0)
    torch.testing.assert_close(own.detach(), -own.grad / (0.5 * 2.0))


def test_amsgrad_is_refused_with_the_way_out():
    AdamBC([parameter()], amsgrad=False)
    with pytest.raises(ValueError, match="amsgrad=True: .*AdamW"):
        AdamBC([parameter()], amsgrad=True)


def private_run(seen, **options):
    """A private run whose optimizer notes the `noise_std` of each step."""

    class Noting(AdamBC):
        def step(self, closure=None, *, noise_std=0.0):
            seen.append(noise_std)
            return super().step(closure, noise_std=noise_std)

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    engine = dpflash.PrivacyEngine(seed=3)
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    made = engine.make_private(
        module=model,
        optimizer=Noting(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x), batch_size=6),
        noise_multiplier=0.5,
        max_grad_norm=2.0,
        verify_first_batch=False,
        **options,
    )
    return engine, *made


def releases(run, steps):
    engine, model, optimizer, loader = run
    last = loader.releases + steps
    while loader.releases < last:
        for (x,) in loader:
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last and loader.releases == last:
                break


@pytest.mark.parametrize(
    ("options", "divisor"), [({}, 6.0), ({"loss_reduction": "sum"}, 1.0)], ids=["mean", "sum"]
)
def test_noise_is_that_of_the_release(options, divisor):
    seen = []
    engine, model, optimizer, loader = private_run(seen, **options)
    for (x,) in loader:
        losses = model(x).square().mean(1)
        engine.backward(losses.sum() if options else losses)
        optimizer.step()
        optimizer.zero_grad()
        if loader.is_last:
            optimizer.noise_multiplier = 0.25  # from the next release on
    assert seen == pytest.approx([1.0 / divisor, *[0.5 / divisor] * (len(seen) - 1)])
    assert len(seen) == loader.releases


def test_noise_of_a_step_on_public_data_is_zero():
    seen = []
    run = engine, model, optimizer, _ = private_run(seen)
    releases(run, 1)
    with engine.public_data():
        model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    releases(run, 1)
    assert seen == pytest.approx([1 / 6, 0.0, 1 / 6])


def test_banded_noise_has_the_rows_of_its_inverse():
    """Against the inverse of C as a matrix; the noise of z is the bound's times |c|."""
    seen = []
    run = private_run(seen, noise_mechanism=BANDED, sampling="cyclic_poisson")
    releases(run, 7)
    c = torch.tensor([i / 256 for i in BANDED.integers], dtype=torch.float64)
    matrix = torch.zeros(7, 7, dtype=torch.float64)
    for lag, value in enumerate(c):
        matrix += torch.diag(value.expand(7 - lag), -lag)
    rows = torch.linalg.inv(matrix).norm(dim=1)
    assert seen == pytest.approx((rows * c.norm() * 0.5 * 2.0 / 6).tolist())


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    whole = private_run([])
    releases(whole, 4)
    begun = private_run([])
    releases(begun, 2)
    begun[0].save_checkpoint(tmp_path / "c.pt")
    resumed = private_run([])
    resumed[0].load_checkpoint(tmp_path / "c.pt")
    releases(resumed, 2)
    assert torch.equal(whole[1].weight, resumed[1].weight)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": math.nan}, {"floor": 0.0}],
    ids=lambda x: next(iter(x)),
)
def test_an_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamBC([parameter()], **options)

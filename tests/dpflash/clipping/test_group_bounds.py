"""Bounds of single clipping groups: max_grad_norm as a list, or by the groups' names."""

import copy

import pytest
import torch
from torch import nn

WIDTH = 4


def squares(model, x):
    return model(x).square().flatten(1).sum(1)


def inputs():
    return torch.randn(4, 3, WIDTH, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("clipping", ["per_layer"])
def test_each_group_is_clipped_to_its_own_bound(clipping, private, oracle, sums):
    x = inputs()
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    engine, *_ = private(copy.deepcopy(plain), x, one_part=True, clipping=clipping)
    names = {group.name: group.parameters for group in engine.groups()}
    bounds = {name: 0.01 * 2.0**i for i, name in enumerate(names)}
    grads = oracle(plain, squares, x)
    for given in (bounds, list(bounds.values())):
        engine, model, optimizer, _ = private(
            copy.deepcopy(plain), x, one_part=True, clipping=clipping, max_grad_norm=given
        )
        engine.backward(squares(model, x))
        found = sums(engine, model)
        for name, bound in bounds.items():
            # All samples are beyond the bound, so the sum is that of their directions.
            norms = grads.norms(names[name])
            assert min(norms) > bound
            for n in names[name]:
                expected = sum(bound / k * g[n] for k, g in zip(norms, grads.grads, strict=True))
                assert torch.allclose(found[n].double(), expected, rtol=1e-6, atol=1e-9)
        assert all(g.bound <= bounds[g.name] for g in engine.groups())
        joint = sum(bound**2 for bound in bounds.values()) ** 0.5
        assert optimizer.max_grad_norm == pytest.approx(joint, rel=1e-15)
        assert engine.groups().sensitivity <= optimizer.max_grad_norm


def test_noise_of_bounded_groups_is_scaled_to_their_joint_bound(private):
    plain = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1, bias=False))
    bounds = [3.0, 4.0]
    engine, model, optimizer, loader = private(
        plain,
        torch.zeros(4, 300),
        one_part=True,
        clipping="per_layer",
        max_grad_norm=bounds,
        noise_multiplier=2.0,
        verify_first_batch=False,
    )
    x = next(iter(loader))[0]
    engine.backward(model(x).square().sum(1))
    before = plain[0].weight.detach().clone()
    optimizer.step()
    # 90,000 entries: the standard deviation is within 1.2% at 5 sigma.
    moved = (plain[0].weight.detach() - before).std() / 0.1 * optimizer.expected_batch_size
    assert moved == pytest.approx(2.0 * 5.0, rel=0.012)


@pytest.mark.parametrize(
    ("bounds", "clipping", "message"),
    [
        ([1.0], "per_layer", "has 1 bounds, but the model has 2 clipping groups: '0', '2'"),
        ([1.0] * 4, "per_layer", "Opacus' per_layer, which clips each parameter by itself"),
        (
            {"0": 1.0, "3": 1.0},
            "per_layer",
            "'3' is no group, '2' is missing. The names are '0', '2'",
        ),
        ([1.0, 1.0], "flat", "need clipping='per_layer'"),
        ([1.0, float("inf")], "per_layer", r"max_grad_norm\[1\]=inf"),
        ([1.0, -1.0], "per_layer", r"max_grad_norm\[1\]=-1.0"),
        ({"0": 1.0, "2": "1"}, "per_layer", r"max_grad_norm\['2'\]='1': expected a number"),
    ],
)
def test_bounds_that_do_not_fit_the_groups_are_refused(bounds, clipping, message, private):
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    with pytest.raises(ValueError, match=message):
        private(plain, torch.zeros(4, WIDTH), clipping=clipping, max_grad_norm=bounds)

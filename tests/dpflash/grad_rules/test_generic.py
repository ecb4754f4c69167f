"""Leaf layers without a rule of their own: what their forward stores, and whether it mixes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpflash import PrivateRefusal

WIDTH = 4


class Leaf(nn.Module):
    """A layer of the user's own: a product, of what `change` makes of the input."""

    def __init__(self, change=lambda x: x, store=lambda self, y: None):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.change, self.store = change, store
        self.calls, self.kept, self.losses, self.ramp = 0, 0.0, [], None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        if self.ramp is None:
            self.ramp = torch.ones(WIDTH)
        y = self.change(x) @ self.weight * self.ramp
        self.store(self, y)
        return y


def keep(self, y):
    self.kept = self.weight.square().sum()


def append(self, y):
    self.losses.append(y.square().sum(1))


def average(self, y):
    self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)


@pytest.fixture
def trained(private):
    """trained(leaf, ...): a call of the layer and its backward; returns the layer."""

    def train(leaf, **options):
        torch.manual_seed(0)
        x = torch.randn(8, WIDTH)
        engine, model, *_ = private(leaf, x, one_part=True, **options)
        engine.backward(model(x).square().sum(1))
        return model

    return train


@pytest.mark.parametrize("proof", [True, False])
@pytest.mark.parametrize(
    ("store", "name"), [(keep, "kept"), (append, "losses"), (average, "mean")]
)
def test_a_stored_value_that_would_be_lost_is_refused(store, name, proof, trained):
    leaf = Leaf(store=store)
    with pytest.raises(RuntimeError, match=f"sets its attribute '{name}'.*Return the value"):
        trained(leaf, verify_first_batch=proof)
    assert (leaf.kept, leaf.losses) == (0.0, []) and not leaf.mean.any()


def test_what_no_sample_is_in_is_stored_once_a_call(trained):
    leaf = trained(Leaf())
    assert leaf.calls == 1 and torch.equal(leaf.ramp, torch.ones(WIDTH))


MIXING = {
    "centered": lambda x: x - x.mean(0),
    "normalized": lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(),
    "attention": lambda x: F.dropout(F.softmax(x @ x.T / WIDTH, 1), 0.1) @ x,
}


@pytest.mark.parametrize("change", MIXING.values(), ids=MIXING)
def test_a_leaf_that_mixes_samples_is_refused(change, trained):
    with pytest.raises(PrivateRefusal, match=r"\(Leaf\) gives a sample alone.*nn.GroupNorm"):
        trained(Leaf(change))
    trained(Leaf(change), verify_first_batch=False)


class Counting(Leaf):
    """Counts its calls in place, and trains as far as they say."""

    def forward(self, x):
        self.mean += 1
        return super().forward(x) / self.mean


def test_a_buffer_that_is_written_in_place_is_written_once_a_call(trained):
    assert (trained(Counting(), allow_buffers=["mean"]).mean == 1).all()


APART = {
    "normalized": lambda x: F.layer_norm(x, (WIDTH,)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "choice": lambda x: x * F.one_hot(x.argmax(1), WIDTH),
}


def test_numbers_of_a_leafs_own_generator_are_not_called_mixing(trained):
    generator = torch.Generator()
    noisy = Leaf(lambda x: x + torch.randn(x.shape[-1:], generator=generator))
    noisy.generator = generator
    with pytest.raises(PrivateRefusal, match="from a generator of its own"):
        trained(noisy)


@pytest.mark.parametrize("change", APART.values(), ids=APART)
def test_a_leaf_that_keeps_samples_apart_trains(change, trained):
    assert trained(Leaf(change)).calls == 1

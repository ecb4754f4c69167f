"""Whatever a loop does, in whatever order: each gradient that it can reach is None or noise."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash

ACTIONS = (
    "next", "backward", "backward", "step", "step", "zero_grad", "model.zero_grad", "late", "late",
    "clip", "keep", "fail", "foreign", "public", "epoch", "write", "other step", "other zero_grad",
)  # fmt: skip


class Loop:
    """A training loop that does one thing after another.

    Args:
        several: whether each layer has an optimizer of its own.
        options: of make_private.
    """

    def __init__(self, several=False, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8))
        self.engine = dpflash.PrivacyEngine(seed=0)
        self.reduction = options.get("loss_reduction")
        parts = (self.model[0], self.model[2]) if several else (self.model,)
        made = [torch.optim.SGD(part.parameters(), lr=1e-9, momentum=0.9) for part in parts]
        self.model, self.optimizers, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=made,
            data_loader=DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4),
            noise_multiplier=1e4,
            max_grad_norm=1.0,
            **options,
        )
        self.optimizer, self.other = self.optimizers[0], self.optimizers[-1]
        self.late = torch.optim.AdamW(self.model.parameters(), lr=1e-9)
        self.epoch()
        self.x = torch.randn(4, 3)

    def next(self):
        batch = next(self.batches, None)
        if batch is None:
            self.epoch()
        else:
            (self.x,) = batch

    def losses(self, x):
        return self.model(x).square().mean(1)

    def backward(self):
        losses = self.losses(self.x)
        if self.reduction is None:
            self.engine.backward(losses)
        else:
            losses.mean().backward()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e4)

    def keep(self):
        """Change gradients in place, which changes nothing that is released later."""
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(-1)

    def fail(self):
        """Have the next backward get fewer rows than the batch has."""
        self.x = self.x[:-1]

    def foreign(self):
        self.x = torch.randn(4, 3)

    def public(self):
        with self.engine.public_data():
            (1e9 * self.losses(torch.randn(2, 3)).mean()).backward()

    def epoch(self):
        self.batches = iter(self.loader)

    def write(self):
        if self.optimizer.releases:
            self.model[0].weight.grad = torch.full((8, 3), 1e4)

    def do(self, action):
        if action == "model.zero_grad":
            self.model.zero_grad()
        elif action == "late":
            self.late.step()
        elif action.startswith("other "):
            getattr(self.other, action[6:])()
        else:
            getattr(self, action)()


def is_noise(x):
    """A sum without noise has no entry above 12, the number of samples."""
    return x is None or not x.any() or float(x.abs().max()) > 15


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"physical_batch_size": 2},
        {"physical_batch_size": 2, "several": True},
        {"clipping": "per_layer", "physical_batch_size": 2},
        {"loss_reduction": "mean", "physical_batch_size": 3},
        {"grad_sample_mode": "ghost"},
    ],
    ids=str,
)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), min_size=8, max_size=40))
def test_every_gradient_that_a_loop_can_reach_is_noise(options, actions):
    loop = Loop(**options)
    kept, refused = [], 0
    for action in ["next", *actions]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loop.do(action)
            except (RuntimeError, ValueError):
                refused += 1
        for p in loop.model.parameters():
            assert is_noise(p.grad), action
            for optimizer in (*loop.optimizers, loop.late):
                held = optimizer.state.get(p, {}).values()
                assert all(is_noise(t) for t in held if isinstance(t, torch.Tensor) and t.ndim)
            if p.grad is not None and not any(p.grad is t for t in kept):
                kept.append(p.grad)
        assert all(map(is_noise, kept)), action
    charged = sum(steps for *_, steps in loop.engine.accountant.history)
    assert charged == loop.optimizer.releases

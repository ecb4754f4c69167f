"""Layers of the generic rule return what they return without it, a row for each token included."""

import pytest
import torch
from torch import nn


class Router(nn.Module):
    """Scores of tokens [B T, 2] for [B, T, E] or [B T, E], and with them a table of positions."""

    def __init__(self, is_flat):
        super().__init__()
        self.weight, self.is_flat = nn.Parameter(torch.rand(2, 5)), is_flat

    def forward(self, x):
        scores = x.reshape(-1, 5) @ self.weight.t()
        if self.is_flat:
            return scores, scores.argmax(1)
        return scores, scores.argmax(1), self.weight.sum() * torch.ones(x.shape[1], 3)


class Routed(nn.Module):
    def __init__(self, is_flat):
        super().__init__()
        self.first, self.router = nn.Linear(5, 5), Router(is_flat)
        self.is_flat = is_flat

    def forward(self, x):
        hidden = self.first(x)
        return self.router(hidden.flatten(0, 1) if self.is_flat else hidden)


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("samples, length", [(3, 4), (1, 4), (3, 1), (4, 4), (2, 2)])
def test_outputs_have_the_shapes_of_the_plain_layer(is_flat, samples, length, private):
    torch.manual_seed(0)
    model, x = Routed(is_flat), torch.randn(samples, length, 5)
    expected = model(x)
    _, made, _, _ = private(model)
    found = made(x)
    for plain, own in zip(expected[:2], found[:2], strict=True):
        assert plain.shape == own.shape and torch.allclose(plain, own)
    if not is_flat:  # what has no batch gets one, since each sample has its own weight
        assert found[2].shape == (samples, *expected[2].shape[length == 1 :])
        assert torch.allclose(found[2], expected[2].expand_as(found[2]))


def test_tokens_beside_samples_are_refused_by_name(private):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(5))

        def forward(self, x, y):
            return x * self.weight + y.repeat_interleave(len(x) // len(y), 0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.both = nn.Linear(5, 5), Both()

        def forward(self, x):
            hidden = self.first(x)
            return self.both(hidden.flatten(0, 1), hidden.mean(1))

    _, made, _, _ = private(Model())
    with pytest.raises(ValueError, match=r"'both'.*\[4, 12\], of which some are samples"):
        made(torch.randn(4, 3, 5))

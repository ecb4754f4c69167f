"""Layers of the generic rule return what they return without it, a row for each token included."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dpflash import PrivateRefusal


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
    with pytest.raises(PrivateRefusal, match="'both'.* samples in some and tokens in others"):
        made(torch.randn(4, 3, 5))


def test_tensors_in_a_tuple_are_refused_by_name(private):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(5))

        def forward(self, x, state):
            return x * self.weight + state[0]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            return self.cell(x, (x,))

    _, made, _, _ = private(Model())
    with pytest.raises(ValueError, match="'cell'.*tuple"):
        made(torch.randn(4, 5))


def test_a_convolution_without_a_channel_dimension_is_refused(private):
    _, made, _, _ = private(nn.Conv1d(1, 4, 2))
    with pytest.raises(PrivateRefusal, match="channels first"):
        made(torch.randn(4, 3))


@pytest.mark.cases(0)
def test_a_convolution_in_16_bit_takes_transposed_inputs_of_length_1_on_older_cpus():
    program = """
import torch, dpflash
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Conv1d(6, 4, 3, padding=1).bfloat16()
engine = dpflash.PrivacyEngine()
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader(TensorDataset(torch.zeros(9, 1)), batch_size=3)
engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1, max_grad_norm=1,
    foreign_batches=True,
)
x = torch.randn(3, 1, 6).bfloat16()
engine.backward(torch.tanh(model(x.transpose(1, 2))).float().square().mean((1, 2)))
"""
    # oneDNN without arithmetic in bfloat16.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

"""The models, batches and losses of private training steps that are measured.

Letters: B samples, T tokens, H heads, D head dim, E = H D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpflash import losses
from dpflash.nn import LongContextLM, MultiheadAttention

VOCABULARY = 256


def _output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


@dataclass(frozen=True)
class Task:
    """A model, its batch and its loss."""

    build: Callable[[], nn.Module]  # makes the model, with the same weights in each call
    x: Tensor  # one batch, samples first
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]  # (output, y) to one loss per sample, `[B]`
    # (model, x, y) to the output; Opacus calls the model with x alone.
    forward: Callable[[nn.Module, Tensor, Tensor], Tensor] = _output
    dtype: str = "float32"  # or "bfloat16", for autocast

    @property
    def batch(self) -> int:
        """B."""
        return len(self.x)

    def losses(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """`[B]`."""
        with self.precision():
            output = self.forward(model, x, y)
        return self.loss(output, y)

    def precision(self) -> torch.autocast:
        """The autocast context of a forward."""
        enabled = self.dtype == "bfloat16"
        return torch.autocast(self.x.device.type, torch.bfloat16, enabled=enabled)


def make_task(
    *,
    model: str,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    layers: int = 1,
    dtype: str = "float32",
    device: str,
    seed: int,
) -> Task:
    """One of the two models, see `private.private_subject`."""
    if model == "lm":
        return bytes_task(
            lambda: lm(tokens, heads, head_dim, layers), batch, tokens, dtype, device, seed
        )
    assert model == "attention", model
    if layers != 1:
        raise ValueError(f"layers={layers} of model='attention': it has one; take model='lm'")

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return (output.float() - y).square().sum(2).mean(1)

    width = heads * head_dim
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, tokens, width, generator=generator) for _ in range(2))
    build = built(lambda: _Attention(width, heads), device, seed)
    return Task(build, x.to(device), y.to(device), loss, dtype=dtype)


def bytes_task(
    make: Callable[[], nn.Module], batch: int, tokens: int, dtype: str, device: str, seed: int
) -> Task:
    """A model of logits on random bytes, `[batch, tokens]`, with its cross entropy."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, VOCABULARY, (2, batch, tokens), generator=generator).to(device)
    return Task(built(make, device, seed), x, y, losses.cross_entropy, dtype=dtype)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = MultiheadAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, is_causal=True)[0]
        return output


def lm(tokens: int, heads: int, head_dim: int, layers: int) -> LongContextLM:
    """The language model over bytes, for at most this number of tokens."""
    # Opacus' ghost clipping refuses tied weights, so none are tied here.
    return LongContextLM(
        VOCABULARY, heads * head_dim, layers, heads, max_seq_len=tokens, tie_embeddings=False
    )


def built(make: Callable[[], nn.Module], device: str, seed: int) -> Callable[[], nn.Module]:
    """Makes a model with the weights of this seed, and leaves torch's generator as it was."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make().to(device)

    return build

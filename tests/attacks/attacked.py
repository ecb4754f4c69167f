"""What `attacks.py` attacks: one step of a private training run, and what it releases.

A mechanism releases the numbers of one step with the target sample in the batch or out of it, and
says what an attacker knows of them: both clipped sums, the noise's std and the public factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash

Array = npt.NDArray[Any]

WEIGHTS = 20_480
SAMPLES = 8
BOUND = 1.0
LEARNING_RATE = 0.1
# The exponent of the public grid on which an exact release lies before its one rounding.
GRID = math.floor(math.log2(BOUND)) - 30
TOKENS, WIDTH = 64, 32


# What is trained


class Probe(nn.Module):
    """A loss that is linear in every weight: a sample's gradient is its data, bit for bit.

    Half of the weights are rows of an embedding, the others three linear layers, of which two get
    data from the target only.

    Args:
        weights: number of weights.
        skips: whether a layer without data of a present sample does not run.
    """

    def __init__(self, weights: int, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.embedding = nn.Embedding(weights // 2 // WIDTH, WIDTH)
        self.widths = [weights // 4, weights // 8, weights // 8]
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for width in self.widths)
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("readout", torch.randn(TOKENS, WIDTH, generator=generator))
        self.reset()

    def reset(self) -> None:
        """All weights 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, tokens: Tensor, presence: Tensor) -> Tensor:
        """Losses [B] of x [B, weights / 2], tokens [B, TOKENS] and presence [B], 0 or 1."""
        dtype = self.embedding.weight.dtype
        found = (self.embedding(tokens) * self.get_buffer("readout").to(dtype)).sum((1, 2))
        for layer, part in zip(self.layers, x.split(self.widths, dim=1), strict=True):
            if not self.skips or bool((part * presence.unsqueeze(1)).any()):
                found = found + layer(part.to(dtype)).squeeze(1)
        return found * presence.to(dtype)


def samples(weights: int) -> list[Tensor]:
    """x, tokens and presence. The last sample is the target; half of its weights are its own.

    No two of the others touch the same weight: sums of two numbers do not depend on their order.
    """
    generator = torch.Generator().manual_seed(2)
    half = weights // 2
    rows = half // WIDTH
    x = torch.zeros(SAMPLES, half)
    # Few large sums, and many small ones.
    ends = [0, *(half >> shift for shift in range(SAMPLES, 1, -1))]
    for i in range(SAMPLES - 1):
        part = x[i, ends[i] : ends[i + 1]]
        part.copy_(10.0 / (i + 1) * torch.randn(part.shape, generator=generator))
    x[-1] = torch.randn(half, generator=generator)
    places = torch.arange(TOKENS)
    tokens = torch.stack([4 * i + places.remainder(4) for i in range(SAMPLES)])
    tokens[-1] = 4 * SAMPLES + places.remainder(rows - 4 * SAMPLES)
    return [x, tokens, torch.ones(SAMPLES)]


# The mechanisms under attack


@dataclass(frozen=True)
class View:
    """What of a training step is looked at, and how the step is made.

    Attributes:
        options: further arguments of make_private.
        dtype: of the parameters.
        weights: whether the zero-initialised weights after one step of SGD are seen, not p.grad.
        skips: see `Probe`.
    """

    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    weights: bool = False
    skips: bool = False

    @property
    def scale(self) -> float:
        """What the noisy sum is multiplied by."""
        return (-LEARNING_RATE if self.weights else 1.0) / SAMPLES

    @property
    def digits(self) -> int:
        """Of the released numbers' significands."""
        return 1 - round(math.log2(torch.finfo(self.dtype).eps))


VIEWS = {
    "p.grad": View({}),
    "weights": View({}, weights=True),
    "p.grad, instantiate": View({"grad_sample_mode": "instantiate"}),
    "p.grad, book_keeping": View({"grad_sample_mode": "book_keeping"}),
    "p.grad, ghost": View({"grad_sample_mode": "ghost"}),
    "p.grad, per_layer": View({"clipping": "per_layer"}),
    "p.grad, microbatches": View({"physical_batch_size": 3}),
    "p.grad, mean": View({"physical_batch_size": 3, "loss_reduction": "mean"}),
    # That a layer runs depends on other samples, which the first batch's proof refuses.
    "p.grad, layers without gradient": View({"verify_first_batch": False}, skips=True),
    "p.grad, fp64": View({}, dtype=torch.float64),
    "p.grad, bf16": View({}, dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Known:
    """What the attacker knows of a release, the rounded (sum + noise) scale.

    Attributes:
        sums: `[2, weights]`, without and with the target.
        std: of the noise.
        scale, digits: see `View`.
        fused: whether std z is added without being rounded first.
        distance: between two elements that would share a radius of Box-Muller.
    """

    sums: Array
    std: float
    scale: float
    digits: int
    fused: bool = True
    distance: int = 1

    @property
    def touched(self) -> Array:
        """`[weights]`: where the target makes a difference."""
        return self.sums[0] != self.sums[1]

    def total(self, seen: Array) -> Array:
        """The noisy sum: exact, but for two roundings where the scale is no power of two."""
        total = seen / self.scale
        return total.astype(np.float32).astype(np.float64) if self.digits == 24 else total


class Mechanism(Protocol):
    """A target of attacks."""

    known: Known

    def release(self, present: bool) -> Array:
        """The numbers of one release, `[weights]`, fp64."""


class DpflashStep:
    """A step of the installed dpflash through `PrivacyEngine.make_private`.

    Args:
        view: what is looked at.
        sigma: noise multiplier.
        seed: of the noise; None for keys of the operating system.
        weights: number of weights.
    """

    def __init__(self, view: View, sigma: float, seed: int | None, weights: int) -> None:
        self._view, self._weights = view, weights
        sums = np.stack([self._clipped_sum(present) for present in (False, True)])
        self._build(sigma, seed)
        self.known = Known(sums, sigma * BOUND, view.scale, view.digits)

    def release(self, present: bool) -> Array:
        self._model.reset()
        for _ in self._after_each_backward(present):
            self._optimizer.step()  # releases after the last microbatch only
        found = [p if self._view.weights else p.grad for p in self._model.parameters()]
        seen = _flat(found)
        self._optimizer.zero_grad()
        return seen

    def _build(self, sigma: float, seed: int | None) -> None:
        data = samples(self._weights)
        self._presence = data[-1]
        model = Probe(self._weights, self._view.skips).to(self._view.dtype)
        self._engine = dpflash.PrivacyEngine(accountant="rdp", seed=seed)
        # At sample rate 1 each iteration over the loader is one draw of all samples.
        self._model = model
        _, self._optimizer, self._loader = self._engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            data_loader=DataLoader(TensorDataset(*data), batch_size=SAMPLES),
            noise_multiplier=sigma,
            max_grad_norm=BOUND,
            **self._view.options,
        )

    def _after_each_backward(self, present: bool) -> Iterator[None]:
        self._presence[-1] = float(present)
        for batch in self._loader:
            losses = self._model(*batch)
            is_mean = "loss_reduction" in self._view.options
            self._engine.backward(losses.mean() if is_mean else losses)
            yield

    def _clipped_sum(self, present: bool) -> Array:
        """What noise is added to."""
        self._build(0.0, 0)
        parts: list[Tensor] = []
        step = self._engine._step
        assert step is not None
        release = step.release

        def keep(**options: Any) -> None:
            parts[:] = [step.sums.get(p, torch.zeros_like(p)) for p in self._model.parameters()]
            release(**options)

        step.release = keep  # type: ignore[method-assign]
        for _ in self._after_each_backward(present):
            self._optimizer.step()
        return _flat(parts)


class PlainStep:
    """A step of plain DP-SGD: the float32 clipped sum, and noise drawn by torch.

    Args:
        draw: (std, like) to noise of the shape of `like`.
        view: "p.grad" or "weights" of `VIEWS`.
        sigma: noise multiplier.
        weights: number of weights.
    """

    def __init__(
        self, draw: Callable[[float, Tensor], Tensor], view: View, sigma: float, weights: int
    ) -> None:
        self._draw, self._view = draw, view
        self._model = Probe(weights)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._sums = [self._clipped_sum(present, weights) for present in (False, True)]
        sums = np.stack([_flat(parts) for parts in self._sums])
        # torch.normal pairs the element k of a run of 16 with k + 8.
        self.known = Known(sums, sigma * BOUND, view.scale, view.digits, fused=False, distance=8)

    def release(self, present: bool) -> Array:
        self._model.reset()
        parameters = list(self._model.parameters())
        for parameter, total in zip(parameters, self._sums[present], strict=True):
            parameter.grad = (total + self._draw(self.known.std, total)) / SAMPLES
        self._optimizer.step()
        return _flat([p if self._view.weights else p.grad for p in parameters])

    def _clipped_sum(self, present: bool, weights: int) -> list[Tensor]:
        x, tokens, presence = samples(weights)
        presence[-1] = float(present)
        parameters = list(self._model.parameters())
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for i in range(SAMPLES):
            one = slice(i, i + 1)
            loss = self._model(x[one], tokens[one], presence[one]).sum()
            grads = torch.autograd.grad(loss, parameters)
            length = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            for total, grad in zip(sums, grads, strict=True):
                total += grad * min(1.0, BOUND / length if length else 1.0)
        return sums


class ExactStep:
    """What an exact release is, for comparison: sum and noise on the grid, then one rounding.

    The noise is numpy's float64 normals, whose digits end far below the grid; not for a release.
    """

    def __init__(self, view: View, sigma: float, seed: int | None, weights: int) -> None:
        wide = replace(view, dtype=torch.float64)
        sums = on_grid(DpflashStep(wide, sigma, seed, weights).known.sums, np.trunc)
        self._view = view
        self._generator = np.random.default_rng(seed)
        self.known = Known(sums, sigma * BOUND, view.scale, view.digits)

    def release(self, present: bool) -> Array:
        return self.seen(self.known.sums[int(present)] + self.noise())

    def noise(self) -> Array:
        """Of one release, on the grid."""
        return on_grid(self.known.std * self.normals(), np.rint)

    def normals(self) -> Array:
        """Standard normal numbers."""
        return self._generator.standard_normal(self.known.sums.shape[1])

    def seen(self, total: Array) -> Array:
        """What is released of a noisy sum."""
        grad = torch.from_numpy(total / SAMPLES).to(self._view.dtype)
        return (-LEARNING_RATE * grad if self._view.weights else grad).double().numpy()


def on_grid(values: Array, rounding: Callable[[Array], Array]) -> Array:
    """Multiples of 2^GRID."""
    return rounding(values * 2.0**-GRID) * 2.0**GRID


def _flat(parts: Sequence[Tensor | None]) -> Array:
    held = [part for part in parts if part is not None]
    assert len(held) == len(parts)
    return torch.cat([part.detach().flatten().double() for part in held]).numpy()


def torch_normal(std: float, like: Tensor) -> Tensor:
    """What most implementations of DP-SGD add."""
    return torch.normal(0.0, std, like.shape)


def opacus_secure(std: float, like: Tensor) -> Tensor:
    """What Opacus' secure_mode adds, here without torchcsprng, whose words it would be made of."""
    from opacus.optimizers.optimizer import _generate_noise

    return _generate_noise(std, like, secure_mode=True)


_PLAIN = {"torch.normal": torch_normal, "opacus secure_mode": opacus_secure}
# Of each target, what is looked at.
TARGETS: Mapping[str, Sequence[str]] = {
    "dpflash": tuple(VIEWS),
    "torch.normal": ("p.grad", "weights"),
    "opacus secure_mode": ("p.grad", "weights"),
    "exact reference": ("p.grad", "weights", "p.grad, fp64"),
}


def mechanism(
    target: str, view: str, sigma: float, *, seed: int | None = None, weights: int = WEIGHTS
) -> Mechanism:
    """A target with keys of its own. A seed fixes them, except for torch's global generator."""
    if target in _PLAIN:
        return PlainStep(_PLAIN[target], VIEWS[view], sigma, weights)
    step = DpflashStep if target == "dpflash" else ExactStep
    return step(VIEWS[view], sigma, seed, weights)

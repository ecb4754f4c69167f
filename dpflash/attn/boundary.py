"""Private boundary: clips the gradient that leaves through an activation and adds noise to it.

Letters: B samples, C max_grad_norm, sigma noise_multiplier.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpflash.kernels import clip_factors, gaussian_noise_, grid_of, squared_norm
from dpflash.kernels.grid import truncated

from .. import _validate
from ..privacy.keys import master_key
from ..verification.second_order import differentiable_once

_releases = itertools.count()
_key = master_key()


def _new_key() -> None:
    """Draw a new key in a forked process, so that the noise of the parent is not repeated."""
    global _key
    _key = master_key()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_new_key)


@dataclass
class NoiseOff:
    """State of one `without_noise` block."""

    active: bool = True  # whether the block is still running
    crossed: bool = False  # whether a boundary was crossed inside the block
    silenced: bool = False  # whether the noise of a boundary was switched off


class _Switch(threading.local):
    off: NoiseOff | None = None


_switch = _Switch()


@contextmanager
def without_noise() -> Iterator[NoiseOff]:
    """Switch off noise, but not clipping, of boundaries that this thread crosses in the block.

    **Gradients without noise are not private.** Only `PrivacyEngine.check` may use this function:
    it compares gradients of a copy of the model, which are not released.

    A boundary reads this state in the forward, since its backward may run in a thread of autograd.
    After the block, also after an exception, all boundaries add noise again. A later backward
    through a boundary that was crossed inside the block adds noise too. A boundary that another
    thread crosses (such as autograd's thread in a reentrant checkpoint) keeps its noise.
    """
    off = NoiseOff()
    before, _switch.off = _switch.off, off
    try:
        yield off
    finally:
        _switch.off = before
        off.active = False


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Clipping bound and noise of a private boundary, see `private_boundary`.

    Args:
        max_grad_norm: C, the L2 bound of one sample's gradient, over all tensors of the boundary.
        noise_multiplier: sigma; the noise on every coordinate has standard deviation sigma C.

    Raises:
        ValueError: max_grad_norm is not positive and finite, noise_multiplier is negative or
            infinite, or the noise does not fit into the range of float32.
    """

    max_grad_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        _validate.noise_fits(
            max_grad_norm=self.max_grad_norm, noise_multiplier=self.noise_multiplier
        )
        _validate.finite(max_grad_norm=self.max_grad_norm)


def private_boundary(x: Tensor, *, max_grad_norm: float, noise_multiplier: float) -> Tensor:
    """Return x; in the backward, clip the gradient of x per sample and add Gaussian noise.

    Row i of the gradient becomes ``c_i dx_i + N(0, (sigma C)^2)`` with ``c_i = min(1, C /
    ||dx_i||)``; the norm is taken over all dimensions but the first. The function is meant for
    split and federated learning, in which one party sends gradients of activations to another.

    Args:
        x: `[B, ...]`, floating point; its gradient is clipped and noised in float64.
        max_grad_norm: C, the L2 bound of a row of the gradient. The differentiated loss is usually
            the sum of the per-sample losses.
        noise_multiplier: sigma.

    Returns:
        A new tensor with the values of x.

    Raises:
        ValueError: x has no batch dimension or is not floating point, or `Boundary` refuses
            max_grad_norm or noise_multiplier.
        RuntimeError: the function is compiled, or a CUDA stream is capturing in the backward:
            a replay would repeat the noise.

    Guarantees:
        The returned gradient is private if its receiver sees nothing else that depends on the
        data of the loss. If row i depends on sample i alone, one backward is one Gaussian
        mechanism with noise multiplier sigma under zero_out: in a neighboring batch, one sample's
        loss has gradient 0 at the sample's row. n backwards compose as n full Gaussian steps;
        `dpflash epsilon --sample-rate 1 --steps n` computes their epsilon. Sampling does not
        amplify privacy: the rows show who is in the batch. The noise never repeats: it comes from
        ChaCha20, with a key from the operating system in each process.

        Not private are the forward (x itself, the loss), the number and order of rows, and
        gradients of parameters between the boundary and the loss. Gradients of parameters before
        the boundary are not private if they partly bypass it. For weights use `PrivacyEngine`.
    """
    boundary = Boundary(max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)
    return cross(boundary, x)[0]


def cross(boundary: Boundary, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply one boundary to several tensors `[B, ...]`, clipped by their joint norm."""
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ValueError(f"x={type(x).__name__}: expected a tensor [B, ...]")
        if x.ndim == 0 or not x.is_floating_point():
            raise ValueError(
                f"x has shape {tuple(x.shape)} and dtype {x.dtype}: expected a floating-point "
                "tensor whose first dimension is the batch"
            )
    return _Boundary.apply(release_of(boundary), *tensors)


def release_of(
    boundary: Boundary,
) -> Callable[[Sequence[Tensor], Tensor], tuple[Tensor, ...]]:
    """Return function (gradients, joint squared norms) -> clipped gradients plus noise."""
    if torch.compiler.is_compiling():
        # A compiled graph would keep the release's number as a constant, and repeat its noise.
        raise RuntimeError(
            "private_boundary inside of a compiled function: its noise would be compiled in, and "
            "each call would repeat it; compile the code before and after the boundary separately"
        )
    off = _switch.off
    if off is not None:
        off.crossed = True
        off.silenced |= boundary.noise_multiplier > 0
    return functools.partial(_release, boundary, off)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        release: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, ...]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.release = release
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        squares = sum(squared_norm(grad) for grad in grads)
        assert isinstance(squares, Tensor)
        return (None, *ctx.release(grads, squares))


def _release(
    boundary: Boundary, off: NoiseOff | None, grads: Sequence[Tensor], squares: Tensor
) -> tuple[Tensor, ...]:
    bound = float(boundary.max_grad_norm)
    factors = clip_factors(squares, bound)
    std = float(boundary.noise_multiplier) * bound
    if off is not None and off.active:
        std = 0.0
    grid = grid_of(boundary.max_grad_norm)
    step = next(_releases)
    return tuple(
        _clipped_and_noised(grad, factors, std, grid, step, number)
        for number, grad in enumerate(grads)
    )


def _clipped_and_noised(
    grad: Tensor, factors: Tensor, std: float, grid: float, step: int, number: int
) -> Tensor:
    """Return ``c_i dx_i``, truncated to multiples of `grid`, plus noise, in grad's dtype."""
    weights = factors.double().view(-1, *[1] * (grad.ndim - 1))
    clipped = (grad.double() * weights).masked_fill(weights == 0, 0.0)
    clipped = truncated(clipped, grid).contiguous()
    if std > 0:
        std = math.nextafter(std, math.inf)
        gaussian_noise_(clipped, std=std, grid=grid, key=_key, step=step, parameter_id=number)
    return clipped.to(grad.dtype)

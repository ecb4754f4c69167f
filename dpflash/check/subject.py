"""Runs a copy of the tested model, each time from the same buffers and seed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..isolation.alteration import copied, rows_of
from ..isolation.dropout import WithoutDropout
from ..verification.nested import tensors_of
from ..verification.unchanged import Unchanged

LossFunction = Callable[[nn.Module, Any], Tensor]


class Result(NamedTuple):
    """A loss, its gradients by parameter name, and the magnitudes of both.

    `sizes` is (absolute value of the loss, norm of the gradients). Rounding errors are relative
    to these values. If results are added, their sizes are added.
    """

    loss: float
    grads: dict[str, Tensor]
    sizes: tuple[float, float]

    def is_finite(self) -> bool:
        return math.isfinite(sum(self.sizes))

    def plus(self, factor: float, other: Result) -> Result:
        """Return the sum of this result and `factor` times the other result."""
        grads = dict(self.grads)
        for name, grad in other.grads.items():
            grads[name] = factor * grad + grads.get(name, 0)
        loss, norm = (
            own + abs(factor) * its for own, its in zip(self.sizes, other.sizes, strict=True)
        )
        return Result(self.loss + factor * other.loss, grads, (loss, norm))


NOTHING = Result(0.0, {}, (0.0, 0.0))


# Losses with class weights, which the user holds in float32. They change no argument in place.
_WEIGHTED = (
    F.cross_entropy,
    F.nll_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.multi_margin_loss,
)


class _Widened(TorchFunctionMode):
    """Converts the class weights of losses to float64 if the model's outputs are in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WEIGHTED and args and args[0].dtype == torch.float64:
            args, kwargs = tree_map_only(
                Tensor,
                lambda x: x.double() if x.dtype == torch.float32 else x,
                (args, kwargs or {}),
            )
        return func(*args, **(kwargs or {}))


class Subject:
    """A copy of the tested model, with the loss function and the batch.

    Args:
        model: the copy; its dropout is disabled.
        loss_fn: loss_fn(model, batch) -> losses [B], or a scalar if a reduction is declared.
        batch: the batch, of `size` samples.
        size: B.
        loss_reduction: "mean" or "sum" if loss_fn returns a scalar, else None.
        is_exact: whether results count as equal only if they have the same bits.
        is_wide: whether the model is in float64, to which class weights are then converted.

    Attributes:
        trained: the trainable parameters by name.
        dropout: whether there was dropout to disable.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        size: int,
        loss_reduction: str | None = None,
        *,
        is_exact: bool = False,
        is_wide: bool = False,
    ):
        self.model = model
        self.loss_fn = loss_fn
        self.batch = batch
        self.size = size
        self.loss_reduction = loss_reduction
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dropout = any(
            isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules()
        )
        self._is_exact, self._is_wide = is_exact, is_wide
        self._buffers = [
            (module, f"{prefix}.{name}".lstrip("."), name, buffer.detach().clone())
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._unchanged = Unchanged(model, (), [dotted for _, dotted, _, _ in self._buffers])
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()

    def losses(self, batch: Any, seed: int = 0) -> Tensor:
        """Call loss_fn on a copy of the batch, since loss_fn may change it in place."""
        for module, _, name, value in self._buffers:
            module._buffers[name] = value.clone()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        with WithoutDropout() as mode, _Widened() if self._is_wide else nullcontext():
            losses = self.loss_fn(self.model, copied(batch))
        self.dropout |= mode.seen
        return losses

    def result(self, batch: Any, index: int = 0) -> Result:
        """Return the loss `losses[index]` (or the scalar loss), with its gradients."""
        losses = self.losses(batch)
        if losses.ndim != (0 if self.loss_reduction else 1):
            raise ValueError(f"losses of shape {tuple(losses.shape)}")
        loss = losses if self.loss_reduction else losses[index]
        found = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
        grads = {n: g for n, g in zip(self.trained, found, strict=True) if g is not None}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        return Result(float(loss.detach()), grads, (abs(float(loss.detach())), norm))

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers after the last run, by name."""
        return {
            dotted: buffer.detach().clone()
            for module, dotted, name, _ in self._buffers
            if (buffer := module._buffers.get(name)) is not None
        }

    def changed(self) -> list[str]:
        """Return names of changed parameters and other state_dict() entries, except buffers."""
        return self._unchanged.found()

    def pick(self, rows: Iterable[int]) -> Any:
        """Return a batch of these samples; a sample may occur several times."""
        return rows_of(self.batch, list(rows), self.size)

    @property
    def indices(self) -> list[int]:
        """The samples that are compared: the first, the middle and the last sample."""
        return sorted({0, self.size // 2, self.size - 1})

    def losses_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of loss_fn's result for `size` samples."""
        return () if self.loss_reduction else (size,)

    @functools.cached_property
    def tolerance(self) -> float:
        """The relative difference up to which results count as equal."""
        if self._is_exact:
            return 0.0
        with _Narrowest() as narrowest:
            self.losses(self.batch)
        # Above rounding errors, which grow with depth, and below the effect of other samples.
        return float(narrowest.eps ** (2 / 3))

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the losses depend on the seed."""
        return not self.close(self.losses(self.batch), self.losses(self.batch, seed=1))

    def agree(self, one: list[Tensor], two: list[Tensor]) -> bool:
        return len(one) == len(two) and all(map(self.close, one, two))

    def close(self, a: Tensor, b: Tensor) -> bool:
        a, b = a.detach(), b.detach()
        if a.shape != b.shape or not (a.is_floating_point() and b.is_floating_point()):
            return torch.equal(a, b)
        a, b = a.double(), b.double()
        # Masks contain infinities; the difference of equal infinities is 0.
        difference = torch.where(a == b, 0.0, a - b).nan_to_num(nan=math.inf).norm()
        finite = torch.where(a.isfinite(), a, 0.0).norm()
        return float(difference) <= self.tolerance * float(finite)


@contextmanager
def randomness_restored(batch: Any) -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python at the end of the with block."""
    devices = sorted(
        {t.device.index or 0 for _, t in tensors_of(batch) if t.device.type == "cuda"}
    )
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _Narrowest(TorchDispatchMode):
    eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for _, tensor in tensors_of(out):
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return out

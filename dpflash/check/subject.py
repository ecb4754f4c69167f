"""Runs a copy of the model under test, each time from the same buffers and seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..attn.boundary import NoiseOff
from ..isolation.dropout import WithoutDropout
from ..verification.nested import tensors_of
from ..verification.unchanged import Unchanged
from .batch import mapped, pick
from .report import ITSELF

LossFunction = Callable[[nn.Module, Any], Tensor]

_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


@dataclass
class LossAndGrads:
    """The loss of one sample of a batch, or a scalar loss, and its gradients by parameter name."""

    loss: float
    grads: dict[str, Tensor | None]

    def norm(self) -> float:
        return math.sqrt(
            sum(float(g.double().square().sum()) for g in self.grads.values() if g is not None)
        )

    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm())


class Subject:
    """The copy under test: each run starts from the same buffers and the same seed."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction):
        self.model = model
        self.loss_fn = loss_fn
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dropout = any(
            isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules()
        )
        self._buffers = [
            (module, f"{prefix}.{name}".lstrip("."), name, buffer.detach().clone())
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._lazy = {n: p for n, p in model.named_parameters() if is_lazy(p)}
        buffers = [dotted for _, dotted, _, _ in self._buffers]
        self._unchanged = Unchanged(model, self._lazy.values(), buffers)
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()

    def losses(self, batch: Any, seed: int = 0) -> Tensor:
        """Call loss_fn: losses `[B]`, or a scalar if a reduction is declared."""
        for module, _, name, value in self._buffers:
            module._buffers[name] = value.clone()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        with _SettableInputs(), WithoutDropout() as mode:
            # loss_fn may modify the batch in place.
            losses = self.loss_fn(self.model, mapped(batch, torch.clone))
        self.dropout |= mode.seen
        return losses

    def loss_and_grads(self, batch: Any, index: int | None) -> LossAndGrads:
        """Loss and gradients of losses[index]; of the scalar if index is None."""
        losses = self.losses(batch)
        if losses.ndim != (0 if index is None else 1):
            raise ValueError(f"losses of shape {tuple(losses.shape)}")
        one = losses if index is None else losses[index]
        found = torch.autograd.grad(one, list(self.trained.values()), allow_unused=True)
        return LossAndGrads(float(one.detach()), dict(zip(self.trained, found, strict=True)))

    def buffers(self) -> dict[str, Tensor]:
        """The buffers after the last run."""
        return {
            dotted: buffer.detach().clone()
            for module, dotted, name, _ in self._buffers
            if (buffer := module._buffers.get(name)) is not None
        }

    def dropping(self) -> list[str]:
        """Modules with a nonzero attribute for dropout, which they may apply themselves."""
        return [
            name or ITSELF
            for name, module in self.model.named_modules()
            if module.training
            and any(
                "drop" in n and isinstance(v, float) and v > 0 for n, v in vars(module).items()
            )
        ]

    def changed(self) -> list[str]:
        """What changed of parameters and of what else state_dict() has, apart from the buffers."""
        return [*self._lazy, *self._unchanged.found()]


@dataclass
class Trial:
    """A subject, its batch, and the tolerance of comparisons.

    Attributes:
        subject: the copy under test.
        batch: the batch, of `size` samples.
        size: B.
        loss_reduction: "mean" or "sum" if loss_fn returns a scalar, else None.
        tolerance: relative difference up to which results count as equal.
        boundaries: records the boundaries that ran; their noise is disabled.
        random: whether the losses depend on the seed.
    """

    subject: Subject
    batch: Any
    size: int
    loss_reduction: str | None
    tolerance: float
    boundaries: NoiseOff
    random: bool = False

    def replace_subject(self, subject: Subject, batch: Any) -> None:
        """Continue with another copy of the model, and with the batch in another dtype."""
        self.subject, self.batch = subject, batch

    def set_tolerance(self, tolerance: float) -> None:
        """Set the relative difference up to which results count as equal."""
        self.tolerance = tolerance

    def set_random(self) -> None:
        """Record that the losses depend on the seed."""
        self.random = True

    @property
    def indices(self) -> list[int]:
        """The samples that are compared one by one."""
        return ends_and_middle(self.size)

    def pick(self, rows: Iterable[int]) -> Any:
        return pick(self.batch, rows)

    def losses_shape(self, size: int) -> tuple[int, ...]:
        """The shape of loss_fn's result for `size` samples."""
        return () if self.loss_reduction else (size,)

    def agree(self, one: list[Tensor], two: list[Tensor]) -> bool:
        return len(one) == len(two) and all(
            a.shape == b.shape and self.close(a, b) for a, b in zip(one, two, strict=True)
        )

    def close(self, a: Tensor, b: Tensor) -> bool:
        if not a.is_floating_point() or not b.is_floating_point():
            return torch.equal(a, b)
        a, b = a.double(), b.double()
        # Masks contain infinities; equal infinities do not count as a difference.
        difference = torch.where(a == b, 0.0, a - b).nan_to_num(nan=math.inf).norm()
        finite = torch.where(a.isfinite(), a, 0.0).norm()
        return float(difference) <= self.tolerance * float(finite)

    def apart(
        self, a: dict[str, Tensor | None], b: dict[str, Tensor | None], scale: float
    ) -> dict[str, float]:
        """Parameters whose gradients differ beyond the tolerance -> difference over `scale`."""
        differences = {}
        for name, one in a.items():
            two = b[name]
            if one is None and two is None:
                continue
            one = torch.zeros_like(self.subject.trained[name]) if one is None else one
            two = torch.zeros_like(one) if two is None else two
            difference = float((one - two).double().norm()) / scale if scale else 0.0
            if not difference <= self.tolerance:
                differences[name] = difference
        return differences


def ends_and_middle(size: int) -> list[int]:
    """The first, middle and last index of a batch of this size."""
    return sorted({0, size // 2, size - 1})


def coarsest_eps(subject: Subject, batch: Any) -> float:
    """The coarsest precision among the results of all operations of a run."""
    narrowest = _Narrowest()
    with narrowest:
        subject.losses(batch)
    return narrowest.eps


@contextmanager
def randomness_restored(batch: Any) -> Iterator[None]:
    """Restore the random states of torch, numpy and Python at the end."""
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


class _SettableInputs(TorchFunctionMode):
    """Lets a model set requires_grad of its inputs where the check differentiates them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_REQUIRES_GRAD and args[1] is True and args[0].requires_grad:
            return None
        return func(*args, **(kwargs or {}))


class _Narrowest(TorchDispatchMode):
    """Records the coarsest precision among the results of all operations."""

    eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for _, tensor in tensors_of(out):
            if tensor.is_floating_point():
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return out

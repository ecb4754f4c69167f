"""PublicGradients: gradients of public data, stored apart from the clipped sums until the step.

    with engine.public_data():      # layers do not clip; every `.grad` is None at first
        loss.backward()             # autograd writes `.grad`, as in ordinary training
                                    # at the end gradients are stored, and `.grad` is restored
    optimizer.step()                # noisy gradient + public gradient, or the latter alone

A public gradient is added to a `.grad` only after noise was added to the clipped sum there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from ..distributed.collectives import all_reduce_all_
from ..distributed.fsdp import is_sharded
from ..distributed.mesh import Ranks


class PublicGradients:
    """Stores the trained parameters' gradients on public data until the next step."""

    def __init__(self, trained: Sequence[nn.Parameter], names: dict[nn.Parameter, str]):
        self._trained = tuple(trained)
        self._names = names
        self._waiting: dict[nn.Parameter, Tensor] = {}
        self._of_other_batches: dict[nn.Parameter, Tensor] = {}
        self._is_inside = False
        self._reached_gate = False

    @property
    def are_waiting(self) -> bool:
        """Whether public gradients are stored for the next step."""
        return bool(self._waiting)

    @property
    def names(self) -> list[str]:
        """Names of the parameters with a stored public gradient."""
        return [self._names[p] for p in self._trained if p in self._waiting]

    @property
    def is_inside(self) -> bool:
        """Whether a `with engine.public_data()` block is open."""
        return self._is_inside

    def refuse_inside(self, call: str) -> None:
        """Raise RuntimeError if a `with engine.public_data()` block is open."""
        if self._is_inside:
            raise RuntimeError(
                f"{call} inside engine.public_data(), where only forwards and backwards of public "
                "data run; leave the with block first"
            )

    def refuse_gate(self) -> None:
        """Raise RuntimeError if a clipped backward runs in `with engine.public_data()`."""
        if self._is_inside:
            self._reached_gate = True
            for parameter in self._trained:
                parameter.grad = None
            self._refuse_gate()

    @staticmethod
    def _refuse_gate() -> NoReturn:
        raise RuntimeError(
            "a backward inside engine.public_data() reached a forward that ran outside of it, on "
            "private data: its gradients would be neither clipped nor noised, so they are "
            "dropped. Compute losses of public data from forwards inside the with block, and "
            "call engine.backward(losses) outside of the block"
        )

    def refuse_ranks(self, ranks: Ranks) -> None:
        """Raise if parameters are sharded over other ranks than the mesh's data dimension."""
        for parameter, name in self._names.items():
            if not is_sharded(parameter):
                continue
            size = parameter.device_mesh.size()
            if ranks.context is not None or size != ranks.data_size:
                raise ValueError(
                    f"engine.public_data(): parameter '{name}' is sharded over "
                    f"{size} ranks, but only {ranks.data_size} with different samples"
                    f"{'' if ranks.context is None else ' and a context'}: fully_shard averages "
                    "public gradients only over its own ranks. Shard over mesh['data'] without a "
                    "context dimension, or train on public data in a run of its own"
                )

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Store the gradients that the with block computes; set `.grad` to None, then restore it.

        If the block raises an exception or runs a clipped backward, its gradients are dropped.
        """
        self.refuse_inside("engine.public_data()")
        held = {parameter: parameter.grad for parameter in self._trained}
        for parameter in self._trained:
            parameter.grad = None
        self._is_inside, self._reached_gate = True, False
        try:
            yield
            if self._reached_gate:
                # The block has caught the error, so raise it again.
                self._refuse_gate()
            for parameter in self._trained:
                if parameter.grad is not None:
                    self._add(parameter, parameter.grad.detach())
        finally:
            self._is_inside = False
            for parameter, grad in held.items():
                parameter.grad = grad

    def _add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        waiting = self._waiting.get(parameter)
        # Copy: with DistributedDataParallel, `.grad` may be a view of a buffer that is reused.
        self._waiting[parameter] = grad.clone() if waiting is None else waiting + grad

    def begin_microbatch(self, *, begins_draw: bool) -> None:
        """Begin a microbatch; drop public gradients of the logical batch's earlier microbatches.

        Their sum would show the number of microbatches of a logical batch, which is private.
        """
        if begins_draw:
            self._of_other_batches = dict(self._waiting)
        self._waiting = dict(self._of_other_batches)

    def mean(self, ranks: Ranks) -> dict[nn.Parameter, Tensor]:
        """Return the stored gradients as new tensors, averaged over ranks with different samples.

        All ranks call this together, with stored gradients of the same parameters.
        """
        found = {p: self._waiting[p].clone() for p in self._trained if p in self._waiting}
        # The backward has already averaged the gradients of sharded parameters.
        whole = [grad for parameter, grad in found.items() if not is_sharded(parameter)]
        all_reduce_all_(whole, ranks.everyone)
        for grad in whole if ranks.everyone is not None else ():
            grad.div_(ranks.data_size)
        return found

    def drop(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Drop the stored gradients of these parameters; None for all parameters."""
        for parameter in self._trained if parameters is None else parameters:
            self._waiting.pop(parameter, None)
            self._of_other_batches.pop(parameter, None)

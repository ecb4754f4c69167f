"""PublicGradients: gradients of public data, which wait for the next step beside the clipped sums.

    with engine.public_data():      # plain layers; every `.grad` is None at first
        loss.backward()             # autograd writes `.grad`, as in any training
                                    # taken out of `.grad`, which is as before
    optimizer.step()                # release + public gradients, or a step on these alone

A clipped sum and a public gradient never meet in one `.grad` before the release is made.
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
    """Gradients of public data, of the parameters that are trained privately, by their names."""

    def __init__(self, trained: Sequence[nn.Parameter], names: dict[nn.Parameter, str]):
        self._trained = tuple(trained)
        self._names = names
        self._waiting: dict[nn.Parameter, Tensor] = {}
        self._of_other_batches: dict[nn.Parameter, Tensor] = {}
        self._is_inside = False
        self._reached_gate = False

    @property
    def are_waiting(self) -> bool:
        """Whether the next step has public gradients."""
        return bool(self._waiting)

    @property
    def names(self) -> list[str]:
        """Names of the parameters with a waiting gradient."""
        return [self._names[p] for p in self._trained if p in self._waiting]

    @property
    def is_inside(self) -> bool:
        """Whether a region of public data is open."""
        return self._is_inside

    def refuse_inside(self, call: str) -> None:
        """Raise a RuntimeError if a region of public data is open."""
        if self._is_inside:
            raise RuntimeError(
                f"{call} inside engine.public_data(), where only forwards and backwards of public "
                "data run; leave the with block first"
            )

    def refuse_gate(self) -> None:
        """Raise a RuntimeError if a region of public data is open: a clipping gate runs in it."""
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
            "call engine.backward(losses) outside of it"
        )

    def refuse_ranks(self, ranks: Ranks) -> None:
        """Refuse parameters sharded over other ranks than those of the data dimension."""
        for parameter, name in self._names.items():
            if not is_sharded(parameter):
                continue
            size = parameter.device_mesh.size()
            if ranks.context is not None or size != ranks.data_size:
                raise ValueError(
                    f"engine.public_data() with parameter '{name}' sharded over "
                    f"{size} ranks, of {ranks.data_size} with other samples"
                    f"{'' if ranks.context is None else ' and a context'}: fully_shard means "
                    "public gradients over its own ranks alone. Shard over mesh['data'], without "
                    "a context, or train on public data in a run of its own"
                )

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Take what the block adds to `.grad` for public; `.grad` is None at first, then restored.

        After an exception the block's gradients are dropped. A clipping gate in it is refused.
        """
        self.refuse_inside("engine.public_data()")
        held = {parameter: parameter.grad for parameter in self._trained}
        for parameter in self._trained:
            parameter.grad = None
        self._is_inside, self._reached_gate = True, False
        try:
            yield
            if self._reached_gate:
                # The block has caught the error.
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
        # A copy: DistributedDataParallel may keep `.grad` in a buffer of its own.
        self._waiting[parameter] = grad.clone() if waiting is None else waiting + grad

    def begin_microbatch(self, *, begins_draw: bool) -> None:
        """A microbatch begins; drops the gradients that earlier ones of its draw added.

        The number of microbatches of a draw is private, so public gradients count once in each.
        """
        if begins_draw:
            self._of_other_batches = dict(self._waiting)
        self._waiting = dict(self._of_other_batches)

    def mean(self, ranks: Ranks) -> dict[nn.Parameter, Tensor]:
        """The waiting gradients, averaged over the ranks with other samples; new tensors.

        All ranks call this together, with waiting gradients of the same parameters.
        """
        found = {p: self._waiting[p].clone() for p in self._trained if p in self._waiting}
        # Those of sharded parameters are averaged in the backward.
        whole = [grad for parameter, grad in found.items() if not is_sharded(parameter)]
        all_reduce_all_(whole, ranks.everyone)
        for grad in whole if ranks.everyone is not None else ():
            grad.div_(ranks.data_size)
        return found

    def drop(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the waiting gradients, those of all parameters by default."""
        for parameter in self._trained if parameters is None else parameters:
            self._waiting.pop(parameter, None)
            self._of_other_batches.pop(parameter, None)

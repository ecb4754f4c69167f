"""What a training job's model, batches and figures are on each of its workers.

Letters: B documents, T tokens, T_p those of this worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..distributed import Layout, context_parallel
from ..distributed import collectives as _workers
from ..distributed.fsdp import is_sharded
from ..distributed.mesh import DATA, Workers
from ..nn import LongContextLM
from .config import Parallelism

__all__ = ["Team"]


class Team:
    """A worker of a job and its peers; a process by itself where there is no mesh.

    Args:
        parallel: how they share the job.
        mesh: of all workers, with the dimensions "data" and "context".

    Attributes:
        workers: their groups.
        is_first: whether this one writes and prints.
    """

    def __init__(
        self, parallel: Parallelism | None = None, mesh: DeviceMesh | None = None
    ) -> None:
        self.parallel = Parallelism() if parallel is None else parallel
        self.mesh = mesh
        self.workers = Workers.of(mesh)
        self.is_first = self.workers.is_first

    def as_dict(self) -> dict[str, object]:
        """How the job is shared, as plain values."""
        parallel = self.parallel
        return {
            "data": self.workers.data_size,
            "context": parallel.context_parallel,
            "context_mode": parallel.context_mode,
            "sharding": parallel.sharding,
            "shard_parameters": parallel.shard_parameters,
        }

    def split_context(self, model: LongContextLM) -> LongContextLM:
        """The model for this worker's tokens, changed in place."""
        if self.mesh is None or self.workers.context is None:
            return model
        parallel = self.parallel
        return context_parallel(
            model, self.mesh, mode=parallel.context_mode, sharding=parallel.sharding
        )

    def shard_parameters(self, model: LongContextLM) -> LongContextLM:
        """The model with this worker's part of each parameter, where the job wants that."""
        if self.mesh is not None and self.parallel.shard_parameters:
            from torch.distributed.fsdp import fully_shard  # slow to load

            for block in model.blocks:
                fully_shard(block, mesh=self.mesh[DATA])
            fully_shard(model, mesh=self.mesh[DATA])
        return model

    def own_tokens(self, x: Tensor) -> Tensor:
        """`[B, T_p]` of `[B, T]`."""
        context = self.workers.context
        if context is None:
            return x
        layout = Layout(x.shape[1], _workers.world_size(context), self.parallel.sharding)
        return x[:, layout.positions(_workers.rank_in(context), x.device)]

    def own_documents(self, x: Tensor) -> Tensor:
        """This worker's share of the rows of x; it may be empty."""
        return x[self.workers.data_rank :: self.workers.data_size]

    @property
    def counts_documents(self) -> bool:
        """Whether this worker, of those with the same documents, is the one that counts them."""
        return _workers.rank_in(self.workers.context) == 0

    def total(self, values: Sequence[float], what: str) -> list[float]:
        """The sums of each worker's values."""
        return self._reduced(values, what, dist.ReduceOp.SUM)

    def greatest(self, value: float, what: str) -> float:
        """The greatest of each worker's values."""
        return self._reduced([value], what, dist.ReduceOp.MAX)[0]

    def _reduced(
        self, values: Sequence[float], what: str, op: dist.ReduceOp.RedOpType
    ) -> list[float]:
        everyone = self.workers.everyone
        if everyone is None:
            return list(values)
        device = _workers.control_device(everyone)
        held = torch.tensor(values, dtype=torch.float64, device=device)
        reduced: list[float] = _workers.all_reduce_(held, everyone, what, op).tolist()
        return reduced

    def add_gradients(self, model: nn.Module) -> None:
        """Each worker's gradients become their sum; no gradient counts as zeros."""
        everyone = self.workers.everyone
        if everyone is None:
            return
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        _workers.all_reduce_all_(gradients, everyone)

    def whole_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The model's state_dict with whole tensors; all workers call this together."""
        state: dict[str, Tensor] = model.state_dict()
        named = dict(model.named_parameters(remove_duplicate=False))
        # A parameter of two names is gathered, and written, once.
        whole: dict[int, Tensor] = {}
        for name, value in state.items():
            if is_sharded(value):
                key = id(named.get(name, value))
                if key not in whole:
                    with _workers.exchanging("gathering the weights", self.workers.data):
                        whole[key] = value.full_tensor()
                state[name] = whole[key]
        return state

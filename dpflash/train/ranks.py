"""Per-rank view of a training job: this rank's model, its part of each batch, and reductions.

Shapes: B documents, T tokens, T_p tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..distributed import ContextParallel, Layout, collectives, context_parallel
from ..distributed.fsdp import is_sharded
from ..distributed.mesh import DATA, Ranks
from ..nn import LongContextLM
from ..packing import PackedBatch
from .config import Parallelism


class Team:
    """This rank of a job, and its communication with other ranks. The first rank writes files."""

    def __init__(self, parallel: Parallelism, mesh: DeviceMesh | None = None) -> None:
        self.parallel = parallel
        self.mesh = mesh
        self.ranks = Ranks.of(mesh)
        self.is_first = self.ranks.is_first

    def as_dict(self) -> dict[str, object]:
        """Return how the ranks divide the job, as plain values."""
        parallel = self.parallel
        return {
            "data": self.ranks.data_size,
            "context": parallel.context_parallel,
            "context_mode": parallel.context_mode,
            "sharding": parallel.sharding,
            "shard_parameters": parallel.shard_parameters,
        }

    def split_context(self, model: nn.Module) -> nn.Module:
        """Make the model context parallel, in place."""
        if self.mesh is None or self.ranks.context is None:
            return model
        parallel = self.parallel
        return context_parallel(
            model, self.mesh, mode=parallel.context_mode, sharding=parallel.sharding
        )

    def shard_parameters(self, model: nn.Module) -> nn.Module:
        """Shard the parameters of a `LongContextLM`, if the job has shard_parameters=True."""
        if self.mesh is not None and self.parallel.shard_parameters:
            assert isinstance(model, LongContextLM)
            from torch.distributed.fsdp import fully_shard  # slow to load

            for block in model.blocks:
                fully_shard(block, mesh=self.mesh[DATA])
            fully_shard(model, mesh=self.mesh[DATA])
        return model

    def own_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens `[B, T_p]` of x `[B, T]`."""
        context = self.ranks.context
        if context is None:
            return x
        layout = Layout(x.shape[1], collectives.world_size(context), self.parallel.sharding)
        return x[:, layout.positions(collectives.rank_in(context), x.device)]

    def own_packed(self, batch: PackedBatch) -> PackedBatch:
        """Return this rank's tokens of each packed row."""
        if self.mesh is None or self.ranks.context is None:
            return batch
        return ContextParallel.of(self.mesh).shard(batch)

    def own_documents(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x; there may be none."""
        return x[self.ranks.data_rank :: self.ranks.data_size]

    @property
    def counts_documents(self) -> bool:
        """Whether this rank counts documents: the first of the ranks that share a window."""
        return collectives.rank_in(self.ranks.context) == 0

    def total(self, values: Sequence[float], operation: str) -> list[float]:
        """Return each value summed over the ranks."""
        return self._reduced(values, operation, dist.ReduceOp.SUM)

    def greatest(self, value: float, operation: str) -> float:
        """Return the maximum of a value over the ranks."""
        return self._reduced([value], operation, dist.ReduceOp.MAX)[0]

    def _reduced(
        self, values: Sequence[float], operation: str, op: dist.ReduceOp.RedOpType
    ) -> list[float]:
        everyone = self.ranks.everyone
        if everyone is None:
            return list(values)
        device = collectives.control_device(everyone)
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        reduced: list[float] = collectives.all_reduce_(tensor, everyone, operation, op).tolist()
        return reduced

    def add_gradients(self, model: nn.Module) -> None:
        """Replace gradients by their sum over the ranks; a missing gradient counts as zeros."""
        everyone = self.ranks.everyone
        if everyone is None:
            return
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        collectives.all_reduce_all_(gradients, everyone)

    def whole_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the model's state_dict with unsharded tensors; all ranks call this together."""
        state: dict[str, Tensor] = model.state_dict()
        named = dict(model.named_parameters(remove_duplicate=False))
        # A tied parameter, which has two names, is gathered and written once.
        whole: dict[int, Tensor] = {}
        for name, value in state.items():
            if is_sharded(value):
                key = id(named.get(name, value))
                if key not in whole:
                    with collectives.exchanging("gathering the weights", self.ranks.data):
                        whole[key] = value.full_tensor()
                state[name] = whole[key]
        return state

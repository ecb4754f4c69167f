"""Counts the calls of torch.distributed in a step, and the bytes that a rank sends in the calls.

P is the number of ranks. A call is a collective of all ranks, or a send to one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .isolated import Place

_RECEIVES = ("recv_", "recv_any_source_")
# Operation -> (index of its tensor argument, function of P that returns sent / tensor bytes).
_TIMES: Mapping[str, tuple[int, Callable[[int], float]]] = {
    "allgather_": (1, lambda p: p - 1),
    "_allgather_base_": (1, lambda p: p - 1),
    "allgather_into_tensor_coalesced_": (1, lambda p: p - 1),
    "reduce_scatter_": (0, lambda p: p - 1),
    "_reduce_scatter_base_": (0, lambda p: p - 1),
    "reduce_scatter_tensor_coalesced_": (0, lambda p: p - 1),
    "allreduce_": (0, lambda p: 2 * (p - 1) / p),
    "allreduce_coalesced_": (0, lambda p: 2 * (p - 1) / p),
    "broadcast_": (0, lambda p: (p - 1) / p),
    "send": (0, lambda p: 1),
    "barrier": (0, lambda p: 0),
}


class SentBytes(TorchDispatchMode):
    """Context that counts the calls of torch.distributed, including calls by DDP and FSDP2.

    `calls` is the number of collectives and sends, without receives. `bytes` is what a rank sends
    by ring algorithms. For example, an all-reduce sends 2 (P-1) / P times the tensor's bytes.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0.0
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in _RECEIVES:
            # Raises a KeyError for a collective that _TIMES does not list.
            self.bytes += self._sent(name, args)
            self.calls += 1
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        rank, size = self._place.rank, self._place.world_size
        if name == "alltoall_":
            return float(sum(x.nbytes for to, x in enumerate(args[1]) if to != rank))
        if name == "alltoall_base_":
            rows = args[4] or [1] * size
            return float(args[1].nbytes * (1 - rows[rank] / max(1, sum(rows))))
        at, times = _TIMES[name]
        return times(size) * sum(x.nbytes for x in tree_leaves(args[at]))

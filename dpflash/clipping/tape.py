"""Tape: predicts the memory and time of operations by running them on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

import dpflash.attn.ops  # noqa: F401  registers the operators that are counted
from dpflash.kernels.tile_graph import real_cpu_tensors

from ..distributed.exchange_plan import ShardedPattern
from ..distributed.layout import Layout
from ..distributed.traffic import ModeCall, mode_costs
from ..patterns import Adaptive, from_key
from .device_speed import Ceilings
from .planner import Work

# Shards of keys and values on a ring's rank at once, without its own; backward: (P = 2, P > 2).
_SHARDS_FORWARD, _SHARDS_BACKWARD = 4, (7, 13)
_FORWARD, _BACKWARD = 4, 10  # FLOPs per pair (query, key) and component of its head
_OPS = torch.ops.dpflash
# Operations with an exponential per element, whose time on a CPU exceeds that of memory.
_CURVED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("gelu", "gelu_backward", "silu", "silu_backward", "tanh", "exp", "sigmoid", "erf"),
        *("_softmax", "_log_softmax", "_log_softmax_backward_data"),
    )
)
_NOTHING_MOVES = (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like)


def attention_flops(pairs: int, head_dim: int, *, forward: bool, backward: bool) -> float:
    """Return the FLOPs of attention over `pairs` (query, key), summed over heads and samples."""
    return float(head_dim * pairs * (_FORWARD * forward + _BACKWARD * backward))


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """Return a formula for the FLOPs of each attention operator, from its pattern's pairs.

    For head dim D, a pair (query, key) takes 4 D FLOPs in the forward and 10 D in the backward. If
    values have another head dim E, it takes 2 (D + E) and 6 D + 4 E.
    """

    def pairs(q: Any, k: Any, key: str) -> int:
        pattern = from_key(key)
        batch, heads, rows, _ = q
        if isinstance(pattern, Adaptive):
            block = pattern.block_size
            return batch * heads * rows * min(pattern.keep * block, k[2])
        return batch * pattern.edges(rows, heads)

    # Arguments after q, k and v are six optional tensors, then the pattern's key.
    def forward(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
        return _FORWARD * (q[3] + v[3]) * pairs(q, k, rest[6]) // 2

    def backward(
        do: Any, dlse: Any, o: Any, lse: Any, q: Any, k: Any, v: Any, *rest: Any, **_: Any
    ) -> int:
        # The products q k, dq and dk have width D; dv and do v have width E.
        return _BACKWARD * (3 * q[3] + 2 * v[3]) * pairs(q, k, rest[6]) // 5

    return {_OPS.attention: forward, _OPS.attention_backward: backward}


class Tape(TorchDispatchMode):
    """Records the operations in its body: which tensors are alive, and each operation's time.

    A storage is counted from the operation that creates it until its last tensor is freed. Each
    operation is counted as one kernel that reads its inputs once and writes its outputs once, with
    the time of a roofline. Memory that an operation uses internally is not counted.

    Args:
        ceilings: speed of the device.
        ranks: P, the number of ranks over which the tokens of attention are split.

    Attributes:
        part: the name of the part to which new storages are added.
        seconds: predicted time of the operations.
        peak: bytes of each part when their total was largest.
    """

    def __init__(self, ceilings: Ceilings, ranks: int = 1) -> None:
        super().__init__()
        self.ceilings = ceilings
        self.ranks = ranks
        self.part = "activations"
        self.seconds = 0.0
        self.alive: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._held: dict[int, tuple[str, int]] = {}
        own = {op: shape_wrapper(formula) for op, formula in attention_formulas().items()}
        self._formulas = {**flop_registry, **own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        own = {x.untyped_storage()._cdata for x in given}
        is_view = own.issuperset(x.untyped_storage()._cdata for x in outs)
        for x in outs:
            self.hold(x)
        packet = func._overloadpacket
        if (is_view and not func._schema.is_mutable) or packet in _NOTHING_MOVES:
            return made
        if self.ranks > 1 and packet in (_OPS.attention, _OPS.attention_backward):
            self._attend_across(packet, args)
            return made
        is_attention = packet in (_OPS.attention, _OPS.attention_backward)
        formula = self._formulas.get(packet)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=made)
        dtype = next((x.dtype for x in (*given, *outs) if x.is_floating_point()), torch.float32)
        name = "attention" if is_attention else str(dtype).removeprefix("torch.")
        moved = sum(x.numel() * x.element_size() for x in (*given, *outs))
        if packet in _CURVED:
            flops, name = outs[0].numel(), "curved"
        self.add(Work(int(flops), moved, name))
        return made

    def add(self, *works: Work) -> None:
        """Add the time of kernels."""
        self.seconds += sum(work.seconds(self.ceilings) for work in works)

    def _attend_across(self, packet: Any, args: Any) -> None:
        """Count the time of attention over the keys of all ranks, and their shards' memory."""
        is_forward = packet is _OPS.attention
        at = 0 if is_forward else 4
        q, k, pattern = args[at], args[at + 1], args[at + 9]
        shards = _SHARDS_FORWARD if is_forward else _SHARDS_BACKWARD[self.ranks > 2]
        self.hold(torch.empty(shards * k.nbytes, dtype=torch.uint8), "workspace")
        if is_forward:
            layout = Layout(self.ranks * q.shape[2], self.ranks, "zigzag")
            heads = q.shape[1], k.shape[1]
            sharded = ShardedPattern(from_key(pattern), layout.num_tokens, *heads, layout)
            device = self.ceilings.device
            call = ModeCall(sharded, q.shape[3], q.dtype, q.shape[0], device)
            with real_cpu_tensors():
                # The predicted time includes the backward.
                self.seconds += min(one.seconds for one in mode_costs(call))

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """In the body, count new storages as this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def begin_loss(self, *_: Any) -> None:
        """From now on, count storages of the forward as logits and loss."""
        if self.part == "activations":
            self.part = "logits and loss"

    def allocate(self, size: int, part: str) -> Tensor:
        """Return a tensor of `size` bytes, counted as this part."""
        with self.counting(part):
            return torch.empty(size, dtype=torch.uint8)

    def hold(self, x: Tensor, part: str | None = None) -> None:
        """Count a tensor's storage while it is alive, or move a counted storage to `part`."""
        storage = x.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is not None:
            if part is not None:
                self._held[key] = (part, held[1])
                self.alive[held[0]] -= held[1]
                self.alive[part] += held[1]
            return
        self._held[key] = (part or self.part, storage.nbytes())
        weakref.finalize(storage, self._drop, key)
        self.alive[self._held[key][0]] += storage.nbytes()
        if self.alive.total() > self.peak.total():
            self.peak = self.alive.copy()

    def _drop(self, key: int) -> None:
        part, size = self._held.pop(key)
        self.alive[part] -= size

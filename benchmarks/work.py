"""How much a call does: floating-point operations, and bytes that its operations move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dpflash.patterns import Adaptive, from_key

_FORWARD, _BACKWARD = 4, 10  # FLOPs of a pair (query, key) and a component of its head


class Work(NamedTuple):
    """What a call does.

    Attributes:
        flops: of matrix products and of attention's pairs; additions and the like are left out.
        moved_bytes: each operation of torch reads its inputs and writes its outputs once; what a
            fused operation keeps on the chip does not count.
    """

    flops: float
    moved_bytes: float


def count_work(call: Callable[[], object]) -> Work:
    """The work of one call, which is made.

    Attention counts the pairs that its pattern has, 4 D each forward and 10 D backward.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_attention_formulas())
    moved = _MovedBytes()
    # What is compiled shows no operations.
    with torch.compiler.set_stance("force_eager"), counter, moved:
        call()
    return Work(float(counter.get_total_flops()), float(moved.total))


def attention_flops(pairs: int, head_dim: int, *, forward: bool, backward: bool) -> float:
    """FLOPs of attention over so many pairs (query, key), of all heads and samples."""
    return float(head_dim * pairs * (_FORWARD * forward + _BACKWARD * backward))


class _MovedBytes(TorchDispatchMode):
    """Sums the bytes of what operations take and give; views take and give nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if not _is_view(func):
            for value in tree_leaves((args, kwargs, given)):
                if isinstance(value, Tensor):
                    self.total += value.numel() * value.element_size()
        return given


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    aliased = [r.alias_info for r in returns if r.alias_info is not None]
    return bool(aliased) and not any(info.is_write for info in aliased)


def _attention_formulas() -> dict[Any, Callable[..., int]]:
    def pairs(q: Any, k: Any, key: str) -> int:
        pattern = from_key(key)
        batch, heads, rows, _ = q
        if isinstance(pattern, Adaptive):
            block = pattern.block_size
            return batch * heads * rows * min(pattern.keep * block, k[2])
        return batch * pattern.edges(rows, heads)

    def forward(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
        return _FORWARD * q[3] * pairs(q, k, rest[5])

    def backward(
        do: Any, dlse: Any, o: Any, lse: Any, q: Any, k: Any, *rest: Any, **_: Any
    ) -> int:
        return _BACKWARD * q[3] * pairs(q, k, rest[6])

    return {torch.ops.dpflash.attention: forward, torch.ops.dpflash.attention_backward: backward}

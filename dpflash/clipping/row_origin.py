"""Finds from autograd's graph whether a tensor's rows are the samples' tokens, in order.

Models flatten `[B, T, E]` to `[B T, E]`. Reshaping keeps the order of the elements, so row r
belongs to sample r // T if the batch was the first dimension. If time came first, T is found
instead of B. Operations between the reshaping and the layer must work row by row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_RESHAPINGS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})
# Elementwise operations: each operand with a gradient must have the shape and rows of the result.
_BY_ELEMENTS = frozenset(
    {
        "AddBackward0",
        "CloneBackward0",
        "DivBackward0",
        "ErfBackward0",
        "GeluBackward0",
        "MulBackward0",
        "NativeDropoutBackward0",
        "NegBackward0",
        "PowBackward0",
        "ReluBackward0",
        "SigmoidBackward0",
        "SiluBackward0",
        "SubBackward0",
        "TanhBackward0",
        "ToCopyBackward0",
    }
)
# Operations on each row -> indices, among the operands, of (the input with the rows, the weight).
_BY_ROWS = {
    "AddmmBackward0": (1, 2),
    "MmBackward0": (0, 1),
    "NativeLayerNormBackward0": (0, 1),
}
_DEEPEST = 64


def batch_sizes_of_rows(x: Tensor) -> frozenset[int]:
    """Return the first dimensions of earlier tensors from which x `[N, ...]` was reshaped.

    If B is among them and divides N, rows r * N / B to (r + 1) * N / B - 1 belong to sample r.
    """
    if x.grad_fn is not None:
        return _sizes(x.grad_fn, _DEEPEST, {})
    base = x._base
    if base is None or not base.ndim or not (x.is_contiguous() and base.is_contiguous()):
        return frozenset()
    same = x.numel() == base.numel() and x.storage_offset() == base.storage_offset()
    return frozenset({base.shape[0]}) if same else frozenset()


def is_flattened(x: Tensor, size: int) -> bool:
    """Return whether the rows of x are the tokens of `size` samples, in their order."""
    if not x.ndim or size < 1 or x.shape[0] % size:
        return False
    return size in batch_sizes_of_rows(x)


def _sizes(node: Any, depth: int, known: dict[Any, frozenset[int]]) -> frozenset[int]:
    if node in known:
        return known[node]
    found: frozenset[int] = frozenset()
    name, shape = node.name(), _shape(node, 0)
    parents = [(parent, _shape(parent, n)) for parent, n in node.next_functions if parent]
    if not depth:
        pass
    elif name in _RESHAPINGS:
        found = frozenset(node._saved_self_sym_sizes[:1])
        for parent, _ in parents:
            found |= _sizes(parent, depth - 1, known)
    elif name in _BY_ELEMENTS and parents and all(own == shape for _, own in parents):
        found = frozenset.intersection(*(_sizes(p, depth - 1, known) for p, _ in parents))
    elif name in _BY_ROWS:
        rows, weight = (node.next_functions[i][0] for i in _BY_ROWS[name])
        normalized = getattr(node, "_saved_normalized_shape", ())
        if rows is not None and _is_parameter(weight) and len(normalized) < len(shape):
            inner = _sizes(rows, depth - 1, known)
            found = frozenset(size for size in inner if size and shape[0] % size == 0)
    known[node] = found
    return found


def _is_parameter(node: Any) -> bool:
    """Return whether a node belongs to a parameter, trained or frozen, transposed or not."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return node is None or node.name() == "torch::autograd::AccumulateGrad"


def _shape(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)

"""Restores the shapes of a module's outputs after a run of the module under vmap.

For example, a router takes tokens `[B, n, E]` or `[B n, E]` and returns scores `[B n, k]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class OutputShapes:
    """Finds and restores the shapes of one call's outputs.

    Args:
        is_flattened: whether the module's inputs are tokens `[B n, ...]`.
        plain: function (args, kwargs) -> outputs that runs the module itself without gradients.
    """

    def __init__(
        self, is_flattened: bool, plain: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        self._is_flattened = is_flattened
        self._plain = plain
        self._rows: list[int] = []

    def of_sample(self, outputs: Any) -> Any:
        """Remove the batch dimension from one sample's outputs, under vmap."""
        self._rows = [t.shape[0] if t.ndim else 1 for t in _tensors(outputs)]
        return outputs if self._is_flattened else map_tensors(lambda t: t.squeeze(0), outputs)

    def of_batch(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of all samples, `[B, ...]`, or `[B n, ...]` if tokens are rows."""
        by_tokens = [self._is_flattened] * len(self._rows)
        if not self._is_flattened and any(rows != 1 for rows in self._rows):
            # Outputs whose size with two samples is that with one (positions) have no batch.
            # Zeros in place of samples, whose contents could raise an error.
            twice = map_tensors(lambda t: t.new_zeros(2, *t.shape[1:]), (args, kwargs))
            with torch.no_grad():
                of_two = [len(t) if t.ndim else 1 for t in _tensors(self._plain(*twice))]
            pairs = zip(self._rows, of_two, strict=True)
            by_tokens = [rows != 1 and two == 2 * rows for rows, two in pairs]
        flags = iter(by_tokens)
        return map_tensors(lambda t: t.flatten(0, 1) if next(flags) else t, outputs)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the tree with `change` applied to each tensor."""
    return tree_map_only(Tensor, change, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

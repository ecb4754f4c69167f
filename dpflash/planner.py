"""How a linear layer's flat-clipped gradient is computed: stored, book-kept, or in two passes.

stored         keep G_i = dy_i^T x_i (no extra product), reduce sum_i c_i G_i at the end.
book_keeping   keep (x, dy), norm without keeping G_i, then one weighted product.
two_pass       norms in one backward, the backward of sum_i c_i loss_i in a second.

The choice minimises a written cost (seconds on a nominal machine) under a memory budget. It
follows shapes alone, so it tells nothing about the data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

WAYS = ("stored", "book_keeping", "two_pass")

# Ratios matter, not the values: a product's FLOP/s and memory's bytes/s of one nominal machine.
_FLOPS = 1.5e11
_BYTES = 2.0e10
_ELEMENT = 4


@dataclass(frozen=True)
class LinearShape:
    """One use of a matrix parameter: B samples, T tokens, I inputs, O outputs."""

    batch: int
    tokens: int
    inputs: int
    outputs: int

    @property
    def stored_bytes(self) -> int:
        return self.batch * self.inputs * self.outputs * _ELEMENT

    @property
    def stored_seconds(self) -> float:
        """Write G_i, read it for the norm, read it for the sum."""
        return 3 * self.stored_bytes / _BYTES

    @property
    def book_keeping_bytes(self) -> int:
        return self.batch * self.tokens * (self.inputs + self.outputs) * _ELEMENT

    @property
    def norm_flops(self) -> int:
        """The norm: by Gram (fp64, twice the cost) or by computing G_i, whichever is less."""
        gram = 2 * 2 * self.tokens**2 * (self.inputs + self.outputs)
        direct = 2 * self.tokens * self.inputs * self.outputs
        return self.batch * min(gram, direct)

    @property
    def book_keeping_seconds(self) -> float:
        return self.norm_flops / _FLOPS

    @property
    def backward_flops(self) -> int:
        """One more backward through the layer: both of its products."""
        return 2 * 2 * self.batch * self.tokens * self.inputs * self.outputs


@dataclass(frozen=True)
class Plan:
    """The chosen way of each parameter, in the order asked for."""

    ways: tuple[str, ...]

    @property
    def two_pass(self) -> bool:
        return "two_pass" in self.ways


def default_memory_budget() -> int:
    """A quarter of this machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def plan(
    uses: Sequence[Sequence[LinearShape]],
    *,
    way: str,
    memory_budget: int,
    two_pass_allowed: bool,
) -> Plan:
    """Choose a way for each parameter.

    Args:
        uses: for each parameter, the shapes of its uses in this forward pass.
        way: "auto", or one of WAYS for all parameters.
        memory_budget: bytes that kept gradients or activations may take together.
        two_pass_allowed: whether per-sample losses are at hand.

    Returns:
        A plan with one way a parameter; "two_pass" is chosen for all parameters or none.
    """
    if way != "auto":
        return Plan((way,) * len(uses))
    ways = []
    total = 0
    for shapes in uses:
        # Uses of one parameter share its stored gradient; book-kept pairs of uses need a product.
        stored_seconds = max(s.stored_seconds for s in shapes)
        kept_seconds = sum(s.book_keeping_seconds for s in shapes) * len(shapes)
        stored = max(s.stored_bytes for s in shapes)
        kept = sum(s.book_keeping_bytes for s in shapes)
        if stored_seconds <= kept_seconds:
            ways.append("stored")
            total += stored
        else:
            ways.append("book_keeping")
            total += kept
    if total <= memory_budget:
        return Plan(tuple(ways))
    if two_pass_allowed:
        return Plan(("two_pass",) * len(uses))
    return Plan(
        tuple(
            "stored"
            if max(s.stored_bytes for s in shapes) <= sum(s.book_keeping_bytes for s in shapes)
            else "book_keeping"
            for shapes in uses
        )
    )

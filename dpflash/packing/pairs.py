"""Pairs: samples of two rows each, such as the chosen and the rejected answer to a prompt.

Letters: B pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .units import Units


class Pairs:
    """A `collate_fn` whose samples are pairs of rows; the gradient of each pair is clipped.

    With a DataLoader of this collate_fn, `make_private` samples pairs. The privacy unit is the
    preference pair, and a microbatch has `physical_batch_size` pairs. `engine.backward` takes one
    loss for each pair, `[B]`, or one for each row, `[2 B]`, and then averages the two losses of a
    pair. Call the model with `Pairs.rows(batch)`, in which a pair's two rows follow each other.

    Args:
        collate: function from a list of n entries to a mapping of tensors. A tensor is either
            `[2 n, ...]`, with the first rows of all pairs before all second rows, as TRL makes
            them, or `[n]`, with a number for each pair.

    Returns:
        The mapping, with tensors `[2 n, ...]` reshaped to `[n, 2, ...]`.

    Raises:
        ValueError: the batch is not a mapping, or a tensor has neither of these shapes.
    """

    ROWS = 2

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Tensor]]) -> None:
        self.collate = collate

    def __call__(self, entries: list[Any]) -> dict[str, Tensor]:
        batch, size = self.collate(entries), len(entries)
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"collate={self.collate!r} returned a {type(batch).__name__}: expected a mapping "
                "from names to tensors"
            )
        return {name: _by_pair(name, x, size) for name, x in batch.items()}

    @staticmethod
    def rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reshape `[B, 2, ...]` of a batch to `[2 B, ...]`; pair i has rows 2 i and 2 i + 1."""
        return {name: x.flatten(0, 1) if x.ndim > 1 else x for name, x in batch.items()}

    @staticmethod
    def units(size: int) -> Units:
        """Return the `Units` of `size` pairs, one unit of two rows for each pair."""
        spans = ((Pairs.ROWS * pair, Pairs.ROWS * (pair + 1)) for pair in range(size))
        return Units((Pairs.ROWS * size,), tuple(spans))


def _by_pair(name: str, x: Any, size: int) -> Tensor:
    if isinstance(x, Tensor) and x.ndim > 1 and len(x) == Pairs.ROWS * size:
        return x.unflatten(0, (Pairs.ROWS, size)).transpose(0, 1).contiguous()
    if isinstance(x, Tensor) and tuple(x.shape) == (size,):
        return x
    found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    raise ValueError(
        f"batch[{name!r}] of {size} pairs is {found}: expected a tensor [{Pairs.ROWS * size}, "
        f"...], all first rows before all second rows, or [{size}] with a number for each pair"
    )

"""Rewritten: finds trained parameters whose contents a forward changes.

An optimizer or a loop may change parameters between forwards. A forward must not: it would write
data of its batch, for instance to revive unused codes or to initialize from a first batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from ..distributed.fsdp import is_sharded
from .contents import EVERY, Comparisons, digest, here


class Rewritten:
    """Finds the trained parameters that forwards of one model have rewritten.

    Version counters and addresses are compared around every forward. A write to `.data` changes
    neither, so contents are also compared, around the first forward and once in `EVERY` forwards.
    If a forward moves a parameter (`flatten_parameters` does), its contents are always compared.

    Args:
        names: names of the parameters that no forward may rewrite.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._by_name = {name: parameter for parameter, name in names.items()}
        sharded = {parameter: is_sharded(parameter) for parameter in names}
        self._whole = [p for p, is_part in sharded.items() if not is_part]
        self._parts = [p for p, is_part in sharded.items() if is_part]
        self._order = [names[p] for p in (*self._whole, *self._parts)] * 2
        self._found: dict[str, None] = {}
        self._moving: dict[str, None] = {}
        self._comparisons = Comparisons()
        self._forwards = 0

    @contextmanager
    def forward(self, *, again: bool = False) -> Iterator[None]:
        """Record the parameters that a forward in the body rewrites.

        Args:
            again: whether the forward is repeated; contents are then always compared.
        """
        whole = again or self._forwards % EVERY == 0
        self._forwards += not again
        marks, before = self._marks(), self._digests(self._by_name if whole else self._moving)
        try:
            yield
        finally:
            after = self._marks()
            if after != marks:
                pairs = zip(self._order, marks, after, strict=True)
                moved = dict.fromkeys(name for name, one, two in pairs if one != two)
                self._found |= {name: None for name in moved if name not in before}
                self._moving |= moved
            self._comparisons.begin(before, self._digests(before))

    def names(self, *, wait: bool) -> list[str]:
        """Return the names of the rewritten parameters; see `Comparisons.differing`."""
        self._found |= dict.fromkeys(self._comparisons.differing(wait=wait))
        return list(self._found)

    def accept(self, ids: Collection[int]) -> None:
        """Accept the contents of the parameters with these ids."""
        for name in self.names(wait=True):
            if id(self._by_name[name]) in ids:
                del self._found[name]

    def _marks(self) -> list[int]:
        held = [*self._whole, *map(here, self._parts)] if self._parts else self._whole
        return [t._version for t in held] + [t.data_ptr() for t in held]

    def _digests(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: digest(self._by_name[name]) for name in names}

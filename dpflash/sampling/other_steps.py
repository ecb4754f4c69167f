"""Steps of other optimizers (a GAN's generator, a probe) inside the loop over a private loader.

The number of microbatches of a draw is private, so a step in each of them would be counted by
private data. While a loop iterates over a private loader, PyTorch asks here before each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..refusal import PrivateRefusal
from .tracker import BatchTracker

_COUNTED = (
    "another optimizer's step() in a microbatch of the private loader that is a trial, or not the "
    "last of its draw: the number of microbatches is private, so these steps would be counted by "
    "private data. Step the other model (a GAN's generator, a probe) where `loader.is_last`, as "
    "often as `loader.releases` counts, or outside of the loop, whose iterator is not kept then"
)

# Of the loaders that are iterated over now: the thread of each of their iterators.
_iterated: WeakKeyDictionary[BatchTracker, list[int]] = WeakKeyDictionary()
# Those that private optimizers wrap, which let them step.
wrapped_optimizers: WeakSet[Optimizer] = WeakSet()


class _Steps:
    """Where a parameter was stepped, by the number of microbatches that each loader yielded."""

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[BatchTracker, int] = WeakKeyDictionary()
        # With the numbers of the loaders that were within a draw then.
        self._ends: WeakKeyDictionary[BatchTracker, tuple[int, list[int]]] = WeakKeyDictionary()

    def may_take(self, within: Sequence[BatchTracker], ended: Sequence[BatchTracker]) -> bool:
        """Whether a step is at a draw's end, or in the one microbatch of a loader that is free.

        An end counts once while other loaders go on: the iterator that reached it may be kept, or
        be that of an outer loop.
        """
        places = [tracker.received for tracker in within]
        for tracker in ended:
            if self._ends.get(tracker, (-1, places))[0] != tracker.received:
                self._ends[tracker] = tracker.received, places
        if any(self._ends[tracker][1] == places for tracker in ended):
            return True
        return all(self._free.setdefault(t, t.received) == t.received for t in within)


# By parameter, since an optimizer may be made anew for each step. It outlives loops: one step in
# each would be counted by private data too, if it is in a microbatch that few draws have.
_stepped: Any = WeakIdKeyDictionary()


@contextmanager
def refusing_counted_steps(tracker: BatchTracker) -> Iterator[None]:
    """In the block the loop iterates over the tracker's loader."""
    threads, own = _iterated.setdefault(tracker, []), get_ident()
    threads.append(own)
    hook = register_optimizer_step_pre_hook(_before_step)
    try:
        yield
    finally:
        hook.remove()
        threads.remove(own)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in wrapped_optimizers:
        has_closure = any(callable(x) for x in (*args, *kwargs.values()))
        refuse_counted_step(optimizer, has_closure=has_closure)


def refuse_counted_step(optimizer: Optimizer, *, has_closure: bool = False) -> None:
    """Refuse a step of the parameters in a second microbatch that is at no draw's end."""
    thread = get_ident()
    own = [tracker for tracker, threads in _iterated.items() if thread in threads]
    within = [t for t in own if not (t.is_waiting or t.current is None or t.current.last)]
    if not within:
        return
    ended = [tracker for tracker in own if tracker not in within]
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is None and not has_closure:
            continue  # It is not changed, as in the private model before a release.
        if not _stepped.setdefault(parameter, _Steps()).may_take(within, ended):
            with within[0].noting_refusals():
                raise PrivateRefusal(_COUNTED) from None

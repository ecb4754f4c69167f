"""Refuses steps of other optimizers (a GAN's generator, a probe) once per private microbatch.

The number of microbatches of a logical batch is private. If another optimizer stepped in each
microbatch, private data would determine how often it steps. While a loop iterates over a private
loader, a hook before each optimizer's step refuses such steps.
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
    "another optimizer's step() in a microbatch of the private loader that is a trial, or not "
    "the last of its logical batch: the number of microbatches is private, so these steps would "
    "be counted by private data. Step the other model (a GAN's generator, a probe) only if "
    "`loader.is_last` is True, or as often as `loader.releases` counts, or outside of the loop "
    "(keep no iterator of the loader)"
)

# Loader over which loops iterate now -> the thread of each iterator.
_iterated: WeakKeyDictionary[BatchTracker, list[int]] = WeakKeyDictionary()
# The optimizers that private optimizers wrap; a wrapped optimizer refuses other steps itself.
wrapped_optimizers: WeakSet[Optimizer] = WeakSet()


class _Steps:
    """Records after how many microbatches of each loader one parameter has stepped."""

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[BatchTracker, int] = WeakKeyDictionary()
        # For each loader whose logical batch has ended: the number of microbatches received from
        # it, and the numbers received by then from loaders within a logical batch.
        self._ends: WeakKeyDictionary[BatchTracker, tuple[int, list[int]]] = WeakKeyDictionary()

    def may_take(self, within: Sequence[BatchTracker], ended: Sequence[BatchTracker]) -> bool:
        """Return True after a logical batch's end, and in the microbatch of the first step.

        If one loader's logical batch has ended and another loader yields a microbatch, no further
        step is allowed: the first loader may belong to an outer loop, or its iterator was kept.
        """
        places = [tracker.received for tracker in within]
        for tracker in ended:
            if self._ends.get(tracker, (-1, places))[0] != tracker.received:
                self._ends[tracker] = tracker.received, places
        if any(self._ends[tracker][1] == places for tracker in ended):
            return True
        return all(self._free.setdefault(t, t.received) == t.received for t in within)


# The keys are parameters, since a loop may create an optimizer for each step. The entries are kept
# when a loop ends. Otherwise each loop could take a first step in a microbatch that few logical
# batches have.
_stepped: Any = WeakIdKeyDictionary()


@contextmanager
def refusing_counted_steps(tracker: BatchTracker) -> Iterator[None]:
    """Refuse steps of other optimizers in the with block, in which a loop iterates the loader."""
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
    """Refuse a step within a logical batch, unless the first step was in the same microbatch."""
    thread = get_ident()
    own = [tracker for tracker, threads in _iterated.items() if thread in threads]
    within = [t for t in own if not (t.is_waiting or t.current is None or t.current.last)]
    if not within:
        return
    ended = [tracker for tracker in own if tracker not in within]
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is None and not has_closure:
            continue  # A step does not change a parameter without a gradient.
        if not _stepped.setdefault(parameter, _Steps()).may_take(within, ended):
            with within[0].noting_refusals():
                raise PrivateRefusal(_COUNTED) from None

"""Steps of other optimizers (a GAN's generator, a probe) inside the loop over a private loader.

The number of microbatches of a draw is private, so a step in each of them would be counted by
private data. While a loop iterates over a private loader, PyTorch asks here before each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..refusal import PrivateRefusal
from .tracker import BatchMark, BatchTracker

_COUNTED = (
    "another optimizer's step() in a microbatch of the private loader that is a trial, or not the "
    "last of its draw: the number of microbatches is private, so these steps would be counted by "
    "private data. Step the other model (a GAN's generator, a probe) where `loader.is_last`, as "
    "often as `loader.releases` counts, or outside of the loop"
)

# Of the loaders that are iterated over now, and the threads that do so.
_iterated: WeakKeyDictionary[BatchTracker, int] = WeakKeyDictionary()
# Where others stepped first. A loop that an exception ended may be kept, and others go on.
_stepped: WeakKeyDictionary[Optimizer, BatchMark] = WeakKeyDictionary()
# Those that private optimizers wrap.
wrapped_optimizers: WeakSet[Optimizer] = WeakSet()


@contextmanager
def refusing_counted_steps(tracker: BatchTracker) -> Iterator[None]:
    """In the block the loop iterates over the tracker's loader."""
    iterated = _iterated
    iterated[tracker] = get_ident()
    hook = register_optimizer_step_pre_hook(_refuse_counted)
    try:
        yield
    finally:
        hook.remove()
        iterated.pop(tracker, None)
        if not iterated:
            _stepped.clear()


def _refuse_counted(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse steps in a second microbatch, neither of a private optimizer nor at a draw's end."""
    own = [tracker for tracker, thread in _iterated.items() if thread == get_ident()]
    within = [t for t in own if not t.is_waiting]
    marks = [(t, t.current) for t in within if t.current is not None and not t.current.last]
    if optimizer in wrapped_optimizers or not marks or len(marks) < len(own):
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    has_closure = any(callable(x) for x in (*args, *kwargs.values()))
    if not has_closure and all(p.grad is None for p in parameters):
        return  # It changes nothing, as an optimizer of the private model before a release.
    tracker, mark = marks[0]
    if _stepped.setdefault(optimizer, mark) is not mark:
        with tracker.noting_refusals():
            raise PrivateRefusal(_COUNTED) from None

"""LogicalBatches: iterates over a private loader by logical batch, for loops that count steps.

Trainers make one optimizer step per element of a loader, and stop after `len(loader)` elements.
The number of microbatches of a logical batch is random and private. So one element of
LogicalBatches holds all microbatches of a logical batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ..refusal import PrivateRefusal
from ..verification.nested import map_tensors
from .loader import PrivateDataLoader


class LogicalBatch:
    """Iterates, once, over the microbatches of a logical batch, and loads them one by one.

    Args:
        loader: the loader that yields the microbatches.
        first: the first microbatch.
        others: the loader's iterator, which yields the other microbatches.
        device: the device to which tensors are moved; None to leave them on their device.
    """

    def __init__(
        self,
        loader: PrivateDataLoader,
        first: Any,
        others: Iterator[Any],
        device: torch.device | str | None = None,
    ):
        self._loader = loader
        self._first = first
        self._others = others
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        with self._loader.tracker.inside():
            # In a trial the loop may have drawn a different number of random values before.
            self._loader.seed_loop()
            yield self._moved(self._first)
            while not self._loader.is_last:
                yield self._moved(next(self._others))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LogicalBatch:
        """Return the same microbatches; their tensors are moved to `device` when loaded."""
        return LogicalBatch(self._loader, self._first, self._others, device)

    def _refuse_names(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a LogicalBatch has no fields and no length: iterate over it to get the microbatches "
            "of a step. A DPTrainer calls compute_loss for each of them: override that instead of "
            "training_step, or call super().training_step(model, inputs) with the same inputs"
        )

    __getitem__ = __len__ = keys = items = values = get = pop = _refuse_names

    def _moved(self, microbatch: Any) -> Any:
        if self._device is None:
            return microbatch
        if hasattr(microbatch, "to"):
            return microbatch.to(self._device)
        return map_tensors(lambda x: x.to(self._device), microbatch)


class LogicalBatches:
    """Yields a `LogicalBatch` for each release of an epoch.

    The loop calls `engine.backward(losses)` for each microbatch of a logical batch, and
    `optimizer.step()` once after the last microbatch. `len()` is the number of releases of an
    epoch, which is public.

    Args:
        loader: the loader that `make_private` returned.

    Raises:
        ValueError: the loader is not private.
        RuntimeError: the loop requests the next logical batch before it took all microbatches of
            the current one.
    """

    def __init__(self, loader: PrivateDataLoader):
        if not isinstance(loader, PrivateDataLoader):
            raise ValueError(
                f"loader={type(loader).__name__}: expected the loader that make_private returned"
            )
        self.loader = loader

    @property
    def dataset(self) -> Any:
        """The dataset of the loader."""
        return self.loader.dataset

    def __len__(self) -> int:
        return self.loader.steps_per_epoch

    def __iter__(self) -> Iterator[LogicalBatch]:
        microbatches = iter(self.loader)
        for first in microbatches:
            self.loader.tracker.wait()
            self.loader.seed_loop("before")
            yield LogicalBatch(self.loader, first, microbatches)
            if not self.loader.is_last:
                raise PrivateRefusal(
                    "the next logical batch was asked for before the last microbatch of the "
                    "current one: iterate over the whole LogicalBatch and call "
                    "engine.backward(losses) for each of its microbatches, then optimizer.step()"
                ) from None

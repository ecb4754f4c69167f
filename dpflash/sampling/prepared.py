"""Checks how Accelerate and Lightning use a private loader and optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader


class Prepared:
    """Mixin of the private loader and optimizer, which Accelerate must not wrap.

    Accelerate's loader would yield batches other than the accountant assumes, and Accelerate's
    optimizer would skip steps.
    """

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True, so that `Accelerator.prepare` does not wrap this object.

        Raises:
            ValueError: the Accelerator accumulates gradients.
        """
        state = sys.modules.get("accelerate.state")
        steps = 1 if state is None else state.GradientState().num_steps
        if steps != 1:
            raise ValueError(
                f"Accelerator(gradient_accumulation_steps={steps}) with a private loader, whose "
                "microbatches are accumulated already; leave gradient_accumulation_steps out, and "
                "pass physical_batch_size= to make_private"
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Ignore the value that `Accelerator.prepare` assigns."""


def refuse_lightning(closure: Callable[[], Any] | None, *, is_inside: bool) -> None:
    """Refuse the closure of a Lightning Trainer that does not make one step per logical batch.

    Args:
        closure: the closure passed to the optimizer's step.
        is_inside: whether the loop iterates over the microbatches of a logical batch.

    Raises:
        RuntimeError: the message states what to change; nothing is released.
    """
    if not isinstance(closure, partial) or closure.func.__name__ != "_wrap_closure":
        return
    module = closure.args[0]
    if module.automatic_optimization:
        raise RuntimeError(
            "automatic_optimization=True of Lightning, which calls loss.backward() for each "
            "microbatch and counts each as a step. Use:\n"
            "    self.automatic_optimization = False  # in __init__\n"
            "    for microbatch in batch: engine.backward(losses)  # in training_step, [B] each\n"
            "    optimizer.step(); optimizer.zero_grad()  # after the loop; optimizer = "
            "self.optimizers()"
        )
    if is_inside:
        raise RuntimeError(
            "optimizer.step() inside `for microbatch in batch`: Lightning counts each call in "
            "trainer.global_step, which would reveal the number of microbatches. Call "
            "optimizer.step() and zero_grad() after that loop, once for each logical batch"
        )
    if module.trainer.world_size > 1:
        raise RuntimeError(
            f"Lightning runs {module.trainer.world_size} processes, and each would train a "
            "separate model with its own epsilon: use Trainer(devices=1), or a plain loop with a "
            "mesh (docs/ranks.md)"
        )
    loader = module.trainer.train_dataloader
    if isinstance(loader, DataLoader):
        raise RuntimeError(
            f"Lightning trains on a {type(loader).__name__}: it would stop after len(loader) "
            "microbatches, or train on batches that are not from make_private. Return "
            "dpflash.sampling.LogicalBatches(loader) from train_dataloader(), with the loader of "
            "make_private"
        )


def wrapper_of(value: object) -> str | None:
    """Return the library that has wrapped a loader or an optimizer, or None."""
    library = type(value).__module__.split(".")[0]
    return library if library in ("accelerate", "lightning", "lightning_fabric") else None

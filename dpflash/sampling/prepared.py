"""Prepared: what Accelerate reads of an object that its `prepare` returns as it is."""

from __future__ import annotations

import sys


class Prepared:
    """Mixin of the private loader and optimizer, which Accelerate must not wrap.

    Its loader would draw other batches than the accountant assumes, and its optimizer would leave
    out steps.
    """

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by `Accelerator.prepare`.

        Raises:
            ValueError: the Accelerator accumulates gradients.
        """
        state = sys.modules.get("accelerate.state")
        steps = 1 if state is None else state.GradientState().num_steps
        if steps != 1:
            raise ValueError(
                f"Accelerator(gradient_accumulation_steps={steps}) with a private loader, whose "
                "microbatches are accumulated already; leave it out, and pass "
                "physical_batch_size= to make_private"
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Assigned by `Accelerator.prepare`."""


def wrapper_of(value: object) -> str | None:
    """The library that has wrapped a loader or an optimizer; None for none."""
    library = type(value).__module__.split(".")[0]
    return library if library in ("accelerate", "lightning", "lightning_fabric") else None

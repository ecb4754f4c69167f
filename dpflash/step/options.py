"""ReleaseOptions: public options of the next release, which must not depend on private data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._validate import finite, noise_fits, positive
from ..refusal import PrivateRefusal, warn


class ReleaseOptions:
    """Noise, bound and divisor of the next release, and the options of the wrapped optimizer.

    The loop may change them between logical batches. `refuse_changed` refuses a change within a
    logical batch: it would depend on the number of microbatches, which is private.

    Args:
        optimizer: the wrapped optimizer.
        noise_multiplier: the noise's standard deviation divided by the bound.
        max_grad_norm: L2 bound C of one sample's contribution.
        expected_batch_size: the public divisor of the released sums.
        divides: whether released sums are divided by `expected_batch_size`.

    Attributes:
        numbers: noise_multiplier, max_grad_norm and expected_batch_size, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
        divides: bool,
    ):
        self.numbers: dict[str, float] = {}
        self._optimizer = optimizer
        self._divides = divides
        self._noted: dict[Any, Any] | None = None
        self._changed: Any = None
        self.load(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
        )

    def load(
        self, *, noise_multiplier: float, max_grad_norm: float, expected_batch_size: float
    ) -> None:
        """Set the three numbers, for instance from a checkpoint."""
        noise_fits(max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)
        self.numbers |= {
            "noise_multiplier": float(noise_multiplier),
            "max_grad_norm": float(max_grad_norm),
            "expected_batch_size": float(expected_batch_size),
        }
        self.end_batch()

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the next release's noise, divided by the bound."""
        return self.numbers["noise_multiplier"]

    def set_noise_multiplier(self, value: float) -> None:
        """Change the noise from the next release on; warn if it is 0.

        Raises:
            ValueError: value is not a number >= 0 that fits the bound.
        """
        noise_fits(max_grad_norm=self.numbers["max_grad_norm"], noise_multiplier=value)
        if value == 0 < self.numbers["noise_multiplier"]:
            warn("noise_multiplier=0: the next release has no noise, and epsilon is inf then")
        # numpy's narrower numbers would round products with it.
        self.numbers["noise_multiplier"] = float(value)

    @property
    def max_grad_norm(self) -> float:
        """L2 bound of one sample's contribution to the next logical batch."""
        return self.numbers["max_grad_norm"]

    def set_max_grad_norm(self, value: float) -> None:
        """Change the bound, and the noise scaled with it, from the next logical batch on.

        Raises:
            ValueError: value is not a finite number > 0 that fits the noise.
        """
        positive(max_grad_norm=value)
        finite(max_grad_norm=value)
        noise_fits(max_grad_norm=value, noise_multiplier=self.numbers["noise_multiplier"])
        self.numbers["max_grad_norm"] = float(value)

    @property
    def expected_batch_size(self) -> float:
        """Divisor of the next release."""
        return self.numbers["expected_batch_size"]

    @property
    def divisor(self) -> float:
        """Divisor of the next release: the expected batch size, or 1 if sums are not divided."""
        return self.numbers["expected_batch_size"] if self._divides else 1.0

    def set_expected_batch_size(self, value: float) -> None:
        """Change the divisor from the next release on; the sample rate does not change.

        Raises:
            ValueError: value is not a finite number > 0, or sums are released undivided.
        """
        positive(expected_batch_size=value)
        finite(expected_batch_size=value)
        if not self._divides:
            raise ValueError(
                f"expected_batch_size={value!r} with loss_reduction='sum', where sums are not "
                "divided; scale the learning rate in optimizer.param_groups"
            )
        self.numbers["expected_batch_size"] = float(value)

    def note(self) -> None:
        """Record options at a logical batch's first backward, and later a change of them."""
        options: dict[Any, Any] = {**self.numbers}
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    options[number, name] = _comparable(value)
        if self._noted is None:
            self._noted = options
        elif self._changed is None and options != self._noted:
            both = self._noted.keys() | options.keys()
            self._changed = next(n for n in both if options.get(n) != self._noted.get(n))

    def refuse_changed(self) -> None:
        """Refuse a step if an option, such as the learning rate, changed since the first backward.

        Raises:
            PrivateRefusal: an option changed; the message names it and the remedy.
        """
        if self._noted is not None:
            self.note()
        changed = self._changed
        if changed is None:
            return
        if isinstance(changed, tuple):
            changed = f"param_groups[{changed[0]}]['{changed[1]}']"
        raise PrivateRefusal(
            f"optimizer.{changed} changed between the first backward of a logical batch and its "
            "step(), so nothing was released: the number of microbatches in between is private. "
            "After optimizer.step() write\n"
            "    if loader.is_last: scheduler.step()\n"
            "(with BatchMemoryManager `if not optimizer.step_was_skipped: scheduler.step()`), and "
            "compute values that you set by hand from loader.releases"
        ) from None

    def of_optimizers(self) -> list[dict[str, object]]:
        """Return each group's options without tensors, for the comparison between ranks."""
        kinds = (bool, int, float, str, tuple)
        return [
            {k: v for k, v in group.items() if isinstance(v, kinds)}
            for group in self._optimizer.param_groups
        ]

    def end_batch(self) -> None:
        """Note that the logical batch has ended, so that options may change."""
        self._noted = self._changed = None


def _comparable(option: Any) -> Any:
    """Return a value that changes with the option, and can be compared without a GPU sync."""
    if isinstance(option, Tensor):
        return id(option), option._version
    return tuple(map(_comparable, option)) if isinstance(option, (tuple, list)) else option

"""PrivateRefusal and PrivateWarning: errors and warnings that depend on private data."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

# Frames of these libraries are skipped: their lines do not help the user.
_INSIDE = ("dpflash", "torch", "contextlib")
UNTESTED = (
    "make_private(verify_first_batch=False) leaves this test out: epsilon is then wrong if "
    "samples depend on each other"
)
MORE_CAUSES = "Other causes: docs/troubleshooting.md, Samples that depend on each other"
TOGETHER = (
    "Models that are trained together have one engine: combine them in one module, such as "
    "nn.ModuleList([a, b]) or a module that calls both, with optimizer=[of_a, of_b]"
)


class PrivateRefusal(RuntimeError):
    """Raised if training must stop for a reason that depends on the private data.

    Epsilon does not cover the fact that this error was raised, see "Refusals" in
    docs/guarantees.md. Every other error depends on public facts alone: arguments, code, declared
    shapes. If a rank is lost within a logical batch, it may have raised a PrivateRefusal. So the
    other ranks raise a subclass of PrivateRefusal that is also a `dpflash.distributed.RankError`.

    Args:
        message: names layers and arguments, and says what to do; must contain no value, index,
            length or count of the data.
        **details: values that describe the reason, by name.

    Attributes:
        details: the values that were passed, by name. PRIVATE, like losses: do not publish them.
    """

    def __init__(self, message: str, **details: Any):
        super().__init__(message)
        self.details = details


class PrivateWarning(UserWarning):
    """A warning whose appearance depends on private data; its text contains no private data."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that is located at the user's line, outside of dpflash and torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level if frame is not None else 2)

"""Noise that is correlated over the steps: its coefficients, sensitivity and expected error.

This package neither draws noise nor imports torch; `dpflash.step` draws the noise.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .banded import Banded
    from .compare import BandsOfRun, compare_bands

__all__ = ["Banded", "BandsOfRun", "compare_bands"]

# The private step needs the module `reference` alone, without the accountants.
__getattr__ = lazy(
    __name__, {"Banded": "banded", "BandsOfRun": "compare", "compare_bands": "compare"}
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

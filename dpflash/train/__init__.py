"""The training job of `dpflash train`, from its configuration to its report."""

from .._lazy import lazy

__getattr__ = lazy(__name__)

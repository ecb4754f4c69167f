"""Sampling: samplers, the private loader, slots and padding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lengths import PadTo
    from .loader import SAMPLINGS, PrivateDataLoader, check_loader
    from .logical import LogicalBatch, LogicalBatches
    from .samplers import FixedSizeBatchSampler, PoissonBatchSampler, PublicSize
    from .tracker import BatchMark, BatchTracker

__all__ = [
    "SAMPLINGS",
    "BatchMark",
    "BatchTracker",
    "FixedSizeBatchSampler",
    "LogicalBatch",
    "LogicalBatches",
    "PadTo",
    "PoissonBatchSampler",
    "PrivateDataLoader",
    "PublicSize",
    "check_loader",
]

# The module of each name. It is imported on first use: a model needs only `slots` and `tracker`,
# not the accounting and scipy that `loader` and `samplers` import.
_MODULES = {
    "SAMPLINGS": "loader",
    "BatchMark": "tracker",
    "BatchTracker": "tracker",
    "FixedSizeBatchSampler": "samplers",
    "LogicalBatch": "logical",
    "LogicalBatches": "logical",
    "PadTo": "lengths",
    "PoissonBatchSampler": "samplers",
    "PrivateDataLoader": "loader",
    "PublicSize": "samplers",
    "check_loader": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

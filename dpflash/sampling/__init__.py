"""Sampling: samplers, the private loader, slots and padding."""

from typing import TYPE_CHECKING

from .._lazy import lazy

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

__getattr__ = lazy(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

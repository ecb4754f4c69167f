"""Samplers of logical batches, the private data loader, and padding to a public batch size."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .lengths import PadTo
    from .loader import PrivateDataLoader
    from .logical import LogicalBatch, LogicalBatches
    from .plan import SAMPLINGS, SamplingPlan, check_loader
    from .samplers import (
        CyclicPoissonBatchSampler,
        FixedSizeBatchSampler,
        PoissonBatchSampler,
        RandomAllocationBatchSampler,
    )
    from .tracker import BatchMark, BatchTracker

__all__ = [
    "SAMPLINGS",
    "BatchMark",
    "BatchTracker",
    "CyclicPoissonBatchSampler",
    "FixedSizeBatchSampler",
    "LogicalBatch",
    "LogicalBatches",
    "PadTo",
    "PoissonBatchSampler",
    "PrivateDataLoader",
    "RandomAllocationBatchSampler",
    "SamplingPlan",
    "check_loader",
]

# Name -> its module, imported on first use: private models need only `slots` and `tracker`, but
# not the accounting and scipy that `loader` and `samplers` import.
_MODULES = {
    **dict.fromkeys(("SAMPLINGS", "SamplingPlan", "check_loader"), "plan"),
    **dict.fromkeys(
        (
            *("CyclicPoissonBatchSampler", "FixedSizeBatchSampler", "PoissonBatchSampler"),
            "RandomAllocationBatchSampler",
        ),
        "samplers",
    ),
    **dict.fromkeys(("LogicalBatch", "LogicalBatches"), "logical"),
    **dict.fromkeys(("BatchMark", "BatchTracker"), "tracker"),
    "PadTo": "lengths",
    "PrivateDataLoader": "loader",
}

__getattr__ = lazy(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

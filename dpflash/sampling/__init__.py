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

# Public name -> module. A module is imported when a name of it is first used, since `loader` and
# `samplers` import scipy, which private models do not need.
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

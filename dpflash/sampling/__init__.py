"""Sampling: samplers, the private loader, slots and padding."""

from .lengths import PadTo
from .loader import (
    SAMPLINGS,
    FixedSizeBatchSampler,
    PoissonBatchSampler,
    PrivateDataLoader,
    PublicSize,
    check_loader,
)
from .tracker import BatchMark, BatchTracker

__all__ = [
    "SAMPLINGS",
    "BatchMark",
    "BatchTracker",
    "FixedSizeBatchSampler",
    "PadTo",
    "PoissonBatchSampler",
    "PrivateDataLoader",
    "PublicSize",
    "check_loader",
]

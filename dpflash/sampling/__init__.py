"""Sampling: samplers, the private loader, slots and padding."""

from .lengths import PadTo
from .loader import SAMPLINGS, PrivateDataLoader, check_loader
from .samplers import FixedSizeBatchSampler, PoissonBatchSampler, PublicSize
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

"""Batches whose samples are not single rows: packed documents, and pairs of rows."""

from .pack import PackedBatch, PackTo, pack
from .pairs import Pairs
from .units import Units

__all__ = ["PackTo", "PackedBatch", "Pairs", "Units", "pack"]

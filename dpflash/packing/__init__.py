"""Packed batches: documents of any length in rows of one length; each document is a sample."""

from .pack import PackedBatch, PackTo, pack
from .units import Units

__all__ = ["PackTo", "PackedBatch", "Units", "pack"]

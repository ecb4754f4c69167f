"""The private step: clipped sums, charge, noise and release of one logical batch at a time."""

from .charge import Charge
from .noise import BandedGaussian, BatchNoise, RoundedGaussian
from .open_batch import Clipper
from .options import ReleaseOptions
from .step import CAPTURED, PrivateStep
from .sums import ClippedSums
from .turns import Turns

__all__ = [
    "CAPTURED",
    "BandedGaussian",
    "BatchNoise",
    "Charge",
    "ClippedSums",
    "Clipper",
    "PrivateStep",
    "ReleaseOptions",
    "RoundedGaussian",
    "Turns",
]

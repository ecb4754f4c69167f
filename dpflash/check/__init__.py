"""Checks on one batch that each sample's loss and gradient depend on that sample alone.

Every comparison runs on a plain copy of the model, in float64 if the model supports it, with the
same buffers and the same seed, without dropout and without the noise of private boundaries.
"""

from .report import CheckReport, Problem
from .run import run_check

__all__ = ["CheckReport", "Problem", "run_check"]

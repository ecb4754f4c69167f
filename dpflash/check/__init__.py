"""Checks on one batch that each sample's loss and gradient depend on that sample alone.

Every comparison runs on a plain copy of the model with the same buffers and the same seed, in
float64 if the model supports it. Dropout and the noise of private boundaries are off.
"""

from .report import CheckReport, Problem
from .run import run_check

__all__ = ["CheckReport", "Problem", "run_check"]

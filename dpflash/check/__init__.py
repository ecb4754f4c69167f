"""Whether a model and its loss keep the samples of a batch apart, tried on one batch.

Every comparison is made on a plain copy of the model, in float64 where it takes that, from the
same buffers and the same seed, without dropout and without the noise of boundaries.
"""

from .report import CheckReport, Problem
from .run import run_check

__all__ = ["CheckReport", "Problem", "run_check"]

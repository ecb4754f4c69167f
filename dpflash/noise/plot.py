"""Draws the picture of `Banded.plot`."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import error


def plot(coefficients: NDArray[np.float64], scale: float, steps: int, path: Path) -> None:
    """Write a PNG of the coefficients of C and C^-1 (left) and the error by step (right)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("plots need matplotlib: pip install dpflash[plot]") from missing
    ones = np.ones(steps)
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    impulse = np.eye(1, 2 * len(coefficients))[0]
    left.plot(coefficients, ".-", label="C: coefficients")
    left.plot(
        error.divided(impulse, coefficients), ".-", label="C⁻¹: a step's noise in later ones"
    )
    left.set(xlabel="steps later", title=f"{len(coefficients)} bands")
    errors = scale * np.sqrt(error.squared_errors(coefficients, ones))
    right.plot(np.sqrt(np.cumsum(ones)), "--", color="grey", label="independent noise")
    right.plot(errors, label="banded noise")
    right.set(xlabel="step", title="standard deviation of the prefix sums, noise multiplier 1")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, format="png")

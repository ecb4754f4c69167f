"""Plots of `epsilon`, `calibrate` and `budget`: epsilon over steps, and the trade-off curve."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpflash.accounting import Accountant, Event, create_accountant
from dpflash.noise import BandsOfRun

from ._tables import described

_MAX_POINTS = 60
_EPSILONS, _ALPHAS = 64, 401
_NEGLIGIBLE_DELTA = 1e-3  # smaller deltas change the curve too little to be visible
_BLUE, _GREY = "#1f5fa8", "#666666"


@dataclass(frozen=True)
class Curve:
    """Epsilon after each of `steps`; NaN if epsilon is not finite."""

    label: str
    steps: Sequence[int]
    epsilons: Sequence[float]
    is_thin: bool = False


@dataclass(frozen=True)
class Tradeoff:
    """The lowest possible type II error at each type I error."""

    label: str
    alphas: Sequence[float]
    betas: Sequence[float]


def check_plot(path: str, accountant: str) -> None:
    """Raise ValueError, before anything is computed, if a plot could not be drawn or written."""
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"plot={path!r}: expected a PNG file; pass a name such as epsilon.png")
    if Path(path).is_dir():
        raise ValueError(f"plot={path!r}: it is a directory; pass the name of a file")
    if not Path(path).parent.is_dir():
        raise ValueError(
            f"plot={path!r}: there is no directory {str(Path(path).parent)!r}; create it first, "
            "or pass another path"
        )
    if accountant == "prv":
        raise ValueError(
            f"plot={path!r}: accountant='prv' needs about 20 seconds per point of the trade-off "
            "curve; use --accountant contour, or drop --plot"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"plot={path!r}: it needs matplotlib; pip install 'dpflash[plot]', or drop --plot"
        ) from error


def epsilon_curve(
    accountant: str, event: Event, count: int, delta: float, *, is_thin: bool = False
) -> Curve:
    """Return epsilon's upper bound after 1 to `count` events, with more points at the start."""
    steps = sorted({count * i * i // _MAX_POINTS**2 for i in range(_MAX_POINTS + 1)})
    epsilons = []
    for step in steps:
        meter = create_accountant(accountant, neighboring_relation=event.relation)
        meter.compose(event, step)
        epsilon = meter.get_epsilon(delta)
        epsilons.append(epsilon if math.isfinite(epsilon) else math.nan)
    return Curve(described(create_accountant(accountant)), steps, epsilons, is_thin)


def tradeoff_of(accountant: Accountant) -> Tradeoff:
    """Return a lower bound of the trade-off curve at many type I errors.

    The bound is computed from a grid of epsilons: each epsilon gives two lines below the curve.
    `Accountant.get_beta` uses a finer grid, but any grid gives a lower bound.
    """
    high = accountant.get_epsilon(_NEGLIGIBLE_DELTA)
    epsilons = np.linspace(0.0, high if 0 < high < 600 else 1.0, _EPSILONS)
    alphas = np.linspace(0.0, 1.0, _ALPHAS)
    betas = np.zeros(_ALPHAS)
    for epsilon in epsilons:
        kept = 1 - accountant.get_delta(float(epsilon))
        steep = kept - math.exp(epsilon) * alphas
        betas = np.maximum(betas, np.maximum(steep, math.exp(-epsilon) * (kept - alphas)))
    betas = np.minimum(betas, 1 - alphas)
    return Tradeoff(described(accountant), alphas.tolist(), betas.tolist())


def draw(
    curves: Sequence[Curve],
    tradeoff: Tradeoff,
    *,
    delta: float,
    unit: str = "step",
    target_epsilon: float | None = None,
) -> Any:
    """Draw a matplotlib Figure: epsilon over the steps (left), the trade-off curve (right)."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
    for curve in curves:
        left.plot(
            curve.steps,
            curve.epsilons,
            label=curve.label,
            color=_GREY if curve.is_thin else _BLUE,
            linewidth=0.8 if curve.is_thin else 1.8,
            marker="." * (len(curve.steps) == 1),
        )
    if target_epsilon is not None:
        left.axhline(target_epsilon, color=_GREY, linestyle="--", linewidth=1, label="target")
    if not any(math.isfinite(epsilon) for curve in curves for epsilon in curve.epsilons[1:]):
        left.text(0.5, 0.5, "no finite epsilon", transform=left.transAxes, ha="center")
    left.set_ylim(bottom=0)
    left.set_xlabel(unit)
    left.set_ylabel(f"epsilon at delta = {delta:g}")
    right.plot(tradeoff.alphas, tradeoff.betas, label=tradeoff.label, color=_BLUE, linewidth=1.8)
    right.plot([0, 1], [1, 0], label="chance", color=_GREY, linestyle="--", linewidth=1)
    right.set_xlim(0, 1)
    right.set_ylim(0, 1)
    right.set_xlabel("type I error of a membership test")
    right.set_ylabel("least type II error")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def draw_errors(runs: Sequence[BandsOfRun], best: BandsOfRun) -> Any:
    """Draw a matplotlib Figure: error over bands, one line per batch size and epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for size, epochs in dict.fromkeys((run.batch_size, run.epochs) for run in runs):
        own = [run for run in runs if (run.batch_size, run.epochs) == (size, epochs)]
        axes.plot(
            [run.noise.bands for run in own],
            [run.scaled_error for run in own],
            ".-",
            label=f"batch size {size}, {epochs:g} epochs",
        )
    axes.plot([best.noise.bands], [best.scaled_error], "o", color=_GREY, label="best")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bands")
    axes.set_ylabel("error at the target epsilon")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def save(figure: Any, path: str) -> None:
    """Write the figure as a PNG, atomically."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.getvalue())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"plot={path!r}: it could not be written ({reason}); pass another file"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)

"""The first screen of the page of results: time, memory and loss beside Opacus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .private import NONPRIVATE
from .result_files import Files, ResultFile

PICTURE = "private-step.png"

_SHAPES = {"B16-T256": "B=16, T=256", "B4-T2048": "B=4, T=2048"}
_LABELS = {
    "dpflash-flat-auto": "dpflash, flat",
    "dpflash-per_layer": "dpflash, per_layer",
    "dpflash-per_block": "dpflash, per_block",
    "opacus-hooks": "Opacus (hooks)",
    "opacus-ghost": "Opacus (ghost)",
    NONPRIVATE: "no privacy",
}
_LOSS_LABELS = {"dpflash": "dpflash", "opacus": "Opacus", NONPRIVATE: "no privacy"}
_OURS, _PEERS = "dpflash-flat-auto", ("opacus-hooks", "opacus-ghost")

Ends = tuple[float, float, float]  # a figure and the ends of its interval


def newest(devices: Mapping[str, Files]) -> tuple[ResultFile, ResultFile] | None:
    """The newest full private-step.json with the shapes shown, and private-loss.json beside it."""
    full = [
        (files["private-step"], files["private-loss"])
        for files in devices.values()
        if {"private-step", "private-loss"} <= files.keys()
        and not files["private-step"].is_quick
        and any(_ratios(files["private-step"], shape) for shape in _SHAPES)
    ]
    return max(full, key=lambda files: str(files[0].environment["date"]), default=None)


def sentences(steps: ResultFile, losses: ResultFile) -> Iterator[str]:
    """Three sentences: time at two shapes, and loss at equal epsilon."""
    where = f"{steps.environment['device']}, {steps.environment['date']}"
    for shape, named in _SHAPES.items():
        ratios = _ratios(steps, shape)
        peers = {name: ratios[name][0] for name in _PEERS if name in ratios}
        if _OURS not in ratios or not peers:
            continue
        ours, low, high = ratios[_OURS]
        fastest = min(peers, key=lambda name: peers[name])
        yield (
            f"At {named} a private step of dpflash takes {ours:.2f} [{low:.2f}, {high:.2f}] times "
            f"as long as a non-private one, and {_LABELS[fastest]} takes {peers[fastest]:.2f} "
            f"times as long: dpflash is {peers[fastest] / ours:.2f} times as fast as the faster "
            f"mode of Opacus that ran, at sample rate 1 and without padding rows ({where})."
        )
    config = losses.held["config"]
    shown = ", ".join(
        f"{mean:.3f} ({low:.3f} to {high:.3f}) for {_LOSS_LABELS[name]}"
        for name, (mean, low, high) in _losses(losses).items()
    )
    epsilons = {run["provider"]: run["epsilon"] for run in losses.held["runs"]}
    yield (
        f"Trained from the same weights for {config['steps']} steps with noise multiplier "
        f"{config['noise_multiplier']:.3f}, a small language model has a held-out loss, in nats a "
        f"byte, of {shown}; these are means and ranges of {_seeds(losses)} seeds. By "
        f"its own accountant dpflash spends epsilon {epsilons['dpflash']:.2f} and Opacus "
        f"{epsilons['opacus']:.2f} at delta {config['delta']:g}."
    )


def draw(steps: ResultFile, losses: ResultFile) -> Any:
    """Bars of time, memory and held-out loss beside Opacus: a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    *times, memory, loss = figure.subplots(2, 2).flat
    for axis, (shape, named) in zip(times, _SHAPES.items(), strict=True):
        _bars(axis, _ratios(steps, shape), _LABELS, "%.2f")
        axis.axvline(1, color="#666666", linewidth=1)
        axis.set(title=f"Time, {named}", xlabel="time of a step over a non-private one")
    shape, named = next(iter(_SHAPES.items()))
    peaks = {
        row["name"].removeprefix(f"step/{shape}/"): row["peak_memory_mb"] for row in steps.rows
    }
    known = {name: (peaks[name],) * 3 for name in _LABELS if peaks.get(name) is not None}
    _bars(memory, known, _LABELS, "%.0f")
    memory.set(title=f"Memory, {named}", xlabel="peak memory of a step, MiB")
    _bars(loss, _losses(losses), _LOSS_LABELS, "%.3f")
    epsilon = losses.held["config"]["target_epsilon"]
    title = f"Loss at epsilon {epsilon:g}, {_seeds(losses)} seeds"
    loss.set(title=title, xlabel="held-out loss, nats a byte")
    about = steps.environment
    figure.suptitle(f"{about['device']}, {about['date']}, torch {about['torch']}")
    return figure


def _bars(axis: Any, found: Mapping[str, Ends], labels: Mapping[str, str], form: str) -> None:
    """Horizontal bars with error bars, Opacus' in another color."""
    colors = {NONPRIVATE: "#999999"} | {name: "#d1601a" for name in found if "opacus" in name}
    lengths = [value for value, _, _ in found.values()]
    bars = axis.barh(
        [labels[name] for name in found],
        lengths,
        xerr=np.array([(value - low, high - value) for value, low, high in found.values()]).T,
        color=[colors.get(name, "#1f5fa8") for name in found],
    )
    axis.bar_label(bars, fmt=form, padding=6)
    axis.set_xlim(0, 1.25 * max(lengths, default=1))
    axis.invert_yaxis()


def _losses(file: ResultFile) -> dict[str, Ends]:
    """Held-out losses by provider: mean and range over the seeds."""
    runs: Sequence[Mapping[str, Any]] = file.held["runs"]
    found = {
        name: [run["held_out_loss"] for run in runs if run["provider"] == name]
        for name in _LOSS_LABELS
    }
    return {name: (float(np.mean(x)), min(x), max(x)) for name, x in found.items()}


def _seeds(file: ResultFile) -> int:
    return sum(run["provider"] == "dpflash" for run in file.held["runs"])


def _ratios(file: ResultFile, shape: str) -> dict[str, Ends]:
    """Time over a non-private step, with its 95% interval, by provider."""
    found = {}
    for row in file.rows:
        provider = row["name"].removeprefix(f"step/{shape}/")
        if provider in _LABELS and row.get("speedup") and row.get("correct") is not False:
            low, high = row["speedup_ci95"]
            found[provider] = (1 / row["speedup"], 1 / high, 1 / low)
    return found

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
}
_LOSS_LABELS = {"dpflash": "dpflash", "opacus": "Opacus", NONPRIVATE: "no privacy"}
_OURS, _PEERS = "dpflash-flat-auto", ("opacus-hooks", "opacus-ghost")


def newest(devices: Mapping[str, Files]) -> tuple[ResultFile, ResultFile] | None:
    """The newest full private-step.json with the shapes shown, and private-loss.json beside it."""
    both = [
        (files["private-step"], files["private-loss"])
        for files in devices.values()
        if {"private-step", "private-loss"} <= files.keys()
    ]
    full = [
        (steps, losses)
        for steps, losses in both
        if not steps.is_quick and any(_ratios(steps, shape) for shape in _SHAPES)
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
    config, found = losses.held["config"], _losses(losses)
    shown = ", ".join(
        f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}) for {_LOSS_LABELS[name]}"
        for name, values in found.items()
    )
    epsilons = {run["provider"]: run["epsilon"] for run in losses.held["runs"]}
    yield (
        f"Trained from the same weights for {config['steps']} steps with noise multiplier "
        f"{config['noise_multiplier']:.3f}, a small language model has a held-out loss, in nats a "
        f"byte, of {shown}; these are means and ranges of {len(found['dpflash'])} seeds. By "
        f"its own accountant dpflash spends epsilon {epsilons['dpflash']:.2f} and Opacus "
        f"{epsilons['opacus']:.2f} at delta {config['delta']:g}."
    )


def draw(steps: ResultFile, losses: ResultFile) -> Any:
    """Bars of time, memory and held-out loss beside Opacus: a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    *times, memory, loss = figure.subplots(2, 2).flat
    for axis, (shape, named) in zip(times, _SHAPES.items(), strict=True):
        ratios = {name: found for name, found in _ratios(steps, shape).items() if name in _LABELS}
        ends = [(x - low, high - x) for x, low, high in ratios.values()]
        _bars(axis, {name: found[0] for name, found in ratios.items()}, _LABELS, ends)
        axis.axvline(1, color="#666666", linewidth=1)
        axis.set(title=f"Time, {named}", xlabel="time of a step over a non-private one")
    shape, named = next(iter(_SHAPES.items()))
    peaks = {
        name: row["peak_memory_mb"]
        for name in (*_LABELS, NONPRIVATE)
        for row in steps.rows
        if row["name"] == f"step/{shape}/{name}" and row["peak_memory_mb"] is not None
    }
    _bars(memory, peaks, {**_LABELS, NONPRIVATE: "no privacy"}, None, "%.0f")
    memory.set(title=f"Memory, {named}", xlabel="peak memory of a step, MiB")
    found = _losses(losses)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    ends = [
        (means[name] - min(values), max(values) - means[name]) for name, values in found.items()
    ]
    _bars(loss, means, _LOSS_LABELS, ends, "%.3f")
    config = losses.held["config"]
    loss.set(
        title=f"Loss at epsilon {config['target_epsilon']:g}, {len(found['dpflash'])} seeds",
        xlabel="held-out loss, nats a byte",
    )
    environment = steps.environment
    figure.suptitle(
        f"{environment['device']}, {environment['date']}, torch {environment['torch']}"
    )
    return figure


def _bars(
    axis: Any,
    lengths: Mapping[str, float],
    labels: Mapping[str, str],
    ends: Sequence[tuple[float, float]] | None,
    fmt: str = "%.2f",
) -> None:
    """Horizontal bars, Opacus' in another color; `ends` is how far each error bar reaches."""
    colors = [
        "#999999" if name == NONPRIVATE else "#d1601a" if "opacus" in name else "#1f5fa8"
        for name in lengths
    ]
    reach = None if ends is None else list(zip(*ends, strict=True))
    bars = axis.barh(
        [labels[name] for name in lengths], lengths.values(), xerr=reach, color=colors
    )
    axis.bar_label(bars, fmt=fmt, padding=6)
    axis.set_xlim(0, 1.25 * max(lengths.values(), default=1))
    axis.invert_yaxis()


def _losses(file: ResultFile) -> dict[str, list[float]]:
    """Held-out losses by provider, one for each seed."""
    found: dict[str, list[float]] = {name: [] for name in _LOSS_LABELS}
    for run in file.held["runs"]:
        found[run["provider"]].append(run["held_out_loss"])
    return found


def _ratios(file: ResultFile, shape: str) -> dict[str, tuple[float, float, float]]:
    """Time over a non-private step, with its 95% interval, by provider."""
    found = {}
    for row in file.rows:
        provider = row["name"].removeprefix(f"step/{shape}/")
        if provider in _LABELS and row.get("speedup") and row.get("correct") is not False:
            low, high = row["speedup_ci95"]
            found[provider] = (1 / row["speedup"], 1 / high, 1 / low)
    return found

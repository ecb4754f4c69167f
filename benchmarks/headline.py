"""The first screen of the page of results: a private step of dpflash beside Opacus'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .result_files import ResultFile

PICTURE = "private-step.png"

_SHAPES = {"B16-T256": "B=16, T=256", "B4-T2048": "B=4, T=2048"}
_LABELS = {
    "dpflash-flat-auto": "dpflash, flat",
    "dpflash-per_layer": "dpflash, per_layer",
    "dpflash-per_block": "dpflash, per_block",
    "opacus-hooks": "Opacus (hooks)",
    "opacus-ghost": "Opacus (ghost)",
}
_OURS, _PEERS = "dpflash-flat-auto", ("opacus-hooks", "opacus-ghost")


def newest(devices: Mapping[str, Mapping[str, ResultFile]]) -> ResultFile | None:
    """The newest full run of the suite private-step with the shapes shown here; None for none."""
    files = [files["private-step"] for files in devices.values() if "private-step" in files]
    full = [file for file in files if not file.is_quick and any(_ratios(file, s) for s in _SHAPES)]
    return max(full, key=lambda file: str(file.environment["date"]), default=None)


def sentences(file: ResultFile) -> Iterator[str]:
    """What the picture shows, in words."""
    where = f"{file.environment['device']}, {file.environment['date']}"
    costs = []
    for shape, named in _SHAPES.items():
        ratios = _ratios(file, shape)
        peers = {name: ratios[name][0] for name in _PEERS if name in ratios}
        if _OURS not in ratios or not peers:
            continue
        ours, low, high = ratios[_OURS]
        costs.append(ours)
        fastest = min(peers, key=lambda name: peers[name])
        yield (
            f"At {named} a private step of dpflash takes {ours:.2f} [{low:.2f}, {high:.2f}] times "
            f"as long as a non-private one, and {_LABELS[fastest]} takes {peers[fastest]:.2f} "
            f"times as long: dpflash is {peers[fastest] / ours:.2f} times as fast as the faster "
            f"mode of Opacus that ran ({where})."
        )
    yield (
        f"So privacy costs {min(costs) - 1:.0%} to {max(costs) - 1:.0%} of time here, at sample "
        "rate 1 and without padding rows. At equal epsilon both libraries add the same noise; "
        "their held-out losses have not been measured side by side."
    )


def draw(file: ResultFile) -> Any:
    """Bars of the time of a private step over a non-private one: a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, (shape, named) in zip(figure.subplots(1, 2), _SHAPES.items(), strict=True):
        ratios = _ratios(file, shape)
        names = [name for name in _LABELS if name in ratios]
        middles = [ratios[name][0] for name in names]
        errors = [
            [ratios[name][0] - ratios[name][1] for name in names],
            [ratios[name][2] - ratios[name][0] for name in names],
        ]
        colors = ["#d1601a" if name in _PEERS else "#1f5fa8" for name in names]
        bars = axis.barh([_LABELS[name] for name in names], middles, xerr=errors, color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=6)
        axis.axvline(1, color="#666666", linewidth=1)
        axis.set_xlim(0, 1.25 * max(middles, default=1))
        axis.set_title(named)
        axis.invert_yaxis()
        axis.set_xlabel("time of a step over a non-private one")
    environment = file.environment
    figure.suptitle(
        f"{environment['device']}, {environment['date']}, torch {environment['torch']}"
    )
    return figure


def _ratios(file: ResultFile, shape: str) -> dict[str, tuple[float, float, float]]:
    """Time over a non-private step, with its 95% interval, by provider."""
    found = {}
    for row in file.rows:
        provider = row["name"].removeprefix(f"step/{shape}/")
        if provider in _LABELS and row.get("speedup") and row.get("correct") is not False:
            low, high = row["speedup_ci95"]
            found[provider] = (1 / row["speedup"], 1 / high, 1 / low)
    return found

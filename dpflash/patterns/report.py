"""Descriptions and pictures of patterns of any length, made from their tile graphs.

A cell of a picture stands for many pairs of tokens. If a cell has too many rows, some rows are
drawn at random, with a fixed seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpflash.kernels.tile_graph import Side, TileGraph

from . import _arguments
from .adaptive import Adaptive

if TYPE_CHECKING:
    from .base import Pattern

_SHADES = " .:+#"
_TEXT_CELLS = 32
_PLOT_CELLS = 512
# Largest numbers of rows, and of runs in these rows, that are examined for one picture. For each
# line of cells, one row or more is examined.
_ROWS = 4096
_RUNS = 2**19
_MOST_PANELS = 4
_LONGEST_NAME = 300


def describe(pattern: Pattern, num_tokens: int, num_heads: int) -> str:
    """See `Pattern.describe`."""
    name = repr(pattern)
    if len(name) > _LONGEST_NAME:
        name = name[:_LONGEST_NAME] + " ..."
    if isinstance(pattern, Adaptive):
        density = pattern.density(num_tokens, num_heads)
        known = f"density at most {density:.3%}; which blocks are seen depends on q and k"
        return f"{name}\ntokens {num_tokens:,}, heads {num_heads}\n{known}"
    graph = pattern.graph(num_tokens, num_heads)
    lines = [
        name,
        f"tokens {num_tokens:,}, heads {num_heads}",
        f"density {pattern.density(num_tokens, num_heads):.3%}, edges {graph.edges():,}",
        f"queries: {_sizes(graph.rows)}",
        f"keys: {_sizes(graph.cols)}",
        f"graph memory {graph.nbytes:,} bytes",
    ]
    if num_tokens:
        variant = int(graph.row_variants[0])
        seen = coverage(graph, variant, _TEXT_CELLS, multiplicity=False)
        lines.append(f"head 0, queries down, keys across{_sampling_note(graph, len(seen))}:")
        lines.append(
            "a cell is empty, up to a quarter full (.), half (:), three quarters (+), more (#)"
        )
        shade = np.ceil(seen * (len(_SHADES) - 1) - 1e-9).astype(int)
        lines += ["|" + "".join(_SHADES[x] for x in row) + "|" for row in shade]
    return "\n".join(lines)


def _sizes(side: Side) -> str:
    groups, runs, variants = len(side.groups), len(side.runs), len(side.variants) - 1
    return f"{groups:,} groups of rows, {runs:,} runs of columns, {variants} kinds of heads"


def _rows_per_cell(side: Side, cells: int) -> int:
    runs_per_group = -(-len(side.runs) // max(len(side.groups), 1))
    return max(1, min(_ROWS, _RUNS // max(runs_per_group, 1)) // cells)


def _sampling_note(graph: TileGraph, cells: int) -> str:
    rows = _rows_per_cell(graph.rows, cells)
    if graph.num_queries <= cells * rows:
        return ""
    return f", {rows} of {graph.num_queries // cells} queries looked at in each line of cells"


def plot(
    pattern: Pattern,
    num_tokens: int,
    path: str | os.PathLike[str] | None,
    *,
    num_heads: int,
) -> Path:
    """See `Pattern.plot`."""
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install dpflash[plot]") from error
    _arguments.integer("num_tokens", num_tokens, 1)
    target = Path(f"{type(pattern).__name__}_T{num_tokens}.png" if path is None else path)
    if target.suffix.lower() != ".png":
        raise _arguments.refusal("path", str(target), "a name ending in .png", "change the name")
    graph = pattern.graph(num_tokens, num_heads)
    heads: dict[int, list[int]] = {}
    for head, variant in enumerate(graph.row_variants.tolist()):
        heads.setdefault(variant, []).append(head)
    shown = list(heads)[:_MOST_PANELS]
    pictures = [coverage(graph, variant, _PLOT_CELLS) for variant in shown]
    norm = PowerNorm(0.5, vmin=0, vmax=max(1.0, *(float(image.max()) for image in pictures)))

    figure = Figure(figsize=(1.5 + 4.5 * len(shown), 5.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for panel, variant, image in zip(panels, shown, pictures, strict=True):
        drawn = panel.imshow(
            image,
            norm=norm,
            cmap="magma_r",
            interpolation="nearest",
            extent=(0, num_tokens, num_tokens, 0),
        )
        panel.set(xlabel="key", title=_heads_title(heads[variant]))
    panels[0].set_ylabel("query")
    figure.colorbar(drawn, ax=list(panels), label="multiplicity, mean over the pairs of a cell")
    note = _sampling_note(graph, len(pictures[0]))
    density = pattern.density(num_tokens, num_heads)
    figure.suptitle(
        f"{type(pattern).__name__}, {num_tokens:,} tokens, density {density:.3%}{note}"
    )
    figure.savefig(target, format="png")
    return target


def _heads_title(heads: list[int]) -> str:
    if len(heads) == 1:
        return f"head {heads[0]}"
    listed = ", ".join(str(head) for head in heads[:6])
    return f"heads {listed}" + (", ..." if len(heads) > 6 else "")


def coverage(
    graph: TileGraph, variant: int, cells: int, multiplicity: bool = True
) -> NDArray[np.float64]:
    """Return each cell's mean multiplicity or, without `multiplicity`, its fraction of seen pairs.

    The result is `[C, C]` with C = min(cells, T), queries first. It is exact unless the rows of a
    cell are sampled.
    """
    cells = min(cells, graph.num_queries)
    borders = np.arange(cells + 1) * graph.num_queries // cells
    side = graph.rows
    first, end = side.variants[variant : variant + 2].tolist()
    groups = side.groups[first:end].cpu().numpy().astype(np.int64)
    runs = side.runs.cpu().numpy().astype(np.int64)
    weights = side.log_multiplicity.exp().cpu().numpy() if multiplicity else np.ones(len(runs))
    picture = np.zeros((cells, cells))
    looked_at = _rows_per_cell(side, cells)
    for cell in range(cells):
        rows = np.arange(borders[cell], borders[cell + 1])
        if len(rows) > looked_at:
            rows = np.random.default_rng(cell).choice(rows, looked_at, replace=False)
        for row in rows.tolist():
            picture[cell] += _row_counts(row, groups, runs, weights, borders)
        picture[cell] /= len(rows)
    return picture / np.diff(borders)


def _row_counts(
    row: int,
    groups: NDArray[np.int64],
    runs: NDArray[np.int64],
    weights: NDArray[np.float64],
    borders: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the number of columns that a row sees between adjacent borders, `[C]`."""
    index, rest = np.divmod(row - groups[:, 0], groups[:, 1])
    holds = np.flatnonzero((rest == 0) & (index >= 0) & (index < groups[:, 2]))
    if not len(holds):
        return np.zeros(len(borders) - 1)
    first_run, end_run = groups[holds[0], 3:]
    column, step, count, lo, hi = (part[:, None] for part in runs[first_run:end_run].T)
    begin = np.maximum(-((column - (row - hi)) // step), 0)
    end = np.maximum(np.minimum((row - lo - column) // step + 1, count), begin)
    before = np.clip(-((column - borders) // step), begin, end)  # columns in front of each border
    return weights[first_run:end_run] @ np.diff(before, axis=1)

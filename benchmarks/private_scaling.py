"""How a private training step of attention grows with its batch and with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import output as results
from .document import (
    EXPONENTS,
    FIGURES,
    LEAST_SIZES,
    ROOFS,
    Column,
    chart,
    columns,
    fitted_row,
)
from .memory import device_memory
from .private import AUTO, NONPRIVATE, private_subject
from .suite import Comparison, Request, Row, compared, of_section

PRIVATE = AUTO
BATCHES = (1, 3, 5, 10, 19, 35, 64)
TOKENS = (128, 223, 389, 677, 1179, 2048)

# The optimal batch is the smallest one within this fraction of the most tokens/s.
_CLOSE = 0.95
_CPU_LIMIT_MB = 8.0 * 1024
_GPU_FRACTION = 0.8


# B, T, heads and head dim.
_Shape = tuple[int, int, int, int]
_Curves = Mapping[str, Sequence[_Shape]]


def batch_plan(request: Request) -> Iterator[Comparison]:
    """Steps at each batch size, private beside nonprivate; section "private_batch"."""
    curves: _Curves = {
        f"seq{tokens}_h{heads}_d{dim}": [(batch, tokens, heads, dim) for batch in BATCHES]
        for tokens, heads, dim in ((512, 12, 64), (1024, 16, 64), (2048, 20, 80))
    }
    if request.quick:
        curves = {"seq128_h4_d32": [(batch, 128, 4, 32) for batch in (1, 3, 10)]}
    yield from _plan("private_batch", curves, (NONPRIVATE, PRIVATE), request)


def sequence_plan(request: Request) -> Iterator[Comparison]:
    """Private steps at each number of tokens; section "private_sequence"."""
    curves: _Curves = {
        f"b16_h{heads}_d{dim}": [(16, tokens, heads, dim) for tokens in TOKENS]
        for heads, dim in ((12, 64), (16, 64), (20, 80))
    }
    if request.quick:
        curves = {"b4_h4_d32": [(4, tokens, 4, 32) for tokens in (32, 64, 128)]}
    yield from _plan("private_sequence", curves, (PRIVATE,), request)


def _plan(
    section: str, curves: _Curves, providers: Sequence[str], request: Request
) -> Iterator[Comparison]:
    dtype = "bfloat16" if request.where.type == "cuda" else "float32"
    limit = memory_limit_mb(request)
    for curve, shapes in curves.items():
        for batch, tokens, heads, head_dim in shapes:
            given = {"batch": batch, "tokens": tokens, "heads": heads, "head_dim": head_dim}
            yield compared(
                f"{section}/{curve}/B{batch}-T{tokens}",
                private_subject,
                "provider",
                providers,
                {"model": "attention", **given, "dtype": dtype},
                section=section,
                baseline=providers[0] if providers[1:] else None,
                columns={"curve": curve, "memory_limit_mb": limit},
                curve=f"{section}/{curve}",
            )


def memory_limit_mb(request: Request) -> float:
    """Memory that an optimal batch may take: 8 GiB on a CPU, 80% of a GPU's."""
    device = request.where
    return _GPU_FRACTION * device_memory(device) if device.type == "cuda" else _CPU_LIMIT_MB


def derive_batch(rows: Sequence[Row]) -> Iterator[Row]:
    """The exponent and the optimal batch of each curve, the cost of privacy, and insights."""
    found = list(of_section(rows, "private_batch"))
    optimal = []
    for curve, own in _curves(found).items():
        yield _exponent("private_batch_exponent", curve, own, "batch", "tokens_per_s")
        best = optimal_batch("private_batch_optimal", curve, own)
        yield best
        optimal += [best] if best["batch"] is not None else []
    if optimal:
        mean = sum(row["batch"] for row in optimal) / len(optimal)
        each = ", ".join(f"{row['batch']} ({row['curve']}{_untried(row)})" for row in optimal)
        text = (
            f"The optimal batch is {mean:.1f} on average: {each}; the smallest within 5% of the "
            f"most tokens/s in {optimal[0]['memory_limit_mb'] / 1024:.0f} GiB."
        )
        yield insight("private_batch/optimal", text, mean_optimal_batch=mean)
    ratios = [1 / row["speedup"] for row in found if row.get("speedup") is not None]
    if ratios:
        text = (
            f"A private step takes {min(ratios):.2f} to {max(ratios):.2f} times as long as a "
            f"nonprivate one, at {len(ratios)} sizes."
        )
        yield insight("private_batch/overhead", text, least=min(ratios), most=max(ratios))


def derive_sequence(rows: Sequence[Row]) -> Iterator[Row]:
    """The exponent of time in tokens of each curve."""
    exponents = []
    for curve, own in _curves(of_section(rows, "private_sequence")).items():
        row = _exponent("private_sequence_exponent", curve, own, "tokens", "median_ms")
        yield row
        if row["exponent"] is not None and len(row["sizes"]) >= LEAST_SIZES:
            low, high = row["exponent_ci95"]
            exponents.append(f"{row['exponent']:.2f} [{low:.2f}, {high:.2f}] ({curve})")
    if exponents:
        text = f"The time of a private step grows with the tokens to the power {exponents[0]}"
        yield insight("private_sequence/exponent", ", ".join([text, *exponents[1:]]) + ".")


def _exponent(section: str, curve: str, rows: Sequence[Row], size: str, value: str) -> Row:
    return fitted_row(f"{section}/{curve}", rows, size, value, section=section, curve=curve)


def _curves(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The private rows of each curve."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        if row["config"]["provider"] == PRIVATE:
            curves.setdefault(row["curve"], []).append(row)
    return curves


def optimal_batch(section: str, curve: str, rows: Sequence[Row]) -> Row:
    """The smallest batch within 5% of the most tokens/s that the limit of memory allows."""
    limit = rows[0]["memory_limit_mb"]
    measured = {row["config"]["batch"]: row for row in rows if row.get("tokens_per_s") is not None}
    speeds = {
        batch: row["tokens_per_s"]
        for batch, row in measured.items()
        if row["peak_memory_mb"] is None or row["peak_memory_mb"] <= limit
    }
    best = [b for b, speed in speeds.items() if speed >= _CLOSE * max(speeds.values())]
    found = {
        "section": section,
        "curve": curve,
        "memory_limit_mb": limit,
        "not_measured": [b for row in rows if (b := row["config"]["batch"]) not in measured],
        "batch": min(best, default=None),
        "tokens_per_s": speeds[min(best)] if best else None,
    }
    lacking = {} if best else {"needs": "a size that was measured and fits the limit"}
    return results.row(f"{section}/{curve}", {}, **found, **lacking)


def insight(name: str, text: str, **numbers: float) -> Row:
    """A row of section "insights": a sentence about other rows, and the numbers in it."""
    return results.row(f"insights/{name}", {}, section="insights", text=text, **numbers)


def overhead(row: Mapping[str, Any]) -> float | None:
    """A step's time over that of the nonprivate one, its comparison's baseline."""
    return None if row.get("speedup") is None else 1 / row["speedup"]


def shown_overhead(row: Mapping[str, Any]) -> str | None:
    """The same with its interval, that of the rounds in which both took turns."""
    if row.get("speedup") is None:
        return None
    low, high = row["speedup_ci95"]
    return f"{1 / row['speedup']:.2f} [{1 / high:.2f}, {1 / low:.2f}]"


def _untried(row: Mapping[str, Any]) -> str:
    return f"; not measured: {_not_measured(row)}" * bool(row["not_measured"])


def _not_measured(row: Mapping[str, Any]) -> str:
    return ", ".join(str(size) for size in row["not_measured"]) or "none"


OPTIMAL = columns(
    "curve | batch: optimal batch | tokens_per_s: tokens/s | memory_limit_mb: memory limit MiB",
    [("not measured", _not_measured)],
)
OVER_NONPRIVATE: Column = ("time over nonprivate", shown_overhead)
BATCH_TABLES = {
    "private_batch": columns("curve | batch | provider", FIGURES, [OVER_NONPRIVATE], ROOFS),
    "private_batch_exponent": EXPONENTS,
    "private_batch_optimal": OPTIMAL,
}
SEQUENCE_TABLES = {
    "private_sequence": columns("curve | tokens", FIGURES, ROOFS),
    "private_sequence_exponent": EXPONENTS,
}
_TITLE = "Private training step of attention"
BATCH_CHART = chart("private_batch", _TITLE, "batch", "tokens_per_s: tokens/s", "curve provider")
SEQUENCE_CHART = chart("private_sequence", _TITLE, "tokens", "median_ms: ms", "curve")

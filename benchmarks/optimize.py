"""The suite "optimize": private training steps at each level of `make_private(optimize=...)`.

The model is a transformer of one block over bytes. Where a batch is larger than a physical one,
the timed step is that of its first physical batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dpflash.clipping.planner import LEVELS

from .document import FIGURES, ROOFS, SPEEDUP, Chart, Row, column, columns, page
from .output import row
from .private import TOLERANCES, adamw, gradient_error, make_training
from .private_tasks import make_task
from .suite import Comparison, Part, Request, Subject, Suite, compared, not_measured
from .work import count_work

# Batch, tokens, heads, head dim.
WORKLOADS = ((8, 512, 12, 64), (32, 512, 12, 64), (64, 1024, 16, 64), (16, 2048, 20, 80))
_QUICK = (4, 64, 4, 16)
# Tokens of a physical batch for 8 to 15 heads; fewer of more heads.
_PHYSICAL = {"cpu": 2048, "cuda": 2**17}
_SIXTEEN_BITS = ("balanced", "aggressive")


def optimize_subject(
    *, level: str, batch: int, physical_batch: int, device: str, seed: int, **shape: int
) -> Subject:
    """A private training step at a level, on a physical batch of a workload."""
    dtype = "bfloat16" if level in _SIXTEEN_BITS else "float32"
    task = make_task(
        model="lm", batch=physical_batch, dtype=dtype, device=device, seed=seed, **shape
    )
    provider = f"optimize-{level}"
    training = make_training(task, provider, noise_multiplier=1.0, optimize=adamw)
    engine = training.engine
    assert engine is not None
    requested = engine.optimization

    def used() -> dict[str, Any]:
        found = engine.optimization
        return {
            "dtype": "bfloat16" if found.autocast else "float32",
            "clipping": found.clipping,
            "compiled": found.compiled,
            "changes": list(found.changes),
            "summary": found.summary,
            # The last change is that of a compiler that failed.
            "fell_back": found.changes[-1] if found.compiled != requested.compiled else None,
        }

    return Subject(
        training.step,
        lambda: gradient_error(task, provider),
        TOLERANCES[dtype],
        tokens=physical_batch * shape["tokens"],
        work=lambda: count_work(training.step),
        dtype=dtype,
        late_figures=used,
    )


def _plan(request: Request) -> Iterator[Comparison | Part]:
    names: dict[tuple[int, ...], str] = {}
    for batch, tokens, heads, head_dim in (_QUICK,) if request.quick else WORKLOADS:
        physical = min(batch, max(2, _PHYSICAL[request.where.type] // tokens // (heads // 8 or 1)))
        name = f"B{batch}-T{tokens}-H{heads}-D{head_dim}"
        shape = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
        given = {"batch": batch, "physical_batch": physical, **shape}
        levels = compared(
            f"optimize/{name}", optimize_subject, "level", LEVELS, given, "levels", "none"
        )
        same = names.setdefault((physical, *shape.values()), name)
        if same == name:
            yield levels
        else:
            reason = f"a larger physical batch: here its step would be the one of {same} again"
            yield not_measured(levels.measurements, reason)


def _derive(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The range of each level's gains over the workloads."""
    gains: dict[str, list[float]] = {}
    for one in rows:
        if one.get("speedup") is not None and one.get("fell_back") is None:
            gains.setdefault(one["config"]["level"], []).append(one["speedup"])
    for level, found in gains.items():
        figures = {"least": min(found), "most": max(found), "workloads": len(found)}
        yield row(f"gain/{level}", {"level": level}, section="gains", **figures)


def _compiled(row: Row) -> str | None:
    # A "NO", as other columns show False, would look like a failure.
    return {True: "yes", False: "no", None: None}[row.get("compiled")]


def _workload(row: Row) -> str:
    return str(row["name"].split("/")[1])


_STEPS = columns(
    "batch: B | physical_batch: physical | tokens: N | heads: H | head_dim: D | level | dtype",
    "clipping",
    [("compiled", _compiled)],
    FIGURES,
    [SPEEDUP],
    ROOFS,
    "fell_back: fell back | correct",
)
_TABLES = {
    "levels": _STEPS,
    "gains": columns("level | least | most | workloads"),
}
SUITE = Suite(
    name="optimize",
    **page("optimize", _TABLES),
    plan=_plan,
    charts=[
        Chart("levels", title, column("level"), column(key, label), _workload, logarithmic=False)
        for title, key, label in (
            ("Speed-up over none", "speedup", "speed-up"),
            ("Peak memory", "peak_memory_mb", "MiB"),
        )
    ],
    derive=_derive,
)

"""The suites "private-step" and "optimize": private training steps.

"private-step" compares dpflash with nonprivate training, Opacus and opake, for a transformer over
bytes and for LoRA of a Llama. "optimize" measures each level of `make_private(optimize=...)` for a
transformer of one block. If a batch is larger than a microbatch, one microbatch is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpflash.clipping.planner import LEVELS

from .document import FIGURES, OVER_NONPRIVATE, ROOFS, SPEEDUP, Row, chart, columns, overhead, page
from .output import row
from .private import AUTO, DPFLASH, NONPRIVATE, OPAKE, PEERS, private_step, private_subject
from .suite import Comparison, Request, Subject, Suite, compared
from .work import count_work

_SIZES = ("model", "batch", "tokens", "heads", "head_dim", "layers")
_ALL = (NONPRIVATE, *DPFLASH, *PEERS)
# Providers that are slow on short sequences. They are left out on long sequences, on which they
# take minutes.
_SLOW = ("dpflash-flat-book_keeping", "dpflash-flat-ghost", "opacus-ghost")
_SOME = tuple(name for name in _ALL if name not in _SLOW)
_FEW = (NONPRIVATE, AUTO, "dpflash-per_layer", "opacus-hooks", OPAKE)
_LORA = ((8, 128), (1, 512), (1, 64))
_STEPS: Mapping[str, Sequence[tuple[tuple[Any, ...], Sequence[str]]]] = {  # _SIZES
    "quick": [(("lm", 4, 128, 2, 32, 1), _ALL)],
    "cpu": [
        (("lm", 16, 256, 8, 32, 2), _ALL),
        (("lm", 4, 2048, 8, 32, 2), _SOME),
        (("lm", 1, 256, 8, 32, 2), _FEW),
        *((("llama-lora", *sizes, 8, 64, 4), _FEW) for sizes in _LORA),
    ],
    "cuda": [(("lm", 4, 4096, 16, 64, 12), _ALL), (("lm", 1, 16384, 16, 64, 12), _ALL)],
}


def _plan(request: Request) -> Iterator[Comparison]:
    size = "quick" if request.quick else request.where.type
    dtype = {"dtype": "bfloat16" if request.where.type == "cuda" else "float32"}
    for sizes, providers in _STEPS[size]:
        yield steps({**dict(zip(_SIZES, sizes, strict=True)), **dtype}, providers)


def steps(shape: Mapping[str, Any], providers: Sequence[str]) -> Comparison:
    """Compare a whole step of each provider."""
    lora = "LoRA-" if shape["model"] == "llama-lora" else ""
    name = f"{lora}B{shape['batch']}-T{shape['tokens']}"
    return compared(
        f"step/{name}",
        private_subject,
        "provider",
        providers,
        shape,
        section="step",
        baseline=providers[0],
        peers=PEERS,
        columns={"shape": name},
    )


_STEP_COLUMNS = columns("shape | layers | provider", FIGURES, [OVER_NONPRIVATE], ROOFS)
_TITLE = "Time over that of a nonprivate step"
SUITE = Suite(
    name="private-step",
    **page("private-step", {"step": _STEP_COLUMNS}),
    plan=_plan,
    charts=[chart("step", _TITLE, "shape", ("times", overhead), "provider", logarithmic=False)],
)

# Batch, tokens, heads, head dim.
WORKLOADS = ((8, 512, 12, 64), (32, 512, 12, 64), (64, 1024, 16, 64), (16, 2048, 20, 80))
_QUICK_WORKLOAD = (4, 64, 4, 16)
# Tokens of a microbatch for 8 to 15 heads; with more heads a microbatch has fewer tokens.
_PHYSICAL = {"cpu": 2048, "cuda": 2**17}
_SIXTEEN_BITS = ("balanced", "aggressive")


def optimize_subject(
    *, level: str, batch: int, physical_batch: int, device: str, seed: int, **shape: int
) -> Subject:
    """Return a private training step at a level, on one microbatch of a workload."""
    dtype = "bfloat16" if level in _SIXTEEN_BITS else "float32"
    shape.update(batch=physical_batch)
    given = {"model": "lm", "dtype": dtype, "device": device, "seed": seed, **shape}
    subject, engine = private_step(provider=f"optimize-{level}", **given)
    assert engine is not None
    requested = engine.optimization

    def used() -> dict[str, Any]:
        found = engine.optimization
        return {
            "dtype": "bfloat16" if found.autocast else "float32",
            "clipping": found.clipping,
            "compiled": found.compiled,
            # If the compiler failed, a new entry of `changes` gives the reason.
            "fell_back": next((x for x in found.changes if x not in requested.changes), None),
        }

    # A compiled model has no plan from which work could be computed.
    return replace(subject, work=lambda: count_work(subject.step), late_figures=used)


def _plan_levels(request: Request) -> Iterator[Comparison]:
    seen: list[Any] = []
    for batch, tokens, heads, head_dim in (_QUICK_WORKLOAD,) if request.quick else WORKLOADS:
        physical = min(batch, max(2, _PHYSICAL[request.where.type] // tokens // (heads // 8 or 1)))
        name = f"B{batch}-T{tokens}-H{heads}-D{head_dim}"
        shape = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
        given = {"batch": batch, "physical_batch": physical, **shape}
        # Workloads with different batches may have the same microbatch, and so the same step.
        if (physical, shape) not in seen:
            seen.append((physical, shape))
            yield compared(
                f"optimize/{name}", optimize_subject, "level", LEVELS, given, "levels", "none"
            )


def _gains(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    gains: dict[str, list[float]] = {}
    for one in rows:
        if one.get("speedup") is not None and one.get("fell_back") is None:
            gains.setdefault(one["config"]["level"], []).append(one["speedup"])
    for level, found in gains.items():
        figures = {"least": min(found), "most": max(found), "workloads": len(found)}
        yield row(f"gain/{level}", {"level": level}, section="gains", **figures)


def _compiled(row: Row) -> str | None:
    # Other columns show False as "NO", which would look like a failure here.
    return {True: "yes", False: "no", None: None}[row.get("compiled")]


_LEVEL_COLUMNS = columns(
    "batch: B | physical_batch: physical | tokens: N | heads: H | head_dim: D | level | dtype",
    "clipping",
    [("compiled", _compiled)],
    FIGURES,
    [SPEEDUP],
    ROOFS,
    "fell_back: fell back | correct",
)
_LEVELS = {"levels": _LEVEL_COLUMNS, "gains": columns("level | least | most | workloads")}
OPTIMIZE = Suite(
    name="optimize",
    **page("optimize", _LEVELS),
    plan=_plan_levels,
    charts=[
        chart(
            "levels",
            "Speed-up over none",
            "level",
            "speedup: speed-up",
            "tokens",
            logarithmic=False,
        )
    ],
    derive=_gains,
)

"""The suite "private-step": private training steps beside no privacy and beside Opacus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .document import (
    FIGURES,
    OVER_NONPRIVATE,
    ROOFS,
    SPEEDUP,
    Chart,
    chart,
    column,
    columns,
    insight,
    overhead,
    page,
    shown_overhead,
)
from .private import (
    AUTO,
    DPFLASH,
    NONPRIVATE,
    OPACUS,
    ghost_subject,
    head_subject,
    private_subject,
)
from .suite import Comparison, Measurement, Request, Row, Suite, compared, needs, of_section
from .timing import Ratio, speedup

# Libraries that are not measured, and why.
ABSENT = {
    "opacus-flash_fuse": "not measured here: it takes a fork of Opacus in place of the package",
    "fastDP": "not measured here: fastDP of github.com/awslabs/fast-differential-privacy",
    "jax_privacy": "not measured here: it takes a model written for JAX, and none of torch",
}

_Shape = Mapping[str, Any]


def _lm(batch: int, tokens: int, heads: int, head_dim: int, layers: int) -> _Shape:
    names = ("batch", "tokens", "heads", "head_dim", "layers")
    return dict(zip(names, (batch, tokens, heads, head_dim, layers), strict=True))


_QUICK_LM = _lm(4, 128, 2, 32, 1)
_PEERS = OPACUS[:2]  # registered, Opacus runs with dpflash's norms, and is no peer
_ALL = (NONPRIVATE, *DPFLASH, *_PEERS)
# Without those that short sequences show to be slow; they take minutes on long ones.
_SLOW = ("dpflash-flat-book_keeping", "dpflash-flat-two_pass", "opacus-ghost")
_SOME = tuple(name for name in _ALL if name not in _SLOW)
_STEPS: Mapping[str, Sequence[tuple[_Shape, Sequence[str]]]] = {
    "quick": [(_QUICK_LM, _ALL)],
    "cpu": [(_lm(16, 256, 8, 32, 2), _ALL), (_lm(4, 2048, 8, 32, 2), _SOME)],
    "cuda": [(_lm(4, 4096, 16, 64, 12), _ALL), (_lm(1, 16384, 16, 64, 12), _ALL)],
}
_GHOST_TOKENS = {
    "quick": (512,),
    "cpu": (512, 1024, 2048, 4096),
    "cuda": (512, 1024, 2048, 4096, 8192, 16384),
}
# Batch, tokens and classes.
_HEADS = {"quick": (2, 128, 2048), "cpu": (1, 2048, 32000), "cuda": (2, 8192, 50000)}
HEAD_FAMILIES = {
    NONPRIVATE: (("dense", NONPRIVATE), ("chunked", NONPRIVATE)),
    "private": (
        ("dense", AUTO),
        ("chunked", AUTO),
        ("chunked", "dpflash-flat-book_keeping"),
        ("chunked", "dpflash-flat-two_pass"),
    ),
}


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Sequence[Row]]]:
    size = "quick" if request.quick else request.where.type
    dtype = {"dtype": "bfloat16" if request.where.type == "cuda" else "float32"}
    for lm_shape, providers in _STEPS[size]:
        yield steps({**lm_shape, **dtype}, providers)
    yield lambda request: [
        needs(f"step/{name}", {"provider": name}, reason, section="step")
        for name, reason in ABSENT.items()
    ]
    for tokens in _GHOST_TOKENS[size]:
        yield compared(
            f"ghost/T{tokens}",
            ghost_subject,
            "provider",
            (NONPRIVATE, *OPACUS[1:]),
            {"batch": 1, "tokens": tokens, "width": 256, "layers": 2},
            section="ghost",
            baseline="opacus-ghost",
            peers=_PEERS,
        )
    batch, tokens, classes = _HEADS[size]
    shape: _Shape = {"batch": batch, "tokens": tokens, "classes": classes, "width": 256}
    for family, members in HEAD_FAMILIES.items():
        own = {"section": "head", "family": family}
        rows = [
            Measurement(
                f"head/{head}-{name}",
                head_subject,
                {"provider": name, "head": head, **shape},
                own,
            )
            for head, name in members
        ]
        yield Comparison(rows, rows[0].name)


def steps(shape: _Shape, providers: Sequence[str]) -> Comparison:
    """A whole step by each provider."""
    name = f"B{shape['batch']}-T{shape['tokens']}"
    return compared(
        f"step/{name}",
        private_subject,
        "provider",
        providers,
        {"model": "lm", **shape},
        section="step",
        baseline=providers[0],
        peers=_PEERS,
        columns={"shape": name},
    )


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    shapes: dict[str, dict[str, Row]] = {}
    for row in _timed(rows, "step"):
        shapes.setdefault(row["shape"], {})[row["config"]["provider"]] = row
    for shape, own in shapes.items():
        yield from _best_clipping(shape, own)
        yield from _beside_opacus(shape, own)


def _timed(rows: Sequence[Row], section: str) -> list[Row]:
    """The rows of a section whose times have an interval."""
    own = of_section(rows, section)
    return [row for row in own if row["median_ms"] is not None and not row.get("range_ms")]


def _times(row: Row, other: Row) -> Ratio:
    """The time of a row over that of another in the same comparison."""
    return speedup(other["samples_ms"], row["samples_ms"])


def _shown(ratio: Ratio) -> str:
    low, high = ratio.ci95
    return f"{ratio.median:.2f} [{low:.2f}, {high:.2f}]"


def _best_clipping(shape: str, own: Mapping[str, Row]) -> Iterator[Row]:
    ours = {provider: own[provider] for provider in DPFLASH if provider in own}
    if not ours:
        return
    fastest = min(ours, key=lambda provider: ours[provider]["median_ms"])
    best = ours[fastest]
    text = f"{shape}: {fastest} is the fastest private step, {best['median_ms']:.0f} ms"
    if best.get("speedup") is not None:
        text += f", {shown_overhead(best)} times a nonprivate one"
    close = [p for p, row in ours.items() if row is not best and _times(row, best).ci95[0] <= 1]
    if close:
        text += f"; no slower for certain: {', '.join(close)}"
    known = {p: row["peak_memory_mb"] for p, row in ours.items() if row["peak_memory_mb"]}
    if known:
        least = min(known, key=lambda provider: known[provider])
        text += f"; {least} takes the least memory, {known[least]:.0f} MiB"
    yield insight(f"clipping/{shape}", text + ".", median_ms=best["median_ms"])


def _beside_opacus(shape: str, own: Mapping[str, Row]) -> Iterator[Row]:
    for peer in _PEERS:
        if AUTO in own and peer in own:
            times = _times(own[peer], own[AUTO])
            low, high = times.ci95
            text = f"{shape}: {peer} takes {_shown(times)} times as long as {AUTO}."
            yield insight(f"{peer}/{shape}", text, ratio=times.median, low=low, high=high)


SUITE = Suite(
    name="private-step",
    plan=_plan,
    derive=_derive,
    **page(
        "private-step",
        {
            "step": columns("shape | layers | provider", FIGURES, [OVER_NONPRIVATE], ROOFS),
            "ghost": columns("tokens | provider", FIGURES, [SPEEDUP]),
            "head": columns(
                "family | head | provider | batch | tokens | classes", FIGURES, [SPEEDUP]
            ),
        },
    ),
    charts=[
        Chart(
            "step",
            "Time over that of a nonprivate step",
            column("shape"),
            ("times", overhead),
            lambda row: str(row["config"]["provider"]),
            logarithmic=False,
        ),
        chart("ghost", "Opacus' ghost clipping", "tokens", "median_ms: ms", "provider"),
    ],
)

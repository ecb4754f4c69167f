"""The benchmark of accountants: dpflash's, Opacus' and those of Google's dp_accounting.

An epsilon is right where it is not below what is certain: the lower end that dpflash's contour
certifies (for the contour itself the one that its PLD does), or the table of truths of a checkout,
which was computed by other code with many digits.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import output as results
from .accounting_providers import (
    DELTA,
    PEERS,
    PROVIDERS,
    RATE,
    Phase,
    add_step,
    build,
    calibrator,
    epsilon,
    first_answer,
    judge_of,
    lower_end,
)
from .document import SPEEDUP, TIME, Chart, Column, Table, column, config
from .isolated import Failed, run_isolated
from .suite import (
    Build,
    Comparison,
    Measurement,
    Request,
    Row,
    Subject,
    Suite,
    Unsupported,
    needs,
    recorded_warnings,
)

TRUTH = Path(__file__).resolve().parents[1] / "tests" / "accounting" / "truth.json"

NOISE = 1.0


@dataclass(frozen=True)
class Grid:
    """What is asked.

    Attributes:
        steps: of a query.
        queries: "cold", "warm".
        targets: (target epsilon, sample rate, steps) of each calibration.
        schedules: (phases, steps of each).
        every: so many-th setting of the table of truths is asked for.
        call_seconds: that one call of a peer may take.
        table_seconds: that one setting of the table may.
    """

    steps: int
    queries: Sequence[str]
    targets: Sequence[tuple[float, float, int]]
    schedules: Sequence[tuple[int, int]]
    every: int
    call_seconds: float
    table_seconds: float


FULL = Grid(
    steps=10_000,
    queries=("cold", "warm"),
    targets=((8.0, 0.01, 1000), (1.0, 0.01, 1000), (0.005, 0.01, 1000), (100.0, 0.1, 1000)),
    schedules=((10, 100), (100, 10), (1000, 1)),
    every=1,
    call_seconds=10.0,
    table_seconds=2.0,
)
QUICK = Grid(
    steps=1000,
    queries=("cold",),
    targets=((8.0, 0.01, 100),),
    schedules=(),
    every=26,
    call_seconds=1.0,
    table_seconds=0.5,
)

# What float64 may lose of a value.
_ROUNDING = 1e-9
_MEMORY = 8 * 2**30


def query(
    *, device: str, seed: int, provider: str, warm: bool, noise: float, steps: int, limit_s: float
) -> Subject:
    """One epsilon of equal steps: of a new history, or (warm) after one more step of a long one.

    Args:
        device: the CPU's whatever it says.
        seed: of nothing.
        provider: one of `PROVIDERS`.
        warm: whether the accountant has answered before.
        noise: noise multiplier.
        steps: of the history.
        limit_s: seconds of one call, of a peer.
    """
    phases = [(noise, RATE, steps)]
    value = first_answer(provider, limit_s, lambda: epsilon(provider, phases, DELTA))
    if warm:
        accountant = build(provider, phases)
        accountant.get_epsilon(DELTA)

        def step() -> float:
            add_step(provider, accountant, noise)
            return float(accountant.get_epsilon(DELTA))
    else:
        # Another noise in each call, so that no cache helps.
        calls = itertools.count(1)

        def step() -> float:
            return epsilon(provider, [(noise + 1e-7 * next(calls), RATE, steps)], DELTA)

    return _judged(step, provider, value, phases)


def schedule(
    *, device: str, seed: int, provider: str, phases: int, steps: int, limit_s: float
) -> Subject:
    """One epsilon of phases whose noise rises from 1 to 2; the other arguments are `query`'s."""

    def of(shift: float) -> list[Phase]:
        return [(1 + k / phases + shift, RATE, steps) for k in range(phases)]

    calls = itertools.count(1)
    value = first_answer(provider, limit_s, lambda: epsilon(provider, of(0.0), DELTA))
    return _judged(
        lambda: epsilon(provider, of(1e-7 * next(calls)), DELTA), provider, value, of(0.0)
    )


def calibration(
    *,
    device: str,
    seed: int,
    provider: str,
    target_epsilon: float,
    sample_rate: float,
    steps: int,
    limit_s: float,
) -> Subject:
    """The noise multiplier of a target; right where the epsilon that it has is not above it."""
    find = calibrator(provider)

    def call(shift: float) -> float:
        return find(target_epsilon * (1 + shift), sample_rate, steps)

    noise = first_answer(provider, limit_s, lambda: call(0.0))
    phases = [(noise, sample_rate, steps)]
    certain = lower_end(judge_of(provider), phases, DELTA)
    calls = itertools.count(1)
    return Subject(
        lambda: call(1e-7 * next(calls)),
        lambda: _shortfall(target_epsilon, certain),
        _ROUNDING,
        figures={
            "noise_multiplier": noise,
            "true_epsilon": lower_end("contour", phases, DELTA),
        },
    )


def _judged(
    step: Callable[[], float], provider: str, value: float, phases: Sequence[Phase]
) -> Subject:
    """The subject of an epsilon that was found for these phases."""
    truth = lower_end(judge_of(provider), phases, DELTA)
    return Subject(
        step,
        lambda: _shortfall(value, truth),
        _ROUNDING,
        figures={
            "epsilon": value,
            "lower_end": truth,
            "above": value / truth - 1 if truth else None,
        },
    )


def _shortfall(value: float, truth: float) -> float:
    """How far an epsilon is below the truth, over the truth.

    Infinite where it is no number, or is infinite and the truth is not.
    """
    if value == truth:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    return max(0.0, 1 - value / truth) if truth > 0 else 0.0


def truth_rows(request: Request) -> Iterator[Row]:
    """Each provider beside the table of truths."""
    grid = _grid(request)
    limit, settings = grid.table_seconds, _settings(grid.every)
    for provider in PROVIDERS:
        name, kept = f"truth/{provider}", {"provider": provider, "limit_s": limit}
        columns = _columns(provider, "truth")
        if settings is None:
            reason = "the table tests/accounting/truth.json of a checkout"
            yield needs(name, kept, reason, **columns)
            continue
        kept["settings"] = len(settings)
        try:
            answers, warned = run_isolated(
                answers_of,
                memory_limit=_MEMORY,
                # Signals do not end what a library does in C.
                timeout=60 + 2 * limit * len(settings),
                provider=provider,
                settings=[(phases, delta) for phases, delta, _ in settings],
                limit=limit,
            )
        except (Failed, Unsupported) as reason:
            yield needs(name, kept, str(reason), **columns)
            continue
        if warned:
            columns["warnings"] = warned
        truths = [truth for _, _, truth in settings]
        yield results.row(name, kept, **columns, **summary(answers, truths))


def answers_of(
    provider: str, settings: Sequence[tuple[list[Phase], float]], limit: float
) -> tuple[list[float | str], list[str]]:
    """The provider's epsilon of each setting, or why there is none; and what it warned of."""
    found: list[float | str] = []
    warned: list[str] = []
    with recorded_warnings(warned):
        for phases, delta in settings:
            ask = functools.partial(epsilon, provider, phases, delta)
            try:
                found.append(first_answer(provider, limit, ask))
            except (Unsupported, MemoryError) as reason:
                found.append(str(reason) or "more memory")
    return found, list(dict.fromkeys(warned))


def summary(answers: Sequence[float | str], truths: Sequence[float]) -> Row:
    """Columns of a provider's row; correct where no answer is below its truth."""
    pairs = [(a, t) for a, t in zip(answers, truths, strict=True) if not isinstance(a, str)]
    finite = [(a, t) for a, t in pairs if math.isfinite(a)]
    errors = [abs(a / t - 1) for a, t in finite if t > 0]
    shortfalls = [_shortfall(a, t) for a, t in pairs]
    return {
        "answers": len(finite),
        "infinite_or_nan": len(pairs) - len(finite),
        "late": sum(isinstance(a, str) and a.startswith("more time") for a in answers),
        "refused": sum(isinstance(a, str) and not a.startswith("more time") for a in answers),
        "below_truth": sum(_shortfall(a, t) > _ROUNDING for a, t in finite),
        "median_error": statistics.median(errors) if errors else None,
        "greatest_error": max(errors, default=None),
        "error": max(shortfalls, default=None),
        "correct": all(short <= _ROUNDING for short in shortfalls) if pairs else None,
        "epsilons": list(answers),
    }


def _settings(every: int) -> list[tuple[list[Phase], float, float]] | None:
    """(phases, delta, epsilon) of the table; None where it is not here."""
    if not TRUTH.is_file():
        return None
    rows = json.loads(TRUTH.read_text(encoding="utf-8"))
    return [
        (
            [
                (noise, rate, steps)
                for noise, rate, steps in row.get("phases")
                or [(row["noise_multiplier"], row["sample_rate"], row["steps"])]
            ],
            row["delta"],
            float(row["epsilon"]),
        )
        for row in rows[::every]
    ]


def plan(
    request: Request,
) -> Iterable[Comparison | Callable[[Request], Iterable[Row]]]:
    """Queries, calibrations, schedules and the table of truths; quick leaves some out."""
    grid = _grid(request)
    limit = {"limit_s": grid.call_seconds}
    for kind in grid.queries:
        kept = {"warm": kind == "warm", "noise": NOISE, "steps": grid.steps, **limit}
        yield _compared(f"query/{kind}", query, kept, "query")
    for target, rate, steps in grid.targets:
        kept = {"target_epsilon": target, "sample_rate": rate, "steps": steps, **limit}
        yield _compared(f"calibration/{target:g}", calibration, kept, "calibration")
    for phases, steps in grid.schedules:
        kept = {"phases": phases, "steps": steps, **limit}
        yield _compared(f"schedule/{phases}", schedule, kept, "schedule")
    yield truth_rows


def _grid(request: Request) -> Grid:
    return QUICK if request.quick else FULL


def _columns(provider: str, section: str) -> dict[str, Any]:
    return {"section": section, **({"peer": True} if provider in PEERS else {})}


def _compared(name: str, subject: Build, kept: dict[str, Any], section: str) -> Comparison:
    measurements = [
        Measurement(
            f"{name}/{provider}",
            subject,
            {"provider": provider, **kept},
            _columns(provider, section),
        )
        for provider in PROVIDERS
    ]
    return Comparison(measurements, baseline=f"{name}/contour")


def _cold_or_warm(row: Mapping[str, Any]) -> str:
    return "warm" if row["config"]["warm"] else "cold"


def _six_digits(row: Mapping[str, Any]) -> str | None:
    return None if row.get("epsilon") is None else f"{row['epsilon']:.6g}"


_PROVIDER = config("provider")
_EPSILON: tuple[Column, ...] = (
    ("epsilon", _six_digits),
    column("above", "above the certified lower end, relative"),
)

SUITE = Suite(
    name="accounting",
    title="Accountants",
    about="Accountants of dpflash (contour, pld, rdp), Opacus and Google's dp_accounting on "
    f"Poisson-subsampled Gaussian steps, delta = {DELTA:g}. They take turns in one process. An "
    "epsilon below what is certain is WRONG and has no figures: the error of such a row is its "
    "shortfall over the truth; nor has one that is infinite where the truth is not. Where a peer "
    "is wrong that is something found, and no failure of the run. Speed-ups are over contour, "
    "so below 1 is slower than it.",
    plan=plan,
    tables=(
        Table(
            "query",
            f"One query of equal steps (q = {RATE}, noise {NOISE:g})",
            (_PROVIDER, ("", _cold_or_warm), config("steps"), *TIME, SPEEDUP, *_EPSILON),
            "Cold: of a new accountant, with another noise in each call. Warm: after one more "
            "step of an accountant that has answered before.",
        ),
        Table(
            "calibration",
            "The noise of a target",
            (
                _PROVIDER,
                config("target_epsilon", "target"),
                config("sample_rate", "q"),
                config("steps"),
                *TIME,
                SPEEDUP,
                column("noise_multiplier"),
                column("true_epsilon", "epsilon it certainly has"),
            ),
            "By each provider's own search; less noise is better where the last column is not "
            "above the target.",
        ),
        Table(
            "schedule",
            f"One query of phases with a noise from 1 to 2 each (q = {RATE})",
            (_PROVIDER, config("phases"), config("steps", "of each"), *TIME, SPEEDUP, *_EPSILON),
        ),
        Table(
            "truth",
            "The table of truths",
            (
                _PROVIDER,
                column("answers"),
                column("infinite_or_nan", "inf or nan"),
                column("refused"),
                column("late"),
                column("below_truth", "below the truth"),
                column("median_error", "median error"),
                column("greatest_error", "greatest error"),
                column("error", "greatest shortfall"),
                column("correct"),
                column("needs"),
            ),
            "Epsilons of the settings in tests/accounting/truth.json; errors over the truth. Late "
            "is a peer that took longer than the row's limit of processor time.",
        ),
    ),
    charts=(
        Chart(
            "query",
            "One query",
            ("", _cold_or_warm),
            column("median_ms", "ms"),
            lambda row: row["config"]["provider"],
        ),
        Chart(
            "schedule",
            "One query of a schedule",
            config("phases", "phases of other noise"),
            column("median_ms", "ms"),
            lambda row: row["config"]["provider"],
        ),
    ),
)

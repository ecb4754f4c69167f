"""The suite "accounting": dpflash's accountants beside Opacus' and Google's dp_accounting.

An epsilon is right where it is not below a certified lower bound: the lower end of contour's
interval (for contour itself, of pld's), or the table of truths of a checkout, which other code
computed with many digits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dpflash.accounting import create_accountant, get_noise_multiplier

from . import output
from .document import SPEEDUP, TIME, Row, chart, column, columns, page
from .isolated import Failed, run_isolated
from .suite import (
    Build,
    Comparison,
    Part,
    Request,
    Subject,
    Suite,
    Unsupported,
    compared,
    needs,
    recorded_warnings,
)

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps

OWN = ("contour", "pld", "rdp")
PEERS = ("opacus prv", "opacus rdp", "google pld", "google rdp")
PROVIDERS = (*OWN, *PEERS)
TRUTH = Path(__file__).resolve().parents[1] / "tests" / "accounting" / "truth.json"

# Of every question that does not name others.
RATE, DELTA, NOISE = 0.01, 1e-5, 1.0
# Target epsilon, sample rate, steps.
TARGETS = ((8.0, 0.01, 1000), (1.0, 0.01, 1000), (0.005, 0.01, 1000), (100.0, 0.1, 1000))
# Phases, and steps of each.
SCHEDULES = ((10, 100), (100, 10), (1000, 1))
# The relative error of float64 arithmetic.
_ROUNDING = 1e-9
_MEMORY = 8 * 2**30


def epsilon(provider: str, phases: Sequence[Phase], delta: float) -> float:
    """A provider's epsilon of a history."""
    return float(build(provider, phases).get_epsilon(delta))


def lower_end(accountant: str, phases: Sequence[Phase], delta: float) -> float:
    """A certified lower bound of epsilon."""
    return float(build(accountant, phases).get_epsilon(delta, interval=True).lower or 0.0)


def build(provider: str, phases: Sequence[Phase]) -> Any:
    """A provider's accountant with this history."""
    accountant = _accountant(provider)()
    if not provider.startswith("google"):
        accountant.history = list(phases)
        return accountant
    for noise, rate, steps in phases:
        accountant.compose(_google_event(noise, rate), steps)
    return accountant


def _accountant(provider: str) -> Callable[[], Any]:
    """The class of a provider's accountant."""
    if provider in OWN:
        return functools.partial(create_accountant, provider)
    package = "opacus" if provider.startswith("opacus") else "dp-accounting"
    try:
        if package == "opacus":
            from opacus.accountants import PRVAccountant, RDPAccountant

            return PRVAccountant if provider == "opacus prv" else RDPAccountant
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise Unsupported(f"{package}: pip install {package}") from None
    # It logs each order of RDP at which its series does not converge.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return PLDAccountant if provider == "google pld" else RdpAccountant


def _google_event(noise: float, rate: float) -> Any:
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


def calibrated(provider: str, target: float, rate: float, steps: int) -> float:
    """The noise multiplier of a target epsilon, by the provider's own search."""
    accountant = _accountant(provider)
    if provider.startswith("google"):
        import dp_accounting as google

        def event(noise: float) -> Any:
            return google.SelfComposedDpEvent(_google_event(noise, rate), steps)

        bracket = google.LowerEndpointAndGuess(0.1, 1.0)
        noise = google.calibrate_dp_mechanism(accountant, event, target, DELTA, bracket, tol=1e-4)
        return float(noise)
    search: Callable[..., float] = get_noise_multiplier
    if provider not in OWN:
        from opacus.accountants import utils

        search = utils.get_noise_multiplier
    given = {"target_epsilon": target, "target_delta": DELTA, "sample_rate": rate, "steps": steps}
    return float(search(accountant=provider.removeprefix("opacus "), **given))


def first_answer(provider: str, limit: float, call: Callable[[], float]) -> float:
    """The first answer.

    Raises:
        Unsupported: a peer took longer than the limit, or refused.
    """
    if provider in OWN:
        return call()
    build(provider, [(3.0, RATE, 10)]).get_epsilon(DELTA)  # imports what it needs
    try:
        with _deadline(limit):
            return call()
    except TimeoutError:
        raise Unsupported(f"more time: one call took longer than {limit:g} s") from None
    except (MemoryError, Unsupported):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        raise Unsupported(f"another setting: {type(error).__name__}: {text}") from None


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block, in the main thread, after this much processor time."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def query(
    *,
    device: str,
    seed: int,
    provider: str,
    steps: int,
    limit_s: float,
    noise: float = NOISE,
    phases: int = 1,
) -> Subject:
    """One epsilon of phases whose noise rises by up to 1, each of so many steps.

    The accountant is a new one in each call, and the noise is shifted, so that no cache helps.
    `limit_s` is the limit for one call of a peer, in seconds.
    """

    def history(shift: float = 0.0) -> list[Phase]:
        return [(noise + k / phases + shift, RATE, steps) for k in range(phases)]

    value = first_answer(provider, limit_s, lambda: epsilon(provider, history(), DELTA))
    truth = lower_end(_judge_of(provider), history(), DELTA)
    above = value / truth - 1 if truth else None
    calls = itertools.count(1)

    def step() -> float:
        return epsilon(provider, history(1e-7 * next(calls)), DELTA)

    return Subject(
        step,
        lambda: _shortfall(value, truth),
        _ROUNDING,
        figures={"epsilon": value, "lower_end": truth, "above": above},
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
    """The noise multiplier of a target; it is right where its true epsilon is not above that."""

    def find(target: float) -> float:
        return calibrated(provider, target, sample_rate, steps)

    noise = first_answer(provider, limit_s, lambda: find(target_epsilon))
    phases = [(noise, sample_rate, steps)]
    certain = lower_end(_judge_of(provider), phases, DELTA)
    calls = itertools.count(1)
    return Subject(
        lambda: find(target_epsilon * (1 + 1e-7 * next(calls))),
        lambda: _shortfall(target_epsilon, certain),
        _ROUNDING,
        figures={"noise_multiplier": noise, "true_epsilon": lower_end("contour", phases, DELTA)},
    )


def _judge_of(provider: str) -> str:
    """The accountant whose lower end judges a provider: never its own."""
    return "pld" if provider == "contour" else "contour"


def _shortfall(value: float, truth: float) -> float:
    """How far an epsilon is below the truth, over the truth.

    Infinite where it is NaN, or infinite and the truth is not.
    """
    if value == truth:
        return 0.0
    if not math.isfinite(value):
        return math.inf
    return max(0.0, 1 - value / truth) if truth > 0 else 0.0


def truth_rows(request: Request) -> Iterator[dict[str, Any]]:
    """Each provider beside the table of truths."""
    every, limit = (26, 0.5) if request.quick else (1, 2.0)
    settings = _settings(every)
    for provider in PROVIDERS:
        name, given = f"truth/{provider}", {"provider": provider, "limit_s": limit}
        figures: dict[str, Any] = {"section": "truth"}
        if provider in PEERS:
            figures["peer"] = True
        if not settings:
            reason = "the table tests/accounting/truth.json of a checkout"
            yield needs(name, given, reason, **figures)
            continue
        given["settings"] = len(settings)
        try:
            answers, warned = run_isolated(
                answers_of,
                memory_limit=_MEMORY,
                # A signal does not end a call inside a library's C code.
                timeout=60 + 2 * limit * len(settings),
                provider=provider,
                settings=[(phases, delta) for phases, delta, _ in settings],
                limit=limit,
            )
        except (Failed, Unsupported) as reason:
            yield needs(name, given, str(reason), **figures)
            continue
        if warned:
            figures["warnings"] = warned
        judged = summary(answers, [truth for _, _, truth in settings])
        yield output.row(name, given, **figures, **judged)


def answers_of(
    provider: str, settings: Sequence[tuple[list[Phase], float]], limit: float
) -> tuple[list[float | str], list[str]]:
    """The provider's epsilon of each setting, or why it has none; and its warnings."""
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


def summary(answers: Sequence[float | str], truths: Sequence[float]) -> dict[str, Any]:
    """Columns of a provider's row; it is correct where no answer is below its truth."""
    given = [(a, t) for a, t in zip(answers, truths, strict=True) if not isinstance(a, str)]
    finite = [(a, t) for a, t in given if math.isfinite(a)]
    errors = [abs(a / t - 1) for a, t in finite if t > 0]
    error = max((_shortfall(a, t) for a, t in given), default=None)
    late = sum(isinstance(answer, str) and answer.startswith("more time") for answer in answers)
    return {
        "answers": len(finite),
        "infinite_or_nan": len(given) - len(finite),
        "late": late,
        "refused": len(answers) - len(given) - late,
        "below_truth": sum(_shortfall(a, t) > _ROUNDING for a, t in finite),
        "median_error": statistics.median(errors) if errors else None,
        "greatest_error": max(errors, default=None),
        "error": error,
        "correct": None if error is None else error <= _ROUNDING,
        "epsilons": list(answers),
    }


def _settings(every: int) -> list[tuple[list[Phase], float, float]]:
    """(phases, delta, epsilon) of every n-th row of the table; empty where there is no table."""
    if not TRUTH.is_file():
        return []
    found = []
    for row in json.loads(TRUTH.read_text(encoding="utf-8"))[::every]:
        one = (row.get("noise_multiplier"), row.get("sample_rate"), row.get("steps"))
        phases = [tuple(phase) for phase in row.get("phases") or [one]]
        found.append((phases, row["delta"], float(row["epsilon"])))
    return found


def _plan(request: Request) -> Iterator[Comparison | Part]:
    quick = request.quick
    limit = {"limit_s": 1.0 if quick else 10.0}
    given = {"noise": NOISE, "steps": 1000 if quick else 10_000}
    yield _beside_contour("query", "cold", query, {**given, **limit})
    for target, rate, steps in [(8.0, 0.01, 100)] if quick else TARGETS:
        given = {"target_epsilon": target, "sample_rate": rate, "steps": steps, **limit}
        yield _beside_contour("calibration", f"{target:g}", calibration, given)
    for phases, steps in () if quick else SCHEDULES:
        given = {"phases": phases, "steps": steps, **limit}
        yield _beside_contour("schedule", str(phases), query, given)
    yield truth_rows


def _beside_contour(section: str, name: str, subject: Build, given: dict[str, Any]) -> Comparison:
    own = (f"{section}/{name}", subject, "provider", PROVIDERS, given, section, "contour")
    return compared(*own, peers=PEERS)


def _six_digits(row: Row) -> str | None:
    return None if row.get("epsilon") is None else f"{row['epsilon']:.6g}"


_EPSILON = (
    ("epsilon", _six_digits),
    column("above", "above the certified lower end, relative"),
)
_TIME = (*TIME, SPEEDUP)
_TABLES = {
    "query": columns("provider | steps", _TIME, _EPSILON),
    "calibration": columns(
        "provider | target_epsilon: target | sample_rate: q | steps",
        _TIME,
        "noise_multiplier | true_epsilon: epsilon it certainly has",
    ),
    "schedule": columns("provider | phases | steps: of each", _TIME, _EPSILON),
    "truth": columns(
        "provider | answers | infinite_or_nan: inf or nan | refused | late",
        "below_truth: below the truth | median_error: median error",
        "greatest_error: greatest error | error: greatest shortfall | correct | needs",
    ),
}
_PHASES = "phases: phases of other noise"
SUITE = Suite(
    name="accounting",
    **page("accounting", _TABLES, {"delta": DELTA, "rate": RATE, "noise": NOISE}),
    plan=_plan,
    charts=(
        chart("query", "One query", "steps", "median_ms: ms", "provider"),
        chart("schedule", "One query of a schedule", _PHASES, "median_ms: ms", "provider"),
    ),
)

"""The benchmark of accountants: dpflash's, Opacus' and those of Google's dp_accounting.

An epsilon is right where it is not below what is certain: the lower end that dpflash's contour
certifies (for the contour itself the one that its PLD does), or the table of truths of a checkout,
which was computed by other code with many digits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import signal
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dpflash.accounting import create_accountant, get_noise_multiplier

from . import results
from .document import SPEEDUP, TIME, Chart, Column, Table, column, config
from .isolated import Failed, run_isolated
from .suite import Comparison, Measurement, Request, Row, Subject, Suite, Unsupported, needs

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps

OWN = ("contour", "pld", "rdp")
PEERS = ("opacus prv", "opacus rdp", "google pld", "google rdp")
PROVIDERS = (*OWN, *PEERS)

TRUTH = Path(__file__).resolve().parents[2] / "tests" / "accounting" / "truth.json"

RATE, NOISE, STEPS, DELTA = 0.01, 1.0, 10_000, 1e-5
# (target epsilon, sample rate, steps); (phases, steps of each).
TARGETS = ((8.0, 0.01, 1000), (1.0, 0.01, 1000), (0.005, 0.01, 1000), (100.0, 0.1, 1000))
SCHEDULES = ((10, 100), (100, 10), (1000, 1))
# Seconds of one call, and of one row of the table; quick.
CALL_SECONDS, TABLE_SECONDS = (10.0, 3.0), (2.0, 1.0)
_QUICK_TABLE = 17  # every so many rows of it
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
    value = _first(provider, limit_s, lambda: epsilon(provider, phases, DELTA))
    if warm:
        accountant = _build(provider, phases)
        accountant.get_epsilon(DELTA)

        def step() -> float:
            _add_step(provider, accountant, noise)
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
    value = _first(provider, limit_s, lambda: epsilon(provider, of(0.0), DELTA))
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
    find = _calibrator(provider)

    def call(shift: float) -> float:
        return find(target_epsilon * (1 + shift), sample_rate, steps)

    noise = _first(provider, limit_s, lambda: call(0.0))
    phases = [(noise, sample_rate, steps)]
    certain = _lower_end(_other(provider), phases, DELTA)
    calls = itertools.count(1)
    return Subject(
        lambda: call(1e-7 * next(calls)),
        lambda: _shortfall(target_epsilon, certain),
        _ROUNDING,
        figures={
            "noise_multiplier": noise,
            "true_epsilon": _lower_end("contour", phases, DELTA),
        },
    )


def epsilon(provider: str, phases: Sequence[Phase], delta: float) -> float:
    """What a provider says of a history."""
    return float(_build(provider, phases).get_epsilon(delta))


def _build(provider: str, phases: Sequence[Phase]) -> Any:
    """An accountant with this history."""
    if provider.startswith("google"):
        accountant = _google(provider)()
        for noise, rate, steps in phases:
            accountant.compose(_google_event(noise, rate), steps)
        return accountant
    accountant = create_accountant(provider) if provider in OWN else _opacus(provider)()
    accountant.history = list(phases)
    return accountant


def _add_step(provider: str, accountant: Any, noise: float) -> None:
    if provider.startswith("google"):
        accountant.compose(_google_event(noise, RATE))
    else:
        accountant.step(noise_multiplier=noise, sample_rate=RATE)


def _calibrator(provider: str) -> Callable[[float, float, int], float]:
    """The provider's own search: target epsilon, sample rate and steps to a noise multiplier."""
    if provider.startswith("google"):
        accountant = _google(provider)
        import dp_accounting

        def find(target: float, rate: float, steps: int) -> float:
            return float(
                dp_accounting.calibrate_dp_mechanism(
                    accountant,
                    lambda noise: dp_accounting.SelfComposedDpEvent(
                        _google_event(noise, rate), steps
                    ),
                    target,
                    DELTA,
                    dp_accounting.LowerEndpointAndGuess(0.1, 1.0),
                    tol=1e-4,
                )
            )

        return find
    search: Callable[..., float] = get_noise_multiplier
    if provider not in OWN:
        _opacus(provider)
        from opacus.accountants import utils

        search = utils.get_noise_multiplier
    return lambda target, rate, steps: float(
        search(
            accountant=provider.removeprefix("opacus "),
            target_epsilon=target,
            target_delta=DELTA,
            sample_rate=rate,
            steps=steps,
        )
    )


def _opacus(provider: str) -> Any:
    try:
        from opacus import accountants
    except ImportError:
        raise Unsupported("Opacus: pip install opacus") from None
    return {
        "opacus prv": accountants.PRVAccountant,
        "opacus rdp": accountants.RDPAccountant,
    }[provider]


def _google(provider: str) -> Any:
    try:
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise Unsupported("dp_accounting: pip install dp-accounting") from None
    # It logs each order of RDP at which its series does not converge.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return {"google pld": PLDAccountant, "google rdp": RdpAccountant}[provider]


def _google_event(noise: float, rate: float) -> Any:
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


def _first(provider: str, limit: float, call: Callable[[], float]) -> float:
    """The first answer; what a peer raises, or does not say in time, is why it has no figures."""
    if provider in OWN:
        return call()
    _build(provider, [(3.0, RATE, 10)]).get_epsilon(DELTA)  # loads what it loads
    try:
        with _deadline(limit):
            return call()
    except TimeoutError:
        raise Unsupported(f"more time: one call took longer than {limit:g} s") from None
    except (MemoryError, Unsupported):
        raise
    except Exception as error:
        raise Unsupported(_refusal(error)) from None


def _refusal(error: Exception) -> str:
    return f"another setting: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block, of the main thread, after so much processor time."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _judged(
    step: Callable[[], float], provider: str, value: float, phases: Sequence[Phase]
) -> Subject:
    """The subject of an epsilon that was found for these phases."""
    truth = _lower_end(_other(provider), phases, DELTA)
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


def _other(provider: str) -> str:
    """Whose lower end judges a provider: not its own."""
    return "pld" if provider == "contour" else "contour"


def _lower_end(accountant: str, phases: Sequence[Phase], delta: float) -> float:
    """What epsilon certainly is not below."""
    return float(_build(accountant, phases).get_epsilon(delta, interval=True).lower or 0.0)


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
    """For each provider how its epsilons lie to the table of truths."""
    limit = TABLE_SECONDS[request.quick]
    settings = _settings(request.quick)
    for provider in PROVIDERS:
        name, kept = f"truth/{provider}", {"provider": provider, "limit_s": limit}
        if settings is None:
            reason = "the table tests/accounting/truth.json of a checkout"
            yield needs(name, kept, reason, section="truth")
            continue
        kept["settings"] = len(settings)
        try:
            answers = run_isolated(
                answers_of,
                memory_limit=_MEMORY,
                # Signals do not end what a library does in C.
                timeout=60 + 2 * limit * len(settings),
                provider=provider,
                settings=[(phases, delta) for phases, delta, _ in settings],
                limit=limit,
            )
        except (Failed, Unsupported) as reason:
            yield needs(name, kept, str(reason), section="truth")
            continue
        truths = [truth for _, _, truth in settings]
        yield results.row(name, kept, section="truth", **summary(answers, truths))


def answers_of(
    provider: str, settings: Sequence[tuple[list[Phase], float]], limit: float
) -> list[float | str]:
    """The provider's epsilon of each setting, or why there is none."""
    found: list[float | str] = []
    for phases, delta in settings:
        try:
            found.append(
                _first(provider, limit, lambda p=phases, d=delta: epsilon(provider, p, d))  # type: ignore[misc]
            )
        except (Unsupported, MemoryError) as reason:
            found.append(str(reason) or "more memory")
    return found


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


def _settings(quick: bool) -> list[tuple[list[Phase], float, float]] | None:
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
        for row in rows[:: _QUICK_TABLE if quick else 1]
    ]


def plan(
    request: Request,
) -> Iterable[Comparison | Callable[[Request], Iterable[Row]]]:
    """Queries, calibrations, schedules and the table of truths."""
    limit = {"limit_s": CALL_SECONDS[request.quick]}
    for kind in ("cold", "warm"):
        kept = {"warm": kind == "warm", "noise": NOISE, "steps": STEPS, **limit}
        yield _compared(f"query/{kind}", query, kept, "query")
    for target, rate, steps in TARGETS[: 1 if request.quick else None]:
        kept = {"target_epsilon": target, "sample_rate": rate, "steps": steps, **limit}
        yield _compared(f"calibration/{target:g}", calibration, kept, "calibration")
    for phases, steps in SCHEDULES[: 1 if request.quick else None]:
        kept = {"phases": phases, "steps": steps, **limit}
        yield _compared(f"schedule/{phases}", schedule, kept, "schedule")
    yield truth_rows


def _compared(name: str, build: Any, kept: dict[str, Any], section: str) -> Comparison:
    measurements = [
        Measurement(
            f"{name}/{provider}", build, {"provider": provider, **kept}, {"section": section}
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
    "epsilon below what is certain has no figures: the error of such a row is its shortfall over "
    "the truth; nor has one that is infinite where the truth is not. Speed-ups are over contour, "
    "so below 1 is slower than it.",
    plan=plan,
    tables=(
        Table(
            "query",
            f"One query of {STEPS:,} equal steps (q = {RATE}, noise {NOISE:g})",
            (_PROVIDER, ("", _cold_or_warm), *TIME, SPEEDUP, *_EPSILON),
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

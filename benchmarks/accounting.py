"""The suite "accounting": dpflash's accountants beside Opacus' and Google's dp_accounting.

An epsilon is right where it is not below a certified lower bound: the lower end of contour's
interval (for contour itself, of pld's).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dpflash.accounting import create_accountant

from .document import SPEEDUP, TIME, Row, chart, columns, page
from .suite import Comparison, Request, Subject, Suite, Unsupported, compared

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps

OWN = ("contour", "pld", "rdp")
PEERS = ("opacus prv", "opacus rdp", "google pld", "google rdp")
PROVIDERS = (*OWN, *PEERS)
RATE, DELTA = 0.01, 1e-5
# Noise multiplier and steps of each query.
QUERIES = {"cold": (1.0, 10_000), "little noise": (0.5, 1000), "much noise": (10.0, 10_000)}
# The relative error of float64 arithmetic.
_ROUNDING = 1e-9


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
    import dp_accounting as google

    for noise, rate, steps in phases:
        event = google.PoissonSampledDpEvent(rate, google.GaussianDpEvent(noise))
        accountant.compose(event, steps)
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


def query(*, device: str, seed: int, provider: str, noise: float, steps: int) -> Subject:
    """One epsilon of equal steps.

    The accountant is a new one in each call, and the noise is shifted, so that no cache helps.
    """

    def history(shift: float = 0.0) -> list[Phase]:
        return [(noise + shift, RATE, steps)]

    value = epsilon(provider, history(), DELTA)
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


def _plan(request: Request) -> Iterator[Comparison]:
    for name, (noise, steps) in ({"cold": (1.0, 1000)} if request.quick else QUERIES).items():
        given = {"noise": noise, "steps": steps}
        own = (f"query/{name}", query, "provider", PROVIDERS, given, "query", "contour")
        yield compared(*own, peers=PEERS)


def _six_digits(row: Row) -> str | None:
    return None if row.get("epsilon") is None else f"{row['epsilon']:.6g}"


_QUERY = columns(
    "provider | noise | steps",
    TIME,
    [SPEEDUP, ("epsilon", _six_digits)],
    "above: above the certified lower end, relative",
)
SUITE = Suite(
    name="accounting",
    **page("accounting", {"query": _QUERY}, {"delta": DELTA, "rate": RATE}),
    plan=_plan,
    charts=[chart("query", "One query", "steps", "median_ms: ms", "provider noise")],
)

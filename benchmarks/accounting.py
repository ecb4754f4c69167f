"""The suite "accounting": dpflash's accountants beside Opacus' and Google's dp_accounting.

An epsilon is correct if it is at least a certified lower bound. The accountant "contour" computes
this bound, or the accountant "pld" if the epsilon to check is from "contour".
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from dpflash.accounting import create_accountant

from .document import SPEEDUP, TIME, chart, columns, page
from .suite import Comparison, Request, Subject, Suite, Unsupported, compared

OWN = ("contour", "pld", "rdp")
PEERS = ("opacus prv", "opacus rdp", "google pld", "google rdp")
PROVIDERS = (*OWN, *PEERS)
RATE, DELTA = 0.01, 1e-5
# Noise multiplier and steps of each query.
QUERIES = {"cold": (1.0, 10_000), "little noise": (0.5, 1000), "much noise": (10.0, 10_000)}
# Allowed relative error, for float64 arithmetic.
_ROUNDING = 1e-9


def epsilon(provider: str, noise: float, steps: int) -> float:
    """Return epsilon by a provider's accountant after `steps` equal steps."""
    return float(build(provider, noise, steps).get_epsilon(DELTA))


def lower_end(accountant: str, noise: float, steps: int) -> float:
    """Return a certified lower bound of epsilon, by one of dpflash's accountants."""
    return float(build(accountant, noise, steps).get_epsilon(DELTA, interval=True).lower or 0.0)


def build(provider: str, noise: float, steps: int) -> Any:
    """Return a provider's accountant that has composed `steps` equal steps."""
    accountant = _accountant(provider)()
    if not provider.startswith("google"):
        accountant.history = [(noise, RATE, steps)]
        return accountant
    import dp_accounting as google

    event = google.PoissonSampledDpEvent(RATE, google.GaussianDpEvent(noise))
    return accountant.compose(event, steps)


def _accountant(provider: str) -> Callable[[], Any]:
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
    # dp_accounting logs each RDP order at which its series does not converge.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return PLDAccountant if provider == "google pld" else RdpAccountant


def query(*, device: str, seed: int, provider: str, noise: float, steps: int) -> Subject:
    """Return a call to measure (`Subject`) that computes epsilon after `steps` equal steps.

    Each call has a new accountant and a slightly different noise multiplier, so no cache helps.
    """
    judge = "pld" if provider == "contour" else "contour"  # never the same accountant
    value, truth = epsilon(provider, noise, steps), lower_end(judge, noise, steps)
    above = value / truth - 1 if truth else None
    calls = itertools.count(1)
    return Subject(
        lambda: epsilon(provider, noise + 1e-7 * next(calls), steps),
        lambda: _shortfall(value, truth),
        _ROUNDING,
        figures={"epsilon": value, "lower_end": truth, "above": above},
    )


def _shortfall(value: float, truth: float) -> float:
    """Return how far `value` is below `truth`, divided by `truth`.

    The result is infinite if `value` is NaN, or if `value` is infinite and `truth` is finite.
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


_QUERY = columns(
    "provider | noise | steps",
    TIME,
    [SPEEDUP],
    "epsilon | above: above the certified lower end, relative",
)
SUITE = Suite(
    name="accounting",
    **page("accounting", {"query": _QUERY}, {"delta": DELTA, "rate": RATE}),
    plan=_plan,
    charts=[chart("query", "One query", "steps", "median_ms: ms", "provider noise")],
)

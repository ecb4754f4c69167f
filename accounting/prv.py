"""PRVAccountant: Opacus' PRV accountant, for comparison with published results."""

from __future__ import annotations

import math
import warnings
from typing import Any

from .accountant import Accountant, Interval
from .pairs import Pairs, check_plain

_EPSILON_ERROR = 0.01  # Opacus' defaults
_DELTA_ERROR = 1e-3  # relative to delta


class PRVAccountant(Accountant):
    """Opacus' PRV accountant behind this library's interface; needs `pip install opacus`.

    It reports Opacus' own interval, which is a bound only up to floating-point errors: at delta
    <= 1e-9 its upper bound was measured below the true epsilon (10.1197 instead of 10.1224 at
    sample_rate 1e-3, noise_multiplier 0.6, 10^5 steps and delta 1.1e-10). For results that you
    publish use accountant="contour".

    Source:
        Gopi, Lee, Wutschitz 2021, Numerical Composition of Differential Privacy.
    """

    _name = "prv"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        check_plain(pairs, "prv")
        error = delta * _DELTA_ERROR
        domain = _composed(pairs, error, f"delta={delta!r}")
        try:
            lower, _, upper = domain.compute_epsilon(delta, error, _EPSILON_ERROR)
        except (RuntimeError, ValueError) as failure:
            raise _refusal(f"delta={delta!r}", failure) from failure
        if not math.isfinite(upper):
            raise _refusal(f"delta={delta!r}", f"its upper bound is {upper}")
        lower = max(0.0, float(lower)) if math.isfinite(lower) else None
        return Interval(lower, max(0.0, float(upper)))

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        check_plain(pairs, "prv")
        # Opacus cannot compute delta at an epsilon: bisect log delta, return the passing end.
        low, high = -690.0, 0.0
        for _ in range(24):
            middle = (low + high) / 2
            try:
                passes = self._epsilon(pairs, math.exp(middle)).upper <= epsilon
            except ValueError:
                passes = False
            low, high = (low, middle) if passes else (middle, high)
        return Interval(None, math.exp(high))


def _composed(pairs: Pairs, delta_error: float, name: str) -> Any:
    if any(pair.symmetric for pair, _ in pairs):
        raise ValueError(
            "accountant='prv' supports Poisson sampling under add_remove or zero_out only, but "
            "the history has an event of fixed-size sampling or of the replace_one relation; use "
            "accountant='contour'"
        )
    try:
        from opacus.accountants import PRVAccountant as OpacusPRVAccountant
    except ImportError as error:
        raise ImportError(
            "accountant='prv' is Opacus' own accountant, and opacus is not installed; run "
            "pip install opacus, or use accountant='contour'"
        ) from error
    theirs = OpacusPRVAccountant()
    theirs.history = [(pair.noise, pair.rate, count) for pair, count in pairs]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return theirs._get_dprv(eps_error=_EPSILON_ERROR, delta_error=delta_error)
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as failure:
        raise _refusal(name, failure) from failure


def _refusal(name: str, reason: object) -> ValueError:
    return ValueError(
        f"{name}: Opacus' PRV accountant failed ({reason}); use accountant='contour'"
    )

"""Accountants by name, of dpflash, Opacus and Google's dp_accounting: epsilons, calibrations."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from dpflash.accounting import create_accountant, get_noise_multiplier

from .suite import Unsupported

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps

OWN = ("contour", "pld", "rdp")
PEERS = ("opacus prv", "opacus rdp", "google pld", "google rdp")
PROVIDERS = (*OWN, *PEERS)

# Of all questions, but for those that name another.
RATE, DELTA = 0.01, 1e-5


def epsilon(provider: str, phases: Sequence[Phase], delta: float) -> float:
    """What a provider says of a history."""
    return float(build(provider, phases).get_epsilon(delta))


def build(provider: str, phases: Sequence[Phase]) -> Any:
    """An accountant with this history."""
    if provider.startswith("google"):
        accountant = _google(provider)()
        for noise, rate, steps in phases:
            accountant.compose(_google_event(noise, rate), steps)
        return accountant
    accountant = create_accountant(provider) if provider in OWN else _opacus(provider)()
    accountant.history = list(phases)
    return accountant


def add_step(provider: str, accountant: Any, noise: float) -> None:
    """Adds one step to an accountant's history."""
    if provider.startswith("google"):
        accountant.compose(_google_event(noise, RATE))
    else:
        accountant.step(noise_multiplier=noise, sample_rate=RATE)


def calibrator(provider: str) -> Callable[[float, float, int], float]:
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


def first_answer(provider: str, limit: float, call: Callable[[], float]) -> float:
    """The first answer; what a peer raises, or does not say in time, is why it has no figures."""
    if provider in OWN:
        return call()
    build(provider, [(3.0, RATE, 10)]).get_epsilon(DELTA)  # loads what it loads
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
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge_of(provider: str) -> str:
    """Whose lower end judges a provider: not its own."""
    return "pld" if provider == "contour" else "contour"


def lower_end(accountant: str, phases: Sequence[Phase], delta: float) -> float:
    """What epsilon certainly is not below."""
    return float(build(accountant, phases).get_epsilon(delta, interval=True).lower or 0.0)

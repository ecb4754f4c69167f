"""Registry of the accountants by name, and conversion of events for Opacus' accountants."""

import copy
from typing import cast

from .accountant import Accountant
from .contour import ContourAccountant
from .events import ADD_REMOVE, REPLACE_ONE, Event, Gaussian, PoissonGaussian, UnitPoissonGaussian
from .gaussian import GaussianAccountant
from .gdp import GDPAccountant
from .pld import PLDAccountant
from .prv import PRVAccountant
from .rdp import RDPAccountant

ACCOUNTANTS: dict[str, type[Accountant]] = {
    "contour": ContourAccountant,
    "pld": PLDAccountant,
    "rdp": RDPAccountant,
    "gdp": GDPAccountant,
    "gaussian": GaussianAccountant,
    "prv": PRVAccountant,
}


def create_accountant(name: str, *, neighboring_relation: str = ADD_REMOVE) -> Accountant:
    """Create an accountant with an empty history.

    Args:
        name: `"contour"` (tight; the default of other functions), `"pld"`, `"rdp"`, `"gdp"` (an
            estimate), `"gaussian"` (sample rate 1 only) or `"prv"` (Opacus' accountant).
        neighboring_relation: relation of its epsilon, "add_remove", "zero_out" or "replace_one".

    Raises:
        ValueError: no accountant has this name, or the relation is unknown.
    """
    if name not in ACCOUNTANTS:
        available = ", ".join(map(repr, ACCOUNTANTS))
        raise ValueError(f"accountant={name!r}: expected one of {available}; pass one of these")
    return ACCOUNTANTS[name](neighboring_relation=neighboring_relation)


def as_accountant(accountant: object) -> Accountant:
    """Return the given accountant (also one of Opacus), or create the one with the given name."""
    if isinstance(accountant, str):
        return create_accountant(accountant)
    has_interface = all(hasattr(accountant, name) for name in ("history", "step", "get_epsilon"))
    if isinstance(accountant, type) or not has_interface:
        kind = accountant.__name__ if isinstance(accountant, type) else type(accountant).__name__
        raise ValueError(
            f"accountant={kind}: expected an object with history, step and get_epsilon; pass an "
            f"accountant, or one of the names {', '.join(map(repr, ACCOUNTANTS))}"
        )
    return cast(Accountant, accountant)


def copied(accountant: Accountant) -> Accountant:
    """Return a copy of an accountant (also of Opacus) to try steps on without changing it."""
    if isinstance(accountant, Accountant):
        return accountant.for_trial()
    trial = copy.copy(accountant)
    trial.history = list(accountant.history)
    return trial


def as_phase(accountant: object, event: Event) -> tuple[float, float]:
    """Return (noise_multiplier, sample_rate) of an event, the form of steps in Opacus."""
    if type(event) is PoissonGaussian and event.relation != REPLACE_ONE:
        return event.noise_multiplier, event.sample_rate
    if isinstance(event, Gaussian) and event.relation != REPLACE_ONE:
        return event.noise_multiplier, 1.0
    name = f"{type(accountant).__module__}.{type(accountant).__qualname__}"
    if isinstance(event, UnitPoissonGaussian):
        if event.examples_per_unit == 1:
            return event.noise_multiplier, event.sample_rate
        raise ValueError(
            f"accountant={name}: it supports units of one example only, not examples_per_unit="
            f"{event.examples_per_unit!r}; use accountant='contour'"
        )
    raise ValueError(
        f"accountant={name}: it supports Poisson sampling only, not the {event.sampler} sampler "
        f"under {event.relation!r}; use accountant='contour'"
    )

"""The accountants by name, and which events each of them knows."""

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
    """A new accountant with an empty history.

    Args:
        name: `"contour"` (tight, the default elsewhere), `"pld"`, `"rdp"`, `"gdp"` (an estimate),
            `"gaussian"` (sample rate 1 only) or `"prv"` (Opacus').
        neighboring_relation: of epsilon: "add_remove", "zero_out" or "replace_one".

    Raises:
        ValueError: there is no accountant of this name, or no such relation.
    """
    if name not in ACCOUNTANTS:
        available = ", ".join(map(repr, ACCOUNTANTS))
        raise ValueError(f"accountant={name!r}: expected one of {available}; pass one of these")
    return ACCOUNTANTS[name](neighboring_relation=neighboring_relation)


def as_accountant(accountant: object) -> Accountant:
    """A new accountant for a name; an accountant, also one of Opacus, is returned as it is."""
    if isinstance(accountant, str):
        return create_accountant(accountant)
    has_interface = all(hasattr(accountant, name) for name in ("history", "step", "get_epsilon"))
    if isinstance(accountant, type) or not has_interface:
        kind = accountant.__name__ if isinstance(accountant, type) else type(accountant).__name__
        raise ValueError(
            f"accountant={kind}: expected an accountant, with history, step and get_epsilon; pass "
            f"one, or a name: {', '.join(map(repr, ACCOUNTANTS))}"
        )
    return cast(Accountant, accountant)


def copied(accountant: Accountant) -> Accountant:
    """A copy with a history of its own, to spend on trial; also of an accountant of Opacus."""
    if isinstance(accountant, Accountant):
        return accountant.for_trial()
    trial = copy.copy(accountant)
    trial.history = list(accountant.history)
    return trial


def as_phase(accountant: object, event: Event) -> tuple[float, float]:
    """(noise_multiplier, sample_rate) of a Poisson or Gaussian step, for Opacus' accountants."""
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

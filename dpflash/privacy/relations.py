"""Under which neighbouring relation, and in which words, an accountant takes an event."""

from __future__ import annotations

from collections.abc import Iterable

from dpflash.accounting import Event, Gaussian, PoissonGaussian
from dpflash.accounting.events import ADD_REMOVE, ZERO_OUT

DEFAULT_ACCOUNTANT = "contour"


def common_relation(relations: Iterable[str]) -> str:
    """The relation under which events of these relations are accounted for together.

    Events of one relation keep it. Others meet in "zero_out", under which every sampler of ours
    has a guarantee: Poisson sampling costs there what it costs under "add_remove", and a shuffled
    or fixed-size batch has no guarantee under that one.
    """
    given = set(relations)
    return given.pop() if len(given) == 1 else ZERO_OUT


def converted(event: Event, relation: str) -> Event:
    """The event under another relation.

    Raises:
        ValueError: it has no guarantee there.
    """
    if event.relation == relation:
        return event
    if type(event) is Gaussian and relation == ADD_REMOVE:
        raise ValueError(
            f"neighboring_relation={relation!r}: a batch that did not come from a private loader "
            "has no guarantee for it, since one sample more could move all the others; use "
            f"{ZERO_OUT!r}"
        )
    if isinstance(event, PoissonGaussian) and (event.relation, relation) == (ZERO_OUT, ADD_REMOVE):
        raise ValueError(
            f"neighboring_relation={relation!r}: the {event.sampler} sampler took the size of the "
            "dataset for public, and its sample rate changes with one sample more; pass "
            f"make_private(dataset_size=...), a public number, or use {ZERO_OUT!r}"
        )
    try:
        return event.convert(relation)
    except ValueError as error:
        raise ValueError(
            f"neighboring_relation={relation!r}: the {event.sampler} sampler has no guarantee "
            f"for it ({error})"
        ) from error


def class_name(accountant: object) -> str:
    """The full name of an object's class."""
    return f"{type(accountant).__module__}.{type(accountant).__qualname__}"

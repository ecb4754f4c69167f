"""Calls of Opacus that dpflash takes over: arguments at their defaults, and of checkpoints."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Arguments of Opacus' engine: the value that changes nothing here, and why.
_WITHOUT_MEANING: dict[str, tuple[object, str]] = {
    "secure_mode": (False, "noise always comes from ChaCha20, keyed by the operating system"),
    "wrap_model": (True, "the model is never wrapped; it comes back as the same object"),
    "batch_first": (True, "the batch is always the first dimension"),
    "noise_generator": (None, "noise comes from a keyed stream"),
    **dict.fromkeys(
        (
            "module_state_dict_kwargs",
            "torch_save_kwargs",
            "module_load_dict_kwargs",
            "torch_load_kwargs",
        ),
        (None, "a checkpoint has a format of its own"),
    ),
    "rand_on_empty": (False, "an empty draw is a batch of padding rows, which count for nothing"),
}
_CRITERION = "losses are made in the loop, also for grad_sample_mode='ghost'"


def without_defaults(
    unknown: Mapping[str, Any], *, mode: object, stacklevel: int
) -> dict[str, Any]:
    """The unknown keywords of a call without those that Opacus has at these values; warns once.

    Args:
        unknown: keywords that the method does not have.
        mode: grad_sample_mode of the call. With "ghost" a criterion would make Opacus return four
            objects, so it is not taken.
        stacklevel: of the warning.
    """
    dropped = {
        name: why
        for name, (value, why) in _WITHOUT_MEANING.items()
        if name in unknown and unknown[name] is value
    }
    if "criterion" in unknown and mode not in ("ghost", "ghost_fsdp"):
        dropped["criterion"] = _CRITERION
    if dropped:
        listed = "; ".join(f"{name} ({why})" for name, why in dropped.items())
        warnings.warn(
            f"arguments of Opacus that mean nothing here: {listed}. Leave them out",
            stacklevel=stacklevel + 1,
        )
    return {name: value for name, value in unknown.items() if name not in dropped}


def keywords_alone(method: _Method) -> _Method:
    """Have a method refuse positional arguments by naming the keywords."""

    @functools.wraps(method)
    def checked(self: Any, *positional: Any, **keywords: Any) -> Any:
        if positional:
            raise TypeError(
                f"{method.__name__} takes keywords alone, and got {len(positional)} positional "
                f"argument(s): write {method.__name__}(module=..., optimizer=..., "
                "data_loader=..., ...)"
            )
        return method(self, **keywords)

    return cast(_Method, checked)


class Scheduler(Protocol):
    """A scheduler of noise or clipping of Opacus."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def require_own(**given: tuple[object, object]) -> None:
    """Refuse objects that are not the engine's own: ``require_own(module=(given, own))``.

    Raises:
        ValueError: naming the argument. None is taken for the engine's own.
    """
    for name, (value, own) in given.items():
        if value is not None and value is not own:
            raise ValueError(
                f"{name}={type(value).__name__}: not the one that make_private returned, which a "
                f"checkpoint is of; leave {name} out"
            )


def with_schedulers(
    extra: Mapping[str, Any] | None, schedulers: Mapping[str, Scheduler | None]
) -> dict[str, Any]:
    """What save_checkpoint stores for the loop: `extra`, and the states of schedulers.

    Raises:
        ValueError: `extra` is no dict, or has the name of a scheduler's state.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise ValueError(f"extra is a {type(extra).__name__}: expected a dict or None")
    states = {_key(n): s.state_dict() for n, s in schedulers.items() if s is not None}
    if taken := sorted(states.keys() & (extra or {}).keys()):
        raise ValueError(f"extra[{taken[0]!r}] is the name of a scheduler's state; choose another")
    return {**(extra or {}), **states}


def require_states(extra: Mapping[str, Any], schedulers: Mapping[str, Scheduler | None]) -> None:
    """Refuse a checkpoint without the state of a scheduler that is to be restored.

    Raises:
        ValueError: naming the scheduler.
    """
    for name, scheduler in schedulers.items():
        if scheduler is not None and _key(name) not in extra:
            raise ValueError(
                f"{name}={type(scheduler).__name__}: the checkpoint has no state of it; pass it "
                "to save_checkpoint too, or leave it out here"
            )


def restore_schedulers(
    extra: Mapping[str, Any], schedulers: Mapping[str, Scheduler | None]
) -> dict[str, Any]:
    """Give the schedulers their states back; returns the rest of `extra`."""
    given = {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}
    for name, scheduler in given.items():
        scheduler.load_state_dict(extra[_key(name)])
    used = {_key(name) for name in given}
    return {name: value for name, value in extra.items() if name not in used}


def _key(name: str) -> str:
    return f"{name}_state_dict"

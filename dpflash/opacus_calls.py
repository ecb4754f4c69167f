"""Accepts, ignores or refuses keyword arguments of Opacus and other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ._validate import did_you_mean
from .refusal import warn

# Arguments of Opacus' engine -> (the value that has no effect here, the reason).
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
    "rand_on_empty": (False, "an empty batch has only padding rows, which have weight 0"),
}
_CRITERION = "the loop computes the losses, also for grad_sample_mode='ghost'"

# Arguments that this library does not have -> what to use instead.
_REFUSED = {
    "secure_mode": "noise always comes from ChaCha20, keyed by the operating system; leave it out",
    "criterion": (
        "make_private returns (module, optimizer, data_loader) in every mode; compute one loss "
        "per sample (dpflash.losses) and call engine.backward(losses)"
    ),
    "batch_first": (
        "the batch is always the first dimension of the model's inputs; transpose inside the model"
    ),
    "noise_generator": "noise comes from a keyed stream; PrivacyEngine(seed=...) reproduces it",
    "wrap_model": "the model is never wrapped; it comes back as the same object, without hooks",
    "rand_on_empty": "an empty batch has only padding rows, which have weight 0",
    "module_state_dict_kwargs": "a checkpoint has a format of its own; save model.state_dict(...)",
    "torch_save_kwargs": "a checkpoint has a format of its own",
    "module_load_dict_kwargs": "the model must have all tensors of the checkpoint",
    "torch_load_kwargs": "a checkpoint is always read as plain values and tensors",
    "clip": "the bound of a sample's gradient is max_grad_norm=",
    "target_epsilon": "make_private_with_epsilon takes it, with target_delta= and epochs=",
    "target_delta": "make_private_with_epsilon takes it, with target_epsilon= and epochs=",
    "epsilon": "in make_private_with_epsilon its name is target_epsilon=",
    "delta": "in make_private_with_epsilon its name is target_delta=",
    "accountant": "PrivacyEngine(accountant=...) takes it",
    "epochs": "make_private_with_epsilon takes it; here training ends with your loop",
    "steps": "training ends with your loop; make_private_with_epsilon takes epochs= or steps=",
    "total_steps": "training ends with your loop; make_private_with_epsilon takes steps=",
    "way": "it is grad_sample_mode= now: 'instantiate' (was 'stored'), 'book_keeping', 'ghost'",
}


def without_defaults(unknown: Mapping[str, Any], *, mode: object) -> dict[str, Any]:
    """Return `unknown` without Opacus' arguments that have no effect here, and warn of them.

    Args:
        unknown: keywords that the method does not have.
        mode: grad_sample_mode of the call. With "ghost" the argument `criterion` is kept (and
            later refused), since Opacus' make_private would then return four objects.
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
        warn(
            f"arguments of Opacus that mean nothing here: {listed}. Leave them out",
        )
    return {name: value for name, value in unknown.items() if name not in dropped}


def refuse_keywords_of(
    method: Callable[..., Any],
    unknown: Mapping[str, Any],
    *,
    mode: object = None,
) -> None:
    """Raise for the first keyword that a method does not have; warn for Opacus' defaults.

    Args:
        method: the method called.
        unknown: the keywords that the method does not have -> their values.
        mode: grad_sample_mode of the call.

    Raises:
        TypeError: names the keyword, and its replacement or a similar keyword.
    """
    unknown = without_defaults(unknown, mode=mode)
    if not unknown:
        return
    name, value = next(iter(unknown.items()))
    if name in _REFUSED:
        given = f"{name!r} (={value!r})" if isinstance(value, bool) else repr(name)
        raise TypeError(f"{method.__name__} has no argument {given}: {_REFUSED[name]}")
    # make_private_with_epsilon refuses noise_multiplier, and says what to pass.
    known = {*known_keywords(method), "noise_multiplier"}
    hint = did_you_mean(name, sorted(known), always=True)
    raise TypeError(f"{method.__name__} got an unknown argument {name!r}{hint}")


def known_keywords(method: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments, without `self` and ``**`` arguments."""
    parameters = inspect.signature(method).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]


class Scheduler(Protocol):
    """Opacus' scheduler of the noise multiplier or the clipping bound."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def require_own(**given: tuple[object, object]) -> None:
    """Check that an argument is None or the engine's own object.

    ``require_own(module=(given, own))`` raises a ValueError that names the argument.
    """
    for name, (value, own) in given.items():
        if value is not None and value is not own:
            raise ValueError(
                f"{name}={type(value).__name__}: expected the object that make_private returned, "
                f"since a checkpoint contains its state; leave {name} out"
            )


def with_schedulers(
    extra: Mapping[str, Any] | None, schedulers: Mapping[str, Scheduler | None]
) -> dict[str, Any]:
    """Return a dict of `extra` and the schedulers' states, for save_checkpoint.

    Raises:
        ValueError: `extra` is not a dict, or uses the name of a scheduler's state.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise ValueError(f"extra is a {type(extra).__name__}: expected a dict or None")
    states = {_key(n): s.state_dict() for n, s in schedulers.items() if s is not None}
    if taken := sorted(states.keys() & (extra or {}).keys()):
        raise ValueError(f"extra[{taken[0]!r}] is the name of a scheduler's state; choose another")
    return {**(extra or {}), **states}


def require_states(extra: Mapping[str, Any], schedulers: Mapping[str, Scheduler | None]) -> None:
    """Raise ValueError if a checkpoint lacks the state of a scheduler that was passed."""
    for name, scheduler in schedulers.items():
        if scheduler is not None and _key(name) not in extra:
            raise ValueError(
                f"{name}={type(scheduler).__name__}: the checkpoint has no state of this "
                "scheduler; pass it to save_checkpoint too, or leave it out here"
            )


def restore_schedulers(
    extra: Mapping[str, Any], schedulers: Mapping[str, Scheduler | None]
) -> dict[str, Any]:
    """Load the schedulers' states, and return the rest of `extra`."""
    given = {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}
    for name, scheduler in given.items():
        scheduler.load_state_dict(extra[_key(name)])
    used = {_key(name) for name in given}
    return {name: value for name, value in extra.items() if name not in used}


def _key(name: str) -> str:
    return f"{name}_state_dict"

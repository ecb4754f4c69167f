"""Finds optimizers that hook the model's forwards, as K-FAC does for its preconditioner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn


def hook_of_optimizer(name: str, module: nn.Module) -> str | None:
    """Return a message that names an optimizer with a hook on a module, or None."""
    hooks = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )
    for hook in chain.from_iterable(held.values() for held in hooks):
        owner = _owner(hook)
        if isinstance(owner, torch.optim.Optimizer) or _is_preconditioner(owner):
            return (
                f"{type(owner).__name__} has a hook on module '{name}', as K-FAC has to keep "
                "statistics of activations: statistics of private data, neither clipped nor "
                "noised, would change the weights in step(). Use an optimizer without hooks "
                "(torch.optim.AdamW), or compute the preconditioner from public data alone, with "
                "the hooks on copy.deepcopy(model) instead of on the model"
            )
    return None


def _owner(hook: Callable[..., Any]) -> Any:
    """Return the object of which the hook is a method, or whose method made it; else None."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    cells = getattr(hook, "__closure__", None) or ()
    names = hook.__code__.co_freevars if cells else ()
    made_in = next((cell for n, cell in zip(names, cells, strict=True) if n == "self"), None)
    try:
        return getattr(hook, "__self__", None) if made_in is None else made_in.cell_contents
    except ValueError:  # an empty cell
        return None


def _is_preconditioner(owner: object) -> bool:
    """Return whether an object has `step` and `load_state_dict`, as K-FAC's preconditioner has."""
    names = ("step", "load_state_dict")
    return not isinstance(owner, nn.Module) and all(hasattr(owner, n) for n in names)

"""Uncovered: finds the leaves that a backward would reach past the clipping gates.

A head, an encoder, a temperature or a soft prompt outside of the private model, and parameters
that entered it later, would get the gradient of private samples in clear. Inputs that ask for
their gradients are new tensors in each batch, with the batch first, and stay allowed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

# Where a scalar's backward has begun, all tensors of the process are looked at: in the first ones,
# and then once in this many.
_ALL_SEARCHED, _EVERY = 8, 61

_LEAF = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
_GATE = "_ClipGateBackward"
_REENTRANT = "CheckpointFunctionBackward"


class Uncovered:
    """Watches the leaves that the losses of one private model train.

    Args:
        module: the model.
        trained: the parameters with private gradients; all others must have none.
    """

    def __init__(self, module: nn.Module, trained: Collection[nn.Parameter]) -> None:
        self._module = module
        self._trained = {id(p) for p in trained}
        self._inputs = WeakIdKeyDictionary()
        self._scalars = 0

    def refusal(self, losses: Tensor | None, batch: object, rows: int | None) -> str | None:
        """A message that names a leaf which no gate covers; None if there is none.

        Args:
            losses: whose backward is about to begin; None inside the backward of a scalar.
            batch: equal for backwards of one batch alone.
            rows: B; None where the first dimension of inputs is not the batch.
        """
        if losses is not None and losses.grad_fn is not None:
            leaves = leaves_past_gates(losses.grad_fn)
        else:
            due = self._scalars < _ALL_SEARCHED or self._scalars % _EVERY == 0
            self._scalars += 1
            leaves = leaves_of_backward() if due else []
        for leaf in leaves:
            if id(leaf) in self._trained or self._is_input(leaf, batch, rows):
                continue
            # Inside the backward of a scalar it may have its gradient already.
            leaf.grad, self._scalars = None, 0
            what = described(leaf, self._module)
            return f"{what} {NOT_CLIPPED}, so nothing was released: {MAKE_PRIVATE}. {_INPUTS}"
        return None

    def _is_input(self, leaf: Tensor, batch: object, rows: int | None) -> bool:
        if isinstance(leaf, nn.Parameter):
            return False
        if rows and (not leaf.ndim or leaf.shape[0] % rows):
            return False
        return bool(self._inputs.setdefault(leaf, batch) == batch)


NOT_CLIPPED = "is trained by losses of private samples, and no private layer clips its gradient"
MAKE_PRIVATE = (
    "put it into the model, and its parameters into the optimizer, before make_private "
    "(engine.detach(model) first); or freeze it with requires_grad_(False), .detach() what it "
    "computes, or train it on public data inside engine.public_data()"
)
_INPUTS = "An input whose gradient is wanted is a new tensor for each batch, with the batch first"


def described(leaf: Tensor, model: nn.Module) -> str:
    """Name of a leaf in the model, or its shape."""
    for name, parameter in model.named_parameters():
        if parameter is leaf:
            return f"'{name}', a parameter that is not private,"
    if isinstance(leaf, nn.Parameter):
        return f"a parameter of shape {tuple(leaf.shape)} outside of the private model"
    return "a tensor outside of the private model that requires grad"


def leaves_past_gates(root: Any) -> list[Tensor]:
    """The leaves that the backward from a node reaches, apart from those behind gates."""
    seen, waiting = {root}, [root] if root is not None else []
    found: dict[int, Tensor] = {}
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if type(below) is _LEAF:
                if type(node).__name__ != _GATE:
                    leaf: Tensor = below.variable  # type: ignore[attr-defined]
                    found[id(leaf)] = leaf
            elif below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
                if type(below).__name__ == _REENTRANT:
                    # Its graph is made in the backward.
                    found |= {id(p): p for p in _parameters_in(below.run_function)}
    return list(found.values())


def _parameters_in(function: Any) -> Iterable[nn.Parameter]:
    """The trainable parameters of the modules that a checkpointed function refers to."""
    waiting = [function]
    for held in waiting:
        if isinstance(held, nn.Module):
            yield from (p for p in held.parameters() if p.requires_grad)
        elif isinstance(held, nn.Parameter):
            yield held
        elif isinstance(held, functools.partial):
            waiting += [held.func, *held.args, *held.keywords.values()]
        elif len(waiting) < 100:
            cells = getattr(held, "__closure__", None) or ()
            waiting += [cell.cell_contents for cell in cells]
            waiting += [held.__self__] if hasattr(held, "__self__") else []


def leaves_of_backward() -> list[Tensor]:
    """The leaves of this process that the backward under way reaches."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    leaves = [x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.requires_grad]
    edges = [(x, get_gradient_edge(x).node) for x in leaves if x.is_leaf]
    return [x for x, node in edges if torch._C._will_engine_execute_node(node)]

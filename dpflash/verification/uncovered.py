"""Uncovered: finds autograd leaves that a backward reaches without passing a clipping gate.

If a parameter is outside of the private model (such as a head, a temperature or a soft prompt), or
was added to the model later, its gradients of private samples would have no clipping and no noise.
Inputs may require grad: they must be new tensors in each batch, with the batch's first dimensions.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

_LEAF = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
_GATE = "_ClipGateBackward"
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@dataclass(frozen=True)
class Hidden:
    """Represents the unknown leaves of a function that builds its graph only in the backward."""

    name: str


class Uncovered:
    """Finds the leaves that the losses of one private model train.

    Args:
        module: the model.
        trained: the parameters with private gradients; no other leaf may have a gradient.

    Attributes:
        path: the operations of model and loop in the last backward, as pairs (name of an autograd
            node, name of the node that follows).
    """

    def __init__(self, module: nn.Module, trained: Collection[nn.Parameter]) -> None:
        self._module = module
        self._modules = list(module.modules())
        self._trained = {id(p) for p in trained}
        self._inputs = WeakIdKeyDictionary()
        self._known = WeakIdKeyDictionary()
        self._given_shapes: set[torch.Size] = set()
        self._is_called = False
        self.path: set[tuple[str, str]] = set()

    @contextmanager
    def call(
        self, tensors: Sequence[Tensor], own: Sequence[Tensor], *, is_compiled: bool = False
    ) -> Iterator[None]:
        """Watch a call of the model in the body.

        Args:
            tensors: the tensors among its arguments.
            own: the batch's tensors. A tensor with one row counts as an input only if it is here.
            is_compiled: whether torch.compile runs the model.
        """
        if not self._is_called:
            self._known.clear()
            self._given_shapes.clear()
        self._is_called = True
        self._given_shapes |= {t.shape[:2] for t in tensors if t.ndim > 1}
        has_one_row = any(t.shape[0] == 1 for t in tensors)
        for t in (*own, *(t for t in tensors if t.shape[0] != 1)):
            self._known[_whole(t)] = True
        with ExitStack() as hooks:
            # For checkpointing, hooks or models make outputs of frozen layers require grad.
            for m in self._modules if not is_compiled and has_one_row else ():
                if m._forward_hooks or isinstance(m, nn.Embedding):
                    hooks.enter_context(m.register_forward_hook(self._note_output, prepend=True))
            yield

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not output.requires_grad:
            self._known[_whole(output)] = True

    def refusal(
        self, losses: Tensor | None, batch: object, leading: Sequence[int | None]
    ) -> str | None:
        """Return a message that names a leaf whose gradient no clipping gate clips, or None.

        Args:
            losses: the losses whose backward is about to begin; None inside a scalar's backward.
            batch: a key; keys are equal only for backwards of the same batch.
            leading: the first dimensions of inputs.
        """
        roots = [losses.grad_fn] if losses is not None else roots_of_backward()
        if not roots:
            return _UNSEEN
        runs = torch._C._will_engine_execute_node if losses is None else _always
        is_called, self._is_called = self._is_called, False
        if not is_called and _is_hidden(self._module):
            return _HIDDEN
        self.path = set()
        found = [
            x for root in roots for x in leaves_past_gates(root, self._module, runs, self.path)
        ]
        refused = [x for x in found if not self._may_be_reached(x, batch, leading, is_called)]
        for leaf in refused:
            if isinstance(leaf, Tensor):
                # In a scalar's backward, autograd may have set the gradient already: drop it.
                leaf.grad = None
        if not refused:
            return None
        fault, remedy = described(refused[0], self._module)
        return f"{fault}, so nothing was released: {remedy}"

    def _may_be_reached(
        self,
        leaf: Tensor | Hidden,
        batch: object,
        leading: Sequence[int | None],
        is_called: bool,
    ) -> bool:
        """Return whether the losses may reach a leaf: it is trained privately, or is an input."""
        if isinstance(leaf, Hidden) or id(leaf) in self._trained:
            return not isinstance(leaf, Hidden)
        if isinstance(leaf, nn.Parameter) or leaf.shape[: len(leading)] != tuple(leading):
            return False
        # Weights of B classes have first dimension B, too, but do not reach the model.
        is_alike = not is_called or leaf.shape[:2] in self._given_shapes
        if _whole(leaf) not in self._known and not (is_alike and any(n != 1 for n in leading)):
            return False
        return bool(self._inputs.setdefault(leaf, batch) == batch)


def _whole(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


_MAKE_PRIVATE = (
    "put it into the model, and its parameters into the optimizer, before make_private "
    "(engine.detach(model) first); or leave it untrained, with requires_grad_(False) or .detach() "
    "of its output; or train it on public data inside engine.public_data(). A backward of "
    "its own on private samples would train it without noise"
)
_COPY = "if it is in a copy of the model, train the model that make_private returned; else "
_LATER = (
    "to train it later, let it require grad at make_private, freeze it after that, and unfreeze "
    "it for its training; otherwise "
)
_NO_PARAMETER = (
    "make it an nn.Parameter of the optimizer before make_private (engine.detach(model) "
    "first), or do not let it require grad"
)
_INPUTS = (
    ". An input whose gradient you need must be a new tensor for each batch, with the batch "
    "first: an argument of the model, or a tensor with the first two dimensions of one; with one "
    "row in a batch, the loader's tensor, or the tensor that the model gets instead"
)
_UNSEEN = (
    "a scalar's backward was not begun by loss.backward() or torch.autograd, so it is unknown "
    "what it trains outside of the private model, and nothing was released: call loss.backward()"
)

_HIDDEN = (
    "model.forward was assigned after make_private and hides the private forward, so the test "
    "that samples stay apart did not see it, and nothing was released: call the replaced "
    "forward inside the new one, or write the new one into the model's class"
)


def _is_hidden(model: nn.Module) -> bool:
    """Return whether `model.forward` was replaced by a function that does not wrap the class's."""
    forward = type(model).forward

    def is_it(x: Any) -> bool:
        return getattr(x, "__func__", x) is forward

    return not is_it(inspect.unwrap(vars(model).get("forward", forward), stop=is_it))


def described(leaf: Tensor | Hidden, model: nn.Module) -> tuple[str, str]:
    """Return (error, remedy); the error names the leaf, or states its shape."""
    if isinstance(leaf, Hidden):
        return (
            f"'{leaf.name}' makes its graph in the backward, as reentrant checkpointing does, "
            "so it is unknown what losses of private samples train in it",
            "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
        )
    what, remedy = "a tensor outside of the private model that requires grad", _MAKE_PRIVATE
    if isinstance(leaf, nn.Parameter):
        what = f"a parameter of shape {tuple(leaf.shape)} outside of the private model"
        remedy = _COPY + remedy
    else:
        remedy += _INPUTS
    for name, parameter in model.named_parameters():
        if parameter is leaf:
            what = f"'{name}', which was frozen, in no optimizer or not there at make_private,"
            remedy = _LATER + _MAKE_PRIVATE
    for prefix, module in model.named_modules():
        for key, held in {**vars(module), **module._buffers}.items():
            if held is leaf:
                name = f"{prefix}.{key}" if prefix else key
                what, remedy = f"'{name}', a buffer or an attribute of the model,", _NO_PARAMETER
    return (
        f"{what} is trained by losses of private samples, and no private layer clips its gradient",
        remedy,
    )


def _always(node: Any) -> bool:
    return True


def leaves_past_gates(
    root: Any,
    model: nn.Module,
    runs: Callable[[Any], bool] = _always,
    path: set[tuple[str, str]] | None = None,
) -> list[Tensor | Hidden]:
    """Return the leaves that a node's backward reaches without passing a clipping gate.

    Args:
        root: the node; None means that there are no leaves.
        model: the model, whose modules may be checkpointed.
        runs: function that returns whether the backward runs a node.
        path: receives pairs (name of a node, name of the node that follows).
    """
    seen, waiting = {root}, [root] if root is not None else []
    found: dict[int, Tensor | Hidden] = {}
    reached: set[int] = set()
    while waiting:
        node = waiting.pop()
        if _is_foreign(node) and (node is root or runs(node)):
            found |= {id(x): x for x in _trained_inside(node, model, reached)}
        for below, output in node.next_functions:
            # A replayed CUDA graph stands for the model's operations, whose names it has.
            replayed = getattr(below, "stands_for", None)
            name = type(below).__name__ if replayed is None else replayed[output]
            if path is not None and not hasattr(node, "stands_for"):
                path.add((type(node).__name__, name))
            if type(below) is _LEAF:
                if type(node).__name__ != _GATE and runs(below):
                    leaf: Tensor = below.variable  # type: ignore[attr-defined]
                    found[id(leaf)] = leaf
            elif below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return list(found.values())


def _is_foreign(node: Any) -> bool:
    """Return whether a user's autograd.Function made a node: it may run another backward."""
    return isinstance(node, BackwardCFunction) and not (
        type(node)._forward_cls.__module__.startswith("dpflash.")  # type: ignore[attr-defined]
    )


def _trained_inside(node: Any, model: nn.Module, reached: set[int]) -> list[Tensor | Hidden]:
    """Return the leaves that a node may train if its own backward runs another backward."""
    backward = type(node)._forward_cls.backward
    code = getattr(inspect.unwrap(backward), "__code__", None)
    # A backward that calls both recomputes a function, as a reentrant checkpoint does.
    if code is not None and {"enable_grad", "backward"} <= set(code.co_names):
        return _recomputed(node, model)
    return list(_held([vars(node), backward], reached))


def _held(waiting: list[Any], reached: set[int]) -> Iterator[nn.Parameter]:
    """Yield the trained parameters of modules that functions, containers and objects reach.

    Args:
        waiting: the functions, containers and objects.
        reached: ids of the values that were searched; new ids are added.
    """
    while waiting:
        x = waiting.pop()
        if id(x) in reached:
            continue
        reached.add(id(x))
        if isinstance(x, nn.Parameter):
            if x.requires_grad:
                yield x
        elif isinstance(x, nn.Module):
            waiting += x.parameters()
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, list | tuple | set):
            waiting += x
        elif isinstance(x, functools.partial):
            waiting += x.func, x.args, x.keywords
        elif isinstance(x, MethodType):
            waiting += x.__func__, x.__self__
        elif isinstance(x, FunctionType):
            waiting += *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
            for cell in x.__closure__ or ():
                with suppress(ValueError):  # The cell may still be empty.
                    waiting.append(cell.cell_contents)
            waiting += _direct(x.__globals__.get(name) for name in x.__code__.co_names)
        elif not isinstance(x, type):
            waiting += _direct(getattr(x, "__dict__", {}).values())


def _direct(held: Iterable[Any]) -> list[Any]:
    return [x for x in held if isinstance(x, nn.Module | nn.Parameter)]


def _recomputed(node: Any, model: nn.Module) -> list[Tensor | Hidden]:
    """Return the parameters of a checkpointed module; `Hidden` if the model does not have it."""
    function = getattr(node, "run_function", type(node)._forward_cls)
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if any(owner is module for module in model.modules()):
        return [p for p in owner.parameters() if p.requires_grad]
    return [Hidden(getattr(function, "__qualname__", type(function).__name__))]


def roots_of_backward() -> list[Any]:
    """Return the nodes at which the running backwards of this process began."""
    roots: list[Any] = []
    # Autograd does not report roots, and each device has its own thread: search all stacks.
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is _BACKWARD:
                roots += frame.f_locals[_BACKWARD.co_varnames[0]]
            frame = frame.f_back
    return [getattr(x, "node", None) or x.grad_fn for x in roots]

"""Unchanged: checks that only optimizer steps on noisy gradients change `state_dict()`.

Values that a forward writes into buffers, parameters or other entries would be released without
noise, and would affect later batches. Version counters are compared in every forward and backward.
Writes to `.data` advance no counter, so one of `EVERY` forwards and backwards compares contents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat, starmap
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import did_you_mean
from ..distributed.fsdp import is_sharded
from ..refusal import PrivateRefusal, PrivateWarning, warn
from .attributes import OwnAttributes
from .contents import EVERY, Comparisons, digest, version
from .entries import Entries
from .optimizer_hooks import hook_of_optimizer
from .rewritten import Rewritten


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the model.

    Attributes:
        module: the module that holds the tensor.
        key: the tensor's name in the module.
        is_buffer: True for a buffer, False for a frozen parameter.
        part: the sharded parameter that the module holds between forwards, or None.
    """

    module: nn.Module
    key: str
    is_buffer: bool
    part: Tensor | None = None

    @property
    def is_public(self) -> bool:
        """Whether `state_dict` contains the tensor."""
        return not self.is_buffer or self.key not in self.module._non_persistent_buffers_set

    def tensor(self) -> Tensor | None:
        if self.part is not None:
            return self.part
        held = self.module._buffers if self.is_buffer else self.module._parameters
        return held.get(self.key)


@dataclass(frozen=True)
class _State:
    tensor: Tensor
    version: int | None
    shape: torch.Size
    digest: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        return cls(tensor, version(tensor), tensor.shape, digest(tensor))

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the same object, with the same version counter."""
        return (
            tensor is self.tensor and self.version is not None and version(tensor) == self.version
        )


class Unchanged:
    """Tracks the buffers, the parameters and the other entries of one model's `state_dict()`.

    Args:
        module: the model.
        trained: the parameters that are trained.
        allowed: names of buffers, parameters and entries that may change, see `check_allowed`.
    """

    def __init__(
        self, module: nn.Module, trained: Collection[nn.Parameter], allowed: Collection[str] = ()
    ) -> None:
        check_allowed(module, allowed)
        self._module = module
        # If one name of a tensor is allowed, all names of this tensor are.
        everything = _places_of(module, ())
        named = [everything[name].tensor() for name in allowed if name in everything]
        ids = {id(t) for t in named if t is not None}
        free = {n for n, p in everything.items() if n in allowed or id(p.tensor()) in ids}
        self._allowed_places = [everything[name] for name in sorted(free)]
        places = _places_of(module, trained)
        self._allowed = free & places.keys()
        self._places = {n: p for n, p in places.items() if n not in free}
        self._states = {
            n: _State.of(t) for n, p in self._places.items() if (t := p.tensor()) is not None
        }
        names = {p: n for n, p in reversed(list(module.named_parameters(remove_duplicate=False)))}
        self._rewritten = Rewritten({p: names[p] for p in trained if names[p] not in free})
        self._entries = Entries(module, allowed)
        self._comparisons = Comparisons()
        self._backwards = 0
        self._structure = _Structure(module)
        self._attributes = OwnAttributes(module.named_modules())
        self._allowed_names = frozenset(allowed)

    def forward(self, *, again: bool = False) -> AbstractContextManager[None]:
        """See `Rewritten.forward`."""
        return self._rewritten.forward(again=again)

    def before_backward(self) -> str | None:
        """Return why to refuse a backward, or None; every `EVERY`-th call compares contents."""
        contents = self._backwards % EVERY == 0
        refusal = self.refusal(contents=contents, wait=False) or self._entered()
        # A refused backward is not counted, so that the next backward is refused too.
        self._backwards += refusal is None
        return refusal

    def changed(self, *, contents: bool = True, wait: bool = True) -> list[str]:
        """Return the names of buffers and frozen parameters that changed.

        Args:
            contents: whether to compare all contents, even if no version counter advanced.
            wait: whether to wait for the devices; see `Comparisons.differing`.
        """
        if contents:
            for name, place in _buffers_of(self._module):
                if name not in self._allowed:
                    self._places.setdefault(name, place)
        before: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        changed = []
        for name, place in self._places.items():
            tensor, seen = place.tensor(), self._states.get(name)
            if tensor is None:
                # The tensor no longer exists, so it cannot be released.
                continue
            is_still = seen is not None and seen.is_of(tensor)
            if is_still and not contents:
                continue
            now = _State.of(tensor)
            if seen is None or now.shape != seen.shape:
                # Tables of rotary angles, outside of `state_dict`, grow with the sequences.
                same = not place.is_public
            elif is_still:
                before[name], after[name] = seen.digest, now.digest
                continue
            else:
                same = bool(now.digest == seen.digest)
            if same:
                self._states[name] = now
            else:
                changed.append(name)
        self._comparisons.begin(before, after)
        return changed + self._compared(wait)

    def _compared(self, wait: bool) -> list[str]:
        """Return the names of the tensors that differ in the comparisons finished so far."""
        names = self._comparisons.differing(wait=wait)
        for name in names:
            # Drop the version: each later call then compares the tensor, and waits.
            self._states[name] = replace(self._states[name], version=None)
        return names

    def refusal(self, *, contents: bool = True, wait: bool = True) -> str | None:
        """Return a message that names the changed tensors, or None; arguments: see `changed`."""
        if changed := self.changed(contents=contents, wait=wait):
            return (
                f"{_listed(changed)} changed since make_private: buffers and frozen parameters "
                "get no noise, so data that a forward writes there is released with the weights "
                "and affects later batches. Keep nothing of a batch in the model. Set weights "
                "before make_private, or by model.load_state_dict; merge adapters in a copy, "
                "copy.deepcopy(model). If its contents are public (a count of forwards is not: "
                f"count releases), pass allow_buffers=[{_listed(changed)}]"
            )
        if rewritten := self._rewritten.names(wait=wait):
            return (
                f"{_listed(rewritten)} changed inside a forward: data that a forward writes into "
                "a trained parameter gets no noise and is released with the weights. Let the "
                "optimizer alone train it: apply masks and limits on norms after "
                "optimizer.step(), if loader.is_last. Initialize it before make_private, or on "
                "public data inside engine.public_data(). Restore weights by "
                "model.load_state_dict. If the written values depend neither on data nor on the "
                f"number of forwards, pass allow_buffers=[{_listed(rewritten)}]"
            )
        return None

    def leaving(
        self, state: Mapping[str, Any] | None = None, prefix: str = "", within: str = ""
    ) -> str | None:
        """Return `refusal` for weights to be released; arguments: see `Entries.changed`."""
        if refusal := self.refusal():
            return refusal
        if others := self._entries.changed(state, prefix, within):
            return (
                f"{_listed(others)} of state_dict() is no parameter and no buffer of the model, "
                "and is new or changed since make_private: data that metrics, get_extra_state "
                "and hooks keep there would be released without noise. Keep it outside of "
                "state_dict() (metrics with persistent=False), and release state_dict() alone, "
                "since torch.save(model) writes everything else too. If its contents are public, "
                f"have it there at make_private, and pass allow_buffers=[{_listed(others)}]"
            )
        return None

    def compare(
        self, state: Mapping[str, Any] | None = None, prefix: str = "", within: str = ""
    ) -> None:
        """Compare all contents; for the arguments see `Entries.changed`.

        Raises:
            PrivateRefusal: a buffer, a parameter or another entry changed.
        """
        refusal = self.leaving(state, prefix, within) or self._entered()
        if refusal is not None:
            raise PrivateRefusal(refusal) from None

    def compare_whole(self) -> None:
        """Call `compare`, and warn of changed attributes, which copies of the whole model contain.

        Raises:
            PrivateRefusal: `state_dict()` contains a change.
        """
        self.compare()
        if (text := self._kept()) is not None:
            warn(text, PrivateWarning)

    def _kept(self) -> str | None:
        """Return the text of a warning about changed attributes, or None."""
        names = [n for n in self._attributes.kept_since() if n not in self._allowed_names]
        if not names:
            return None
        return (
            f"not for release: attribute {_listed(names)} of the model is new or changed since "
            "make_private, and a copy or pickle of the whole model holds it. What forwards keep "
            "of a batch there, such as outputs, counts and metrics, has no noise: release "
            "model.state_dict()"
        )

    def found(self) -> list[str]:
        """Return the names of all buffers, parameters and entries that changed."""
        entered = self._structure.entered(self._allowed)
        return [
            *self.changed(),
            *self._rewritten.names(wait=True),
            *([] if entered is None else [entered]),
            *self._entries.changed(),
        ]

    def structure(self) -> int:
        """Return how often the modules, forwards or hooks were found to have changed.

        Raises:
            PrivateRefusal: a parameter entered the model, or left its place.
        """
        if (refusal := self._entered()) is not None:
            raise PrivateRefusal(self.refusal(contents=False) or refusal) from None
        return self._structure.changes

    def _entered(self) -> str | None:
        """Return a message that names a new parameter, or an optimizer's hook; or None."""
        name = self._structure.entered(self._allowed)
        if name is None:
            return self._structure.hooked
        return (
            f"'{name}' entered the model after make_private, took another parameter's place, or "
            "left its own, as for pruning and parametrizations: its gradient would be neither "
            "clipped nor noised, and state_dict() would release it. "
            "Call engine.detach(model), change the model, build the optimizer again, then "
            "make_private again. For a forward with other weights, as by "
            "torch.func.functional_call, use copy.deepcopy(model) with requires_grad_(False)"
        )

    def loaded(self, names: Collection[str]) -> None:
        """Accept the contents that `load_state_dict` has set under these names."""
        self._compared(wait=True)
        places = _places_of(self._module, ())
        found = [places[name].tensor() for name in names if name in places]
        ids = {id(t) for t in found if t is not None}
        self._rewritten.accept(ids)
        self._entries.accept(names)
        for name, place in self._places.items():
            tensor = place.tensor()
            if tensor is not None and id(tensor) in ids:
                self._states[name] = _State.of(tensor)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Accept the changes that a move to another device or dtype makes in the body."""
        changed, others = self.changed(), self._entries.changed()
        yield
        self._entries.accept(apart_from=others)
        for name, place in self._places.items():
            tensor = place.tensor()
            if tensor is not None and name not in changed:
                self._states[name] = _State.of(tensor)

    def allowed_contents(self) -> Contents:
        """Return the current contents of the tensors that may change."""
        return Contents(self._allowed_places)


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + ", ..." * (len(names) > 3)


class _Structure:
    """The parameters, modules, forwards and hooks of a model, compared by identity.

    Attributes:
        changes: how often a comparison found a change.
        hooked: a message that names an optimizer's hook, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.changes = -1
        self._places: dict[int, dict[str, nn.Parameter | None]] = {}
        self._note()

    def _note(self) -> None:
        self.changes += 1
        named = self._module.named_modules()
        self.hooked = next(filter(None, starmap(hook_of_optimizer, named)), None)
        modules = list(self._module.modules())
        # During a forward, fully_shard replaces the parameters of its modules.
        shards = {id(m) for m in modules if any(map(_is_shard, m._parameters.values()))}
        shards |= {i for i, own in self._places.items() if any(map(_is_shard, own.values()))}
        still = [m for m in modules if id(m) not in shards]
        dicts: list[dict[Any, Any]] = [m._parameters for m in still]
        dicts += [m._modules for m in modules]
        dicts += [h for m in modules for h in (m._backward_hooks, m._backward_pre_hooks)]
        for m in modules[1:]:  # Hooks of the model itself run outside of the tested forward.
            dicts += m._forward_hooks, m._forward_pre_hooks
        self._empty = [held for held in dicts if not held]
        # In scripted modules, some of these are not dicts.
        self._dicts = [held for held in dicts if held and isinstance(held, dict)]
        self._own = [vars(m) for m in modules]
        self._held = list(self._now())
        known = {i: own for i, own in self._places.items() if i in shards}
        self._places = {id(m): known.get(id(m)) or dict(m._parameters) for m in modules}
        self._modules = modules  # Referenced so that their ids are not reused.
        self._known = {id(p) for held in self._places.values() for p in held.values()}

    def _now(self) -> Iterator[Any]:
        # A Python loop over the modules would take longer than the call of a small model.
        forwards = map(dict.get, self._own, repeat("forward"))
        compiled = map(dict.get, self._own, repeat("_compiled_call_impl"))
        return chain(chain.from_iterable(map(dict.values, self._dicts)), forwards, compiled)

    def entered(self, allowed: Collection[str]) -> str | None:
        """Return the name of a parameter that is new, or not in its place; or None."""
        size = sum(map(len, self._dicts)) + 2 * len(self._own)
        is_same = size == len(self._held) and all(map(is_, self._now(), self._held))
        if is_same and not any(self._empty):
            return None
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            own = self._places.get(id(module))
            now = dict(module._parameters.items())  # In a scripted module it is not a dict.
            for key in {**(own or {}), **now}:
                name = f"{prefix}.{key}" if prefix else key
                parameter, held = now.get(key), (own or {}).get(key)
                if name in allowed or _is_shard(held) or parameter is held:
                    continue
                is_new = own is None and id(parameter) in self._known
                if key not in now or (parameter is not None and not is_new):
                    return name
        self._note()
        return None


def _is_shard(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and is_sharded(parameter)


def check_allowed(module: nn.Module, allowed: Collection[str]) -> None:
    """Check that each name is a buffer, a parameter or another entry of `state_dict()`.

    Raises:
        ValueError: a name is not; the message has the first such name.
    """
    known = _places_of(module, ())
    for name in allowed:
        if name not in known and name not in module.state_dict():
            hint = did_you_mean(name, known)
            raise ValueError(
                f"allow_buffers has {name!r}, which is no buffer and no parameter of the "
                f"module{hint}"
            )


class Contents:
    """Saved contents of some buffers and parameters, which can be restored."""

    def __init__(self, places: Iterable[_Place]) -> None:
        held = [(place, place.tensor()) for place in places]
        self._held = [(p, t, t.detach().clone()) for p, t in held if t is not None]

    def restore(self) -> None:
        for place, tensor, contents in self._held:
            if place.is_buffer:
                place.module._buffers[place.key] = tensor
            with torch.no_grad():
                tensor.copy_(contents)


def _buffers_of(module: nn.Module) -> Iterator[tuple[str, _Place]]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key in owner._buffers:
            yield f"{prefix}.{key}" if prefix else key, _Place(owner, key, True)


def _places_of(module: nn.Module, trained: Collection[nn.Parameter]) -> dict[str, _Place]:
    ids = {id(p) for p in trained}
    places = dict(_buffers_of(module))
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in ids:
                part = parameter if is_sharded(parameter) else None
                places[f"{prefix}.{key}" if prefix else key] = _Place(owner, key, False, part)
    return places

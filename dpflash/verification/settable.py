"""Refuses to set public attributes that a class does not declare, or that are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .._validate import did_you_mean


class OnlySettable:
    """A class that refuses to set public names, except properties with a setter and some methods.

    `replaceable_methods` lists the methods. Setting another public name raises an AttributeError
    with advice. Frameworks that mark objects can set names that begin with an underscore.
    """

    # Methods that other code may replace, as learning-rate schedulers wrap `step`.
    replaceable_methods: ClassVar[tuple[str, ...]] = ()
    # For each name, what to do instead of setting it.
    instead_of_setting: ClassVar[Mapping[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name.startswith("_") or name in self.replaceable_methods):
            settable = _settable_properties(type(self))
            if name not in settable:
                raise AttributeError(self._refusal(name, value, settable))
        super().__setattr__(name, value)

    def _refusal(self, name: str, value: Any, settable: list[str]) -> str:
        text = f"{type(self).__name__}.{name}={value!r}: setting it would do nothing"
        if name in self.instead_of_setting:
            return f"{text}; {self.instead_of_setting[name]}"
        if not settable:
            return f"{text}; no attribute can be set"
        return text + (did_you_mean(name, settable) or f"; what can be set: {', '.join(settable)}")


class Fixed:
    """A class whose public attributes keep the values that its `__init__` set.

    Setting such an attribute again, or another public name of the class, raises an AttributeError
    that says what to do instead. Properties with a setter can be set. Frameworks can mark objects
    by names that begin with an underscore, and by new names.
    """

    fixed_by: ClassVar[str] = "its __init__"
    # What to do instead of setting an attribute: by name, and for all other names.
    instead_of_setting: ClassVar[Mapping[str, str]] = {}
    instead_of_setting_others: ClassVar[str] = "make another one"

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if not name.startswith("_") and (name in vars(self) or hasattr(kind, name)):
            if name not in _settable_properties(kind):
                way_out = self.instead_of_setting.get(name, self.instead_of_setting_others)
                raise AttributeError(
                    f"{kind.__name__}.{name} cannot be set: {self.fixed_by} has fixed it; "
                    + way_out
                )
        super().__setattr__(name, value)


def _settable_properties(kind: type) -> list[str]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found.update(vars(base))
    return sorted(n for n, x in found.items() if isinstance(x, property) and x.fset is not None)

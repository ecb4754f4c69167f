"""Attention patterns: which keys each query sees, as masks and as tile graphs."""

import functools
import json
from dataclasses import fields

from .adaptive import Adaptive
from .base import Pattern
from .block_sparse import BlockSparse
from .dense import Dense
from .dilated import Dilated
from .documents import Documents
from .hierarchical import Hierarchical
from .sliding_window import SlidingWindow
from .text import parse
from .within_documents import WithinDocuments

__all__ = [
    "Adaptive",
    "BlockSparse",
    "Dense",
    "Dilated",
    "Documents",
    "Hierarchical",
    "Pattern",
    "SlidingWindow",
    "WithinDocuments",
    "from_key",
    "from_text",
]

_PATTERNS: dict[str, type[Pattern]] = {
    pattern.__name__: pattern
    for pattern in (
        *(Adaptive, BlockSparse, Dense, Dilated, Documents, Hierarchical, SlidingWindow),
        WithinDocuments,
    )
}


@functools.lru_cache(maxsize=256)
def from_key(key: str) -> Pattern:
    """Restore a pattern from its `Pattern.key`.

    Args:
        key: JSON with the name of the pattern and its fields.

    Returns:
        An equal pattern; calls with the same key return the same object.

    Raises:
        ValueError: key is not the key of a pattern.
    """
    try:
        named = json.loads(key)
        pattern = _PATTERNS[named.pop("pattern")]
        if "inner" in named:
            named["inner"] = from_key(named["inner"])
        return pattern(**named)  # lists become tuples there
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        known = ", ".join(sorted(_PATTERNS))
        raise ValueError(
            f"key={key!r}: expected the key of one of {known}; pass the value of Pattern.key"
        ) from error


def from_text(text: str, *, causal: bool, tokens: int) -> Pattern:
    """Make the pattern that a text describes.

    Args:
        text: a name, such as ``"sliding_window"``, for the arguments of `dpflash bench attention`;
            a name with its arguments, as in the repr of a pattern, such as
            ``"sliding_window(window=256)"``; or a `Pattern.key`.
        causal: whether no query sees a later key. If the text sets `causal` too, both must agree.
        tokens: T, which determines the sizes of a name without arguments.

    Raises:
        ValueError: the text is not of these forms, a name or argument is unknown, or the pattern
            refuses a size.
    """
    if text.lstrip().startswith("{"):
        pattern = from_key(text)
    else:
        kind, arguments = parse(text, _PATTERNS, tokens)
        try:
            pattern = kind(**{"causal": causal, **arguments})
        except TypeError as error:  # a required argument is missing
            names = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
            raise ValueError(
                f"pattern={text!r}: an argument is missing; {kind.__name__} takes {names}"
            ) from error
    if pattern.causal != causal:
        raise ValueError(
            f"pattern={text!r}: expected causal={causal}; pass this value, or leave causal out"
        )
    return pattern

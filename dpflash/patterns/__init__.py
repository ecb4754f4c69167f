"""Attention patterns: which keys each query sees, as definitions and as tile graphs."""

import functools
import json

from .adaptive import Adaptive
from .base import Pattern
from .block_sparse import BlockSparse
from .dense import Dense
from .dilated import Dilated
from .documents import Documents
from .hierarchical import Hierarchical
from .sliding_window import SlidingWindow
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
    """The pattern whose `Pattern.key` this is.

    Args:
        key: JSON with the name of the pattern and its fields.

    Returns:
        An equal pattern, the same object for the same key.

    Raises:
        ValueError: for a key that no pattern has.
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

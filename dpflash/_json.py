"""Prepares values for JSON, which supports neither NaN nor infinities."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return the value with None for NaN and infinities, which JSON does not support."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value

"""Upgrades result files of older schemas to the names of today.

Schema 1, which files without a "schema" have, called ranks workers, and `roof_fraction`
`roof_share`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMA = 2

_KEYS = {"workers": "ranks", "roof_share": "roof_fraction"}


def upgraded(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result document with today's names; the figures stay as they are.

    Raises:
        ValueError: a newer dpflash wrote it.
    """
    schema = document.get("schema", 1)
    if schema == SCHEMA:
        return dict(document)
    if schema != 1:
        raise ValueError(
            f"schema={schema!r}: this dpflash reads schemas 1 to {SCHEMA}; read it with the "
            "dpflash that wrote it, or a later one"
        )
    found: dict[str, Any] = {**_renamed(document), "schema": SCHEMA}
    if "assumptions" in found:
        found["environment"].setdefault("suite", "scaling")
    return found


def _renamed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_KEYS.get(key, key): _renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    # No result speaks of other workers, such as those of a DataLoader.
    return value.replace("worker", "rank") if isinstance(value, str) else value

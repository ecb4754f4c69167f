"""Upgrades result files of older schemas to the names of today.

Schema 1, which files without a "schema" have, called ranks workers, and `roof_fraction`
`roof_share`. Schemas 1 and 2 called the modes "instantiate" and "ghost" stored and two_pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMA = 3

_KEYS = {"workers": "ranks", "roof_share": "roof_fraction"}
_MODES = {"flat-stored": "flat-instantiate", "flat-two_pass": "flat-ghost"}


def upgraded(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result document with today's names; the figures stay as they are.

    Raises:
        ValueError: a newer dpflash wrote it.
    """
    schema = document.get("schema", 1)
    if schema == SCHEMA:
        return dict(document)
    if schema not in (1, 2):
        raise ValueError(
            f"schema={schema!r}: this dpflash reads schemas 1 to {SCHEMA}; read it with the "
            "dpflash that wrote it, or a later one"
        )
    found: dict[str, Any] = {**_renamed(document, schema), "schema": SCHEMA}
    if "assumptions" in found:
        found["environment"].setdefault("suite", "scaling")
    return found


def _renamed(value: Any, schema: int) -> Any:
    if isinstance(value, Mapping):
        keys = _KEYS if schema == 1 else {}
        return {keys.get(key, key): _renamed(item, schema) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, schema) for item in value]
    if not isinstance(value, str):
        return value
    for old, new in _MODES.items():
        value = value.replace(old, new)
    # No result speaks of other workers, such as those of a DataLoader.
    return value.replace("worker", "rank") if schema == 1 else value

"""Reads committed JSON files of results: ``<results>/<device>/<suite>.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ResultFile:
    """A JSON file of results."""

    path: Path
    held: Mapping[str, Any]  # the content of the file

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of a benchmark; empty if the file is not of a benchmark."""
        rows: Sequence[Row] = self.held.get("rows", ())
        return rows

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of the measurement."""
        environment: Mapping[str, Any] = self.held.get("environment", {})
        return environment

    @property
    def is_quick(self) -> bool:
        """Whether the run had small sizes and few trials."""
        return bool(self.environment.get("quick"))

    @property
    def is_complete(self) -> bool:
        """Whether the run was not interrupted."""
        return bool(self.held.get("complete", True))


Files = Mapping[str, ResultFile]


def load(results: Path, device: str) -> dict[str, ResultFile]:
    """Read the files of a device; return them by the name of the suite or script."""
    return {
        path.stem: ResultFile(path, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((results / device).glob("*.json"))
    }


def device_names(results: Path) -> list[str]:
    """Return the names of the devices that have results."""
    return sorted(path.name for path in results.iterdir() if any(path.glob("*.json")))

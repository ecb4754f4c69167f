"""The title, introduction and tables of a suite, with the texts of suite_pages.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .document import Column, Table
from .page_texts import heading_and_text


def page(
    name: str, tables: Mapping[str, Sequence[Column]], values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The title, introduction and tables of a suite, with the texts of suite_pages.md.

    Args:
        name: of the suite.
        tables: the columns of each table, by its section.
        values: for the words in braces.
    """
    title, about = heading_and_text(name, values or {})
    made = []
    for section, own in tables.items():
        heading, note = heading_and_text(f"{name}/{section}", values or {})
        made.append(Table(section, heading, own, note))
    return {"title": title, "about": about, "tables": made}

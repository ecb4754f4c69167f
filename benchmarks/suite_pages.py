"""The title, introduction and tables of a suite, with the texts of suite_pages.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any]]  # header, and cell of a row


@dataclass(frozen=True)
class Table:
    """Rows of one section."""

    section: str  # which rows, by their column "section"
    title: str  # above it
    columns: Sequence[Column]
    note: str = ""  # below it


def page(
    name: str, tables: Mapping[str, Sequence[Column]], values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields title, about and tables of a suite.

    Args:
        name: of the suite.
        tables: the columns of each table, by its section.
        values: for the words in braces.
    """

    def filled(key: str) -> tuple[str, str]:
        title, text = texts()[key]
        return title.format_map(values or {}), text.format_map(values or {})

    title, about = filled(name)
    made = []
    for section, own in tables.items():
        heading, note = filled(f"{name}/{section}")
        made.append(Table(section, heading, own, note))
    return {"title": title, "about": about, "tables": made}


def glossary(name: str) -> dict[str, str]:
    """The list "- TERM: text" below a heading."""
    items = (item.removeprefix("- ") for item in re.split(r" (?=- )", texts()[name][1]))
    return {term: text for term, _, text in (item.partition(": ") for item in items)}


@functools.cache
def texts() -> dict[str, tuple[str, str]]:
    """The title and the text of each heading, by SUITE or SUITE/SECTION."""
    source = Path(__file__).with_name("suite_pages.md").read_text(encoding="utf-8")
    found, suite = {}, ""
    for part in re.split(r"^(?=##? )", source, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        mark, _, words = heading.partition(" ")
        name, _, title = words.partition(": ")
        suite = name if mark == "#" else suite
        # A paragraph becomes one line.
        paragraphs = [" ".join(lines.split()) for lines in text.strip().split("\n\n")]
        found[suite if mark == "#" else f"{suite}/{name}"] = title, "\n\n".join(paragraphs)
    return found

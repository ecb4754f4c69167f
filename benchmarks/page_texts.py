"""Reads suite_pages.md: titles, introductions, notes and lists of terms."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def glossary(name: str) -> dict[str, str]:
    """The list "- TERM: text" below a heading."""
    items = f"\n{_texts()[name][1]}".split("\n- ")[1:]
    terms = (item.partition(": ") for item in items)
    return {term: " ".join(text.split()) for term, _, text in terms}


def heading_and_text(name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """The title and the text of a heading, each paragraph in one line."""
    title, text = _texts()[name]
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return title.format_map(values), "\n\n".join(paragraphs).format_map(values)


@functools.cache
def _texts() -> dict[str, tuple[str, str]]:
    """The title and the text of each heading, by SUITE or SUITE/SECTION."""
    source = Path(__file__).with_name("suite_pages.md").read_text(encoding="utf-8")
    found, suite = {}, ""
    for part in re.split(r"^(?=##? )", source, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        mark, _, words = heading.partition(" ")
        name, _, title = words.partition(": ")
        suite = name if mark == "#" else suite
        found[suite if mark == "#" else f"{suite}/{name}"] = title, text.strip()
    return found

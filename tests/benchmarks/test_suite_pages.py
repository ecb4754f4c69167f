"""The texts of the suites' pages come from suite_pages.md."""

import pytest

from dpflash.bench import document
from dpflash.bench.document import columns, page
from dpflash.bench.suites import SUITES, suite_named

TEXT = """Not read.

# speed: How {unit} grow

One
two.

Three.

## first: The first {unit}

A note,
in lines.

## second: Without a note

# words: A list

- one: the first
  word
- two: a: b
"""


@pytest.fixture
def text(monkeypatch, tmp_path):
    (tmp_path / "suite_pages.md").write_text(TEXT)
    monkeypatch.setattr(document, "__file__", str(tmp_path / "document.py"))
    document.texts.cache_clear()
    yield
    document.texts.cache_clear()


def test_a_page_has_itstexts_in_paragraphs_with_the_values(text):
    own = columns("tokens: T | density")
    found = page("speed", {"second": own, "first": own}, {"unit": "ms"})
    assert (found["title"], found["about"]) == ("How ms grow", "One two.\n\nThree.")
    second, first = found["tables"]
    assert (first.section, first.title, first.note) == (
        "first",
        "The first ms",
        "A note, in lines.",
    )
    assert (second.section, second.title, second.note) == ("second", "Without a note", "")
    cells = [cell({"density": 1, "config": {"tokens": 2}}) for _, cell in first.columns]
    assert [head for head, _ in first.columns] == ["T", "density"] and cells == [2, 1]


def test_a_missing_heading_or_value_raises(text):
    with pytest.raises(KeyError, match="speed/third"):
        page("speed", {"third": ()}, {"unit": "ms"})
    with pytest.raises(KeyError, match="unit"):
        page("speed", {})


def test_every_heading_is_a_suite_or_one_of_its_tables():
    tables = {f"{name}/{table.section}" for name in SUITES for table in suite_named(name).tables}
    assert set(document.texts()) - {
        "legend",
        "results",
        "results/reports",
        "results/columns",
    } <= {*SUITES, *tables}

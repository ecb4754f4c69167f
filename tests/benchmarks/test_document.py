"""Columns and charts are made of the keys of rows and of their config."""

import pytest

from dpflash.bench.document import chart, columns, with_interval

ROW = {"name": "a", "config": {"tokens": 8, "batch": 2}, "median_ms": 1.5, "batch": 3}


def test_columns_take_the_key_of_the_row_before_that_of_its_config():
    found = columns("tokens: T | batch", [("ms", lambda row: row["median_ms"])], "absent: none")
    assert [head for head, _ in found] == ["T", "batch", "ms", "none"]
    assert [cell(ROW) for _, cell in found] == [8, 3, 1.5, None]


@pytest.mark.parametrize(("wanted", "value"), [(8, 1.5), (9, None)])
def test_a_chart_draws_only_the_rows_whose_config_has_its_values(wanted, value):
    made = chart("s", "title", "batch: B", "median_ms: ms", "name tokens", only={"tokens": wanted})
    (x_label, x), (y_label, y) = made.x, made.y
    assert (x_label, x(ROW), y_label, y(ROW)) == ("B", 3, "ms", value)
    assert made.series(ROW) == "a 8"


def test_an_interval_stands_beside_its_figure():
    head, cell = with_interval("gain", "points", "+.1f")
    assert cell({"gain": 0.25, "gain_ci95": [-0.5, 1.0]}) == "+0.2 [-0.5, +1.0]"
    assert head == "points" and cell({}) is None

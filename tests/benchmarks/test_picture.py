"""Pictures that can be read, of rows made up here."""

import dataclasses

import pytest

from dpflash.bench.document import Chart, Table, column
from dpflash.bench.output import row
from dpflash.bench.picture import draw
from dpflash.bench.suite import Suite

HELD = {"device": "CPU of a test", "threads": 1, "date": "2026-11-22", "quick": False}
CHART = Chart(
    "s", "A chart", column("tokens", "T"), column("median_ms", "ms"), lambda r: r["config"]["who"]
)


def one(tokens, median_ms, who="a", **given):
    shape = {"tokens": tokens, "batch": 2, "heads": 4, "dtype": "float32", "who": who}
    reach = [0.9 * median_ms, 1.2 * median_ms]
    return row("x", {**shape, **given}, section="s", median_ms=median_ms, ci95_ms=reach)


def panel(rows, chart=CHART, **changes):
    chart = dataclasses.replace(chart, **changes)
    suite = Suite("toy", "A toy", "", lambda request: (), [Table("s", "", ())], [chart])
    figure = draw(suite, {"environment": HELD, "complete": True, "rows": rows})
    figure.canvas.draw()
    return figure.axes[0]


@pytest.mark.parametrize(
    ("span", "least"),
    [(1.0, 4321.0), (1.02, 0.0123), (1.5, 95.0), (9, 1.0), (11, 0.0123), (90, 95.0), (1e5, 1.0)],
)
def test_the_upright_axis_has_two_ticks_or_more_in_plain_numbers(span, least):
    axis = panel([one(1024, least), one(2048, least * span)])
    low, high = axis.get_ylim()
    seen = [
        label.get_text()
        for tick, label in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
        if low <= tick <= high
    ]
    assert len(set(seen)) == len(seen) >= 2, seen
    assert not any("10^" in text or "mathdefault" in text for text in seen)
    assert len(seen) <= 12, seen


def test_thirty_series_all_look_different():
    axis = panel([one(tokens, 1.0 + n, f"who {n}") for n in range(30) for tokens in (8, 16)])
    looks = {(line.get_color(), line.get_marker()) for line in axis.lines if line.get_marker()}
    assert len({look for look in looks if look[1] not in ("_", "|", "None")}) == 30


def test_a_legend_covers_no_point():
    axis = panel([one(tokens, 1.0 + n, f"who {n}") for n in range(12) for tokens in (8, 16)])
    legend = axis.get_legend().get_window_extent()
    assert legend.x0 >= axis.get_window_extent().x1
    assert legend.x1 <= axis.figure.get_window_extent().x1


def test_a_ratio_has_its_interval():
    for key in ("speedup", "cpu_overhead"):
        rows = [
            {**one(tokens, 5.0), key: ratio, f"{key}_ci95": [0.5 * ratio, 2 * ratio]}
            for tokens, ratio in ((8, 1.5), (16, 3.0))
        ]
        axis = panel(rows, y=column(key), logarithmic=False)
        (bars,) = axis.containers[0].lines[2]
        reach = [sorted(segment[:, 1]) for segment in bars.get_segments()]
        assert reach == [[0.75, 3.0], [1.5, 6.0]]


def test_a_chart_without_rows_says_so():
    assert [text.get_text() for text in panel([]).texts] == ["nothing was measured"]

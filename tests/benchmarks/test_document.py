"""What a page says of rows made up here."""

import pytest

from dpflash.bench.document import ROOFS, bound_by, key_insights
from dpflash.bench.results import row


def timed(pattern, tokens, ms, **given):
    shape = {"tokens": tokens, "batch": 1, "heads": 4, "head_dim": 64, "dtype": "float32"}
    held = {"pattern": pattern, "operator": "dpflash", "direction": "forward", "causal": True}
    return row(f"{pattern}/{tokens}", {**shape, **held, **given}, median_ms=ms)


def test_patterns_are_told_over_dense_attention_at_the_longest_length_that_has_both():
    rows = [
        *(timed("dense", tokens, 1.0 * tokens) for tokens in (8, 16)),
        timed("dense", 32, None),
        *(timed("window", tokens, 8.0) for tokens in (8, 16, 32)),
        timed("blocks", 16, 4.0),
        timed("blocks", 16, 1.0, operator="flex"),
        timed("window", 16, 4.0, direction="forward+backward"),
    ]
    first, count = key_insights(rows)
    assert "forward, causal, D=64, float32, at the longest T with both, 16: " in first
    assert first.endswith(" are blocks 4.00, window 2.00.")
    assert count == "8 rows were timed."


@pytest.mark.parametrize(
    ("bound", "share", "told"),
    [
        ("compute", 0.13, "overhead"),
        ("compute", 0.5, "compute_bound"),
        ("memory_bandwidth", 0.6, "memory_bandwidth"),
        ("balanced", 0.1, "overhead"),
        ("memory_capacity", 0.1, "memory_capacity"),
        (None, None, None),
    ],
)
def test_rows_of_older_files_are_bound_by_the_rule_of_today(bound, share, told):
    assert bound_by({"bound": bound, "roof_share": share}) == told


@pytest.mark.parametrize(
    ("held", "roof"),
    [
        ({"bound": "overhead", "roof": "memory"}, "memory"),
        ({"bound": "compute"}, "compute"),
        ({"bound": "memory_bandwidth"}, "memory"),
        ({"bound": "overhead"}, None),
    ],
)
def test_the_lower_roof_is_told_where_a_file_has_it(held, roof):
    assert dict(ROOFS)["roof"](held) == roof

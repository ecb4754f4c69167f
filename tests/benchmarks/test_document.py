"""What a page says of rows made up here."""

from dpflash.bench.document import key_insights
from dpflash.bench.output import row


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

"""The suites over batch, heads and tokens: what they measure of dilated attention and derive."""

import pytest

from dpflash import patterns
from dpflash.bench import batch, heads, sequence
from dpflash.bench.output import row
from dpflash.bench.suite import Comparison, Request

SUITES = {module.SUITE.name: module.SUITE for module in (batch, heads, sequence)}


def planned(suite, *, quick):
    """The measurements of dilated attention."""
    return [
        one
        for item in suite.plan(Request(quick=quick, device="cpu"))
        if isinstance(item, Comparison)
        for one in item.measurements
        if "segment_lengths" in one.config
    ]


@pytest.mark.parametrize("name", SUITES)
def test_quick_sizes_are_long_enough_for_the_pattern_to_leave_pairs_out(name):
    found = planned(SUITES[name], quick=True)
    assert found
    for one in found:
        pattern = patterns.Dilated(
            segment_lengths=one.config["segment_lengths"],
            dilation_rates=one.config["dilation_rates"],
        )
        shape = one.config["tokens"], one.config["heads"]
        assert pattern.edges(*shape) < 0.9 * patterns.Dense().edges(*shape), one.name


@pytest.mark.parametrize(("quick", "least"), [(True, 3), (False, 5)])
def test_the_exponent_is_of_lengths_that_span_sixteenfold_and_hold_whole_segments(quick, least):
    found = [
        one.config
        for one in planned(sequence.SUITE, quick=quick)
        if one.columns["section"] == sequence.LONG
        and one.config["direction"] == "forward+backward"
    ]
    lengths = [config["tokens"] for config in found]
    assert len(set(lengths)) >= least and max(lengths) >= 16 * min(lengths)
    for key in ("segment_lengths", "dilation_rates", "batch", "heads", "head_dim"):
        assert len({config[key] for config in found}) == 1
    assert all(tokens % max(found[0]["segment_lengths"]) == 0 for tokens in lengths)


def rows_of(section, times):
    config = {"direction": "forward+backward", "segment_lengths": [512, 1024]}
    return [
        row(
            f"{tokens}",
            {**config, "tokens": tokens, "batch": 1},
            section=section,
            median_ms=milliseconds,
        )
        for tokens, milliseconds in times.items()
    ]


def test_lengths_below_the_longest_segment_are_not_in_the_fit():
    # A short sequence costs less for each token, which would look like a larger exponent.
    rows = rows_of(sequence.FIXED, {512: 0.3, 1024: 1.0, 2048: 2.0, 4096: 4.0, 8192: 8.0})
    found = {one["name"]: one for one in sequence.SUITE.derive(rows)}
    exponent = found["exponents/dilated_fixed/forward+backward"]
    assert exponent["sizes"] == [1024, 2048, 4096, 8192]
    assert exponent["exponent"] == pytest.approx(1)
    assert exponent["exponent_ci95"] == pytest.approx([1, 1])
    text = found["insights/dilated_fixed/forward+backward"]["text"]
    assert "grows with the tokens to the power 1.00 [1.00, 1.00]" in text


def test_three_lengths_are_told_as_a_row_and_not_as_an_insight():
    rows = rows_of(sequence.LONG, {2048: 1.0, 4096: 2.0, 8192: 4.0})
    (exponent,) = sequence.SUITE.derive(rows)
    assert exponent["exponent"] == pytest.approx(1)


def test_two_lengths_have_no_exponent_but_a_need():
    rows = rows_of(sequence.LONG, {2048: 1.0, 4096: 2.0, 8192: None})
    (exponent,) = sequence.SUITE.derive(rows)
    assert exponent["exponent"] is None
    assert exponent["needs"] == "three sizes: 2 of 3 were measured"

"""The suites over sequence length, batch and heads: their sizes, exponents and memory."""

from dataclasses import replace

import pytest

from dpflash import patterns
from dpflash.bench import growth, suite
from dpflash.bench.output import row
from dpflash.bench.suite import Comparison, Request, run_suite
from dpflash.bench.timing import Effort
from dpflash.clipping.device_speed import Ceilings


def planned(suite, *, quick):
    """The measurements of dilated attention."""
    return [
        one
        for item in suite.plan(Request(quick=quick, device="cpu"))
        if isinstance(item, Comparison)
        for one in item.measurements
        if "segment_lengths" in one.config
    ]


@pytest.mark.parametrize("name", ["SEQUENCE", "BATCH", "HEADS"])
def test_quick_sizes_are_long_enough_for_the_pattern_to_leave_pairs_out(name):
    found = planned(getattr(growth, name), quick=True)
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
        for one in planned(growth.SEQUENCE, quick=quick)
        if one.columns["section"] == growth.LONG and one.config["direction"] == "forward+backward"
    ]
    lengths = [config["tokens"] for config in found]
    assert len(set(lengths)) >= least and max(lengths) >= 16 * min(lengths)
    for key in ("segment_lengths", "dilation_rates", "batch", "heads", "head_dim"):
        assert len({config[key] for config in found}) == 1
    assert all(tokens % max(found[0]["segment_lengths"]) == 0 for tokens in lengths)


def rows_of(section, times, **columns):
    config = {"direction": "forward+backward", "segment_lengths": [512, 1024], "batch": 2}
    config |= {"heads": 4, "head_dim": 64, "dtype": "float32"}
    return [
        row(f"{t}", {**config, "tokens": t}, section=section, median_ms=ms)
        | {key: value(t) for key, value in columns.items()}
        for t, ms in times.items()
    ]


def test_lengths_below_the_longest_segment_are_not_in_the_fit():
    # A short sequence costs less for each token, which would look like a larger exponent.
    rows = rows_of(growth.FIXED, {512: 0.3, 1024: 1.0, 2048: 2.0, 4096: 4.0, 8192: 8.0})
    found = {one["name"]: one for one in growth.SEQUENCE.derive(rows)}
    exponent = found["exponents/dilated_fixed/forward+backward"]
    assert exponent["sizes"] == [1024, 2048, 4096, 8192]
    assert exponent["exponent"] == pytest.approx(1)
    assert exponent["exponent_ci95"] == pytest.approx([1, 1])


def test_three_lengths_have_an_exponent_and_two_a_need():
    times = {2048: 1.0, 4096: 4.0, 8192: 16.0}
    (exponent,) = growth.SEQUENCE.derive(rows_of(growth.LONG, times))
    assert exponent["exponent"] == pytest.approx(2)
    (exponent,) = growth.SEQUENCE.derive(rows_of(growth.LONG, {**times, 8192: None}))
    assert exponent["exponent"] is None
    assert exponent["needs"] == "three sizes: 2 of 3 were measured"


def test_memory_of_a_token_is_the_slope_over_tokens():
    times = {512: 1.0, 1024: 1.0, 2048: 1.0}
    rows = rows_of(growth.FIXED, times, peak_memory_mb=lambda t: 5.0 + 2 * t * 1040 / 2**20)
    (found,) = [one for one in growth.SEQUENCE.derive(rows) if one["section"] == "bytes_per_token"]
    assert found["measured"] == pytest.approx(1040)


def test_a_run_writes_rows_that_are_right_with_their_figures(monkeypatch, tmp_path):
    def in_this_process(function, *, memory_limit, timeout, **given):
        return function(**given)

    # Tests of the limits of memory and time are in test_suite.py.
    monkeypatch.setattr(suite, "run_isolated", in_this_process)
    roofs = Ceilings({"float32": 1e11}, 1e10, "cpu", "a processor", "given")
    monkeypatch.setattr(suite, "measured_roofs", lambda *_, **__: roofs)
    request = Request(quick=True, device="cpu", threads=1, has_progress=False, effort=Effort(1, 3))
    forward = replace(growth.HEADS, plan=lambda request: [next(iter(growth.HEADS.plan(request)))])
    found = run_suite(forward, request, tmp_path)
    *rows, exponent = found["rows"]
    assert [row["config"]["heads"] for row in rows] == [2, 4, 8]
    for one in rows:
        assert one["correct"] is True and one["median_ms"] > 0
        assert one["tokens_per_s"] == pytest.approx(512e3 / one["median_ms"])
        assert one["gflop_per_s"] > 0 and one["checked_rows"] == 512
    assert exponent["section"] == "exponents" and exponent["exponent"] is not None
    assert "| heads, forward | heads |" in (tmp_path / "heads.md").read_text()

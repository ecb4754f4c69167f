"""Exponents, optimal batches and insights from measured rows of private steps."""

import pytest

from dpflash.bench.growth import BATCH, BATCHES, SEQUENCE, TOKENS, optimal_batch
from dpflash.bench.output import row
from dpflash.bench.private import AUTO
from dpflash.bench.suite import Request


def batch_row(batch, tokens_per_s, *, provider=AUTO, curve="seq", **columns):
    return row(
        f"{curve}/{batch}/{provider}",
        {"batch": batch, "provider": provider, "tokens": 8},
        section="private_batch",
        curve=curve,
        tokens_per_s=tokens_per_s,
        **columns,
    )


def steps_of(suite, section):
    plan = suite.plan(Request(device="cpu"))
    return [one for one in plan if one.measurements[0].columns["section"] == section]


def test_the_plan_has_every_batch_of_every_configuration_of_the_report():
    plan = steps_of(BATCH, "private_batch")
    shapes = [
        (c["tokens"], c["heads"], c["head_dim"], c["batch"], c["provider"])
        for item in plan
        for c in (one.config for one in item.measurements)
    ]
    assert shapes == [
        (tokens, heads, head_dim, batch, provider)
        for tokens, heads, head_dim in ((512, 12, 64), (1024, 16, 64), (2048, 20, 80))
        for batch in BATCHES
        for provider in ("nonprivate", AUTO)
    ]
    assert all(item.baseline == item.measurements[0].name for item in plan)
    # Behind a size that is too slow the larger ones of its curve are not tried.
    assert len({item.curve for item in plan}) == 3


def test_optimal_batch_is_the_smallest_within_five_percent_of_the_best():
    rows = [batch_row(1, 50.0), batch_row(3, 94.0), batch_row(5, 96.0), batch_row(10, 100.0)]
    found = optimal_batch("seq", rows)
    assert (found["batch"], found["tokens_per_s"]) == (5, 96.0)
    assert found["not_measured"] == []


def test_batches_that_were_not_measured_are_told():
    rows = [batch_row(1, 50.0), batch_row(3, None, needs="a faster device")]
    assert optimal_batch("seq", rows)["not_measured"] == [3]
    assert optimal_batch("seq", rows[1:])["needs"] == "a size that was measured"


def derived(rows, derive):
    return {one["name"]: one for one in derive(rows)}


def test_exponent_and_insights_of_batches_follow_from_private_rows_alone():
    rows = [batch_row(b, 10.0 * b**0.5, speedup=0.8) for b in (1, 2, 4, 16)]
    rows += [batch_row(b, 1e9, provider="nonprivate") for b in (1, 2, 4, 16)]
    found = derived(rows, BATCH.derive)
    exponent = found["private_batch_exponent/seq"]
    assert exponent["exponent"] == pytest.approx(0.5)
    assert exponent["exponent_ci95"] == pytest.approx([0.5, 0.5])
    assert found["insights/private_batch/optimal"]["mean_optimal_batch"] == 16


def test_mean_optimal_batch_is_over_the_curves():
    rows = [batch_row(b, v, curve="a") for b, v in ((1, 10.0), (3, 10.0))]
    rows += [batch_row(b, v, curve="b") for b, v in ((1, 1.0), (3, 10.0))]
    found = derived(rows, BATCH.derive)
    assert found["insights/private_batch/optimal"]["mean_optimal_batch"] == 2.0


def test_two_sizes_have_no_exponent_but_a_need():
    found = derived([batch_row(1, 1.0), batch_row(3, 2.0)], BATCH.derive)
    exponent = found["private_batch_exponent/seq"]
    assert exponent["exponent"] is None
    assert "2 of 2" in exponent["needs"]


def test_exponent_of_a_sequence_is_of_time_in_tokens():
    rows = [
        row(
            f"{tokens}",
            {"batch": 16, "tokens": tokens, "provider": AUTO},
            section="private_sequence",
            curve="b16",
            median_ms=3e-6 * tokens**1.5,
        )
        for tokens in TOKENS
    ]
    found = derived(rows, SEQUENCE.derive)
    assert found["private_sequence_exponent/b16"]["exponent"] == pytest.approx(1.5)

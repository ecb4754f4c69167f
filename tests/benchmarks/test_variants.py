"""Variants compute the attention of their names, and every plan of an attention suite is sound."""

import json

import numpy as np
import pytest

from dpflash.bench import attention, growth, variants
from dpflash.bench.suite import Comparison, Request, Unsupported
from dpflash.bench.variants import VARIANTS, sparse_pattern, variant_subject
from dpflash.patterns import Dense, Dilated

SMALL = {"tokens": 192, "batch": 2, "heads": 2, "head_dim": 16, "dtype": "float32"}
SUITES = (attention.SUITE, variants.SUITE, growth.HEADS, growth.BATCH, growth.SEQUENCE)
CPU = Request(device="cpu")


def subject_of(name, direction="forward+backward", causal=False, **shape):
    shape = {**SMALL, **shape}
    return variant_subject(
        variant=name, direction=direction, causal=causal, **shape, device="cpu", seed=0
    )


def measurements(suite, request=CPU):
    comparisons = [item for item in suite.plan(request) if isinstance(item, Comparison)]
    return [one for item in comparisons for one in item.measurements]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("Sparse")])
def test_a_variant_computes_its_pattern(name, causal):
    subject = subject_of(name, causal=causal)
    assert subject.error() <= subject.tolerance
    subject.step()
    assert subject.tokens == 384
    assert subject.work().flops == 14 * 16 * subject.figures["pairs"]


def test_every_variant_is_measured():
    rows = [one for one in measurements(variants.SUITE) if "variant" in one.config]
    assert {one.config["variant"] for one in rows} == set(VARIANTS)
    assert {one.config["variant"] for one in rows if one.columns.get("peer")} == {"SDPA"}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("drawn", [False, True], ids=["window", "drawn"])
@pytest.mark.parametrize("percent", [50, 90])
def test_sparse_patterns_leave_out_their_percentage_in_every_head_and_no_more_than_needed(
    percent, drawn, causal
):
    tokens, dense = 8192, Dense(causal=causal)
    pattern = sparse_pattern(tokens, causal, percent, drawn)
    # Of each of four heads.
    own = np.diff([0, *(pattern.edges(tokens, count) for count in range(1, 5))])
    allowed = dense.edges(tokens) * (100 - percent) / 100
    assert (own <= allowed).all()
    # With one block more in each row, or to each side, there would be too many; some random
    # blocks fall on those that are seen anyway.
    assert (own >= allowed - 3 * tokens * 128).all()
    assert VARIANTS[f"Sparse{'Random' * drawn}{percent}"].pattern(tokens, causal) == pattern


@pytest.mark.parametrize(
    ("name", "causal", "least"),
    [("Sparse75", True, 2432), ("Sparse90", False, 6272), ("SparseRandom90", True, 3840)],
)
def test_a_sequence_too_short_for_its_sparsity_is_refused_with_the_one_that_is_not(
    name, causal, least
):
    pattern = VARIANTS[name].pattern
    for tokens in (192, least - 128):
        with pytest.raises(Unsupported, match="a longer sequence"):
            pattern(tokens, causal)
    found = pattern(least, causal)
    assert found.random_blocks + found.local_blocks == 1


def test_an_unknown_variant_or_direction_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        subject_of("dilated")
    with pytest.raises(ValueError, match="direction"):
        subject_of("Dense", "backward")


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_rows_of_a_plan_have_names_of_their_own_and_baselines_that_exist(suite, quick):
    items = list(suite.plan(Request(quick=quick, device="cpu")))
    comparisons = [item for item in items if isinstance(item, Comparison)]
    measured = [one for item in comparisons for one in item.measurements]
    names = [one.name for one in measured]
    assert len(names) == len(set(names))
    sections = {table.section for table in suite.tables}
    assert {one.columns["section"] for one in measured} <= sections
    for item in comparisons:
        assert item.baseline is None or item.baseline in {one.name for one in item.measurements}
    # Plain values, since they travel to other processes and into JSON.
    json.dumps([dict(one.config) for one in measured])


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_patterns_are_not_dense_at_the_lengths_of_their_rows(quick):
    for one in measurements(variants.SUITE, Request(quick=quick, device="cpu")):
        # At the smallest size of the reports they are dense, as the page states.
        small = one.name.startswith("reports/small")
        name = one.config.get("variant") or one.config["segments"]
        if small or name in ("SDPA", "Dense"):
            continue
        tokens, heads, causal = (one.config[key] for key in ("tokens", "heads", "causal"))
        if "segments" in one.config:
            lengths, rates = variants.SEGMENTS[name]
            pattern = Dilated(segment_lengths=lengths, dilation_rates=rates)
        else:
            pattern = VARIANTS[name].pattern(tokens, causal)
        dense = Dense(causal=causal).edges(tokens, heads)
        assert pattern.edges(tokens, heads) < 0.8 * dense, one.name

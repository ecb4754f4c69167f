"""The variants of the reports are what they are called, and their suites find them right."""

import itertools
import json

import numpy as np
import pytest

from dpflash.bench import (
    attention,
    attention_cases,
    batch,
    heads,
    named_variants,
    results,
    sequence,
    variants,
)
from dpflash.bench.attention import DIRECTIONS, attention_subject, exponent_row
from dpflash.bench.named_variants import VARIANTS, sparse_pattern, variant_named
from dpflash.bench.suite import Comparison, Request, Unsupported, run_suite
from dpflash.bench.timing import Effort
from dpflash.nn import MultiheadAttention
from dpflash.patterns import Adaptive, Dense, Dilated

SMALL = {"tokens": 192, "batch": 2, "heads": 2, "head_dim": 16, "dtype": "float32"}
SUITES = (attention.SUITE, variants.SUITE, heads.SUITE, batch.SUITE, sequence.SUITE)


def subject_of(name, direction="forward+backward", causal=False, **shape):
    return attention_subject(
        variant=name,
        direction=direction,
        causal=causal,
        **{**SMALL, **shape},
        device="cpu",
        seed=0,
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("Sparse")])
def test_a_variant_computes_what_its_pattern_defines(name, causal):
    subject = subject_of(name, causal=causal)
    assert subject.error() <= subject.tolerance
    subject.step()
    assert subject.tokens == 384
    work = subject.work()
    attention_work = 14 * 16 * subject.figures["pairs"]
    # Projections of width 32: 8 E^2 FLOPs a token forward, and twice that backward.
    projections = 24 * 32**2 * 384 if name == "MultiheadDilatedAttention" else 0
    assert work.flops == attention_work + projections


def test_a_wrong_variant_is_found(monkeypatch):
    import dpflash

    right = dpflash.attention

    def wrong(q, k, v, *, pattern):
        return right(q, k, v, pattern=Dense(causal=pattern.causal))

    monkeypatch.setattr(dpflash, "attention", wrong)
    subject = subject_of("BlockSparseOptimized", tokens=512)
    assert subject.error() > 100 * subject.tolerance


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_module_that_computes_something_else_is_found(direction, monkeypatch):
    class Wrong(MultiheadAttention):
        def forward(self, *inputs):
            output, _ = super().forward(*inputs)
            wrong = 1.01 * output
            # Forward it is wrong, or only its gradient is.
            return (wrong if direction == "forward" else output + (wrong - wrong.detach())), None

    monkeypatch.setattr(attention, "MultiheadAttention", Wrong)
    subject = subject_of("MultiheadDilatedAttention", direction)
    assert subject.error() > 10 * subject.tolerance


def test_a_subset_of_rows_suffices_for_all_gradients_of_a_module(monkeypatch):
    monkeypatch.setattr(attention_cases, "CHECKED_TOKENS", 0)
    subject = subject_of("MultiheadDilatedAttention")
    assert subject.figures["checked_rows"] == 64
    assert subject.error() <= subject.tolerance


def test_a_detached_gradient_is_marked_and_its_output_checked():
    subject = subject_of("BranchByBranchDetached")
    assert subject.figures["gradient"] == "detached"
    assert subject.error() <= subject.tolerance
    assert subject_of("BranchByBranchDetached", "forward").figures["gradient"] is None


def test_names_of_one_operator_say_so_and_are_measured_once():
    for variant in VARIANTS.values():
        if variant.same_as is not None:
            other = VARIANTS[variant.same_as]
            assert other.same_as is None
            assert variant.pattern(512, True) == other.pattern(512, True)
    measured = {
        one.config["variant"]
        for item in variants.SUITE.plan(Request(device="cpu"))
        if isinstance(item, Comparison)
        for one in item.measurements
        if "variant" in one.config
    }
    assert all(VARIANTS[name].same_as is None for name in measured)
    assert measured == {name for name, variant in VARIANTS.items() if variant.same_as is None}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("drawn", [False, True], ids=["window", "drawn"])
@pytest.mark.parametrize("percent", [50, 75, 90])
def test_sparse_patterns_leave_out_what_they_say_in_every_head_and_no_more_than_needed(
    percent, drawn, causal
):
    tokens, dense = 8192, Dense(causal=causal)
    pattern = sparse_pattern(tokens, causal, percent, drawn)
    # Of each of four heads.
    own = np.diff([0, *(pattern.edges(tokens, count) for count in range(1, 5))])
    allowed = dense.edges(tokens) * (100 - percent) / 100
    assert (own <= allowed).all()
    # With one block more in each row, or to each side, there would be too many; of drawn blocks
    # some fall on those that are seen anyway.
    assert (own >= allowed - 3 * tokens * 128).all()
    assert VARIANTS[f"Sparse{'Random' * drawn}{percent}"].pattern(tokens, causal) == pattern


@pytest.mark.parametrize(
    ("name", "causal", "least"),
    [
        ("Sparse90", True, 6272),
        ("Sparse75", True, 2432),
        ("Sparse90", False, 6272),
        ("SparseRandom90", True, 3840),
        ("SparseRandom90", False, 2560),
    ],
)
def test_a_sequence_too_short_for_its_sparsity_is_refused_with_the_one_that_is_not(
    name, causal, least
):
    pattern = VARIANTS[name].pattern
    for tokens in (192, 2048, least - 128):
        with pytest.raises(Unsupported, match=rf"longer sequence, from T = {least:,} on"):
            pattern(tokens, causal)
    found = pattern(least, causal)
    assert found.random_blocks + found.local_blocks == 1


def test_adaptive_keeps_a_tenth_of_the_blocks():
    assert VARIANTS["BlockSparseAdaptive"].pattern(2048, False) == Adaptive(keep=3)


def test_an_unknown_variant_or_direction_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        variant_named("dilated")
    with pytest.raises(ValueError, match="direction"):
        subject_of("Dense", "backward")


def test_live_shares_are_those_of_the_mask():
    pattern = Dilated(segment_lengths=(64, 200), dilation_rates=(2, 3))
    for branch, share in enumerate(variants.live_shares(pattern, 500, 4)):
        alone = Dilated(
            segment_lengths=pattern.segment_lengths[branch : branch + 1],
            dilation_rates=pattern.dilation_rates[branch : branch + 1],
        )
        live = alone.mask(500, 4).diagonal(dim1=1, dim2=2)
        assert share == pytest.approx(live.mean().item())


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_rows_of_a_plan_have_names_of_their_own_and_baselines_that_exist(suite, quick):
    planned = list(suite.plan(Request(quick=quick, device="cpu")))
    comparisons = [item for item in planned if isinstance(item, Comparison)]
    measured = [one for item in comparisons for one in item.measurements]
    names = [one.name for one in measured]
    assert len(names) == len(set(names))
    sections = {table.section for table in suite.tables}
    assert {one.columns["section"] for one in measured} <= sections
    own = [item for item in comparisons if item.baseline is not None]
    for item in own:
        assert item.baseline in {one.name for one in item.measurements}
    # Plain values, since they travel to other processes and into JSON.
    json.dumps([dict(one.config) for one in measured])


def test_a_patient_run_tries_on_a_cpu_what_others_leave_out():
    def tried(**options):
        plan = variants.SUITE.plan(Request(device="cpu", **options))
        comparisons = [item for item in plan if isinstance(item, Comparison)]
        return {one.name for item in comparisons for one in item.measurements}

    large = "reports/large/forward+backward/"
    assert {f"{large}{one}" for one in (variants.OURS, variants.FORMULA)} <= tried()
    assert f"{large}BlockSparse" not in tried()
    assert f"{large}BlockSparse" in tried(max_seconds=600)
    left = [
        row
        for item in variants.SUITE.plan(Request(device="cpu"))
        if not isinstance(item, Comparison) and item is not variants.quality_rows
        for row in item(Request(device="cpu"))
    ]
    (row,) = [row for row in left if row["name"] == f"{large}BlockSparse"]
    assert "--max-seconds" in row["needs"] and row["median_ms"] is None


def timed_row(name, config, milliseconds, **columns):
    return results.row(name, config, median_ms=milliseconds, **columns)


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_patterns_are_not_dense_at_the_lengths_of_their_rows(quick):
    for item in variants.SUITE.plan(Request(quick=quick, device="cpu")):
        for one in item.measurements if isinstance(item, Comparison) else ():
            # Whose own sizes are such; the page says so.
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


def test_rows_that_take_minutes_say_so_under_a_name_of_the_plan():
    parts = [
        item
        for item in variants.SUITE.plan(Request(device="cpu"))
        if not isinstance(item, Comparison)
    ]
    assert all(part.__doc__ for part in parts)


def test_what_is_refused_tells_whose_operator_it_is():
    plan = variants.SUITE.plan(Request(device="cpu"))
    operators = {
        one.config["variant"]: (one.columns["operator"], one.columns["peer"])
        for item in plan
        if isinstance(item, Comparison)
        for one in item.measurements
        if "variant" in one.config
    }
    assert operators["SparseRandom90"] == ("dpflash", False)
    assert operators["SDPA"] == ("sdpa-flash", True)


def test_exponents_come_with_intervals_or_say_what_they_need():
    rows = [
        timed_row(str(tokens), {"tokens": tokens}, 3e-6 * tokens**2)
        for tokens in (512, 1024, 2048, 4096)
    ]
    row = exponent_row("somewhere", "forward", rows, "tokens")
    assert row["exponent"] == pytest.approx(2)
    assert row["exponent_ci95"] == pytest.approx([2, 2])
    assert "three sizes" in exponent_row("somewhere", "forward", rows[:2], "tokens")["needs"]


def test_memory_of_a_token_is_the_slope_over_tokens():
    rows = [
        timed_row(
            str(tokens),
            {
                "direction": "forward",
                "tokens": tokens,
                "batch": 2,
                "heads": 4,
                "head_dim": 64,
                "dtype": "float32",
            },
            1.0,
            section="dilated_fixed",
            peak_memory_mb=5.0 + 2 * tokens * 1040 / 2**20,
        )
        for tokens in (512, 1024, 2048)
    ]
    (row,) = [row for row in sequence.SUITE.derive(rows) if row["section"] == "bytes_per_token"]
    assert row["measured"] == pytest.approx(1040)
    # o and lse of 4 heads.
    assert row["model"] == 4 * (64 * 4 + 4)


@pytest.mark.slow
def test_a_run_writes_rows_that_are_right_with_their_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "_QUICK_HEADS", (1, 2, 3))
    request = Request(quick=True, device="cpu", threads=1, has_progress=False, effort=Effort(1, 3))
    found = run_suite(heads.SUITE, request, tmp_path)
    rows = [row for row in found["rows"] if row["section"] == "heads"]
    places = itertools.product(DIRECTIONS, (1, 2, 3))
    assert [(row["config"]["direction"], row["config"]["heads"]) for row in rows] == list(places)
    for row in rows:
        assert row["correct"] is True and row["median_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(512e3 / row["median_ms"])
        assert row["gflop_per_s"] > 0 and row["checked_rows"] == 512
    exponents = [row for row in found["rows"] if row["section"] == "exponents"]
    assert len(exponents) == 2 and all(row["exponent"] is not None for row in exponents)
    assert "| heads, forward | heads |" in (tmp_path / "heads.md").read_text()


def test_variants_module_lists_the_named_ones():
    assert variants.VARIANTS is named_variants.VARIANTS

"""dpflash.recommend, on figures whose law is known."""

import json

import pytest
import torch

import dpflash
from dpflash import recommender
from dpflash.bench.attention import build_pattern
from dpflash.bench.quality import contestants
from dpflash.bench.variants import VARIANTS
from dpflash.clipping.device_speed import cpu_model
from dpflash.patterns import BlockSparse, Dense, Dilated, SlidingWindow

HERE = f"CPU {cpu_model()}"
DENSE, WINDOW = Dense(causal=True), SlidingWindow(window=256, causal=True)
MIB = 2**20
_ENVIRONMENT = {"device": HERE, "threads": 1, "date": "2026-11-22", "torch": "2.13.0"}


def _row(pattern, tokens, ms, mib, **config):
    shape = {"tokens": tokens, "batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32"}
    variant = {"variant": type(pattern).__name__, "direction": "forward+backward"}
    return {
        "config": {**variant, **shape, **config},
        "pattern_key": pattern.key,
        "operator": "dpflash",
        "correct": True,
        "median_ms": ms,
        "peak_memory_mb": mib,
    }


def _rows(*lengths):
    """Dense: pairs / 1024^2 ms; a window: 16 times that; T / 64 and T / 32 MiB."""
    return [
        row
        for t in lengths
        for row in (
            _row(DENSE, t, DENSE.edges(t) / MIB, t / 64),
            _row(WINDOW, t, WINDOW.edges(t) * 16 / MIB, t / 32),
        )
    ]


def _wide(window=1024):
    return SlidingWindow(window=window, causal=True)


def _quality(pattern, difference, **columns):
    return {
        "section": "quality",
        "pattern_key": pattern.key,
        "config": {"tokens": 1024},
        "baseline": "dense",
        "difference": difference,
        "difference_ci95": [difference - 0.1, difference + 0.1],
        "relative_difference": difference / 2,
        **columns,
    }


def _file(folder, rows, name="variants", **environment):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": {**_ENVIRONMENT, **environment}, "rows": rows}))
    return path


def _recommend(results, tokens, **options):
    return dpflash.recommend(tokens, **{"results": results, "device": "cpu", **options})


def test_the_fastest_pattern_changes_with_the_number_of_tokens(tmp_path):
    _file(tmp_path, _rows(1024, 4096, 16384))
    short, long = (_recommend(tmp_path, tokens) for tokens in (1024, 16384))
    assert (short.pattern, long.pattern) == (DENSE, WINDOW)
    assert str(short).splitlines()[0].endswith("float32: Dense")
    assert "a query sees 3.1% of its pairs" in str(long) and HERE in long.measured_on
    assert "held-out loss of a small model was not measured" in str(long)
    assert "another model" not in str(short)
    q = torch.randn(1, 2, 64, 16)
    assert dpflash.attention(q, q, q, pattern=long.pattern).shape == q.shape


def test_what_was_not_measured_is_refused_with_what_was(tmp_path):
    _file(tmp_path, _rows(1024, 16384))
    for tokens in (1023, 2048, 65536):
        message = rf"tokens={tokens}, .*tokens=\[1024, 16384\] with .*\[512\].*attention --out DIR"
        with pytest.raises(ValueError, match=message):
            _recommend(tmp_path, tokens)
    with pytest.raises(ValueError, match="heads=1, head_dim=31, causal"):
        _recommend(tmp_path, 1024, heads=1, head_dim=31)
    for missing in ({"causal": False}, {"dtype": "bfloat16"}, {"direction": "forward"}):
        with pytest.raises(ValueError, match="not measured for Pattern"):
            _recommend(tmp_path, 1024, **missing)
    with pytest.raises(ValueError, match="not measured for BlockSparse"):
        _recommend(tmp_path, 1024, patterns=[BlockSparse])


def test_figures_of_another_device_are_given_only_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _file(tmp_path, [_row(WINDOW, 1024, 1e-3, 1.0, dtype="bfloat16")], device="NVIDIA H200")
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="nothing was measured on .*its name: 'NVIDIA H200'"):
            _recommend(tmp_path, 1024, device=device)
    found = _recommend(tmp_path, 1024, device="NVIDIA H200")
    assert found.pattern == WINDOW and found.measured_on.startswith("NVIDIA H200")
    _file(tmp_path, _rows(1024), name="here")
    assert _recommend(tmp_path, 1024, device=None).pattern == DENSE
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert _recommend(tmp_path, 1024, device=None).pattern == WINDOW


def test_of_equal_rows_those_of_a_full_run_and_then_the_latest_count(tmp_path):
    _file(tmp_path, [_row(DENSE, 1024, 3.0, 1.0)], name="old")
    _file(tmp_path, [_row(DENSE, 1024, 2.0, 1.0)], name="new", date="2026-11-23")
    _file(tmp_path, [_row(DENSE, 1024, 1.0, 1.0)], name="quick", date="2026-11-24", quick=True)
    assert _recommend(tmp_path, 1024).chosen.expected_ms == 2.0


def test_time_and_memory_are_scaled_with_heads_and_batch(tmp_path):
    _file(tmp_path, [_row(DENSE, 1024, 8.0, 64.0, batch=2)])
    found = _recommend(tmp_path, 1024, heads=4).chosen
    assert (found.expected_ms, found.expected_peak_mib) == (2.0, 16.0)
    _file(tmp_path, [_row(DENSE, 1024, 5.0, 1.0, heads=3)], name="nearer")
    assert _recommend(tmp_path, 1024, heads=3).chosen.expected_ms == 5.0


def test_the_fastest_within_the_memory_is_chosen(tmp_path):
    _file(tmp_path, _rows(1024, 16384))
    for memory in (512 * MIB, "512MiB", "0.6 GB"):
        assert _recommend(tmp_path, 16384, memory=memory).variant == "SlidingWindow"
    found = _recommend(tmp_path, 16384, memory=511 * MIB)
    assert found.variant == "Dense"
    assert [one.fits for one in found.alternatives] == [False]
    assert "do not fit, or their memory is unknown: SlidingWindow" in str(found)
    with pytest.raises(ValueError, match=r"fits memory=1048576 \(Dense 16 MiB, SlidingWindow 32"):
        _recommend(tmp_path, 1024, memory=MIB)


def test_a_pattern_of_unknown_memory_fits_no_limit(tmp_path):
    _file(tmp_path, [_row(WINDOW, 1024, 0.1, None), *_rows(1024)[:1]])
    assert _recommend(tmp_path, 1024).variant == "SlidingWindow"
    assert _recommend(tmp_path, 1024, memory=2**40).variant == "Dense"


def test_a_pattern_that_does_not_reach_all_is_left_out_and_named(tmp_path):
    alone = BlockSparse(block_size=128, local_blocks=0, causal=True)
    parts = Dilated(segment_lengths=(1024,), dilation_rates=(1,), causal=True)
    apart = [_row(alone, 2048, 1e-3, 1.0), _row(parts, 2048, 1e-3, 1.0)]
    _file(tmp_path, [*apart, *_rows(2048)])
    found = _recommend(tmp_path, 2048)
    assert found.variant == "Dense" and len(found.alternatives) == 1
    assert "however many layers: BlockSparse, Dilated" in str(found)
    _file(tmp_path, apart)
    with pytest.raises(ValueError, match="no measured pattern whose last position depends on all"):
        _recommend(tmp_path, 2048)


def test_the_loss_of_the_same_pattern_scaled_with_t_is_shown(tmp_path):
    losses = [_quality(DENSE, -0.03), _quality(_wide(17), 0.5), _quality(_wide(16), -0.2)]
    _file(tmp_path, [*_rows(1024, 4096, 16384), *losses])
    found = _recommend(tmp_path, 16384)
    assert found.variant == "SlidingWindow" and found.chosen.quality is not None
    assert found.chosen.quality.difference == -0.2
    text = "a small model was -10.00% (-0.2000 [-0.3000, -0.1000] nats a byte, lower is better)"
    assert text in str(found)
    # Of the same class, with another window.
    assert _recommend(tmp_path, 4096).alternatives[0].quality is None
    # Dense attention is the reference of the losses and has none.
    dense = _recommend(tmp_path, 1024, patterns=Dense)
    assert dense.chosen.quality is None and "reference" in str(dense)


@pytest.mark.parametrize(
    "changes", [{"baseline": None}, {"baseline": "dense, private"}, {"quick": True}], ids=str
)
def test_losses_of_private_models_and_of_quick_runs_are_not_used(tmp_path, changes):
    quick = changes.pop("quick", False)
    _file(tmp_path, [*_rows(16384), _quality(_wide(16), -0.2, **changes)], quick=quick)
    assert _recommend(tmp_path, 16384).chosen.quality is None


def test_a_pattern_with_a_greater_loss_than_dense_is_chosen_only_if_no_other_fits(tmp_path):
    rows = [_row(DENSE, 16384, 100.0, 512.0), _row(WINDOW, 16384, 1.0, 4.0)]
    _file(tmp_path, [*rows, _quality(_wide(16), 0.02)])
    found = _recommend(tmp_path, 16384)
    assert found.pattern == DENSE and found.alternatives[0].is_worse
    assert "their measured loss is above that of dense attention: SlidingWindow" in str(found)
    assert _recommend(tmp_path, 16384, memory=16 * MIB).pattern == WINDOW


@pytest.mark.cases(0)
def test_no_shipped_figure_recommends_a_greater_loss_than_dense():
    for device in ("CPU AMD EPYC", "CPU Intel(R) Xeon(R) Processor"):
        for tokens in (1024, 4096, 8192, 16384):
            assert not dpflash.recommend(tokens, device=device).chosen.is_worse


def test_what_the_suite_trains_has_losses_for_what_the_suites_time(tmp_path):
    trained = [
        _quality(one.pattern, 0.1, config={"tokens": 512})
        for one in contestants(512)
        if not (one.seeds_on or one.name == "dense")
    ]
    timed = [
        VARIANTS[name].pattern(8192, True)
        for name in ("DilatedAttention", "Sparse50", "Sparse75", "Sparse90")
    ] + [build_pattern(name, True, 8192) for name in ("sliding_window", "hierarchical")]
    _file(tmp_path, [*(_row(p, 8192, 1.0, 1.0) for p in timed), *trained])
    found = _recommend(tmp_path, 8192)
    assert all(one.quality is not None for one in (found.chosen, *found.alternatives))


@pytest.mark.parametrize(("ms", "is_chosen"), [(10.4, True), (10.6, False)])
def test_of_those_within_5_percent_the_one_that_sees_most_and_fits_is_chosen(
    tmp_path, ms, is_chosen
):
    _file(tmp_path, [_row(WINDOW, 16384, 10.0, 1.0), _row(_wide(), 16384, ms, 99.0)])
    found = _recommend(tmp_path, 16384)
    assert (found.pattern == _wide()) == is_chosen and len(found.alternatives) == 1
    assert ("within 5% (SlidingWindow sees less)" in str(found)) == is_chosen
    assert _recommend(tmp_path, 16384, memory=9 * MIB).pattern == WINDOW


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"heads": 0}, "heads=0"),
        ({"memory": -1}, "memory=-1"),
        ({"memory": "100 apples"}, r"memory='100 apples': expected bytes; .* such as '80GB'"),
        ({"direction": "backward"}, "direction='backward'"),
        ({"device": "tpu"}, "device='tpu': nothing was measured on tpu"),
        ({"results": "missing.json"}, "results='missing.json'"),
        ({"results": []}, "nothing was measured on .*; run `dpflash bench attention --out"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"causal": None}, "causal=None"),
        ({"patterns": []}, r"patterns=\[\]: .*pass some, such as"),
        ({"patterns": "Dense"}, "patterns='Dense': .*pass some, such as"),
        ({"patterns": [Dense, Dense()]}, r"patterns=\[<class .*pass some, such as"),
        ({"patterns": [int]}, r"patterns=\[<class 'int'>\]: .*pass some, such as"),
    ],
)
def test_a_refusal_names_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        dpflash.recommend(**{"tokens": 1024, "results": [], **options})


def test_the_shipped_table_gives_the_answers_of_the_files_it_is_made_from(tmp_path, monkeypatch):
    wrong = {**_row(_wide(), 16384, 1e-3, 1.0), "correct": False}
    rows = [*_rows(1024, 16384), wrong, _quality(_wide(16), -0.2)]
    table = recommender.shipped_table([_file(tmp_path, rows)])
    assert len(table.splitlines()) == 5 + 4
    shipped = recommender._from_table(table)
    monkeypatch.setattr(recommender, "_shipped", lambda: shipped)
    assert str(dpflash.recommend(16384, device="cpu")) == str(_recommend(tmp_path, 16384))


def test_rows_that_are_wrong_untimed_or_of_another_kind_do_not_count(tmp_path):
    wrong = {**_row(WINDOW, 1024, 1e-3, 1.0), "correct": False}
    peer = {**_row(WINDOW, 1024, 1e-3, 1.0), "operator": "sdpa-flash"}
    untimed, other = _row(WINDOW, 1024, None, 1.0), {"name": "step", "median_ms": 1e-3}
    lists = BlockSparse(block_size=512, block_lists=(((0,), (1,)), ((0,), (0, 1))), causal=True)
    of_two_heads = _row(lists, 1024, 1e-3, 1.0, heads=2)
    _file(tmp_path, [wrong, peer, untimed, other, of_two_heads, *_rows(1024)[:1]])
    (tmp_path / "other.json").write_text("[]")
    found = _recommend(tmp_path, 1024)
    assert (found.variant, found.alternatives) == ("Dense", ())
    assert _recommend(tmp_path, 1024, heads=2).pattern == lists
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(ValueError, match=r"other.json': it cannot be read"):
        _recommend(tmp_path, 1024)

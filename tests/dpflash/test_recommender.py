"""dpflash.recommend, on figures whose law is known."""

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import dpflash
from dpflash import recommender
from dpflash.bench.attention import build_pattern
from dpflash.bench.quality import contestants
from dpflash.bench.variants import VARIANTS
from dpflash.clipping.device_speed import cpu_model
from dpflash.patterns import BlockSparse, Dense, Dilated, Pattern, SlidingWindow
from dpflash.recommender import Recommendation

HERE = f"CPU {cpu_model()}"
DENSE, WINDOW = Dense(causal=True), SlidingWindow(window=256, causal=True)
MIB = 2**20
_ENVIRONMENT = {
    "device": HERE,
    "threads": 1,
    "date": "2026-11-22",
    "torch": "2.13.0",
    "dpflash": version("dpflash"),
    "commit": "abcdef0",
}


def _row(pattern: Pattern, tokens: int, ms: float, mib: float | None, **config: Any) -> dict:
    variant = type(pattern).__name__
    shape = {"tokens": tokens, "batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32"}
    return {
        "name": f"{variant}/{tokens}",
        "config": {"variant": variant, **shape, "direction": "forward+backward", **config},
        "pattern_key": pattern.key,
        "operator": "dpflash",
        "correct": True,
        "median_ms": ms,
        "peak_memory_mb": mib,
    }


def _ms(pattern: Pattern, tokens: int) -> float:
    return pattern.edges(tokens) * (1 if pattern == DENSE else 16) / MIB


def _rows(*lengths: int) -> list[dict]:
    """Dense: pairs / 1024^2 ms; a window: 16 times that; T / 64 and T / 32 MiB."""
    return [
        row
        for t in lengths
        for row in (
            _row(DENSE, t, _ms(DENSE, t), t / 64),
            _row(WINDOW, t, _ms(WINDOW, t), t / 32),
        )
    ]


def _wide(window: int = 1024) -> Pattern:
    return SlidingWindow(window=window, causal=True)


def _timed(pattern: Pattern, ms: float, low: float, high: float) -> dict:
    return {**_row(pattern, 16384, ms, 1.0), "ci95_ms": [low, high]}


def _quality(what: str, pattern: Pattern, difference: float | None, **columns: Any) -> dict:
    return {
        "name": f"quality/{what}",
        "section": "quality",
        "what": what,
        "pattern_key": pattern.key,
        "config": {"pattern": repr(pattern), "tokens": 1024},
        "baseline": None if difference is None else "dense",
        "difference": difference,
        "difference_ci95": None if difference is None else [difference - 0.1, difference + 0.1],
        "relative_difference": None if difference is None else difference / 2,
        **columns,
    }


# The window at T = 16384 which WINDOW's is at 1024.
_SCALED = _wide(16)
_QUALITIES = (
    _quality("dense", DENSE, None),
    _quality("another seed", DENSE, -0.03),
    _quality("window", _SCALED, -0.2),
)


def _file(folder: Path, rows: list[dict], name: str = "variants", **environment: Any) -> Path:
    path = folder / f"{name}.json"
    held = {"environment": {**_ENVIRONMENT, **environment}, "complete": True, "rows": rows}
    path.write_text(json.dumps(held))
    return path


def _recommend(results: Path, tokens: int, **options: Any) -> Recommendation:
    return dpflash.recommend(tokens, **{"results": results, "device": "cpu", **options})


def test_the_fastest_pattern_changes_with_the_number_of_tokens(tmp_path: Path) -> None:
    _file(tmp_path, _rows(1024, 4096, 16384))
    short, long = (_recommend(tmp_path, tokens) for tokens in (1024, 16384))
    assert (short.pattern, long.pattern) == (DENSE, WINDOW)
    assert str(short).splitlines()[0].endswith(": Dense (fastest that fits)")
    first = ": SlidingWindow (fastest that fits; its quality is not known)"
    assert str(long).splitlines()[0].endswith(first)
    assert "not equivalent to dense attention: a query sees 3.1% of its pairs" in str(long)
    assert "held-out loss not measured for this pattern" in str(long)
    assert "not equivalent" not in str(short)
    q = torch.randn(1, 2, 64, 16)
    assert dpflash.attention(q, q, q, pattern=long.pattern).shape == q.shape


def test_figures_between_measured_lengths_follow_the_power_law(tmp_path: Path) -> None:
    _file(tmp_path, _rows(1024, 16384))
    found = _recommend(tmp_path, 2048).chosen
    assert (found.variant, found.expected_ms) == ("Dense", pytest.approx(_ms(DENSE, 2048)))
    assert found.expected_peak_mib == pytest.approx(32.0)
    assert "between T=1,024 and T=16,384" in found.basis


@pytest.mark.parametrize("tokens", [64, 16384])
def test_beyond_measured_lengths_it_says_that_it_extrapolates(tmp_path: Path, tokens: int) -> None:
    # A window of 256 is dense at 128 and linear from 1024 on.
    _file(tmp_path, _rows(128, 256, 4096))
    found = _recommend(tmp_path, tokens)
    for one in (found.chosen, *found.alternatives):
        assert one.expected_ms == pytest.approx(_ms(one.pattern, tokens))
        assert "EXTRAPOLATED" in one.basis
    assert "EXTRAPOLATED" in str(found)


def test_what_is_too_far_from_every_measurement_is_refused_with_what_there_is(
    tmp_path: Path,
) -> None:
    _file(tmp_path, _rows(1024, 16384))
    for tokens in (255, 65537):
        message = f"tokens={tokens}, .* Measured were T = 1,024, 16,384 and .*attention --out DIR"
        with pytest.raises(ValueError, match=message):
            _recommend(tmp_path, tokens)
    for tokens in (256, 65536):
        assert _recommend(tmp_path, tokens)
    with pytest.raises(ValueError, match="heads=1, head_dim=31: .*B x H x D = 512 to 512"):
        _recommend(tmp_path, 1024, heads=1, head_dim=31)
    _file(tmp_path, _rows(64, 65536))
    with pytest.raises(ValueError, match="tokens=2048, .*nothing was measured near enough"):
        _recommend(tmp_path, 2048)


def test_a_pattern_measured_at_one_length_is_used_at_that_length_only(tmp_path: Path) -> None:
    lone = _row(Dilated(segment_lengths=(2048,), dilation_rates=(1,), causal=True), 2048, 0.1, 1.0)
    _file(tmp_path, [*_rows(1024, 4096), lone])
    assert _recommend(tmp_path, 2048).variant == "Dilated"
    assert _recommend(tmp_path, 2049).variant == "Dense"


def test_the_fastest_within_the_memory_is_chosen(tmp_path: Path) -> None:
    _file(tmp_path, _rows(1024, 16384))
    assert _recommend(tmp_path, 16384, memory=512 * MIB).variant == "SlidingWindow"
    found = _recommend(tmp_path, 16384, memory=511 * MIB)
    assert found.variant == "Dense"
    assert [one.fits for one in found.alternatives] == [False]
    assert "1 more do not fit, or their memory is unknown: SlidingWindow" in str(found)
    with pytest.raises(ValueError, match=r"memory=1048576: .*Dense takes least, 16 MiB"):
        _recommend(tmp_path, 1024, memory=MIB)


def test_a_pattern_of_unknown_memory_fits_no_limit(tmp_path: Path) -> None:
    _file(tmp_path, [_row(WINDOW, 1024, 0.1, None), *_rows(1024)[:1]])
    assert _recommend(tmp_path, 1024).variant == "SlidingWindow"
    assert _recommend(tmp_path, 1024, memory=2**40).variant == "Dense"


def test_how_a_pattern_differs_from_dense_attention_is_said(tmp_path: Path) -> None:
    _file(tmp_path, [_row(WINDOW, 128, 1.0, 1.0), _row(WINDOW, 4096, 1730.4, 1.0)])
    assert "it sees all that dense attention sees at this T" in str(_recommend(tmp_path, 128))
    text = str(_recommend(tmp_path, 4096))
    assert "not equivalent to dense attention" in text
    assert "1,730 ms and" in text and "e+" not in text
    _file(tmp_path, [_row(_wide(1023), 1025, 1.0, 1.0)])
    assert "a query sees 99.9% of its pairs" in str(_recommend(tmp_path, 1025))
    dilated = Dilated(segment_lengths=(2048, 4096), dilation_rates=(1, 2), causal=True)
    _file(tmp_path, [_row(dilated, 2048, 1.0, 1.0)])
    text = str(_recommend(tmp_path, 2048))
    assert "it sees every pair, but some weigh more than others, which makes another" in text
    assert "of its pairs" not in text


def test_a_pattern_that_does_not_reach_all_is_left_out_and_named(tmp_path: Path) -> None:
    alone = BlockSparse(block_size=128, local_blocks=0, causal=True)
    parts = Dilated(segment_lengths=(1024,), dilation_rates=(1,), causal=True)
    apart = [_row(alone, 2048, 1e-3, 1.0), _row(parts, 2048, 1e-3, 1.0)]
    _file(tmp_path, [*apart, *_rows(2048)])
    found = _recommend(tmp_path, 2048)
    assert found.variant == "Dense" and len(found.alternatives) == 1
    assert "2 left out, since their last position never depends on all" in str(found)
    assert "however many layers: BlockSparse, Dilated" in str(found)
    _file(tmp_path, apart)
    with pytest.raises(ValueError, match=r"tokens=2048: .*\(BlockSparse, Dilated\) the last"):
        _recommend(tmp_path, 2048)


def test_patterns_measured_elsewhere_are_counted_and_named(tmp_path: Path) -> None:
    elsewhere = [_row(WINDOW, t, 1.0, 1.0) for t in (64, 128)]
    once = _row(_wide(9), 512, 1.0, 1.0, variant="Nine")
    _file(tmp_path, [*elsewhere, once, _row(DENSE, 2048, 2.0, 8.0)])
    text = str(_recommend(tmp_path, 2048))
    assert "2 left out, since they were not measured near this T: SlidingWindow (from T=64" in text
    assert "Nine (at T=512 only)" in text


def test_a_pattern_without_a_variant_is_named_by_its_arguments(tmp_path: Path) -> None:
    row = _row(BlockSparse(block_size=64, global_blocks=1, causal=True), 1024, 1.0, 1.0)
    del row["config"]["variant"]
    _file(tmp_path, [row])
    assert _recommend(tmp_path, 1024).variant == "BlockSparse(block_size=64, global_blocks=1)"


def test_the_loss_of_the_same_pattern_scaled_with_t_is_shown(tmp_path: Path) -> None:
    near = _quality("near", _wide(17), 0.5)
    _file(tmp_path, [*_rows(1024, 4096, 16384), near, *_QUALITIES])
    found = _recommend(tmp_path, 16384)
    assert found.variant == "SlidingWindow" and found.chosen.quality is not None
    assert found.chosen.quality.difference == -0.2
    text = "a small model was -10.00% (-0.2000 [-0.3000, -0.1000] nats a byte, lower is better)"
    assert text in str(found)
    assert "more than another seed changes it (0.0300 nats)" in str(found)
    assert str(found).splitlines()[0].endswith("(fastest that fits; held-out loss -10.00%)")
    # Of the same class, with another window.
    other = _recommend(tmp_path, 4096)
    assert other.alternatives[0].quality is None
    assert "not measured" in str(other).splitlines()[-1]
    # Dense attention is the reference of the losses and has none.
    dense = _recommend(tmp_path, 1024, patterns=[Dense])
    assert dense.chosen.quality is None and "reference" in str(dense)


@pytest.mark.parametrize(
    "changes", [{"difference": None}, {"baseline": "dense, private"}, {"quick": True}], ids=str
)
def test_losses_of_private_models_and_of_quick_runs_are_not_used(
    tmp_path: Path, changes: dict
) -> None:
    quick = changes.pop("quick", False)
    row = {**_QUALITIES[2], **changes}
    _file(tmp_path, [*_rows(16384), *_QUALITIES[:2], row], quick=quick)
    assert _recommend(tmp_path, 16384).chosen.quality is None


def test_a_difference_that_a_seed_makes_too_is_marked(tmp_path: Path) -> None:
    small = [*_QUALITIES[:2], _quality("window", _SCALED, -0.02)]
    _file(tmp_path, [*_rows(16384), *small])
    text = str(_recommend(tmp_path, 16384))
    assert "no more than another seed changes it (0.0300 nats)" in text
    assert "-1.00% (as a seed)" in text
    _file(tmp_path, [*_rows(16384), small[0], small[2]])
    text = str(_recommend(tmp_path, 16384))
    assert "the effect of another seed was not measured" in text


def test_a_pattern_with_a_greater_loss_than_dense_is_chosen_only_if_no_other_fits(
    tmp_path: Path,
) -> None:
    # Even by no more than another seed changes it.
    worse = [*_QUALITIES[:2], _quality("window", _SCALED, 0.02)]
    rows = [_row(DENSE, 16384, 100.0, 512.0), _row(WINDOW, 16384, 1.0, 4.0)]
    _file(tmp_path, [*rows, *worse])
    found = _recommend(tmp_path, 16384)
    assert found.pattern == DENSE and found.alternatives[0].is_worse
    assert "1 not chosen, since their measured loss is above that of dense" in str(found)
    assert _recommend(tmp_path, 16384, memory=8 * MIB * 2).pattern == WINDOW


def test_no_shipped_figure_recommends_a_greater_loss_than_dense() -> None:
    for tokens in (1024, 2048, 4096, 8192, 16384):
        for heads in (1, 8):
            assert not dpflash.recommend(tokens, heads=heads, device="cpu").chosen.is_worse


def test_what_the_suite_trains_has_losses_for_what_the_suites_time(tmp_path: Path) -> None:
    trained = [
        _quality(one.name, one.pattern, 0.1, config={"tokens": 512})
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


def test_patterns_direction_and_causality_restrict_the_choice(tmp_path: Path) -> None:
    other = _row(Dense(causal=False), 1024, 0.1, 1.0)
    forward = _row(WINDOW, 1024, 0.1, 1.0, direction="forward")
    peer = {**_row(DENSE, 1024, 0.1, 1.0), "operator": "sdpa-flash"}
    _file(tmp_path, [peer, *_rows(1024, 16384), other, forward])
    assert _recommend(tmp_path, 1024).chosen.expected_ms == pytest.approx(_ms(DENSE, 1024))
    assert _recommend(tmp_path, 1024, causal=False).pattern == Dense(causal=False)
    assert _recommend(tmp_path, 1024, direction="forward").pattern == WINDOW
    for kinds in ([Dense], Dense):
        found = _recommend(tmp_path, 16384, patterns=kinds)
        assert (found.pattern, found.alternatives) == (DENSE, ())
    message = r"patterns=SlidingWindow: none was measured with causal=False, .*; measured: "
    message += (
        r"Dense \(causal=False, forward\+backward\), .*SlidingWindow \(causal=True, forward\), "
    )
    with pytest.raises(ValueError, match=message):
        _recommend(tmp_path, 16384, causal=False, patterns=[SlidingWindow])
    with pytest.raises(ValueError, match=r"patterns=BlockSparse: .*: Dense .*, SlidingWindow "):
        _recommend(tmp_path, 16384, patterns=[BlockSparse])


def test_time_and_memory_are_scaled_with_heads_and_batch(tmp_path: Path) -> None:
    _file(tmp_path, [_row(DENSE, 1024, 8.0, 64.0, batch=2)])
    found = _recommend(tmp_path, 1024, heads=4).chosen
    assert (found.expected_ms, found.expected_peak_mib) == (2.0, 16.0)
    assert "scaled from B x H x D = 1024" in found.basis


def test_figures_of_another_device_or_release_come_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _file(tmp_path, _rows(1024))
    assert "WARNING" not in str(_recommend(tmp_path, 1024))
    text = str(_recommend(tmp_path, 1024, device="cuda"))
    assert f"WARNING: the figures are of another device ({HERE}) than yours (no GPU)" in text
    _file(tmp_path, _rows(1024), device="NVIDIA H200", dpflash="0.0.7")
    text = str(_recommend(tmp_path, 1024))
    assert f"another device (NVIDIA H200) than yours ({HERE})" in text
    assert f"WARNING: figures of dpflash 0.0.7, and this is {version('dpflash')}, which" in text


def test_figures_of_this_device_win_and_of_two_runs_the_later_one(tmp_path: Path) -> None:
    _file(tmp_path, _rows(1024), name="here")
    fast = [_row(WINDOW, 1024, 1e-3, 1.0)]
    _file(tmp_path, fast, name="there", device="CPU of somebody else", date="2027-01-01")
    found = _recommend(tmp_path, 1024)
    assert found.variant == "Dense" and HERE in found.measured_on
    assert "WARNING" not in str(found)
    _file(tmp_path, [_row(DENSE, 1024, 2.0, 1.0)], name="new", date="2026-11-23")
    assert _recommend(tmp_path, 1024).chosen.expected_ms == 2.0


@pytest.mark.parametrize(
    ("wide", "is_chosen"),
    [
        ((10.4, 10.35, 10.5), True),  # within 5%
        ((12.0, 10.2, 13.0), True),  # the intervals overlap
        ((10.6, 10.5, 10.7), False),
    ],
)
def test_of_those_as_fast_within_noise_the_one_that_sees_most_and_fits_is_chosen(
    tmp_path: Path, wide: tuple[float, float, float], is_chosen: bool
) -> None:
    large = {**_timed(_wide(), *wide), "peak_memory_mb": 99.0}
    _file(tmp_path, [_timed(WINDOW, 10.0, 9.0, 10.3), large])
    found = _recommend(tmp_path, 16384)
    assert (found.pattern == _wide()) == is_chosen
    assert len(found.alternatives) == 1
    assert ("as fast within noise as the fastest of 2 that fit" in str(found)) == is_chosen
    assert ("as fast as the fastest that fits" in str(found)) == is_chosen
    assert _recommend(tmp_path, 16384, memory=9 * MIB).pattern == WINDOW
    _file(tmp_path, [_timed(WINDOW, 10.0, 9.0, 10.3), _timed(_wide(), 9.9, 9.0, 10.3)])
    assert _recommend(tmp_path, 16384).pattern == _wide()


def test_where_figures_are_from_is_said_once(tmp_path: Path) -> None:
    _file(tmp_path, _rows(1024, 16384))
    text = str(_recommend(tmp_path, 2048))
    table = text.partition("figures: between T=1,024 and T=16,384, float32\n")[2]
    assert table.startswith("variant") and "from" not in table and "between" not in table
    _file(tmp_path, [*_rows(1024, 16384), _row(_wide(), 2048, 99.0, 1.0)])
    table = str(_recommend(tmp_path, 2048)).partition("says nothing else\n")[2]
    assert table.count("between") == 0 and table.rstrip().endswith("measured, float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"heads": 0}, "heads=0"),
        ({"memory": -1}, "memory=-1"),
        ({"memory": "100MB"}, r"memory='100MB': expected bytes .* 100 \* 2\*\*20"),
        ({"direction": "backward"}, "direction='backward'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"results": "missing.json"}, "results='missing.json'"),
        (
            {"results": []},
            "results: there are no measurements; run `dpflash bench attention --out",
        ),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"causal": None}, "causal=None"),
        ({"patterns": []}, r"patterns=\[\]: .*pass some, such as"),
        ({"patterns": "Dense"}, "patterns='Dense': .*pass some, such as"),
        ({"patterns": Dense()}, r"patterns=Dense\(.*pass some, such as"),
        ({"patterns": [Dense, Dense()]}, r"patterns=\[<class .*pass some, such as"),
        ({"patterns": [int]}, r"patterns=\[<class 'int'>\]: .*pass some, such as"),
    ],
)
def test_a_refusal_names_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpflash.recommend(**{"tokens": 1024, "results": [], **options})


def test_the_shipped_table_gives_the_answers_of_the_files_it_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = BlockSparse(block_size=64, block_lists=((0,),) * 256, causal=True)
    wrong = {**_row(_wide(), 16384, 1e-3, 1.0), "correct": False}
    rows = [*_rows(1024, 16384), _row(blocks, 16384, 1.0, None), wrong, *_QUALITIES]
    table = recommender.shipped_table([_file(tmp_path, rows)])
    assert len(table.splitlines()) == 5 + 2 + 4
    shipped = recommender._from_table(table)
    monkeypatch.setattr(recommender, "_shipped", lambda: shipped)
    for tokens in (2048, 16384):
        found = str(_recommend(tmp_path, tokens))
        of_file = found.replace("\n- Left out: variants.json: row 'SlidingWindow/16384'", "\nX")
        lines = [line for line in of_file.splitlines() if not line.startswith("X")]
        assert str(dpflash.recommend(tokens, device="cpu")).splitlines() == lines
    monkeypatch.setattr(recommender, "_shipped", tuple)
    text = "run `dpflash bench attention --out DIR` .*--quick will do, .*pass results=DIR$"
    with pytest.raises(ValueError, match=text):
        dpflash.recommend(1024, device="cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"correct": False}, "it is wrong"),
        ({"median_ms": math.nan}, "median_ms=nan"),
        ({"median_ms": math.inf}, "median_ms=inf"),
        ({"median_ms": 0.0}, "median_ms=0.0"),
        ({"median_ms": "1"}, "median_ms='1'"),
        ({"peak_memory_mb": math.nan}, "peak_memory_mb=nan"),
        ({"peak_memory_mb": -1.0}, "peak_memory_mb=-1.0"),
        ({"pattern_key": "garbage"}, "key='garbage'"),
        ({"pattern_key": 3}, "key=3"),
        ({"config": {}}, "it has no 'direction'"),
        ({"config": None}, "NoneType"),
        ({"config": {"direction": "forward+backward"}}, "it has no 'tokens'"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_used_is_left_out_with_the_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    bad = {**_row(WINDOW, 1024, 1e-3, 1.0), **change}
    _file(tmp_path, [bad, *_rows(1024)[:1]])
    found = _recommend(tmp_path, 1024)
    assert (found.variant, found.alternatives) == ("Dense", ())
    assert f"Left out: variants.json: row '{bad['name']}': " in str(found) and reason in str(found)
    _file(tmp_path, [bad])
    with pytest.raises(ValueError, match=r"none was measured .*Left out: variants.json: row"):
        _recommend(tmp_path, 1024)


def test_block_lists_of_other_heads_are_left_out_with_the_reason(tmp_path: Path) -> None:
    lists = (((0,), (1,)), ((0,), (0, 1)))
    pattern = BlockSparse(block_size=512, block_lists=lists, causal=True)
    _file(tmp_path, [_row(pattern, 1024, 1e-3, 1.0, heads=2), *_rows(1024)[:1]])
    assert _recommend(tmp_path, 1024, heads=2).pattern == pattern
    found = _recommend(tmp_path, 1024, heads=8)
    assert found.variant == "Dense"
    assert "Left out: BlockSparse: num_heads=8: expected 2, as block_lists has" in str(found)


def test_a_file_that_cannot_be_used_is_left_out_with_the_reason(tmp_path: Path) -> None:
    for environment, reason in (
        (..., "bad.json: it cannot be read"),
        ({"device": HERE}, "bad.json: its environment has no 'threads'"),
        (None, "bad.json: its environment has no 'device'"),
    ):
        held = json.dumps({"environment": environment, "rows": _rows(1024)}, default=str)
        (tmp_path / "bad.json").write_text("{" if environment is ... else held)
        (tmp_path / "variants.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=f"no measurements; .*Left out: {reason}"):
            _recommend(tmp_path, 1024)
        _file(tmp_path, _rows(1024)[:1])
        assert f"Left out: {reason}" in str(_recommend(tmp_path, 1024))
    # Files of other kinds are none of its business.
    (tmp_path / "bad.json").unlink()
    for number, other in enumerate(({"environment": {}, "rows": None}, [], {"rows": [1]})):
        (tmp_path / f"{number}.json").write_text(json.dumps(other))
    (tmp_path / "4.json").write_text(json.dumps({"environment": {}, "rows": [1, {}]}))
    assert "Left out" not in str(_recommend(tmp_path, 1024))


def test_of_many_rows_left_out_some_are_named_and_the_others_counted(tmp_path: Path) -> None:
    wrong = [{**row, "correct": False} for row in _rows(1024, 2048, 4096)]
    _file(tmp_path, [*wrong, *_rows(1024)])
    text = str(_recommend(tmp_path, 1024))
    assert text.count("it is wrong") == 3 and "; and 3 more" in text


def test_a_quality_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    bad = _quality("window", _SCALED, math.nan)
    short = {**_quality("short", _SCALED, 0.1), "difference_ci95": None}
    _file(tmp_path, [*_rows(1024, 16384), *_QUALITIES[:1], bad, short])
    found = _recommend(tmp_path, 16384)
    assert found.chosen.quality is None
    assert "row 'quality/window': difference=nan" in str(found)
    assert "row 'quality/short'" in str(found)


def test_figures_of_one_dtype_only_are_ranked(tmp_path: Path) -> None:
    half = [_row(WINDOW, 1024, 1e-3, 1.0, dtype="bfloat16")]
    _file(tmp_path, [*_rows(1024), *half])
    found = _recommend(tmp_path, 1024)
    assert found.variant == "Dense" and len(found.alternatives) == 1
    assert "forward+backward, float32: Dense" in str(found)
    assert "not ranked with it: bfloat16 (pass dtype=)" in str(found)
    found = _recommend(tmp_path, 1024, dtype="bfloat16")
    assert found.variant == "SlidingWindow" and found.alternatives == ()
    assert "forward+backward, bfloat16: SlidingWindow" in str(found)
    with pytest.raises(ValueError, match="dtype='float16': .*were float32, bfloat16 only"):
        _recommend(tmp_path, 1024, dtype="float16")


def test_on_a_gpu_the_dtype_of_most_patterns_is_ranked(tmp_path: Path) -> None:
    half = [_row(p, 1024, 1.0, 1.0, dtype="bfloat16") for p in (DENSE, WINDOW)]
    rows = [*half, _row(DENSE, 1024, 1e-3, 1.0)]
    path = _file(tmp_path, rows, device="NVIDIA of a test")
    found = _recommend(path, 1024, device="cuda")
    assert "bfloat16" in found.asked and found.chosen.expected_ms == 1.0
    _file(tmp_path, rows)
    assert "float32" in _recommend(tmp_path, 1024).asked
    _file(tmp_path, half)
    assert "bfloat16" in _recommend(tmp_path, 1024).asked


def test_quick_runs_count_only_where_no_full_run_is_near(tmp_path: Path) -> None:
    _file(tmp_path, [_row(DENSE, t, _ms(DENSE, t), 1.0) for t in (512, 2048)], name="full")
    quick = [_row(DENSE, 1024, 1e-3, 1.0), _row(WINDOW, 1024, 16.0, 1.0)]
    quick += [_row(DENSE, 16384, 1e-3, 1.0)]
    _file(tmp_path, quick, name="quick", quick=True)
    found = _recommend(tmp_path, 1024)
    assert found.chosen.basis == "between T=512 and T=2,048, float32"
    assert found.chosen.expected_ms == pytest.approx(_ms(DENSE, 1024))
    assert [one.basis for one in found.alternatives] == ["measured, quick run, float32"]
    assert found.measured_on.count("quick run") == 1
    # Full figures reach to 8192.
    found = _recommend(tmp_path, 16384)
    assert found.chosen.expected_ms == 1e-3 and "quick run" in found.chosen.basis

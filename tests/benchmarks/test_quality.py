"""The held-out loss of patterns, with tiny models."""

import numpy as np
import pytest
import scipy.stats

from dpflash.bench import output, quality
from dpflash.bench.quality import QUALITY, Contestant, Size, contestants
from dpflash.bench.suite import Request
from dpflash.patterns import BlockSparse, Dense
from dpflash.patterns.reach import reaches_all

TINY = Size(tokens=128, width=16, layers=1, heads=2, batch=2, steps=3, held_out=6)
REQUEST = Request(quick=True, device="cpu", has_progress=False)
DENSE = Dense(causal=True)


def rows_of(monkeypatch, *given):
    monkeypatch.setattr(quality, "contestants", lambda tokens: list(given))
    return {row["what"]: row for row in quality.quality_rows(REQUEST, TINY)}


def test_every_pattern_is_trained_and_compared_with_a_baseline_before_it():
    rows = list(quality.quality_rows(REQUEST, TINY))
    names = [row["what"] for row in rows]
    names_of_seeds = {"dense, another seed": 1}
    assert {"sparse 50%", "sparse 75%", "sparse 90%", "dilated", "adaptive"} <= set(names)
    for row in rows:
        assert set(output.COLUMNS) <= set(row) and row["section"] == "quality"
        assert row["correct"] and row["error"] < 1e-4
        assert row["held_out_loss"] < row["loss_before"]
        if row["baseline"] is not None:
            assert names.index(row["baseline"]) < names.index(row["what"])
            low, high = row["difference_ci95"]
            assert low <= row["difference"] <= high
        assert row["config"]["seed"] == REQUEST.seed + names_of_seeds.get(row["what"], 0)
        for _, cell in QUALITY:
            output.shown(cell(row))


def test_patterns_that_see_the_same_learn_the_same(monkeypatch):
    everything = BlockSparse(block_size=16, local_blocks=7, causal=True)
    rows = rows_of(
        monkeypatch,
        Contestant("dense", DENSE, baseline=None),
        Contestant("all blocks", everything),
        Contestant("seed", DENSE, seeds_on=1),
    )
    assert rows["all blocks"]["sparsity"] == 0
    assert abs(rows["all blocks"]["difference"]) < 1e-4 < abs(rows["seed"]["difference"])


WRONG_ATTENTION = ("check", lambda *_, **__: {"o": 0.0, "dq": 2e-4})
NO_LEARNING = ("_train", lambda *_: None)


@pytest.mark.parametrize(("name", "broken"), [WRONG_ATTENTION, NO_LEARNING])
def test_wrong_attention_and_a_model_that_learns_nothing_have_no_loss(name, broken, monkeypatch):
    monkeypatch.setattr(quality, name, broken)
    row = rows_of(monkeypatch, Contestant("dense", DENSE, baseline=None))["dense"]
    assert row["correct"] is False and "held_out_loss" not in row


def test_a_model_after_a_wrong_baseline_has_no_difference(monkeypatch):
    errors = iter([1.0, 0.0])
    monkeypatch.setattr(quality, "check", lambda *_, **__: {"o": next(errors)})
    rows = rows_of(
        monkeypatch, Contestant("dense", DENSE, baseline=None), Contestant("other", DENSE)
    )
    assert "held_out_loss" in rows["other"] and "difference" not in rows["other"]


@pytest.mark.parametrize("tokens", [512, 1024])
def test_patterns_leave_out_the_part_in_their_name_and_reach_all(tokens):
    for contestant in contestants(tokens):
        assert reaches_all(contestant.pattern, tokens, 4)
        name, _, percent = contestant.name.partition(" ")
        if name == "sparse":
            mask = contestant.pattern.mask(tokens)[0]
            left_out = 1 - mask.sum() / (tokens * (tokens + 1) / 2)
            sparsity = float(percent.rstrip("%")) / 100
            assert sparsity <= left_out < sparsity + 0.03


def test_differences_are_of_the_same_windows():
    own, other = np.array([1.0, 2.0, 3.5, 9.0]), np.array([0.9, 1.8, 3.1, 8.8])
    mean, (low, high) = quality._paired(own, other)
    expected = scipy.stats.ttest_rel(own, other).confidence_interval(0.95)
    assert mean == pytest.approx(0.225)
    assert (low, high) == pytest.approx((expected.low, expected.high))


def test_held_out_documents_are_not_trained_on():
    train, held_out = quality.windows_of(128, 0)
    assert len(held_out) > 50
    assert not set(train.documents) & set(held_out.documents)

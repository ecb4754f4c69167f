"""The attention check finds wrong results; definitions, baselines and modules pass it."""

import itertools
import math

import pytest
import torch

from dpflash import patterns
from dpflash.bench import attention, attention_cases
from dpflash.bench.attention_cases import (
    Case,
    band_error,
    check,
    document_borders,
    multiplicity,
)
from dpflash.bench.peers import OPERATORS, build_run, flex
from dpflash.bench.suite import Request, Unsupported

LONGNET = {"segment_lengths": (64, 128, 256), "dilation_rates": (1, 2, 4)}
LISTS = ((0,), (0, 1), (), (3, 1), (2, 0))
PATTERNS = {
    "dense": (patterns.Dense, {}),
    "window": (patterns.SlidingWindow, {"window": 40}),
    "documents": (patterns.Documents, {"cu_seqlens": (0, 30, 31, 190, 250)}),
    "dilated": (patterns.Dilated, LONGNET),
    "set": (patterns.Dilated, {**LONGNET, "overlap": "set"}),
    "offset-group": (patterns.Dilated, {**LONGNET, "offset": "group"}),
    "grouped": (patterns.Dilated, {**LONGNET, "heads": "grouped"}),
    "masked-rows": (patterns.Dilated, {"segment_lengths": (64,), "dilation_rates": (3,)}),
    "blocks": (
        patterns.BlockSparse,
        {"block_size": 25, "local_blocks": 1, "global_blocks": 1, "stride_blocks": 4},
    ),
    "random-blocks": (
        patterns.BlockSparse,
        {"block_size": 25, "local_blocks": 0, "random_blocks": 2},
    ),
    "listed-blocks": (patterns.BlockSparse, {"block_size": 50, "block_lists": LISTS}),
    "hierarchical": (
        patterns.Hierarchical,
        {"levels": ((16, 64), (64, 128), (128, -1)), "block_size": 16},
    ),
    "adaptive": (patterns.Adaptive, {"block_size": 32, "keep": 3}),
}
TOKENS, HEADS = 250, 5
PARTS = ("o", "dq", "dk", "dv")


def pattern_of(name, causal=True):
    kind, arguments = PATTERNS[name]
    return kind(**arguments, causal=causal)


def case_of(pattern, tokens=TOKENS, batch=2, heads=HEADS, head_dim=16):
    return Case(pattern, tokens, batch, heads, head_dim, "float32", "cpu")


def errors_of(case, run, *, with_grads=True, seed=0):
    return check(case, run, case.inputs(0), with_grads=with_grads, seed=seed)


@pytest.fixture(params=[False, True], ids=["full", "causal"])
def causal(request):
    return request.param


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "adaptive"])
def test_the_elementwise_definition_is_the_mask_of_the_pattern(name, causal):
    case = case_of(pattern_of(name, causal))
    seen, per_head = multiplicity(case)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]
    masks = case.pattern.mask(TOKENS, HEADS)
    for head in range(HEADS):
        assert torch.equal(seen(head, i, j).float(), masks[head])
    if not per_head:
        assert all(torch.equal(masks[0], mask) for mask in masks)
    assert case.pairs == 2 * (masks > 0).sum()


@pytest.mark.parametrize("name", PATTERNS)
def test_the_definition_agrees_with_the_library_in_every_gradient(name, causal):
    case = case_of(pattern_of(name, causal))
    errors = errors_of(case, build_run("dpflash", case))
    assert set(errors) == set(PARTS)
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("name", ["dilated", "adaptive"])
def test_a_subset_of_rows_suffices_for_all_gradients(name, monkeypatch):
    monkeypatch.setattr(attention_cases, "CHECKED_TOKENS", 0)
    case = case_of(pattern_of(name))
    first, second = (case.checked_rows(seed) for seed in (0, 1))
    assert len(first) == 64 < TOKENS and not torch.equal(first, second)
    for seed in (0, 1):
        assert max(errors_of(case, build_run("dpflash", case), seed=seed).values()) < 1e-5


def test_a_wrong_row_or_nan_is_an_error_of_the_check():
    expected = torch.randn(4096, 16, dtype=torch.float64)
    # Rows that shrink, as those of causal attention do: the late ones must not vanish.
    expected *= torch.linspace(1, 0.02, 4096).unsqueeze(1)
    assert band_error(expected.float(), expected) < 1e-6
    late = expected.clone()
    late[4000:] = 0
    assert band_error(late, expected) > 0.1
    late[4000] = math.nan
    assert band_error(late, expected) == math.inf


def test_gradients_of_a_single_query_and_key_are_compared_with_the_size_of_dv():
    case = case_of(patterns.Dense(causal=True), tokens=1, batch=1, heads=1)
    assert max(errors_of(case, build_run("dpflash", case)).values()) < 1e-5

    def change(name, x):
        if name == "dq":
            x += 0.1

    assert errors_of(case, altered(case, change))["dq"] > 0.01


def altered(case, change):
    """The library's operator with another output or gradients."""
    run = build_run("dpflash", case)

    class Altered(torch.autograd.Function):
        @staticmethod
        def forward(context, q, k, v):
            context.save_for_backward(q, k, v)
            o = run(q.detach(), k.detach(), v.detach()).clone()
            change("o", o)
            return o

        @staticmethod
        def backward(context, do):
            leaves = [x.detach().requires_grad_() for x in context.saved_tensors]
            with torch.enable_grad():
                grads = torch.autograd.grad(run(*leaves), leaves, do)
            grads = [grad.clone() for grad in grads]
            for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
                change(name, grad)
            return tuple(grads)

    return Altered.apply


@pytest.mark.parametrize("which", PARTS)
@pytest.mark.parametrize("place", [(0, 0), (1, 0), (2, 1)])
def test_an_error_in_one_sample_and_head_is_found(which, place):
    case = case_of(patterns.Dense(causal=True), tokens=96, batch=3, heads=2)

    def change(name, x):
        if name == which:
            x[place] *= 1.5

    errors = errors_of(case, altered(case, change))
    assert errors.pop(which) > 0.4
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("which", PARTS)
def test_a_value_that_is_not_finite_is_found_outside_of_the_checked_rows(which, monkeypatch):
    monkeypatch.setattr(attention_cases, "CHECKED_TOKENS", 0)
    case = case_of(patterns.Dense(causal=True), tokens=128, batch=2, heads=4)
    row = next(row for row in range(128) if row not in case.checked_rows())

    def change(name, x):
        if name == which:
            x[1, 0, row, 3] = math.nan

    errors = errors_of(case, altered(case, change))
    assert errors.pop(which) == math.inf
    assert max(errors.values()) < 1e-5


def test_rows_are_drawn_from_each_part_of_a_long_sequence_by_the_seed():
    case = case_of(patterns.Dense(), tokens=4096)
    drawn = [case.checked_rows(seed).tolist() for seed in range(3)]
    for rows in drawn:
        assert [row // 64 for row in rows] == list(range(64))
    assert drawn[0] != drawn[1] != drawn[2]
    assert drawn[0] == case.checked_rows(0).tolist()
    uneven = case_of(patterns.Dense(), tokens=5001).checked_rows(1).tolist()
    assert len(set(uneven)) == 64 and max(uneven) <= 5000


def test_an_error_that_is_nan_makes_a_row_wrong(monkeypatch):
    case = case_of(patterns.Dense(), tokens=16)
    for part in PARTS:
        errors = dict.fromkeys(PARTS, 0.0) | {part: math.nan}
        monkeypatch.setattr(attention, "check", lambda *_, errors=errors, **__: errors)
        subject = attention.operator_subject(case, "dpflash", "forward+backward", 0)
        assert subject.error() == math.inf


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_every_pattern_but_the_dense_one_leaves_pairs_out_at_every_length(quick):
    shapes = {
        (one.config["pattern"], one.config["causal"], one.config["tokens"], one.config["heads"])
        for comparison in attention.SUITE.plan(Request(quick=quick, device="cpu"))
        for one in comparison.measurements
    }
    few = {tokens for name, _, tokens, heads in shapes if heads == 1 and name == "dense"}
    assert few == {1, 16, 128}  # of dense attention alone
    assert len(shapes) == 7 * len({tokens for _, _, tokens, _ in shapes} - few) + len(few)
    for name, causal, tokens, heads in shapes:
        dense = patterns.Dense(causal=causal).edges(tokens, heads)
        pairs = attention.build_pattern(name, causal, tokens).edges(tokens, heads)
        assert pairs == dense if name == "dense" else pairs < 0.9 * dense, (name, tokens)


def test_documents_fill_the_sequence_and_are_the_same_each_time():
    borders = document_borders(100_000)
    assert borders == document_borders(100_000)
    lengths = [end - begin for begin, end in itertools.pairwise(borders)]
    assert borders[0] == 0 and borders[-1] == 100_000
    assert all(128 <= length <= 4096 for length in lengths[:-1])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["dense", "documents", "dilated", "random-blocks"])
def test_flexattention_is_given_the_same_multiplicities(name):
    # On the CPU it has no backward.
    case = case_of(pattern_of(name))
    inputs = [x.detach() for x in case.inputs(0)]
    assert check(case, flex(case, compiled=False), inputs, with_grads=False)["o"] < 1e-5


@pytest.mark.parametrize(
    ("operator", "name", "reason"),
    [
        ("sdpa-flash", "dilated", "dense or causal"),
        ("sdpa-cudnn", "dense", "CUDA"),
        ("flex", "dense", "GPU"),
    ],
)
def test_an_operator_that_cannot_run_names_its_needs(operator, name, reason):
    assert operator in OPERATORS
    with pytest.raises(Unsupported, match=reason):
        build_run(operator, case_of(pattern_of(name), tokens=322))

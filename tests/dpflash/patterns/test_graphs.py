"""Every pattern's graph is its definition, whatever the sizes; mask() is the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.kernels.tile_graph import UNBOUNDED, side_matrix
from dpflash.patterns import (
    BlockSparse,
    Dense,
    Dilated,
    Documents,
    Hierarchical,
    SlidingWindow,
)

FEW = settings(max_examples=60)


def check_graph(pattern, num_tokens, num_heads=1):
    """All that holds for a graph."""
    graph = pattern.graph(num_tokens, num_heads)
    mask = pattern.mask(num_tokens, num_heads)
    assert mask.shape == (num_heads, num_tokens, num_tokens)
    assert mask.dtype == torch.float32
    assert (graph.num_queries, graph.num_keys) == (num_tokens, num_tokens)
    assert graph.causal == pattern.causal

    torch.testing.assert_close(graph.multiplicity().float(), mask, rtol=1e-6, atol=1e-6)
    for head, variant in enumerate(graph.col_variants.tolist()):
        matrix = side_matrix(graph.cols, variant, num_tokens, num_tokens)
        torch.testing.assert_close(matrix.float(), mask[head].T, rtol=1e-6, atol=1e-6)
    assert graph.edges() == pattern.edges(num_tokens, num_heads) == int((mask > 0).sum())
    if pattern.causal:
        assert not mask.triu(1).any()
    for side in (graph.rows, graph.cols):
        check_tables(side, num_tokens)


def check_tables(side, num_tokens):
    groups, runs = side.groups.tolist(), side.runs.tolist()
    assert {t.dtype for t in (side.groups, side.runs, side.variants)} == {torch.int32}
    assert side.log_multiplicity.dtype == torch.float64
    borders = side.variants.tolist()
    assert borders[0] == 0 and borders[-1] == len(groups) and borders == sorted(borders)
    per_variant = [end - begin for begin, end in zip(borders, borders[1:], strict=False)]
    assert side.max_groups == max(per_variant, default=0)
    assert side.max_length == max((group[2] for group in groups), default=0)
    assert [group[3] for group in groups] == [0, *(group[4] for group in groups)][: len(groups)]
    assert len(runs) == (groups[-1][4] if groups else 0)
    for begin, end in zip(borders, borders[1:], strict=False):
        rows = [row for group in groups[begin:end] for row in progression(*group[:3], num_tokens)]
        assert len(set(rows)) == len(rows)
    for _, _, _, first_run, end_run in groups:
        assert first_run < end_run
        columns = [c for run in runs[first_run:end_run] for c in progression(*run[:3], num_tokens)]
        assert len(set(columns)) == len(columns)
    assert all(-UNBOUNDED <= run[3] <= run[4] <= UNBOUNDED for run in runs)


def progression(start, stride, length, num_tokens):
    assert start >= 0 and stride >= 1 and length >= 1
    assert start + stride * (length - 1) < num_tokens
    return range(start, start + stride * length, stride)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64])
def test_dense_graph_is_its_mask(num_tokens, causal):
    check_graph(Dense(causal=causal), num_tokens, 3)


@given(
    num_tokens=st.integers(0, 40),
    window=st.integers(0, 45),
    global_tokens=st.integers(0, 45),
    causal=st.booleans(),
)
@FEW
def test_sliding_window_graph_is_its_mask(num_tokens, window, global_tokens, causal):
    check_graph(
        SlidingWindow(window=window, global_tokens=global_tokens, causal=causal), num_tokens, 2
    )


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), causal=st.booleans())
@FEW
def test_documents_graph_is_its_mask(lengths, causal):
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    check_graph(Documents(cu_seqlens=borders, causal=causal), borders[-1], 2)


@st.composite
def dilated(draw, longest=40, most_branches=4):
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most_branches))
    return Dilated(
        segment_lengths=lengths,
        dilation_rates=[draw(st.integers(1, min(length, 12))) for length in lengths],
        causal=draw(st.booleans()),
        overlap=draw(st.sampled_from(["multiset", "set"])),
        offset=draw(st.sampled_from(["head", "group"])),
        heads=draw(st.sampled_from(["all", "grouped"])),
    )


@given(pattern=dilated(), num_tokens=st.integers(0, 60), num_heads=st.integers(1, 4))
@settings(max_examples=120)
def test_dilated_graph_is_its_mask(pattern, num_tokens, num_heads):
    check_graph(pattern, num_tokens, num_heads)


@given(pattern=dilated(longest=16, most_branches=3), num_heads=st.integers(5, 13))
@settings(max_examples=15)
def test_dilated_graph_is_its_mask_with_many_heads(pattern, num_heads):
    check_graph(pattern, 23, num_heads)


@given(
    num_tokens=st.integers(0, 40),
    num_heads=st.integers(1, 3),
    block_size=st.integers(1, 9),
    local_blocks=st.integers(0, 3),
    stride_blocks=st.integers(0, 4),
    global_blocks=st.integers(0, 3),
    random_blocks=st.integers(0, 4),
    seed=st.integers(0, 3),
    causal=st.booleans(),
)
@FEW
def test_block_sparse_graph_is_its_mask(num_tokens, num_heads, **arguments):
    check_graph(BlockSparse(**arguments), num_tokens, num_heads)


@st.composite
def block_lists(draw):
    num_blocks = draw(st.integers(1, 6))
    row = st.lists(st.integers(0, num_blocks - 1), max_size=num_blocks, unique=True)
    lists = st.lists(row, min_size=num_blocks, max_size=num_blocks)
    # The last block of queries sees the first of keys, so that some pair exists.
    return [
        sorted({*found, 0}) if i == num_blocks - 1 else found
        for i, found in enumerate(draw(lists))
    ]


@given(lists=block_lists(), missing=st.integers(0, 2), causal=st.booleans())
@FEW
def test_block_lists_graph_is_its_mask(lists, missing, causal):
    pattern = BlockSparse(block_size=3, causal=causal, block_lists=lists)
    check_graph(pattern, 3 * len(lists) - missing, 2)


@given(lists=block_lists(), causal=st.booleans())
@FEW
def test_block_lists_of_each_head_have_a_graph_each(lists, causal):
    reverse = [sorted({len(lists) - 1 - j for j in row} | {0}) for row in lists]
    pattern = BlockSparse(block_size=2, causal=causal, block_lists=[lists, reverse])
    check_graph(pattern, 2 * len(lists) - 1, 2)


@given(
    num_tokens=st.integers(0, 50),
    levels=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from([-1, 1, 2, 5, 8, 13, 30])),
        min_size=1,
        max_size=3,
    ),
    block_size=st.integers(1, 8),
    causal=st.booleans(),
)
@FEW
def test_hierarchical_graph_is_its_mask(num_tokens, levels, block_size, causal):
    check_graph(Hierarchical(levels=levels, block_size=block_size, causal=causal), num_tokens, 2)


def test_dense_causal_graph_is_one_group_with_one_run():
    graph = Dense(causal=True).graph(1000)
    assert graph.rows.groups.tolist() == [[0, 1, 1000, 0, 1]]
    assert graph.rows.runs.tolist() == [[0, 1, 1000, 0, UNBOUNDED]]
    assert graph.cols.runs.tolist() == [[0, 1, 1000, -UNBOUNDED, 0]]


def test_sliding_window_graph_has_the_same_size_at_any_length():
    pattern = SlidingWindow(window=100, global_tokens=3, causal=True)
    assert pattern.graph(2**20).nbytes == pattern.graph(2**10).nbytes < 1000


def test_equal_neighbouring_block_rows_share_one_group():
    graph = BlockSparse(block_size=4, local_blocks=8).graph(32)
    assert graph.rows.groups.tolist() == [[0, 1, 32, 0, 1]]
    assert graph.rows.runs[:, :3].tolist() == [[0, 1, 32]]


def test_runs_wholly_in_the_past_carry_no_band():
    graph = BlockSparse(block_size=4, local_blocks=0, global_blocks=1, causal=True).graph(12)
    past = [-UNBOUNDED, UNBOUNDED]
    causal = [0, UNBOUNDED]
    # Block row 1 sees blocks 0 and 1 as one run.
    expected = [[0, 1, 4, *causal], [0, 1, 8, *causal], [0, 1, 4, *past], [8, 1, 4, *causal]]
    assert graph.rows.runs.tolist() == expected


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "make",
    [
        lambda causal: Dilated(
            segment_lengths=[64, 128, 512], dilation_rates=[1, 2, 6], causal=causal
        ),
        lambda causal: BlockSparse(block_size=16, global_blocks=1, random_blocks=2, causal=causal),
        lambda causal: Hierarchical(levels=[(16, 64), (64, 128)], block_size=16, causal=causal),
    ],
    ids=["dilated", "block_sparse", "hierarchical"],
)
def test_memory_of_a_graph_grows_with_its_segments(make, causal):
    pattern = make(causal)
    short, long = pattern.graph(2**11, 2).nbytes, pattern.graph(2**14, 2).nbytes
    assert 6 * short < long < 10 * short


def test_edges_of_a_long_graph_are_those_of_the_formula():
    num_tokens, window = 2**17, 300
    inside = num_tokens * (2 * window + 1) - window * (window + 1)
    assert SlidingWindow(window=window).edges(num_tokens) == inside
    assert Dense(causal=True).density(num_tokens) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("num_tokens", [-1, 2**30, 2.0, True], ids=repr)
def test_impossible_lengths_are_refused(num_tokens):
    with pytest.raises(ValueError, match="^num_tokens="):
        Dense().graph(num_tokens)


@pytest.mark.parametrize("num_heads", [0, -1, 1.0], ids=repr)
def test_impossible_numbers_of_heads_are_refused(num_heads):
    with pytest.raises(ValueError, match="^num_heads="):
        Dense().graph(4, num_heads)


def test_a_graph_is_built_once():
    assert Dense().graph(8, 2) is Dense().graph(8, 2)
    assert Dense().graph(8, 2) is not Dense(causal=True).graph(8, 2)

"""Masks against small matrices and loops written by hand, and what constructors refuse."""

import itertools

import numpy as np
import pytest
import torch

from dpflash import PrivateRefusal
from dpflash.patterns import BlockSparse, Dense, Documents, Hierarchical, SlidingWindow


def picture(mask):
    return ["".join(".#"[int(m)] for m in row) for row in mask.tolist()]


def test_dense_sees_all_or_all_before():
    assert picture(Dense().mask(3)[0]) == ["###", "###", "###"]
    assert picture(Dense(causal=True).mask(3, 2)[1]) == ["#..", "##.", "###"]


def test_window_reaches_to_both_sides_and_globals_reach_everywhere():
    assert picture(SlidingWindow(window=1).mask(4)[0]) == ["##..", "###.", ".###", "..##"]
    assert picture(SlidingWindow(window=0, global_tokens=1).mask(4)[0]) == [
        "####",
        "##..",
        "#.#.",
        "#..#",
    ]
    causal = SlidingWindow(window=1, global_tokens=1, causal=True)
    assert picture(causal.mask(4)[0]) == ["#...", "##..", "###.", "#.##"]


def test_documents_see_themselves_only():
    pattern = Documents(cu_seqlens=(0, 0, 2, 3, 3))
    assert picture(pattern.mask(3)[0]) == ["##.", "##.", "..#"]
    assert picture(Documents(cu_seqlens=(0, 2, 3), causal=True).mask(3)[0]) == [
        "#..",
        "##.",
        "..#",
    ]


@pytest.mark.parametrize(
    "borders",
    [[0, 2, 5], torch.tensor([0, 2, 5], dtype=torch.int32), np.array([0, 2, 5])],
    ids=["list", "tensor", "array"],
)
def test_borders_of_documents_may_be_lists_tensors_or_arrays(borders):
    pattern = Documents(cu_seqlens=borders)
    assert pattern == Documents(cu_seqlens=(0, 2, 5))
    assert all(type(border) is int for border in pattern.cu_seqlens)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("local_blocks", "stride_blocks", "global_blocks"),
    [(0, 0, 0), (1, 0, 2), (0, 3, 0), (2, 4, 1)],
)
def test_block_sparse_follows_its_rules(local_blocks, stride_blocks, global_blocks, causal):
    pattern = BlockSparse(
        block_size=3,
        local_blocks=local_blocks,
        stride_blocks=stride_blocks,
        global_blocks=global_blocks,
        causal=causal,
    )
    mask = pattern.mask(32)[0]
    for t, s in itertools.product(range(32), repeat=2):
        i, j = t // 3, s // 3
        near = abs(i - j) <= local_blocks
        strided = stride_blocks > 0 and (i - j) % stride_blocks == 0
        everywhere = min(i, j) < global_blocks
        assert mask[t, s] == ((near or strided or everywhere) and (t >= s or not causal))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("random_blocks", [1, 3, 40])
def test_random_blocks_are_distinct_and_as_many_as_asked_for(random_blocks, causal):
    pattern = BlockSparse(block_size=1, random_blocks=random_blocks, causal=causal)
    pairs = pattern._random_pairs(20, head=3).tolist()
    assert len({tuple(pair) for pair in pairs}) == len(pairs)
    for i in range(20):
        blocks = [j for row, j in pairs if row == i]
        assert len(blocks) == min(random_blocks, i if causal else 20)
        assert all(0 <= j < (i if causal else 20) for j in blocks)


def test_random_blocks_depend_on_seed_and_head_only():
    def pattern(seed):
        return BlockSparse(block_size=2, local_blocks=0, random_blocks=2, seed=seed)

    first = pattern(5).mask(40, 3)
    assert torch.equal(first, pattern(5).mask(40, 3))
    assert torch.equal(first, pattern(5).mask(40, 7)[:3])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, pattern(6).mask(40, 3))


def test_random_blocks_are_uniform():
    """20,000 draws of 3 out of 10: each block 6,000 times, beyond 6 sigma once in 5e7 runs."""
    pattern = BlockSparse(block_size=1, random_blocks=3, seed=1)
    drawn = [pattern._random_pairs(10, head)[:, 1] for head in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=10)
    assert counts.sum() == 60_000
    assert np.abs(counts - 6000).max() < 6 * np.sqrt(20_000 * 0.3 * 0.7)


def test_block_lists_say_what_is_seen_and_rows_may_be_empty():
    pattern = BlockSparse(block_size=2, block_lists=[[1], [], [0, 2]])
    assert pattern.block_lists == ((1,), (), (0, 2))
    assert picture(pattern.mask(5)[0]) == ["..##.", "..##.", ".....", ".....", "##..#"]
    per_head = BlockSparse(block_size=2, block_lists=[[[0], []], [[], [1]]])
    assert [picture(mask) for mask in per_head.mask(3, 2)] == [
        ["##.", "##.", "..."],
        ["...", "...", "..#"],
    ]


def test_hierarchical_is_the_union_of_its_levels():
    levels = [(2, 4), (4, 12), (9, -1)]
    mask = Hierarchical(levels=levels, block_size=2).mask(23)[0]
    for t, s in itertools.product(range(23), repeat=2):
        i, j = t // 2, s // 2
        seen = i == j or abs(i - j) <= 1  # (2, 4): every block, two blocks wide
        seen = seen or (i % 2 == 0 and abs(i - j) <= 3)  # (4, 12): six blocks wide
        seen = seen or i % 4 == 0  # (9, -1)
        assert mask[t, s] == seen


BAD = [
    (Dense, "causal", {"causal": None}),
    (SlidingWindow, "window", {"window": -1}),
    (SlidingWindow, "window", {"window": True}),
    (SlidingWindow, "global_tokens", {"window": 1, "global_tokens": -1}),
    (Documents, "cu_seqlens", {"cu_seqlens": [0]}),
    (Documents, "cu_seqlens", {"cu_seqlens": [1, 4]}),
    (Documents, "cu_seqlens", {"cu_seqlens": [0, 4, 3]}),
    (Documents, "cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 4.0])}),
    (Documents, "cu_seqlens", {"cu_seqlens": torch.tensor([[0, 4]])}),
    (Documents, "cu_seqlens", {"cu_seqlens": 4}),
    (BlockSparse, "block_size", {"block_size": 0}),
    (BlockSparse, "local_blocks", {"block_size": 4, "local_blocks": -1}),
    (BlockSparse, "stride_blocks", {"block_size": 4, "stride_blocks": -1}),
    (BlockSparse, "global_blocks", {"block_size": 4, "global_blocks": -1}),
    (BlockSparse, "random_blocks", {"block_size": 4, "random_blocks": 0.5}),
    (BlockSparse, "seed", {"block_size": 4, "seed": -1}),
    (BlockSparse, "local_blocks", {"block_size": 4, "local_blocks": 2, "block_lists": [[0]]}),
    (BlockSparse, "random_blocks", {"block_size": 4, "random_blocks": 1, "block_lists": [[0]]}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": [[0], [2]]}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": [[0, 0]]}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": [[0.0]]}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": []}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": [[], []]}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": [[[0], [1]], [[0]]]}),
    (BlockSparse, "block_lists", {"block_size": 4, "block_lists": [[[0]], [0]]}),
    (BlockSparse, "block_lists", {"block_size": 4, "causal": True, "block_lists": [[1], []]}),
    (Hierarchical, "levels", {"levels": []}),
    (Hierarchical, "levels", {"levels": [(0, 4)]}),
    (Hierarchical, "levels", {"levels": [(4, -2)]}),
    (Hierarchical, "levels", {"levels": [(4,)]}),
    (Hierarchical, "levels", {"levels": [4, 4]}),
    (Hierarchical, "block_size", {"levels": [(4, 4)], "block_size": 0}),
]


@pytest.mark.parametrize(
    ("pattern", "name", "arguments"),
    BAD,
    ids=[f"{pattern.__name__}-{name}-{i}" for i, (pattern, name, _) in enumerate(BAD)],
)
def test_bad_arguments_are_refused_by_name(pattern, name, arguments):
    kind = PrivateRefusal if name == "cu_seqlens" else ValueError
    with pytest.raises(kind, match=f"^{name}=.*expected.*; "):
        pattern(**arguments)


SIZES = [
    ("num_tokens", Documents(cu_seqlens=[0, 4]), 5, 1),
    ("num_tokens", BlockSparse(block_size=2, block_lists=[[0], [1]]), 2, 1),
    ("num_tokens", BlockSparse(block_size=2, block_lists=[[0], [1]]), 5, 1),
    ("num_heads", BlockSparse(block_size=2, block_lists=[[[0]], [[0]]]), 2, 3),
]


@pytest.mark.parametrize(("name", "pattern", "num_tokens", "num_heads"), SIZES)
def test_sizes_that_a_pattern_does_not_take_are_refused(name, pattern, num_tokens, num_heads):
    for call in (pattern.graph, pattern.mask, pattern.edges, pattern.describe):
        with pytest.raises(ValueError, match=f"^{name}=.*expected.*; "):
            call(num_tokens, num_heads)

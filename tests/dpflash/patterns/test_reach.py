"""Reach over layers is that of the patterns' own masks."""

import pytest
import torch

from dpflash.patterns import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Hierarchical,
    SlidingWindow,
    reach,
)
from dpflash.patterns.reach import reaches_all

_RINGS = (
    ((0,), (0, 1), (1, 2), (2, 3)),
    ((0,), (0,), (1,), (0, 2)),
    ((1,), (2,), (2,), (0, 3)),
)


def _by_masks(pattern, tokens, heads):
    sees = (pattern.mask(tokens, heads) > 0).any(0)
    reached = torch.zeros(tokens, dtype=torch.bool)
    reached[-1] = True
    for _ in range(tokens):
        reached = reached | sees[reached].any(0)
    return bool(reached.all())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("make", "arguments", "heads"),
    [
        (Dense, {}, 1),
        (SlidingWindow, {"window": 0}, 1),
        (SlidingWindow, {"window": 0, "global_tokens": 2}, 1),
        (SlidingWindow, {"window": 1}, 1),
        (BlockSparse, {"block_size": 8, "local_blocks": 0}, 1),
        (BlockSparse, {"block_size": 8, "local_blocks": 0, "global_blocks": 1}, 1),
        (BlockSparse, {"block_size": 8, "local_blocks": 0, "stride_blocks": 2}, 1),
        (BlockSparse, {"block_size": 8, "local_blocks": 1}, 1),
        (BlockSparse, {"block_size": 8, "local_blocks": 0, "random_blocks": 1}, 1),
        (BlockSparse, {"block_size": 8, "local_blocks": 0, "random_blocks": 4}, 4),
        (BlockSparse, {"block_size": 24, "block_lists": _RINGS[0]}, 1),
        (BlockSparse, {"block_size": 24, "block_lists": _RINGS[1]}, 1),
        (BlockSparse, {"block_size": 24, "block_lists": _RINGS[2]}, 1),
        (Dilated, {"segment_lengths": (16, 32), "dilation_rates": (1, 2)}, 2),
        (Dilated, {"segment_lengths": (16, 96), "dilation_rates": (1, 2)}, 1),
        (Dilated, {"segment_lengths": (16, 96), "dilation_rates": (1, 2)}, 2),
        (Dilated, {"segment_lengths": (96,), "dilation_rates": (3,)}, 2),
        (Dilated, {"segment_lengths": (96,), "dilation_rates": (3,)}, 3),
        (Dilated, {"segment_lengths": (8, 96), "dilation_rates": (1, 4), "heads": "grouped"}, 4),
        (Hierarchical, {"levels": ((16, 1), (32, -1)), "block_size": 8}, 1),
        (Hierarchical, {"levels": ((8, 16),), "block_size": 8}, 1),
    ],
    ids=str,
)
def test_reach_is_that_of_the_mask(make, arguments, heads, causal):
    pattern = make(**arguments, causal=causal)
    # Lists are of four blocks.
    for tokens in (95, 96) if "block_lists" in arguments else (1, 7, 95, 96):
        assert reaches_all(pattern, tokens, heads) is _by_masks(pattern, tokens, heads)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_windows_reach_all_step_by_step_too(monkeypatch, causal):
    # Without their short cut.
    monkeypatch.setattr(reach, "SlidingWindow", Adaptive)
    assert reaches_all(SlidingWindow(window=5, causal=causal), 96)


def test_blocks_that_see_themselves_alone_do_not_reach_all():
    alone = BlockSparse(block_size=128, local_blocks=0, causal=True)
    assert reaches_all(alone, 128) and not reaches_all(alone, 2048)


def test_segments_that_no_branch_joins_do_not_reach_all():
    pattern = Dilated(segment_lengths=(2048, 8192), dilation_rates=(1, 4), causal=True)
    assert reaches_all(pattern, 8192, 4) and not reaches_all(pattern, 16384, 4)


def test_a_block_that_is_chosen_may_be_any():
    assert reaches_all(Adaptive(keep=2, causal=True), 4096)

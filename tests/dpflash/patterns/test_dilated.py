import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.patterns import Dilated

LONGNET = {
    "segment_lengths": (2048, 4096, 8192, 16384, 32768),
    "dilation_rates": (1, 2, 4, 6, 12),
}


def counted(lengths, rates, offsets, num_tokens, causal):
    """Every (query, key) of every branch, by walking through the segments."""
    seen = Counter()
    for length, rate, offset in zip(lengths, rates, offsets, strict=True):
        for begin in range(0, num_tokens, length):
            live = range(num_tokens)[begin : begin + length][offset::rate]
            for query in live:
                for key in live:
                    if key <= query or not causal:
                        seen[query, key] += 1
    return seen


def as_matrix(seen, num_tokens):
    matrix = torch.zeros(num_tokens, num_tokens)
    for pair, m in seen.items():
        matrix[pair] = m
    return matrix


@given(
    branches=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    num_tokens=st.integers(1, 45),
    num_heads=st.integers(1, 13),
    data=st.data(),
    causal=st.booleans(),
)
@settings(max_examples=60)
def test_multiplicity_counts_the_branches_that_hold_a_pair(
    branches, num_tokens, num_heads, data, causal
):
    lengths = [max(branch) for branch in branches]
    rates = [min(branch) for branch in branches]
    head = data.draw(st.integers(0, num_heads - 1))
    offset = data.draw(st.sampled_from(["head", "group"]))
    pattern = Dilated(segment_lengths=lengths, dilation_rates=rates, causal=causal, offset=offset)
    if offset == "head":
        offsets = [head % rate for rate in rates]
    else:
        offsets = [math.floor(head / math.ceil(num_heads / rate)) for rate in rates]
    seen = counted(lengths, rates, offsets, num_tokens, causal)
    expected = as_matrix(seen, num_tokens)
    assert torch.equal(pattern.mask(num_tokens, num_heads)[head], expected)
    graph = pattern.graph(num_tokens, num_heads).multiplicity()[head]
    torch.testing.assert_close(graph.float(), expected)


def test_set_counts_each_key_once():
    arguments = {"segment_lengths": (4, 8), "dilation_rates": (1, 2)}
    multiset = Dilated(**arguments).mask(11)
    once = Dilated(**arguments, overlap="set").mask(11)
    assert multiset.max() == 2
    assert torch.equal(once, (multiset > 0).float())
    graph = Dilated(**arguments, overlap="set").graph(11)
    assert not graph.rows.log_multiplicity.any()


def test_group_offset_is_that_of_torchscale_and_not_a_reordering_of_heads():
    arguments = {"segment_lengths": (8, 8), "dilation_rates": (2, 4)}
    # Head 1 of 4: o_2 = 0 and o_4 = 1, so no token is live in both.
    assert Dilated(**arguments, offset="group").mask(8, 4)[1].max() == 1
    assert Dilated(**arguments, offset="head").mask(8, 4).amax((1, 2)).tolist() == [2] * 4


@pytest.mark.parametrize(
    ("num_heads", "branch_of_head"),
    [(1, "0"), (2, "01"), (3, "012"), (4, "0012"), (5, "00112"), (8, "00011122")],
    ids=lambda value: f"H{value}",
)
def test_grouped_heads_are_split_over_the_branches(num_heads, branch_of_head):
    lengths, rates = (4, 8, 12), (1, 2, 3)
    mask = Dilated(segment_lengths=lengths, dilation_rates=rates, heads="grouped").mask(
        12, num_heads
    )
    for head, branch in enumerate(map(int, branch_of_head)):
        only = [[lengths[branch]], [rates[branch]], [head % rates[branch]]]
        assert torch.equal(mask[head], as_matrix(counted(*only, 12, False), 12))


def test_heads_with_equal_offsets_share_a_variant():
    graph = Dilated(segment_lengths=(8, 12), dilation_rates=(2, 3)).graph(30, 13)
    assert graph.row_variants.tolist() == [h % 6 for h in range(13)]
    assert len(graph.rows.variants) - 1 == 6


def test_a_rate_behind_the_end_of_a_short_sequence_leaves_heads_without_keys():
    mask = Dilated(segment_lengths=(64,), dilation_rates=(8,)).mask(3, 8)
    assert mask.sum((1, 2)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    graph = Dilated(segment_lengths=(64,), dilation_rates=(8,)).graph(3, 8)
    assert graph.edges() == 3
    assert graph.multiplicity().sum((1, 2)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_rates_without_common_factors_on_a_short_sequence_stay_small():
    """Their least common multiple is 2.4e9, the classes are no more than the tokens."""
    rates = (29, 31, 37, 41, 43, 41)
    pattern = Dilated(segment_lengths=(200,) * 6, dilation_rates=rates)
    graph = pattern.graph(150, 2)
    assert torch.equal(graph.multiplicity().round().float(), pattern.mask(150, 2))
    assert len(graph.rows.groups) <= 2 * 150


def test_rows_of_one_coarse_branch_go_through_the_borders_of_the_others():
    graph = Dilated(segment_lengths=(16, 4096), dilation_rates=(2, 1)).graph(4096)
    odd = [group for group in graph.rows.groups.tolist() if group[0] % 2]
    assert [group[:3] for group in odd] == [[1, 2, 2048]]


def test_regions_of_equal_multiplicity_become_one_run():
    pattern = Dilated(segment_lengths=(8, 64), dilation_rates=(1, 1), overlap="set")
    assert len(pattern.graph(64).rows.runs) == 8
    assert len(Dilated(segment_lengths=(8, 64), dilation_rates=(1, 1)).graph(64).rows.runs) == 22


def test_classes_of_equal_multiplicity_become_one_run():
    pattern = Dilated(segment_lengths=(8, 8), dilation_rates=(1, 2), overlap="set")
    assert [run[:3] for run in pattern.graph(8).rows.runs.tolist()] == [[0, 1, 8], [0, 1, 8]]


def test_a_million_tokens_of_longnet_take_tables_of_some_megabytes():
    pattern = Dilated(**LONGNET, causal=True)
    graph = pattern._build(2**20, 8)
    assert len(graph.rows.variants) - 1 == 8
    assert graph.nbytes < 16 * 2**20
    # No more per token than the graph of one period of segments.
    assert graph.nbytes < 1.1 * 2**20 / 98304 * pattern.graph(98304, 8).nbytes


def test_edges_of_a_million_tokens_are_those_of_dilation():
    pattern = Dilated(**LONGNET, overlap="set")
    # The 32768 are no multiple of 12: live tokens of a segment, rounded up for the first offsets.
    one = Dilated(segment_lengths=(32768,), dilation_rates=(12,))
    live = [math.ceil((32768 - h) / 12) for h in range(8)]
    assert one.edges(2**20, 8) == 32 * sum(n * n for n in live)
    assert pattern.edges(2**20, 8) > 8 * 2**20 * 2048


BAD = [
    ("segment_lengths", {"segment_lengths": [], "dilation_rates": []}),
    ("segment_lengths", {"segment_lengths": [0], "dilation_rates": [1]}),
    ("segment_lengths", {"segment_lengths": [4.0], "dilation_rates": [1]}),
    ("segment_lengths", {"segment_lengths": 4, "dilation_rates": [1]}),
    ("segment_lengths", {"segment_lengths": "48", "dilation_rates": [1, 1]}),
    ("dilation_rates", {"segment_lengths": [4], "dilation_rates": [0]}),
    ("dilation_rates", {"segment_lengths": [4], "dilation_rates": [-1]}),
    ("dilation_rates", {"segment_lengths": [4], "dilation_rates": [True]}),
    ("dilation_rates", {"segment_lengths": [4], "dilation_rates": [5]}),
    ("dilation_rates", {"segment_lengths": [4, 8], "dilation_rates": [1]}),
    ("overlap", {"segment_lengths": [4], "dilation_rates": [1], "overlap": "sum"}),
    ("offset", {"segment_lengths": [4], "dilation_rates": [1], "offset": "zero"}),
    ("heads", {"segment_lengths": [4], "dilation_rates": [1], "heads": "some"}),
    ("causal", {"segment_lengths": [4], "dilation_rates": [1], "causal": 1}),
]


@pytest.mark.parametrize(
    ("name", "arguments"), BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)]
)
def test_bad_arguments_are_refused_by_name(name, arguments):
    with pytest.raises(ValueError, match=f"^{name}=.*expected.*; "):
        Dilated(**arguments)

"""Pieces with a bias for each pair, and results that are written before anything is summed."""

import pytest
import torch

from dpflash.kernels import attention_cpu_plan, attention_cpu_work
from dpflash.kernels.attention_cpu_batch import BIASED, CAUSAL
from dpflash.patterns import BlockSparse, Dense, Dilated, SlidingWindow

LONGNET = ((512, 1024, 2048), (1, 2, 4))


def dilated(lengths, rates, **options):
    return Dilated(segment_lengths=lengths, dilation_rates=rates, **options)


def batches_of(pattern, tokens, heads=4):
    return attention_cpu_plan.make_plan(pattern.graph(tokens, heads).rows)


def area(batches):
    return sum(b.column_start.numel() * b.rows * b.columns for b in batches)


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_interleaving_rows_up_to_the_diagonal_are_tiles_of_contiguous_rows(tokens):
    pattern = dilated(*LONGNET, causal=True)
    batches = batches_of(pattern, tokens)
    assert not any(batch.kind == CAUSAL for batch in batches)
    tiles = [b for b in batches if b.kind == BIASED and b.bias.window.rows > 1]
    assert {(b.rows, b.row_stride, b.column_stride) for b in tiles} == {(128, 1, 1)}
    assert sum(b.rows * len(b.row_start) for b in tiles) == 4 * tokens
    assert area(batches) < 1.25 * pattern.edges(tokens, 4)


def test_tiles_of_a_cell_share_one_bias_with_each_other_and_with_other_plans():
    pattern = dilated(*LONGNET, causal=True)
    tiles = [b for b in batches_of(pattern, 4096) if b.kind == BIASED and b.bias.window.rows > 1]
    biases = {id(b.bias) for b in tiles}
    assert len(biases) == 4  # one for each offset of heads
    clipped = attention_cpu_plan.make_plan(pattern.graph(4096, 4).rows, (0, 3000))
    own = {id(b.bias) for b in clipped if b.kind == BIASED and b.bias.window.rows > 1} - biases
    # Of the interval that the range cuts, each of its four tiles at most.
    assert len(own) <= 4 * 4


def test_columns_of_several_weights_that_all_rows_see_are_one_piece():
    pattern = dilated((2048, 4096), (1, 2))
    batches = batches_of(pattern, 4096, 2)
    assert {(b.rows, b.columns) for b in batches if b.kind == BIASED} == {(1024, 2048)}
    assert area(batches) == pattern.edges(4096, 2)


def test_few_rows_that_see_alike_are_tiles_too():
    pattern = dilated((256, 512), (1, 2))
    tiles = [b for b in batches_of(pattern, 1024, 2) if b.kind == BIASED]
    assert {(b.rows, b.row_stride, b.columns) for b in tiles} >= {(256, 1, 256)}


def test_a_long_interval_is_a_rectangle_and_two_diagonals():
    pattern = dilated((4096, 8192), (1, 2), causal=True)
    batches = batches_of(pattern, 8192, 2)
    tiles = [b for b in batches if b.kind == BIASED and b.bias.window.rows > 1]
    assert max(b.columns for b in tiles) == 2048
    assert area(batches) < 1.1 * pattern.edges(8192, 2)


@pytest.mark.parametrize("tokens", [128, 1024, 2048, 4096])
def test_dense_attention_stays_one_operation(tokens):
    (batch,) = batches_of(Dense(causal=True), tokens)
    assert batch.kind == CAUSAL and batch.rows == tokens


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_is_the_log_of_the_multiplicity(causal):
    pattern = dilated(*LONGNET, causal=causal)
    graph = pattern.graph(2048, 4)
    seen = torch.zeros(4, 2048, 2048, dtype=torch.float64)
    for batch in attention_cpu_plan.plan(graph).batches:
        rows = batch.row_stride * torch.arange(batch.rows).unsqueeze(1)
        columns = batch.column_stride * torch.arange(batch.columns)
        if batch.bias is None:
            weights = batch.seen() * batch.log_multiplicity.exp().view(-1, 1, 1)
        else:
            bias = batch.bias.dense(torch.float64)
            bias = bias[:, batch.bias_first : batch.bias_first + batch.columns]
            weights = bias.exp().expand(len(batch.row_start), batch.rows, -1)
        for piece, variant in enumerate(batch.variant.tolist()):
            for run, start in enumerate(batch.column_start[piece].tolist()):
                of_run = weights[piece][:, run * batch.columns : (run + 1) * batch.columns]
                seen[variant, batch.row_start[piece] + rows, start + columns] += of_run
    torch.testing.assert_close(seen, graph.multiplicity().double(), rtol=1e-12, atol=1e-12)


ONCE = {
    "diagonal-blocks": (BlockSparse(block_size=64, local_blocks=0, causal=True), True, True),
    "neighbouring-blocks": (BlockSparse(block_size=64, local_blocks=1, causal=True), True, False),
    "dilated": (dilated(*LONGNET, causal=True), True, False),
    "every-other-row": (dilated((512,), (2,), causal=True), False, False),
    "dilated-not-causal": (dilated(*LONGNET), True, False),
    "window": (SlidingWindow(window=300, causal=True), True, False),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_the_first_pieces_have_once_is_known(name):
    pattern, rows, columns = ONCE[name]
    q = torch.zeros(1, 4, 2048, 8)
    work = attention_cpu_work.Work.of(q, q, pattern.graph(2048, 4), None, False)
    assert (work.rows_once(), work.columns_once()) == (rows, columns)


def test_keys_that_several_heads_read_are_summed():
    pattern, *_ = ONCE["diagonal-blocks"]
    q = torch.zeros(1, 4, 2048, 8)
    work = attention_cpu_work.Work.of(q, q[:, :2], pattern.graph(2048, 4), None, False)
    assert work.rows_once() and not work.columns_once()


def test_rows_that_a_key_range_leaves_without_keys_are_not_had_once():
    pattern, *_ = ONCE["diagonal-blocks"]
    q, ranges = torch.zeros(2, 4, 2048, 8), torch.tensor([[0, 2048], [100, 2048]]).int()
    work = attention_cpu_work.Work.of(q, q, pattern.graph(2048, 4), ranges, False)
    assert not work.rows_once()


@pytest.mark.parametrize(
    "pattern",
    [
        BlockSparse(block_size=128, local_blocks=9, global_blocks=1, causal=True),
        SlidingWindow(window=700, causal=True),
        dilated(*LONGNET, causal=True),
        dilated((512, 1024), (1, 2)),
    ],
    ids=["blocks", "window", "dilated-causal", "dilated"],
)
def test_no_token_is_twice_in_what_is_written_at_once(pattern):
    tokens = 4096
    q, place = torch.zeros(1, 4, tokens, 64), torch.arange(tokens).view(1, 1, tokens, 1)
    work = attention_cpu_work.Work.of(q, q, pattern.graph(tokens, 4), None, False)
    together = 0
    for chunk in work.chunks():
        for where in (chunk.rows, chunk.columns):
            if isinstance(where, attention_cpu_work.View):
                of_one_head = where._replace(heads=attention_cpu_work.Heads(0, 1, 0, 1, 1))
                for taken in of_one_head.of(place):
                    assert taken.unique().numel() == taken.numel()
                together += where.pieces > 1
    assert (together > 0) == (not isinstance(pattern, SlidingWindow))  # whose pieces overlap

"""How the CPU executor joins and spreads its pieces, against the plain twin in float64."""

import dataclasses
import math

import pytest
import torch
import torch.utils.deterministic

from dpflash.kernels import attention_cpu, attention_cpu_plan, attention_cpu_work
from dpflash.kernels import attention_reference as twin
from dpflash.kernels.attention_cpu_batch import CAUSAL, FULL, Pieces, batch_stepped
from dpflash.kernels.attention_cpu_join import step
from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph
from dpflash.kernels.tile_shard import Chunk, restrict
from dpflash.patterns import BlockSparse, Dilated, SlidingWindow

ALL = (-UNBOUNDED, UNBOUNDED)
# Pieces as views, as gathered blocks, and as they are chosen.
SPREADS = {"views": 1, "gathered": 2**60, "chosen": None}
LONG = {
    "blocks": BlockSparse(block_size=128, local_blocks=9, global_blocks=1, causal=True),
    "few-blocks": BlockSparse(block_size=96, local_blocks=1, global_blocks=2, random_blocks=3),
    "window": SlidingWindow(window=1300, causal=True),
    "window-globals": SlidingWindow(window=1100, global_tokens=130),
    "dilated": Dilated(segment_lengths=(512, 1024, 2048), dilation_rates=(1, 2, 4)),
    "dilated-causal": Dilated(
        segment_lengths=(512, 1024, 2048), dilation_rates=(1, 2, 4), causal=True
    ),
    "dilated-long": Dilated(segment_lengths=(2300, 4600), dilation_rates=(1, 3), causal=True),
    "diagonal-blocks": BlockSparse(block_size=64, local_blocks=0, causal=True),
    "neighbouring-blocks": BlockSparse(block_size=64, local_blocks=2, causal=True),
    "dilated-set": Dilated(
        segment_lengths=(600, 1250), dilation_rates=(1, 3), causal=True, overlap="set"
    ),
}


@pytest.fixture(params=SPREADS)
def spread(request, monkeypatch):
    products = SPREADS[request.param]
    if products is not None:
        monkeypatch.setattr(attention_cpu_work, "_PRODUCTS", products)
    return request.param


@pytest.fixture
def fresh_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def make_tensors(graph, samples, heads, groups, dim):
    torch.manual_seed(0)
    q, do = (
        torch.randn(samples, heads, graph.num_queries, dim, dtype=torch.float64) for _ in range(2)
    )
    k, v = (
        torch.randn(samples, groups, graph.num_keys, dim, dtype=torch.float64) for _ in range(2)
    )
    return q, k, v, do


def run(module, graph, tensors, key_range=None):
    """All outputs by name."""
    q, k, v, do = tensors
    dlse = do[..., 0]
    o, lse = module.attention_forward(q, k, v, graph, 0.3, key_range=key_range)
    grads = module.attention_backward(
        *(do, dlse, q, k, v, o, lse, graph, 0.3), key_range=key_range
    )
    return {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def assert_matches_the_twin(graph, tensors, key_range=None):
    expected = run(twin, graph, tensors, key_range)
    outputs = run(attention_cpu, graph, tensors, key_range)
    for name, x in outputs.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("tokens", [2304, 2211])
@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name, tokens, spread):
    graph = LONG[name].graph(tokens, 4)
    assert_matches_the_twin(graph, make_tensors(graph, 1, 4, 2, 3))


@pytest.mark.parametrize("key_range", [None, [[0, 1111], [700, 1000]]], ids=["all", "some"])
@pytest.mark.parametrize(
    "name", ["blocks", "dilated-causal", "diagonal-blocks", "neighbouring-blocks"]
)
def test_what_memory_held_before_does_not_matter(name, key_range, spread, fresh_memory_is_nan):
    graph = LONG[name].graph(1111, 4)
    ranges = None if key_range is None else torch.tensor(key_range).int()
    assert_matches_the_twin(graph, make_tensors(graph, 2, 4, 4, 3), ranges)


def test_neighbouring_tiles_are_joined():
    graph = LONG["blocks"].graph(2304, 2)
    batches = attention_cpu_plan.plan(graph).batches
    full = [batch for batch in batches if batch.kind == FULL]
    assert max(batch.rows for batch in full) >= 512
    assert min(batch.column_unit for batch in full) == 128
    # Long intervals of columns, and at each end of a row's window what tiles do not share.
    assert sum(batch.rows * len(batch.row_start) for batch in batches) <= 2 * 2304
    scores = sum(b.column_start.numel() * b.rows * b.columns for b in batches)
    assert scores <= 1.1 * graph.edges() / 2


@pytest.mark.parametrize("size", [32, 64, 96, 128, 256])
def test_a_diagonal_goes_with_the_columns_before_it(size):
    pattern = BlockSparse(block_size=size, local_blocks=2, causal=True)
    graph = pattern.graph(8 * size, 2)
    batches = attention_cpu_plan.plan(graph).batches
    assert {batch.kind for batch in batches} == {CAUSAL}
    rows = torch.cat([batch.row_start for batch in batches])
    assert sorted(rows.tolist()) == list(range(0, 8 * size, size))
    assert {batch.column_start.shape[1] for batch in batches} == {1, 2, 3}
    assert_matches_the_twin(graph, make_tensors(graph, 1, 2, 1, 8))


def test_diagonals_of_another_weight_or_width_stay_alone():
    """The columns before them count twice, or are no multiple of their rows."""
    twice = [(0, 1, 128, *ALL), (128, 1, 128, 0, UNBOUNDED)]
    groups = [(128, 1, 128, 0, 2)]
    for runs, log in (twice, math.log(2)), ([(28, 1, 100, *ALL), twice[1]], 0.0):
        logs = torch.tensor([log, 0.0])
        borders = torch.tensor([0, 1]).int()
        side = Side(torch.tensor(groups).int(), torch.tensor(runs).int(), logs, borders, 1, 128)
        kinds = [(b.kind, b.column_start.shape[1]) for b in attention_cpu_plan.make_plan(side)]
        assert sorted(kinds) == [(FULL, 1), (CAUSAL, 1)]


def test_two_diagonals_of_the_same_rows_keep_their_weights():
    """Columns 128, 130, ... count once and columns 127, 129, ... twice."""

    def pieces(*columns):
        numbers = torch.tensor([(0, 0, 256, 2, 64, start, 2, 64, 0, 0) for start in columns])
        return Pieces(*numbers.unbind(1), torch.tensor([0.0, 2.0]).log1p())

    steps = step(pieces(128, 127), pieces(256, 255))
    batches = batch_stepped(steps.full, steps.diagonal)
    found = {tuple(batch.column_start[0].tolist()): batch for batch in batches}
    assert set(found) == {(128, 256), (127, 255)}
    for columns, batch in found.items():
        assert float(batch.log_multiplicity) == pytest.approx(math.log1p(2 * (columns[0] % 2)))


@pytest.mark.parametrize("begin", [700, 1300])
@pytest.mark.parametrize("name", LONG)
def test_shards_of_long_sequences(name, begin, spread):
    graph = LONG[name].graph(2211, 2)
    shard = restrict(graph, [Chunk(begin, 800, 0)], 800, [Chunk(100, 1200, 0)], 1200)
    assert_matches_the_twin(shard, make_tensors(shard, 1, 2, 2, 3))


HEADS = {
    "all": [0, 0, 0, 0, 0, 0, 0, 0],
    "turns": [0, 1, 0, 1, 0, 1, 0, 1],
    "fourth": [0, 1, 1, 1, 0, 2, 2, 2],
    "pairs": [1, 1, 0, 0, 1, 1, 2, 2],
    "halves": [0, 0, 0, 0, 1, 1, 1, 1],
    "odd": [0, 0, 0, 1, 1, 1, 2, 1],
    "samples": [[0, 1, 0, 1, 0, 1, 0, 1], [2, 2, 2, 2, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]],
}


@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "key-range"])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_any_variants_and_groups(name, groups, clipped, spread, monkeypatch):
    monkeypatch.setattr(attention_cpu_work, "_VIEWED", 5000)  # some heads at a time
    pattern = Dilated(segment_lengths=(48, 96), dilation_rates=(1, 3), causal=True)
    graph = pattern.graph(190, 3)
    heads = torch.tensor(HEADS[name], dtype=torch.int32)
    graph = dataclasses.replace(graph, row_variants=heads, plans={})
    key_range = torch.tensor([[5, 150], [0, 190], [5, 150]]).int() if clipped else None
    assert_matches_the_twin(graph, make_tensors(graph, 3, 8, groups, 5), key_range)


def test_tokens_before_heads_in_memory(spread):
    graph = LONG["blocks"].graph(1100, 4)
    tensors = make_tensors(graph, 2, 4, 2, 8)
    expected = run(attention_cpu, graph, tensors)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for name, x in run(attention_cpu, graph, by_token).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def overlapping():
    """A joined pair of tiles of 256 rows would share rows with another group's 512."""
    groups = [(0, 1, 256, 0, 1), (256, 1, 512, 1, 3)]
    runs = [(0, 1, 600, *ALL), (0, 1, 600, -UNBOUNDED, 600), (2000, 1, 600, *ALL)]
    logs, borders = torch.zeros(3, dtype=torch.float64), torch.tensor([0, 2]).int()
    side = Side(torch.tensor(groups).int(), torch.tensor(runs).int(), logs, borders, 2, 512)
    heads = torch.zeros(2, dtype=torch.int32)
    return TileGraph(768, 2600, side, side, heads, heads, False)


def test_no_row_is_twice_in_a_batch(spread):
    graph = overlapping()
    sizes = []
    for batch in attention_cpu_plan.plan(graph).batches:
        rows = batch.row_start.unsqueeze(1) + batch.row_stride * torch.arange(batch.rows)
        assert rows.unique().numel() == rows.numel()
        sizes.append(batch.rows)
    assert sizes.count(512) == 2
    assert_matches_the_twin(graph, make_tensors(graph, 1, 2, 1, 3))


@pytest.mark.parametrize("name", LONG)
def test_threads_change_no_bit_of_the_output_and_calls_none_of_all(name):
    graph = LONG[name].graph(2211, 6)
    tensors = [x.float() for x in make_tensors(graph, 1, 6, 2, 16)]
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 7, 7):
            torch.set_num_threads(threads)
            outputs.append(run(attention_cpu, graph, tensors))
    finally:
        torch.set_num_threads(before)
    for others in outputs[1:]:
        # The products in torch's backward depend on the number of threads.
        assert all(torch.equal(others[name], outputs[0][name]) for name in ("o", "lse"))
    assert all(torch.equal(x, outputs[3][name]) for name, x in outputs[2].items())


@pytest.mark.parametrize("key_range", [None, [[0, 9], [3, 4]], [[5, 5], [5, 5]]], ids=str)
@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 0), (2, 0, 2)], ids=str)
def test_without_samples_or_heads(sizes, key_range, spread):
    samples, heads, groups = sizes
    graph = LONG["blocks"].graph(300, 4)
    graph = dataclasses.replace(graph, row_variants=graph.row_variants[:heads], plans={})
    ranges = None if key_range is None else torch.tensor(key_range[:samples]).int().view(-1, 2)
    tensors = make_tensors(graph, samples, heads, groups, 4)
    outputs = run(attention_cpu, graph, tensors, ranges)
    assert outputs["o"].shape == tensors[0].shape and outputs["lse"].shape == tensors[0].shape[:3]
    assert outputs["dk"].shape == tensors[1].shape and (outputs["dk"] == 0).all()

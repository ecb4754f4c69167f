"""Restricted tile graphs against slices of the masks, and what shards merge to against the whole.

The kernels run here as in `test_attention_triton.py`: interpreted without a GPU.
"""

import importlib
import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch

from dpflash.kernels import attention, attention_cpu, attention_reference
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph, side_matrix
from dpflash.kernels.tile_shard import Chunk, is_empty, live_keys, restrict
from dpflash.patterns import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Documents,
    Hierarchical,
    SlidingWindow,
)
from dpflash.patterns.adaptive import runtime_graph
from dpflash.patterns.dense import cross_graph

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (37, 64, 101)
PATTERNS = {
    "dense": lambda tokens: Dense(),
    "causal": lambda tokens: Dense(causal=True),
    "window": lambda tokens: SlidingWindow(window=9, causal=False),
    "window-0": lambda tokens: SlidingWindow(window=0, causal=True),
    "window-globals": lambda tokens: SlidingWindow(window=18, global_tokens=2),
    "window-globals-causal": lambda tokens: SlidingWindow(window=5, global_tokens=3, causal=True),
    "documents": lambda tokens: Documents(cu_seqlens=(0, 1, 20, 20, tokens)),
    "documents-causal": lambda tokens: Documents(cu_seqlens=(0, 7, 24, tokens), causal=True),
    "dilated": lambda tokens: Dilated(segment_lengths=(16, 32, 64), dilation_rates=(1, 2, 4)),
    "dilated-causal": lambda tokens: Dilated(
        segment_lengths=(16, 32, 64), dilation_rates=(1, 2, 4), causal=True
    ),
    "dilated-odd": lambda tokens: Dilated(
        segment_lengths=(13, 29), dilation_rates=(3, 5), causal=True
    ),
    "dilated-set": lambda tokens: Dilated(
        segment_lengths=(10, 25), dilation_rates=(2, 3), overlap="set", offset="group"
    ),
    "dilated-grouped": lambda tokens: Dilated(
        segment_lengths=(10, 20, 40), dilation_rates=(1, 2, 3), causal=True, heads="grouped"
    ),
    "blocks": lambda tokens: BlockSparse(
        block_size=8, local_blocks=1, stride_blocks=3, global_blocks=1, random_blocks=1
    ),
    "blocks-causal": lambda tokens: BlockSparse(
        block_size=8, local_blocks=2, random_blocks=2, causal=True
    ),
    "block-lists": lambda tokens: BlockSparse(
        block_size=32, block_lists=[[i - 1] if i else [] for i in range(-(-tokens // 32))]
    ),
    "hierarchical": lambda tokens: Hierarchical(
        levels=((8, 16), (16, 32), (32, -1)), block_size=8
    ),
    "hierarchical-causal": lambda tokens: Hierarchical(
        levels=((8, 16), (16, 32), (32, -1)), block_size=8, causal=True
    ),
}


class Shard(NamedTuple):
    chunks: list[Chunk]
    size: int

    def positions(self):
        """Of the shard's tokens in the sequence, -1 for those that are in no chunk."""
        found = torch.full((self.size,), -1)
        for start, length, local in self.chunks:
            found[local : local + length] = torch.arange(start, start + length)
        return found


def contiguous(tokens, ranks):
    """Uneven stretches; the last rank may have no token."""
    size = -(-tokens // ranks) + 1
    borders = [min(rank * size, tokens) for rank in range(ranks + 1)]
    borders[-1] = tokens
    return [Shard([Chunk(a, b - a, 0)], b - a) for a, b in itertools.pairwise(borders)]


def zigzag(tokens, ranks):
    """Two stretches a rank, an early and a late one."""
    size = -(-tokens // (2 * ranks))
    shards = []
    for rank in range(ranks):
        chunks, local = [], 0
        for index in (rank, 2 * ranks - 1 - rank):
            start = min(index * size, tokens)
            length = min(size, tokens - start)
            chunks.append(Chunk(start, length, local))
            local += length
        shards.append(Shard(chunks, local))
    return shards


def scattered(tokens, ranks):
    """Three stretches a rank, in the wrong order, with tokens of no sequence between them."""
    size = -(-tokens // (3 * ranks))
    shards = []
    for rank in range(ranks):
        chunks, local = [], 1
        for index in (2 * ranks + rank, rank, ranks + rank):
            start = min(index * size, tokens)
            length = min(size, tokens - start)
            chunks.append(Chunk(start, length, local))
            local += length + 2
        shards.append(Shard(chunks, local))
    return shards


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "scattered": scattered}
RANKS = (1, 2, 3, 4)


def shards_of(tokens):
    """All layouts with all numbers of ranks."""
    return [layout(tokens, ranks) for layout in LAYOUTS.values() for ranks in RANKS]


def sliced(matrix, queries, keys):
    """`[H, T, S]` in the coordinates of two shards, 0 where there is no token."""
    padded = torch.nn.functional.pad(matrix, (0, 1, 0, 1))
    return padded[..., queries.positions()[:, None], keys.positions()]


def cols_matrix(graph):
    """`[H, T, S]` by the other side."""
    variants = graph.col_variants
    sides = [
        side_matrix(graph.cols, x, graph.num_keys, graph.num_queries).mT
        for x in variants.flatten().tolist()
    ]
    return torch.stack(sides).unflatten(0, variants.shape)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", PATTERNS)
def test_restricted_graphs_are_slices_of_the_mask(name, tokens):
    pattern = PATTERNS[name](tokens)
    graph, mask = pattern.graph(tokens, 3), pattern.mask(tokens, 3).double()
    for shards in shards_of(tokens):
        edges = 0
        for queries, keys in itertools.product(shards, shards):
            part = restrict(graph, *queries, *keys)
            expected = sliced(mask, queries, keys)
            torch.testing.assert_close(part.multiplicity(), expected)
            torch.testing.assert_close(cols_matrix(part), expected)
            seen = (expected > 0).any(1)
            assert torch.equal(live_keys(part), seen)
            assert is_empty(part) == (not seen.any())
            assert part.edges() == (expected > 0).sum()
            assert (part.num_queries, part.num_keys) == (queries.size, keys.size)
            edges += part.edges()
        assert edges == pattern.edges(tokens, 3)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", PATTERNS)
def test_what_nobody_sees_is_in_no_table(name, tokens):
    graph = PATTERNS[name](tokens).graph(tokens, 3)
    for shards in shards_of(tokens):
        for queries, keys in itertools.product(shards, shards):
            part = restrict(graph, *queries, *keys)
            for side in (part.rows, part.cols):
                assert (side.groups[:, 2] > 0).all() and (side.runs[:, 2] > 0).all()
                # Each run belongs to the one group whose runs follow those of the group before.
                assert torch.equal(side.groups[1:, 3], side.groups[:-1, 4])
                assert len(side.runs) == int(side.groups[-1, 4]) if len(side.groups) else True
                assert side.max_length == max(side.groups[:, 2].tolist(), default=0)
                assert side.max_groups == int(side.variants.diff().max())
            if not name.startswith("dilated"):
                assert is_empty(part) == (len(part.rows.groups) == 0)
    late = restrict(graph, [Chunk(0, 10, 0)], 10, [Chunk(tokens - 10, 10, 0)], 10)
    if graph.causal:
        assert len(late.rows.groups) == len(late.cols.groups) == 0


def test_a_dense_pair_of_shards_needs_no_mask():
    graph = Dense(causal=True).graph(4096, 2)
    part = restrict(graph, [Chunk(2048, 512, 0)], 512, [Chunk(512, 512, 0)], 512)
    assert part.rows.runs.tolist() == [[0, 1, 512, -UNBOUNDED, UNBOUNDED]]
    assert part.rows.is_complete(512) and not part.rows.has_fully_masked_rows(512)
    assert part.distance_shift == part.to(torch.device("cpu")).distance_shift == 1536
    again = restrict(part, [Chunk(100, 50, 0)], 50, [Chunk(0, 60, 0)], 60)
    assert again.distance_shift == 1636
    pairs = restrict(graph, [Chunk(0, 512, 0), Chunk(2048, 512, 512)], 1024, [Chunk(0, 9, 0)], 9)
    assert pairs.distance_shift == 0


def test_tables_do_not_grow_with_tokens():
    graph = SlidingWindow(window=300, global_tokens=4, causal=True).graph(2**24, 2)
    (queries, *_), size = zigzag(2**24, 8)[3]
    part = restrict(graph, [queries], size, [queries], size)
    assert part.nbytes < 1000 and bool(live_keys(part).any())


def test_live_keys_knows_bands_and_strides():
    groups = torch.tensor([[0, 3, 20, 0, 2], [1, 3, 20, 2, 3]], dtype=torch.int32)
    runs = torch.tensor(
        [[1, 7, 6, 2, 4], [0, 2, 20, -40, UNBOUNDED], [2, 5, 11, -1, 1]], dtype=torch.int32
    )
    logs = torch.tensor([0.0, -math.inf, math.log(3)], dtype=torch.float64)
    side = Side(groups, runs, logs, torch.tensor([0, 2], dtype=torch.int32), 2, 20)
    zero = torch.zeros(1, dtype=torch.int32)
    graph = TileGraph(60, 60, side, side, zero, zero, False)
    expected = side_matrix(side, 0, 60, 60)
    assert torch.equal(live_keys(graph)[0], (expected > 0).any(1))
    for begin in range(50):
        shard = Chunk(begin, 3, 0)
        part = restrict(graph, [Chunk(0, 60, 0)], 60, [shard], 3)
        assert torch.equal(live_keys(part)[0], (expected[begin : begin + 3] > 0).any(1))


def random_side(generator, rows, columns):
    """Rows by residue, runs of any stride, phase and band, most of them narrow."""
    modulus = generator.randint(1, 5)
    groups, runs = [], []
    for residue in range(modulus):
        begin = len(runs)
        for _ in range(generator.randint(0, 3)):
            start, step = generator.randrange(columns), generator.randint(1, 6)
            lo = generator.choice([-UNBOUNDED, generator.randint(-columns, rows)])
            hi = generator.choice([UNBOUNDED, max(lo, -columns) + generator.randint(0, 6)])
            runs.append((start, step, len(range(start, columns, step)), lo, hi))
        groups.append((residue, modulus, len(range(residue, rows, modulus)), begin, len(runs)))
    return Side(
        torch.tensor(groups, dtype=torch.int32),
        torch.tensor(runs, dtype=torch.int32).view(-1, 5),
        torch.tensor([generator.randint(1, 3) for _ in runs], dtype=torch.float64).log(),
        torch.tensor([0, modulus], dtype=torch.int32),
        modulus,
        -(-rows // modulus),
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_stride_and_band_is_restricted_exactly(seed):
    generator = random.Random(seed)
    tokens, others = generator.randint(20, 80), generator.randint(20, 80)
    rows, cols = random_side(generator, tokens, others), random_side(generator, others, tokens)
    zero = torch.zeros(1, dtype=torch.int32)
    graph = TileGraph(tokens, others, rows, cols, zero, zero, False)
    by_rows, by_cols = graph.multiplicity(), cols_matrix(graph)
    assert torch.equal(live_keys(graph), (by_cols > 0).any(1))
    for queries, keys in itertools.product(scattered(tokens, 3), scattered(others, 2)):
        part = restrict(graph, *queries, *keys)
        torch.testing.assert_close(part.multiplicity(), sliced(by_rows, queries, keys))
        expected = sliced(by_cols, queries, keys)
        torch.testing.assert_close(cols_matrix(part), expected)
        assert torch.equal(live_keys(part), (expected > 0).any(1))
        assert is_empty(part) == (not (expected > 0).any())


@pytest.mark.parametrize("chunk", [Chunk(0, 5, 4), Chunk(-1, 5, 0), Chunk(0, -1, 0)], ids=str)
def test_a_chunk_outside_of_its_shard_is_refused(chunk):
    graph = Dense().graph(8, 1)
    with pytest.raises(ValueError, match="queries has"):
        restrict(graph, [chunk], 8, [], 0)
    with pytest.raises(ValueError, match="keys has"):
        restrict(graph, [], 0, [chunk], 8)


def chosen_blocks(tokens, *, causal, samples=2, heads=2, dtype=torch.float64):
    """q, k and v `[B, H, T, D]` (H / 2 key heads) and the graph of the blocks they choose."""
    generator = torch.Generator().manual_seed(3)
    sizes = (samples, heads, tokens, 16), *((samples, heads // 2, tokens, 16),) * 2
    q, k, v = (torch.randn(x, generator=generator).to(DEVICE, dtype) for x in sizes)
    pattern = Adaptive(block_size=16, keep=3, causal=causal)
    blocks, gates = pattern.choose(q, k, 0.25)
    return q, k, v, runtime_graph(blocks, gates.float(), pattern, tokens)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_graphs_built_at_run_time_are_restricted_without_a_look(tokens, causal):
    *_, graph = chosen_blocks(tokens, causal=causal)
    whole = graph.multiplicity()
    for shards in (contiguous(tokens, 3), zigzag(tokens, 2), scattered(tokens, 2)):
        for queries, keys in itertools.product(shards, shards):
            part = restrict(graph, *queries, *keys)
            torch.testing.assert_close(part.multiplicity(), sliced(whole, queries, keys))
            torch.testing.assert_close(cols_matrix(part), sliced(whole, queries, keys))
            for side, of_whole in ((part.rows, graph.rows), (part.cols, graph.cols)):
                assert side.runtime and side.partial
                assert not side.is_complete(queries.size)
                assert side.has_fully_masked_rows(queries.size)
                copies = len(queries.chunks) * len(keys.chunks)
                assert len(side.runs) == copies * len(of_whole.runs)
                assert side.max_length >= side.groups[:, 2].max()
                assert side.max_groups >= side.variants.diff().max()
            # What is open in the whole is open here, not merely wide.
            assert (part.rows.runs[:, 4] == UNBOUNDED).all()
            assert (part.cols.runs[:, 3] == -UNBOUNDED).all()
            assert part.rows.to(DEVICE).partial
            assert not is_empty(part)
    with pytest.raises(ValueError, match="built at run time"):
        live_keys(graph)


# What a backend gives for the whole is what it gives for the shards, merged.


class Triton:
    """The launcher, which takes what `attention` hands on: a positive scale, do without NaN."""

    def __getattr__(self, name):
        pytest.importorskip("triton")
        return getattr(importlib.import_module("dpflash.kernels.attention_launch"), name)


BACKENDS = {"reference": attention_reference, "cpu": attention_cpu, "triton": Triton()}


@pytest.fixture(autouse=True)
def tensors_of_a_gpu_stay_out_of_the_kernels_of_the_cpu(request):
    callspec = getattr(request.node, "callspec", None)
    if DEVICE.type == "cuda" and callspec and callspec.params.get("backend") == "cpu":
        pytest.skip("tested where there is no GPU")


def make_inputs(tokens, heads=4, groups=2, samples=2, dim=16, dtype=torch.float64):
    """q, k, v, do and dlse."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(samples, heads, tokens, dim), *[(samples, groups, tokens, dim)] * 2]
    sizes += [sizes[0], sizes[0][:3]]
    return [torch.randn(x, generator=generator).to(DEVICE, dtype) for x in sizes]


def take(x, shard):
    """The shard's tokens of `[B, H, T, ...]`; NaN where there is none."""
    positions = shard.positions().to(x.device)
    taken = x[:, :, positions]
    taken[:, :, positions < 0] = math.nan
    return taken


def put(x, shard, values):
    """Adds to the shard's tokens of x; the others must be 0."""
    positions = shard.positions().to(x.device)
    x[:, :, positions[positions >= 0]] += values[:, :, positions >= 0].to(x.dtype)
    assert (values[:, :, positions < 0] == 0).all()


def merge(parts):
    """o and lse of all keys from those of some each, with guards for rows that see nothing."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    pivot = lse.masked_fill(lse == -math.inf, 0.0)
    return sum(o * (part - pivot).exp().unsqueeze(3) for o, part in parts), lse


def pairs(queries, keys, singly):
    """What is restricted at a time: all chunks, or one pair."""
    if not singly:
        return [(queries.chunks, keys.chunks)]
    return [([q], [k]) for q, k in itertools.product(queries.chunks, keys.chunks)]


def ring(backend, graph, tensors, shards, scale=0.25, singly=False, sinks=None, **options):
    """All outputs by name, shard by shard; sinks belong to the step of a rank with itself."""
    q, k, v, do, dlse = tensors
    run_grads = options.pop("run_grads", False)
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(q.shape, dtype=wide, device=DEVICE)
    lse = torch.zeros(q.shape[:3], dtype=wide, device=DEVICE)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=DEVICE) for x in (q, k, v))
    sums = {}
    for mine, queries in enumerate(shards):
        # Tokens of no sequence must not matter, whatever is there: the dispatcher sees to do.
        x, dx, dl = (take(y, queries).nan_to_num(0.5) for y in (q, do, dlse))
        steps = []
        for other, keys in enumerate(shards):
            y, z = (take(tensor, keys).nan_to_num(0.5) for tensor in (k, v))
            for n, (some, others) in enumerate(pairs(queries, keys, singly)):
                part = restrict(graph, some, queries.size, others, keys.size)
                own = {"sinks": sinks} if mine == other and n == 0 else {}
                steps.append((part, keys, y, z, (len(some), -1, len(others)), {**options, **own}))
        results = []
        for part, _, y, z, _, named in steps:
            found = backend.attention_forward(
                AttentionInputs(x, y, z, part, scale, **named), wide=True
            )
            assert found[0].dtype == found[1].dtype == wide
            results.append(found)
        x_o, x_lse = merge(results)
        lost = queries.positions().to(DEVICE) < 0
        if sinks is not None:
            # A sink is seen by rows of no sequence, too.
            x_o[:, :, lost], x_lse[:, :, lost] = 0.0, -math.inf
        blind = x_lse == -math.inf
        dx, dl = dx.masked_fill(blind.unsqueeze(3), 0.0), dl.masked_fill(blind, 0.0)
        put(o, queries, x_o)
        put(lse, queries, x_lse.masked_fill(lost, 0.0))
        for part, keys, y, z, shape, named in steps:
            own = AttentionInputs(x, y, z, part, scale, **named)
            grads = backend.attention_backward(
                dx, dl, x_o, x_lse, own, run_grads=run_grads, wide=True
            )
            assert grads.dq.dtype == grads.dk.dtype == grads.dv.dtype == wide
            put(dq, queries, grads.dq)
            put(dk, keys, grads.dk)
            put(dv, keys, grads.dv)
            for name in ("dsinks", "dslopes"):
                if (grad := getattr(grads, name)) is not None:
                    put(sums.setdefault(name, torch.zeros_like(lse)), queries, grad)
            if (grad := grads.dlog_multiplicity) is not None:
                of_runs = grad.view(shape).sum((0, 2))
                sums["dlog_multiplicity"] = sums.get("dlog_multiplicity", 0) + of_runs
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **sums}


def whole(graph, tensors, scale=0.25, run_grads=False, **options):
    """The reference's outputs by name, in float64."""

    def widened(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    q, k, v, do, dlse = map(widened, tensors)
    options = {name: widened(x) for name, x in options.items()}
    inputs = AttentionInputs(q, k, v, graph, scale, **options)
    o, lse = attention_reference.attention_forward(inputs)
    grads = attention_reference.attention_backward(do, dlse, o, lse, inputs, run_grads=run_grads)
    found = {"o": o, "lse": lse, **grads._asdict()}
    return {name: x for name, x in found.items() if x is not None}


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        blind = x == -math.inf
        assert torch.equal(found[name] == -math.inf, blind), name
        finite = x[~blind]
        error = (found[name][~blind].double() - finite).abs()
        assert error.numel() == 0 or error.max() <= tolerance * max(1.0, finite.abs().max()), name


RINGS = {"contiguous-3": (contiguous, 3), "zigzag-2": (zigzag, 2), "scattered-2": (scattered, 2)}


@pytest.mark.parametrize("ranks", RINGS)
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_shards_merge_to_the_whole(backend, name, ranks):
    tokens = 64 if name == "dilated" else 61
    graph = PATTERNS[name](tokens).graph(tokens, 4)
    layout, count = RINGS[ranks]
    tensors = make_inputs(tokens)
    found = ring(BACKENDS[backend], graph, tensors, layout(tokens, count))
    assert_close(found, whole(graph, tensors), 1e-12)


@pytest.mark.parametrize("ranks", RINGS)
@pytest.mark.parametrize("name", ["causal", "window-globals", "dilated-odd", "block-lists"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_shards_merge_with_slopes_pair_by_pair(backend, name, ranks):
    graph = PATTERNS[name](61).graph(61, 4)
    layout, count = RINGS[ranks]
    tensors = make_inputs(61)
    generator = torch.Generator().manual_seed(6)
    slopes, sinks = torch.rand(2, 2, 4, generator=generator, dtype=torch.float64).to(DEVICE)
    shards = layout(61, count)
    options = {"slopes": slopes / 4, "sinks": sinks}
    found = ring(BACKENDS[backend], graph, tensors, shards, singly=True, **options)
    assert_close(found, whole(graph, tensors, **options), 1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("ranks", RINGS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_shards_of_chosen_blocks_merge_to_the_whole_and_its_run_grads(backend, ranks, causal):
    q, k, v, graph = chosen_blocks(61, causal=causal)
    layout, count = RINGS[ranks]
    tensors = [q, k, v, *make_inputs(61, 2, 1)[3:]]
    found = ring(BACKENDS[backend], graph, tensors, layout(61, count), run_grads=True)
    assert_close(found, whole(graph, tensors, run_grads=True), 1e-12)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("causal", "zigzag-2"),
        ("window-globals-causal", "contiguous-3"),
        ("dilated-grouped", "zigzag-2"),
        ("blocks", "scattered-2"),
    ],
    ids=lambda x: x,
)
def test_shards_merge_to_the_whole_in_the_kernels(name, ranks):
    layout, count = RINGS[ranks]
    graph = PATTERNS[name](45).graph(45, 2, DEVICE)
    tensors = make_inputs(45, 2, 1, 1, dtype=torch.float32)
    found = ring(BACKENDS["triton"], graph, tensors, layout(45, count))
    assert_close(found, whole(graph, tensors), 3e-6)


@pytest.mark.cases(0)
@pytest.mark.parametrize("name", ["causal", "window-globals"])
def test_shards_merge_with_slopes_pair_by_pair_in_the_kernels(name):
    graph = PATTERNS[name](45).graph(45, 2, DEVICE)
    tensors = make_inputs(45, 2, 1, 1, dtype=torch.float32)
    options = {"slopes": torch.tensor([[0.2, 0.05]]).to(DEVICE)}
    found = ring(BACKENDS["triton"], graph, tensors, zigzag(45, 2), singly=True, **options)
    assert_close(found, whole(graph, tensors, **options), 5e-6)


@pytest.mark.cases(0)
def test_shards_of_chosen_blocks_merge_in_the_kernels():
    q, k, v, graph = chosen_blocks(27, causal=True, samples=1, dtype=torch.float32)
    tensors = [q, k, v, *make_inputs(27, 2, 1, 1, dtype=torch.float32)[3:]]
    found = ring(BACKENDS["triton"], graph, tensors, zigzag(27, 2), run_grads=True)
    assert_close(found, whole(graph, tensors, run_grads=True), 3e-6)


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
    ids=["fp16", "bf16"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_narrow_tensors_merge_before_they_are_rounded(backend, dtype, tolerance):
    """o and do are float32 in every step, q, k and v are not."""
    graph = PATTERNS["causal"](45).graph(45, 2, DEVICE)
    q, k, v, do, dlse = make_inputs(45, 2, 1, 1, dtype=torch.float32)
    tensors = [*(x.to(dtype) for x in (q, k, v)), do, dlse]
    found = ring(BACKENDS[backend], graph, tensors, zigzag(45, 2))
    exact = 2e-6 if backend != "triton" else tolerance
    assert_close(found, whole(graph, tensors), exact)
    assert_close({"lse": found["lse"]}, {"lse": whole(graph, tensors)["lse"]}, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["causal", "window-globals"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_results_are_those_that_are_rounded_otherwise(backend, name, dtype):
    module = BACKENDS[backend]
    graph = PATTERNS[name](45).graph(45, 2, DEVICE)
    q, k, v, do, _ = (x.to(dtype) for x in make_inputs(45, 2, 1, samples=1))
    inputs = AttentionInputs(q, k, v, graph, 0.25)
    narrow_o, lse = module.attention_forward(inputs)
    o, same_lse = module.attention_forward(inputs, wide=True)
    assert o.dtype == torch.float32 and narrow_o.dtype == dtype and torch.equal(lse, same_lse)
    arguments = (do, None, o, lse, inputs)
    named = {"token_sums": True, "squares": True}
    narrow = module.attention_backward(*arguments, **named)
    wide = module.attention_backward(*arguments, **named, wide=True)
    for few, many in ((narrow_o, o), *zip(narrow[:3], wide[:3], strict=True)):
        assert few.dtype == dtype and many.dtype == torch.float32
        if dtype == torch.bfloat16 and backend == "triton" and DEVICE.type == "cpu":
            # The interpreter cuts bfloat16 off where a GPU rounds it.
            assert (few.float() - many).abs().le(many.abs() * 2.0**-7).all()
        else:
            assert torch.equal(few, many.to(dtype))
        assert not torch.equal(few.float(), many)
    squares = sum(x.double().square().sum((1, 2, 3)) for x in wide[:3])
    torch.testing.assert_close(wide.squares, squares, rtol=1e-12, atol=0)
    assert torch.equal(narrow.q_sum, wide.q_sum) and torch.equal(narrow.v_sum, wide.v_sum)


@pytest.mark.parametrize("narrow", ["o", "do", "neither"])
def test_delta_sees_do_and_o_unrounded_and_products_see_one_dtype(narrow, monkeypatch):
    launch = BACKENDS["triton"]
    q, k, v, do, lse = make_inputs(21, dtype=torch.float32)
    q, k, v = q.half(), k.half(), v.half()
    o = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    o, do = (x.half() if name == narrow else x for name, x in (("o", o), ("do", do)))
    seen = []

    def launched(dq, dbias, do, statistics, inputs, **named):
        seen.append((do, statistics.view(torch.float32)[..., 1]))
        return None, None, None, None

    monkeypatch.setattr(importlib.import_module(launch.__name__), "_launch_dq", launched)
    graph = Dense().graph(21, 4, DEVICE)
    launch.attention_backward(do, None, o, lse, AttentionInputs(q, k, v, graph, 0.25))
    ((taken, delta),) = seen
    assert taken.dtype == q.dtype
    assert (delta.double() - (o.double() * do.double()).sum(3)).abs().max() < 1e-5


@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_wide_is_handed_on_for_every_scale(scale):
    graph = Dense(causal=True).graph(37, 4)
    q, k, v, do, dlse = (x.bfloat16() for x in make_inputs(37))
    q, k, v, do, dlse = (x.cpu() for x in (q, k, v, do, dlse))
    inputs = AttentionInputs(q, k, v, graph, scale)
    o, lse = attention.attention_forward(inputs, wide=True)
    named = {"squares": True, "wide": True}
    grads = attention.attention_backward(do, dlse, o, lse, inputs, **named)
    assert {o.dtype, grads.dq.dtype, grads.dk.dtype, grads.dv.dtype} == {torch.float32}
    squares = sum(x.double().square().sum((1, 2, 3)) for x in grads[:3])
    torch.testing.assert_close(grads.squares, squares, rtol=1e-12, atol=0)


def test_wide_beside_out_is_refused():
    graph = Dense().graph(5, 4)
    q, k, v, do, _ = (x.cpu() for x in make_inputs(5))
    inputs = AttentionInputs(q, k, v, graph, 0.25)
    o, lse = attention.attention_forward(inputs)
    out = tuple(torch.empty_like(x) for x in (q, k, v))
    with pytest.raises(ValueError, match="wide=True together with out"):
        attention.attention_backward(do, None, o, lse, inputs, wide=True, out=out)


def test_rows_blind_here_or_everywhere_take_no_gradient_from_nan():
    """The dispatcher: row 0 sees nothing anywhere, rows up to 15 nothing in this shard."""
    graph = BlockSparse(block_size=16, block_lists=((), (0,), (1,))).graph(48, 4)
    q, k, v, do, dlse = (x.cpu() for x in make_inputs(48))
    inputs = AttentionInputs(q, k, v, graph, 0.25)
    o, lse = attention.attention_forward(inputs)
    do[:, :, :16], dlse[:, :, :16] = math.nan, math.nan
    expected = attention.attention_backward(do, dlse, o, lse, inputs)
    part = restrict(graph, [Chunk(0, 48, 0)], 48, [Chunk(16, 16, 0)], 16)
    y, z = k[:, :, 16:32], v[:, :, 16:32]
    found = attention.attention_backward(do, dlse, o, lse, AttentionInputs(q, y, z, part, 0.25))
    torch.testing.assert_close(found.dk, expected.dk[:, :, 16:32])
    torch.testing.assert_close(found.dq[:, :, 32:], expected.dq[:, :, 32:])
    assert (found.dq[:, :, :32] == 0).all()


NOTHING = {
    "no-groups": (9, 7, 2),
    "no-queries": (0, 7, 2),
    "no-keys": (9, 0, 2),
    "neither": (0, 0, 2),
    "no-samples": (9, 7, 0),
}


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("runtime", [False, True], ids=["static", "run-time"])
@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("backend", BACKENDS)
def test_where_nothing_is_seen_everything_is_zero(backend, case, runtime, options):
    module, (queries, keys, samples) = BACKENDS[backend], NOTHING[case]
    if runtime:
        graph = chosen_blocks(40, causal=True, samples=samples, heads=4)[3]
    else:
        graph = Dense(causal=True).graph(40, 4, DEVICE)
    part = restrict(graph, [Chunk(0, queries, 0)], queries, [Chunk(32, keys, 0)], keys)
    assert runtime or (is_empty(part) and part.edges() == 0 and not live_keys(part).any())
    variants = part.row_variants.shape[:-1]
    assert part.multiplicity().shape == (*variants, 4, queries, keys)
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, _, _, do, dlse = make_inputs(queries, samples=samples, dtype=dtype)
    _, k, v, *_ = make_inputs(keys, samples=samples, dtype=dtype)
    extra = {}
    if options == "all":
        extra["sinks"] = torch.arange(samples * 4.0, device=DEVICE, dtype=dtype).view(samples, 4)
        extra["slopes"] = torch.ones(samples, 4, device=DEVICE, dtype=dtype)
        extra["key_range"] = torch.tensor([[0, 3]] * samples, dtype=torch.int32, device=DEVICE)
        extra["key_range"] = extra["key_range"].view(samples, 2)
    o, lse = module.attention_forward(AttentionInputs(q, k, v, part, 0.25, **extra))
    assert o.shape == q.shape and (o == 0).all()
    expected = extra["sinks"].unsqueeze(2) if extra else torch.full((), -math.inf, device=DEVICE)
    torch.testing.assert_close(lse, expected.to(dtype).expand(q.shape[:3]))
    sums = {"token_sums": True, "run_grads": True, "squares": True}
    grads = module.attention_backward(
        do, dlse, o, lse, AttentionInputs(q, k, v, part, 0.25, **extra), **sums
    )
    for name, shape in (("dq", q.shape), ("dk", k.shape), ("dv", v.shape)):
        assert getattr(grads, name).shape == shape
    assert len(grads.dlog_multiplicity) == len(part.rows.runs)
    if extra:
        torch.testing.assert_close(grads.dsinks, dlse)
        grads = grads._replace(dsinks=None)
    assert all((x == 0).all() for x in grads if x is not None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_attention_is_restricted_too(backend):
    graph = cross_graph(19, 37, 4, DEVICE)
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, k, v, *_ = make_inputs(37, dtype=dtype)
    q = q[:, :, :19]
    parts = []
    for begin, end in ((0, 20), (20, 37)):
        part = restrict(graph, [Chunk(0, 19, 0)], 19, [Chunk(begin, end - begin, 0)], end - begin)
        tensors = q, k[:, :, begin:end], v[:, :, begin:end]
        parts.append(
            BACKENDS[backend].attention_forward(AttentionInputs(*tensors, part, 0.25), wide=True)
        )
    expected = attention_reference.attention_forward(AttentionInputs(q, k, v, graph, 0.25))
    for found, x in zip(merge(parts), expected, strict=True):
        torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-5)

"""Attention over several ranks against attention of one, for every pattern."""

import os
import re
from pathlib import Path

import distributed_world
import pytest
import torch

from dpflash import patterns
from dpflash.distributed import Layout, edges_per_rank, ring_attention
from dpflash.distributed.exchange_plan import ShardedPattern
from dpflash.distributed.traffic import ModeCall, cheapest_mode, mode_costs

FULL = os.environ.get("DPFLASH_FULL") == "1"
CASES = str(Path(__file__).with_name("attention_cases.py"))
cases = distributed_world.load(CASES)

NAMES = tuple(cases.all_patterns(64))
MODES = ("ring", "all_gather", "ulysses")
SHARDINGS = ("contiguous", "zigzag")
LENGTHS = (37, 64, 101)


def bytes_on_paper(name, tokens, mode, sharding, size, kv_heads, rank, item=4, dim=16, batch=2):
    """(forward, backward), from the mask and nothing else of the library but the positions."""
    at = [Layout(tokens, size, sharding).positions(r) for r in range(size)]
    pattern = cases.all_patterns(tokens)[name] if isinstance(name, str) else name
    seen = pattern.mask(tokens, 4) > 0
    per_kv = seen.unflatten(0, (kv_heads, -1)).any(1)

    def rows(receiver, owner):
        return int(per_kv[:, at[receiver]][:, :, at[owner]].any(1).sum())

    row, others = batch * dim, [r for r in range(size) if r != rank]
    if mode == "ring":
        given = 2 * row * item * sum(rows(other, rank) for other in others)
        return given, given + 2 * row * 4 * sum(rows(rank, other) for other in others)
    if mode == "all_gather":
        shard = 2 * row * kv_heads * max(len(x) for x in at)
        return (size - 1) * shard * item, (size - 1) * shard * (item + 4)
    counts = [4 // size + (r < 4 % size) for r in range(size)]
    kv_counts = counts
    if kv_heads >= size:
        kv_counts = [kv_heads // size + (r < kv_heads % size) for r in range(size)]
        counts = [x * (4 // kv_heads) for x in kv_counts]
    forward = backward = 0
    for other in others:
        mine, theirs = len(at[rank]), len(at[other])
        of_q, of_kv = counts[other] * mine, kv_counts[other] * mine
        own_q, own_kv = counts[rank] * theirs, kv_counts[rank] * theirs
        forward += batch * ((of_q + 2 * of_kv + own_q) * dim * item + own_q * 4)
        backward += batch * ((of_q + own_q + 2 * own_kv) * dim * item + of_q * 4)
    return forward, backward


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_pattern_gives_what_one_process_gives(world, size, mode):
    batch = {}
    for i, name in enumerate(NAMES):
        for j, sharding in enumerate(SHARDINGS):
            if (size == 1 or mode == "auto") and (i + j) % 2:
                continue
            tokens, kv_heads = LENGTHS[(i + j + size) % 3], (4, 2, 1)[(i + 2 * j) % 3]
            batch[name, sharding, tokens, kv_heads] = {
                "pattern": name,
                "mode": mode,
                "sharding": sharding,
                "tokens": tokens,
                "kv_heads": kv_heads,
                "seed": i,
            }
    for of_rank in world.run(CASES, "compare", size, cases=batch):
        for label, distances in of_rank.items():
            assert max(distances.values()) < 5e-6, (label, distances)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sinks_and_slopes_and_float64(world, size, mode):
    batch = {}
    for i, name in enumerate(NAMES[:: 1 if size == 3 else 2]):
        batch[name] = {
            "pattern": name,
            "mode": mode,
            "sharding": SHARDINGS[i % 2],
            "tokens": LENGTHS[i % 3],
            "kv_heads": (2, 4)[i % 2],
            "sinks": i % 3 != 0,
            "slopes": i % 3 != 1,
            "dtype": torch.float64,
            "options": {"softmax_scale": (0.25, -0.3, 0.7)[i % 3]},
        }
    for of_rank in world.run(CASES, "compare", size, cases=batch):
        for label, distances in of_rank.items():
            # Gates are float32 by definition, and so then are the scores that hold them.
            limit = 1e-6 if label.startswith("adaptive") else 1e-12
            assert max(distances.values()) < limit, (label, distances)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_as_exact_as_in_one_process(world, mode):
    for errors in world.run(CASES, "errors_in_half", 3, mode=mode):
        for name, (alone, found) in errors.items():
            # Ulysses rounds the gradients of repeated heads before it sums them.
            factor = 6 if name.startswith("ds") else 1.7 if mode == "ulysses" else 1.3
            assert found <= factor * alone + 1e-3, (name, alone, found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["dilated causal", "adaptive"])
def test_repeats_have_the_same_bits(world, mode, name):
    assert all(world.run(CASES, "repeats", 3, mode=mode, name=name, times=50 if FULL else 10))


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("mode", "size"), [(m, s) for m in MODES for s in (2, 3, 4)])
def test_bytes_sent_are_those_foretold_and_those_on_paper(world, mode, size, sharding):
    for i, name in enumerate(n for n in NAMES if not n.startswith("adaptive")):
        if (i + size) % 3:
            continue
        tokens, kv_heads = LENGTHS[i % 3], (4, 2)[i % 2]
        arguments = {"tokens": tokens, "mode": mode, "sharding": sharding, "kv_heads": kv_heads}
        found = world.run(CASES, "traffic", size, name=name, **arguments)
        for rank, (counted, predicted, _) in enumerate(found):
            paper = bytes_on_paper(name, size=size, rank=rank, **arguments)
            assert counted == predicted == paper, (name, rank, counted, predicted, paper)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_bytes_of_adaptive_patterns_and_bfloat16_are_those_foretold(world, mode):
    for name, dtype in (("adaptive", torch.float32), ("dilated", torch.bfloat16)):
        arguments = {"tokens": 101, "sharding": "zigzag", "kv_heads": 2, "dtype": dtype}
        for counted, predicted, _ in world.run(
            CASES, "traffic", 3, name=name, mode=mode, **arguments
        ):
            assert counted == predicted


@pytest.mark.cases(0)
@pytest.mark.parametrize("mode", ["ring", "all_gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_calls_in_parts_of_the_heads_have_the_bits_and_bytes_of_one_call(world, mode, dtype):
    for of_rank in world.run(CASES, "in_parts", 3, mode=mode, parts=2, dtype=dtype):
        for same_bits, same_bytes, (exchanges, in_parts) in of_rank:
            assert same_bits and same_bytes and exchanges <= in_parts <= 2 * exchanges
        exchanges, in_parts = of_rank[0][2]
        assert in_parts == 2 * exchanges > 0


def test_longnet_sends_nothing_where_segments_fit_and_live_keys_only_where_not(world):
    fits = patterns.Dilated(segment_lengths=(8, 16), dilation_rates=(1, 2))
    arguments = {"tokens": 64, "mode": "ring", "sharding": "contiguous", "kv_heads": 4}
    for counted, predicted, sends in world.run(CASES, "traffic", 4, name=fits, **arguments):
        assert counted == predicted == (0, 0) and sends == []
    width, rate, shard = 64, 4, 16
    wide = patterns.Dilated(segment_lengths=(8, width), dilation_rates=(1, rate))
    live_elsewhere = (width - shard) // rate
    for counted, _, _ in world.run(CASES, "traffic", 4, name=wide, **arguments):
        assert counted[0] == 2 * (2 * 4 * live_elsewhere * 16) * 4  # k and v, B, H, D, bytes


def test_steps_without_keys_are_neither_sent_nor_computed(world):
    window = patterns.SlidingWindow(window=3, causal=True)
    arguments = {"tokens": 64, "sharding": "contiguous"}
    assert world.run(CASES, "computed_steps", 4, name=window, **arguments) == [1, 2, 2, 2]
    dense = patterns.Dense(causal=True)
    assert world.run(CASES, "computed_steps", 4, name=dense, **arguments) == [1, 2, 3, 4]
    found = world.run(CASES, "traffic", 4, name=window, mode="ring", kv_heads=4, **arguments)
    forward = [[s for s in sends if s.startswith("keys")] for _, _, sends in found]
    assert [len(sends) for sends in forward] == [2, 2, 2, 0]  # to the next only, in both passes


@pytest.mark.parametrize("mode", ["ring", "all_gather"])
def test_only_local_shards_are_kept_for_the_backward(world, mode):
    for kept, local in world.run(CASES, "saved", 4, name="dense", tokens=64, mode=mode):
        assert max(kept) == local and sum(kept) <= 4 * local + local // 16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_padding_is_neither_seen_nor_computed(world, mode, sharding):
    for name in ("dense", "window causal", "adaptive", "blocks"):
        for length in (33, 13):
            arguments = {"name": name, "tokens": 40, "length": length}
            for size in (1, 3, 4) if FULL else (3,):
                found = world.run(CASES, "padded", size, mode=mode, sharding=sharding, **arguments)
                for distances in found:
                    assert max(distances.values()) < 5e-6, (name, length, size, distances)


@pytest.mark.parametrize(
    ("problem", "named"),
    [
        ("batch", r"\[B, H, D\] of q differs"),
        ("head_dim", r"\[B, H, D\] of q differs"),
        ("rank", "q has shape"),
        ("not a tensor", "q is a NoneType"),
        ("pattern", "pattern differs"),
        ("no pattern", "pattern='dense'"),
        ("mode", "mode='rings'"),
        ("modes", "mode differs"),
        ("sharding", "sharding='striped'"),
        ("local length", "shard_sequence"),
        ("too few tokens", "num_tokens=2 over 3 ranks"),
        ("too few heads", "2 heads and 3 ranks.*all_gather"),
        ("length", "length: expected at most"),
        ("lengths", "length differs"),
        ("scale", "softmax_scale differs"),
        ("gradients", "need gradients"),
        ("sinks", "sinks differs"),
        ("documents", "36"),
        ("keys", "q has 12 tokens and k 11"),
        ("group", "group='context'"),
        ("cutting: shape", "shape of x"),
        ("cutting: few", "num_tokens=2 over 3 ranks"),
        ("cutting: dim", "dim=2"),
        ("cutting: sharding", "sharding='striped'"),
        ("cutting: dtype", "dtype of x"),
        ("cutting: shards", "shard_sequence"),
        ("cutting: length", "length: expected at most"),
    ],
)
def test_mistakes_are_value_errors_on_all_ranks(world, problem, named):
    case = "shard_refused" if problem.startswith("cutting: ") else "refused"
    problem = problem.removeprefix("cutting: ")
    for failure in world.gather(CASES, case, 3, seconds=20, problem=problem):
        assert failure.kind == "ValueError", failure
        assert re.search(named, failure.message), failure


@pytest.mark.parametrize("where", ["before", "forward", "lost"])
def test_a_rank_that_is_gone_is_an_error_for_the_others(new_world, where):
    world = new_world(2, timeout=4.0)
    survivor, dead = world.gather(CASES, "death", 2, seconds=40, where=where)
    assert survivor.kind == "RankError" and "of 2 lost the others" in survivor.message
    assert dead.kind in ("Died", "RuntimeError")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_cutting_and_putting_together_gives_back_the_sequence(world, size):
    assert world.run(CASES, "round_trips", size) == [[]] * size


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_gradients_of_cutting_and_putting_together(world, size, sharding):
    for parts in world.run(CASES, "shard_gradients", size, sharding=sharding):
        assert all(parts), parts


@pytest.mark.parametrize("size", [1, 3, 4])
def test_weighted_losses_of_shards_add_up_to_the_whole(world, size):
    for sharding in SHARDINGS:
        for error, is_float in world.run(CASES, "weights_of_losses", size, sharding=sharding):
            assert error < 1e-6 and is_float


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_an_empty_batch_sends_nothing(world, mode):
    for sent, shapes in world.run(CASES, "empty_batch", 3, mode=mode):
        assert sent == 0 and shapes == [(0, 4, 6, 16), (0, 4, 6), *[(0, 4, 6, 16)] * 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("needed", ["q", "kv", "v"])
def test_gradients_of_some_inputs_only(world, mode, needed):
    for distances in world.run(CASES, "partial_gradients", 3, mode=mode, needed=needed):
        assert max(distances.values()) < 3e-6


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_has_no_gradient(world, mode):
    for failure in world.gather(CASES, "twice_differentiated", 2, mode=mode):
        assert failure.kind == "RuntimeError" and "create_graph=True" in failure.message


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", range(1, 9))
def test_layouts_hold_every_token_once_in_equal_shares(size, sharding):
    for tokens in (size, size + 1, 2 * size - 1, 2 * size, 3 * size + 2, 101):
        layout = Layout(tokens, size, sharding)
        positions = [layout.positions(rank) for rank in range(size)]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(tokens))
        lengths = [layout.local_length(rank) for rank in range(size)]
        assert lengths == [len(x) for x in positions]
        assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1


def test_a_layout_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="num_tokens=3 over 4 ranks"):
        Layout(3, 4)
    with pytest.raises(ValueError, match="sharding='striped'"):
        Layout(8, 4, "striped")


def test_zigzag_balances_causal_work_and_edges_add_up():
    for name, pattern in cases.all_patterns(101).items():
        if name.startswith("adaptive"):
            continue
        edges = pattern.edges(101, 4)
        assert sum(edges_per_rank(pattern, 101, 4, 3)) == edges
        assert sum(edges_per_rank(pattern, 101, 4, 3, "zigzag")) == edges
    causal = patterns.Dense(causal=True)
    assert edges_per_rank(causal, 1024, 1, 4, "zigzag") == [1024 * 1025 // 2 // 4] * 4
    slow = edges_per_rank(causal, 1024, 1, 4)
    assert max(slow) > 6 * min(slow)


def call_of(pattern, heads, kv_heads, size, sharding="contiguous", tokens=65536):
    layout = Layout(tokens, size, sharding)
    sharded = ShardedPattern(pattern, tokens, heads, kv_heads, layout)
    return ModeCall(sharded, 128, torch.bfloat16, 1, "cuda")


def test_auto_takes_the_fastest_mode():
    dense, causal = patterns.Dense(), patterns.Dense(causal=True)
    for best, pattern, heads, kv_heads, size in (
        ("ulysses", dense, 32, 32, 4),
        # A contiguous ring leaves ranks idle; on two ranks it sends as much as Ulysses.
        ("ulysses", causal, 32, 32, 2),
        ("ulysses", causal, 32, 8, 4),
        ("ring", patterns.SlidingWindow(window=512, causal=True), 32, 32, 4),
        ("ring", dense, 2, 2, 4),  # fewer heads than ranks
        ("ring", dense, 6, 6, 4),  # two ranks would have two heads and two one
        ("all_gather", dense, 32, 1, 8),
    ):
        assert cheapest_mode(call_of(pattern, heads, kv_heads, size)) == best


def test_costs_are_those_of_the_busiest_rank():
    causal, products = patterns.Dense(causal=True), 14 * 128
    pairs = 1024 * 1025 // 2
    contiguous, zigzag = (
        {cost.mode: cost for cost in mode_costs(call_of(causal, 4, 4, 4, sharding, tokens=1024))}
        for sharding in SHARDINGS
    )
    last = 256 * 768 + 256 * 257 // 2  # pairs of the last quarter of the queries
    for mode, work in (("ring", last), ("all_gather", last), ("ulysses", pairs // 4)):
        assert contiguous[mode].flops == 4 * products * work
        assert zigzag[mode].flops == products * pairs
    shard = 4 * 256 * 128 * 2
    assert contiguous["ring"].sent in ((6 * shard, 6 * shard), (0, 12 * shard))
    assert contiguous["all_gather"].sent == (6 * shard, 6 * shard + 12 * shard)
    assert [contiguous[mode].exchanges for mode in MODES] == [9, 3, 4]


def test_one_process_needs_no_process_group():
    q, k, v, *_ = cases.inputs(37)
    pattern = patterns.SlidingWindow(window=5)
    for mode in (*MODES, "auto"):
        o, lse = ring_attention(q, k, v, pattern=pattern, mode=mode, return_lse=True)
        expected = cases.dpflash.attention(q, k, v, pattern=pattern, return_lse=True)
        assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    assert ring_attention(q, k, v, pattern=None, length=30)[:, :, 30:].abs().max() == 0
    with pytest.raises(ValueError, match="mode='rings'"):
        ring_attention(q, k, v, pattern=None, mode="rings")

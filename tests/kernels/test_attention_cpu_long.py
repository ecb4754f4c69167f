"""The CPU kernels on long sequences, shards and heads of many kinds, against the reference."""

import contextlib
import dataclasses

import pytest
import torch
import torch.utils.deterministic

from dpflash.kernels import attention_cpu
from dpflash.kernels import attention_reference as reference
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.tile_shard import Chunk, restrict
from dpflash.patterns import BlockSparse, Dilated, SlidingWindow

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
    inputs = AttentionInputs(q, k, v, graph, 0.3, key_range=key_range)
    o, lse = module.attention_forward(inputs)
    grads = module.attention_backward(do, dlse, o, lse, inputs)
    return {"o": o, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def assert_matches_the_reference(graph, tensors, key_range=None):
    expected = run(reference, graph, tensors, key_range)
    outputs = run(attention_cpu, graph, tensors, key_range)
    for name, x in outputs.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.cases(0)
@pytest.mark.parametrize("tokens", [2304, 2211])
@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name, tokens):
    graph = LONG[name].graph(tokens, 4)
    assert_matches_the_reference(graph, make_tensors(graph, 1, 4, 2, 3))


@pytest.mark.parametrize("key_range", [None, [[0, 1111], [700, 1000]]], ids=["all", "some"])
@pytest.mark.parametrize(
    "name", ["blocks", "dilated-causal", "diagonal-blocks", "neighbouring-blocks"]
)
def test_what_memory_held_before_does_not_matter(name, key_range, fresh_memory_is_nan):
    graph = LONG[name].graph(1111, 4)
    ranges = None if key_range is None else torch.tensor(key_range).int()
    assert_matches_the_reference(graph, make_tensors(graph, 2, 4, 4, 3), ranges)


@pytest.mark.parametrize("begin", [700, 1300])
@pytest.mark.parametrize("name", LONG)
def test_shards_of_long_sequences(name, begin):
    graph = LONG[name].graph(2211, 2)
    shard = restrict(graph, [Chunk(begin, 800, 0)], 800, [Chunk(100, 1200, 0)], 1200)
    assert_matches_the_reference(shard, make_tensors(shard, 1, 2, 2, 3))


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
def test_heads_of_any_variants_and_groups(name, groups, clipped):
    pattern = Dilated(segment_lengths=(48, 96), dilation_rates=(1, 3), causal=True)
    graph = pattern.graph(190, 3)
    heads = torch.tensor(HEADS[name], dtype=torch.int32)
    graph = dataclasses.replace(graph, row_variants=heads)
    key_range = torch.tensor([[5, 150], [0, 190], [5, 150]]).int() if clipped else None
    assert_matches_the_reference(graph, make_tensors(graph, 3, 8, groups, 5), key_range)


def test_tokens_before_heads_in_memory():
    graph = LONG["blocks"].graph(1100, 4)
    tensors = make_tensors(graph, 2, 4, 2, 8)
    expected = run(attention_cpu, graph, tensors)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for name, x in run(attention_cpu, graph, by_token).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-12, msg=name)


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("name", LONG)
def test_threads_change_no_bit(name, groups):
    graph = LONG[name].graph(2211, 6)
    tensors = [x.float() for x in make_tensors(graph, 1, 6, groups, 16)]
    outputs = []
    for number in (1, 2, 3, 7, 7):
        with threads(number):
            outputs.append(run(attention_cpu, graph, tensors))
    for others in outputs[1:]:
        for key, x in others.items():
            assert torch.equal(x, outputs[0][key]), key


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 4])
def test_other_samples_change_no_bit(groups, number, options):
    """Nor do they where threads are more than samples and key heads: squares are clipped by."""
    pattern = Dilated(segment_lengths=(512, 2300), dilation_rates=(1, 3), causal=True)
    graph = pattern.graph(2300, 4)
    tensors = [x.float() for x in make_tensors(graph, 3, 4, groups, 20)]
    torch.manual_seed(1)
    extra = {"sinks": torch.randn(3, 4), "slopes": torch.rand(3, 4)} if options == "all" else {}

    def of(samples):
        q, k, v, do = (x[samples] for x in tensors)
        more = {name: x[samples] for name, x in extra.items()}
        inputs = AttentionInputs(q, k, v, graph, 0.3, **more)
        o, lse = attention_cpu.attention_forward(inputs)
        grads = attention_cpu.attention_backward(
            do, do[..., 0], o, lse, inputs, squares=True, token_sums=True
        )
        return {"o": o, "lse": lse, **grads._asdict()}

    with threads(number):
        together = of(slice(None))
        for sample in range(3):
            for key, x in of(slice(sample, sample + 1)).items():
                if x is not None:
                    assert torch.equal(x, together[key][sample : sample + 1]), key


@pytest.mark.parametrize("key_range", [None, [[0, 9], [3, 4]], [[5, 5], [5, 5]]], ids=str)
@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 0), (2, 0, 2)], ids=str)
def test_without_samples_or_heads(sizes, key_range):
    samples, heads, groups = sizes
    graph = LONG["blocks"].graph(300, 4)
    graph = dataclasses.replace(graph, row_variants=graph.row_variants[:heads])
    ranges = None if key_range is None else torch.tensor(key_range[:samples]).int().view(-1, 2)
    tensors = make_tensors(graph, samples, heads, groups, 4)
    outputs = run(attention_cpu, graph, tensors, ranges)
    assert outputs["o"].shape == tensors[0].shape and outputs["lse"].shape == tensors[0].shape[:3]
    assert outputs["dk"].shape == tensors[1].shape and (outputs["dk"] == 0).all()

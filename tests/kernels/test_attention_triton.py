"""The Triton attention kernels against their reference implementation in float64.

Without a GPU they run in Triton's interpreter, at sizes of several tiles and chunks of 16.
"""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from dpflash.kernels import attention_reference as reference
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.layout import is_aligned
from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph
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

pytest.importorskip("triton")
launch = pytest.importorskip("dpflash.kernels.attention_launch")

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = pytest.mark.gpu


def fused_qkv(batch, heads, groups, tokens, head_dim, dtype, more=16):
    """q, k and v as views of one buffer whose remaining columns, so many more, are NaN."""
    generator = torch.Generator().manual_seed(7)
    width = (heads + 2 * groups) * head_dim
    buffer = torch.full((batch, tokens, width + more), torch.nan)
    buffer[..., :width] = torch.randn(batch, tokens, width, generator=generator)
    buffer = buffer.to(DEVICE, dtype)[..., :width].unflatten(2, (-1, head_dim))
    return [x.transpose(1, 2) for x in buffer.split((heads, groups, groups), dim=2)]


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def in_float64(x):
    """A tensor, or the tensors of AttentionInputs, in float64."""
    if isinstance(x, AttentionInputs):
        return AttentionInputs(*(in_float64(getattr(x, field.name)) for field in fields(x)))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def error(found, expected):
    """Largest distance over the scale of what was expected; equal infinities are no distance."""
    assert found.shape == expected.shape
    same = found.double() == expected.double()
    distance = (found.double() - expected.double()).masked_fill(same, 0).abs()
    finite = expected[expected.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return float(distance.max()) / scale if distance.numel() else 0.0


BACKWARD = ("token_sums", "run_grads", "squares", "bias_grad")


def run(graph, q, k, v, scale=None, with_dlse=True, **named):
    """Forward and backward of kernels and reference: two dicts of the same names."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(8)
    do = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q)
    dlse = torch.randn(q.shape[:3], generator=generator).to(DEVICE) if with_dlse else None
    backward = {x: named.pop(x, False) for x in BACKWARD}
    inputs = AttentionInputs(q, k, v, graph, scale, **named)
    found_o, found_lse = launch.attention_forward(inputs)
    found = launch.attention_backward(do, dlse, found_o, found_lse, inputs, **backward)
    inputs = in_float64(inputs)
    o, lse = reference.attention_forward(inputs)
    wide = in_float64(do), in_float64(dlse)
    expected = reference.attention_backward(*wide, o, lse, inputs, **backward)
    return (
        {"o": found_o, "lse": found_lse, **found._asdict()},
        {"o": o, "lse": lse, **expected._asdict()},
    )


def assert_close(found, expected, tolerance):
    for name, value in expected.items():
        if value is None:
            assert found[name] is None
        else:
            assert error(found[name], value) <= tolerance, name


def block(pattern, tokens, heads):
    return pattern.graph(tokens, heads, DEVICE)


PATTERNS = {
    "dense": Dense(),
    "causal": Dense(causal=True),
    "window": SlidingWindow(window=9, causal=False),
    "window-0": SlidingWindow(window=0, causal=True),
    "window-globals-causal": SlidingWindow(window=5, global_tokens=3, causal=True),
    "window-globals": SlidingWindow(window=18, global_tokens=2),
    "documents": Documents(cu_seqlens=(0, 1, 20, 20, 53)),
    "documents-causal": Documents(cu_seqlens=(0, 7, 24, 53), causal=True),
    "longnet": Dilated(segment_lengths=(16, 32, 64), dilation_rates=(1, 2, 4)),
    "longnet-causal": Dilated(segment_lengths=(16, 32, 64), dilation_rates=(1, 2, 4), causal=True),
    "longnet-set": Dilated(
        segment_lengths=(10, 25), dilation_rates=(2, 3), overlap="set", offset="group"
    ),
    "longnet-grouped": Dilated(
        segment_lengths=(10, 20, 40), dilation_rates=(1, 2, 3), causal=True, heads="grouped"
    ),
    "longnet-odd": Dilated(segment_lengths=(13, 29), dilation_rates=(3, 5), causal=True),
    "block-sparse": BlockSparse(
        block_size=8, local_blocks=1, stride_blocks=3, global_blocks=1, random_blocks=1
    ),
    "block-lists": BlockSparse(
        block_size=16, local_blocks=0, block_lists=((0, 2), (), (1, 3), (3,)), causal=True
    ),
    "hierarchical": Hierarchical(levels=((8, 16), (16, 32), (32, -1)), block_size=8, causal=True),
}
T = 53


@pytest.mark.parametrize("name", PATTERNS)
def test_kernels_match_the_reference_for_every_pattern(name):
    q, k, v = fused_qkv(1, 2, 1, T, 16, torch.float32)
    found, expected = run(block(PATTERNS[name], T, 2), q, k, v, token_sums=True)
    assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 128, 5, 1])
def test_kernels_match_the_reference_for_every_head_dim(head_dim):
    q, k, v = fused_qkv(1, 2, 1, 35, head_dim, torch.float32)
    found, expected = run(block(Dense(causal=True), 35, 2), q, k, v, token_sums=True)
    assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("name", ["causal", "longnet-causal", "window-globals"])
def test_kernels_match_the_reference_at_any_length(name, tokens):
    q, k, v = fused_qkv(2, 1, 1, tokens, 16, torch.float32)
    found, expected = run(block(PATTERNS[name], tokens, 1), q, k, v, token_sums=True)
    assert_close(found, expected, 2e-6)


@pytest.mark.cases(0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["causal", "longnet-causal", "block-sparse"])
def test_narrow_dtypes_err_at_most_twice_what_torch_errs(name, dtype):
    q, k, v = fused_qkv(1, 2, 1, T, 32, dtype)
    graph = block(PATTERNS[name], T, 2)
    found, expected = run(graph, q, k, v, with_dlse=False)
    scores = graph.multiplicity().log().to(DEVICE)
    keys = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    logits = (keys[0] * 32**-0.5) @ keys[1].repeat_interleave(2, 1).mT + scores.to(dtype)
    o = logits.softmax(3) @ keys[2].repeat_interleave(2, 1)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(8)).to(q)
    grads = torch.autograd.grad(o, keys, do)
    for name, of_torch in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True):
        allowed = 2 * (of_torch.double() - expected[name]).abs().max() + 1e-5
        away = (found[name].double() - expected[name]).abs()
        if dtype == torch.bfloat16 and DEVICE.type == "cpu":
            # The interpreter cuts bfloat16 off where a GPU rounds it: half of its last bit more.
            away = away - expected[name].abs() * 2.0**-8
        assert away.max() <= allowed, name
    assert error(found["lse"], expected["lse"]) < 2e-6


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("causal", 40), ("window-globals", 16), ("longnet-causal", 16)],
    ids=["causal-D40", "window-globals-D16", "longnet-causal-D16"],
)
def test_sinks_slopes_padding_and_their_gradients_match_the_reference(name, head_dim):
    q, k, v = fused_qkv(3, 2, 1, 29, head_dim, torch.float32)
    generator = torch.Generator().manual_seed(9)
    found, expected = run(
        block(PATTERNS[name], 29, 2),
        q,
        k,
        v,
        sinks=torch.randn(3, 2, generator=generator).to(DEVICE),
        slopes=torch.randn(3, 2, generator=generator).to(DEVICE) / 8,
        key_range=torch.tensor([[0, 29], [5, 21], [11, 11]], dtype=torch.int32, device=DEVICE),
        token_sums=True,
    )
    assert_close(found, expected, 2e-6)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_any_positive_scale_is_taken(scale):
    q, k, v = fused_qkv(1, 2, 2, 21, 16, torch.float32)
    found, expected = run(block(Dense(causal=True), 21, 2), q, k, v, scale=scale)
    assert_close(found, expected, 4e-6)


def test_rows_without_key_give_zero_and_minus_infinity_and_no_gradient():
    q, k, v = fused_qkv(1, 1, 1, 64, 16, torch.float32)
    found, expected = run(block(PATTERNS["block-lists"], 64, 1), q, k, v)
    assert (found["o"][:, :, 16:32] == 0).all()
    assert (found["lse"][:, :, 16:32] == -torch.inf).all()
    assert (found["dq"][:, :, 16:32] == 0).all()
    assert_close(found, expected, 2e-6)


def test_a_padded_away_sample_attends_to_nothing():
    q, k, v = fused_qkv(2, 1, 1, 20, 16, torch.float32)
    key_range = torch.tensor([[0, 20], [20, 20]], dtype=torch.int32, device=DEVICE)
    found, _ = run(block(Dense(), 20, 1), q, k, v, key_range=key_range)
    assert (found["o"][1] == 0).all() and (found["lse"][1] == -torch.inf).all()
    assert all((found[name][1] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.cases(0)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [T, 64])
def test_chosen_blocks_and_the_gradient_of_their_gates_match_the_reference(causal, tokens):
    q, k, v = fused_qkv(2, 2, 1, tokens, 16, torch.float32)
    pattern = Adaptive(block_size=16, keep=2, causal=causal)
    blocks, gates = pattern.choose(q, k, 0.25)
    graph = runtime_graph(blocks, gates.float(), pattern, tokens)
    found, expected = run(graph, q, k, v, run_grads=True, token_sums=True)
    assert_close(found, expected, 2e-6)


@pytest.mark.cases(0)
def test_query_heads_that_differ_share_a_key_head():
    pattern = Dilated(segment_lengths=(24, 40), dilation_rates=(2, 3), causal=True)
    q, k, v = fused_qkv(1, 4, 2, 41, 16, torch.float32)
    graph = block(pattern, 41, 4)
    assert not graph.heads_share_cols(2)
    found, expected = run(graph, q, k, v, token_sums=True)
    assert_close(found, expected, 2e-6)


@pytest.mark.cases(0)
def test_cross_attention_of_other_lengths_matches_the_reference():
    q, _, _ = fused_qkv(2, 2, 1, 19, 16, torch.float32)
    _, k, v = fused_qkv(2, 2, 1, 37, 16, torch.float32)
    found, expected = run(cross_graph(19, 37, 2, DEVICE), q, k, v, token_sums=True)
    assert_close(found, expected, 2e-6)


@pytest.mark.cases(0)
def test_gradients_are_written_into_one_fused_buffer():
    q, k, v = fused_qkv(1, 4, 2, 21, 16, torch.float32)
    graph = block(PATTERNS["window-globals"], 21, 4)
    inputs = AttentionInputs(q, k, v, graph, 0.25)
    o, lse = launch.attention_forward(inputs)
    do = torch.ones_like(o)
    apart = launch.attention_backward(do, None, o, lse, inputs)
    buffer = torch.full((1, 21, 8, 16), torch.nan, device=DEVICE)
    out = tuple(x.transpose(1, 2) for x in buffer.split((4, 2, 2), dim=2))
    fused = launch.attention_backward(
        do, None, o, lse, AttentionInputs(q, k, v, graph, 0.25), out=out
    )
    assert fused.dq.data_ptr() == buffer.data_ptr()
    expected = torch.cat([x.transpose(1, 2) for x in (apart.dq, apart.dk, apart.dv)], dim=2)
    assert torch.equal(buffer, expected)


def test_multiplicities_count_as_often_as_they_say():
    groups = torch.tensor([[0, 1, 20, 0, 2]], dtype=torch.int32)
    runs = torch.tensor(
        [[0, 2, 10, -UNBOUNDED, UNBOUNDED], [1, 2, 10, -UNBOUNDED, UNBOUNDED]], dtype=torch.int32
    )
    log_multiplicity = torch.tensor([3.0, 1.0], dtype=torch.float64).log()
    side = Side(groups, runs, log_multiplicity, torch.tensor([0, 1], dtype=torch.int32), 1, 20)
    zero = torch.zeros(1, dtype=torch.int32)
    # Seen from the keys, even and odd ones count differently: two groups.
    col_groups = torch.tensor([[0, 2, 10, 0, 1], [1, 2, 10, 1, 2]], dtype=torch.int32)
    col_runs = torch.tensor([[0, 1, 20, -UNBOUNDED, UNBOUNDED]] * 2, dtype=torch.int32)
    borders = torch.tensor([0, 2], dtype=torch.int32)
    cols = Side(col_groups, col_runs, log_multiplicity, borders, 2, 10)
    graph = TileGraph(20, 20, side, cols, zero, zero, False).to(DEVICE)
    q, k, v = fused_qkv(1, 1, 1, 20, 16, torch.float32)
    found, expected = run(graph, q, k, v)
    assert_close(found, expected, 2e-6)
    assert found["lse"].exp().sum() > 0


def test_tiles_that_see_most_columns_come_first():
    causal = block(PATTERNS["causal"], T, 1)
    assert causal.rows.tiles(16)[0, :, 0].tolist() == [48, 32, 16, 0]
    assert causal.cols.tiles(16)[0, :, 0].tolist() == [0, 16, 32, 48]
    documents = block(PATTERNS["documents"], T, 1).rows.tiles(16)
    assert documents[0, :, 0].tolist() == [20, 36, 52, 1, 17, 0]
    assert documents[0, :, 2].tolist() == [16, 16, 1, 16, 3, 1]


def test_tiles_of_a_run_time_side_are_those_of_a_static_one():
    """Variants of two, no and one groups, the last group longer than the others."""
    groups = [[0, 2, 9, 0, 1], [1, 2, 3, 1, 1], [4, 3, 19, 1, 2]]
    runs = torch.tensor([[0, 1, 60, -UNBOUNDED, UNBOUNDED]] * 2, dtype=torch.int32)
    variants = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    side = Side(torch.tensor(groups, dtype=torch.int32), runs, torch.zeros(2), variants, 2, 19)
    static, dynamic = (x.tiles(8) for x in (side, replace(side, runtime=True, _tables={})))
    assert static.shape == (3, 3, 8) and dynamic.shape == (3, 6, 8)
    for found, expected in zip(dynamic, static, strict=True):
        assert sorted(found[found[:, 2] > 0].tolist()) == sorted(
            expected[expected[:, 2] > 0].tolist()
        )
    assert static[0, :, 2].tolist() == [8, 1, 3] and static[2, :, 0].tolist() == [4, 28, 52]


def test_strides_are_divided_by_exactly():
    """At multiples of a stride and beside them, of which those near 2^31 are the hardest."""
    strides = [x for n in range(30) for x in (2**n, 2**n + 1, 3 * 2**n // 2)] + [7, 2**30 - 1]
    runs = torch.tensor([[0, x, 1, 0, 0] for x in strides], dtype=torch.int32)
    empty, borders = torch.zeros(0, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    side = Side(empty, runs, torch.zeros(len(runs)), borders, 0, 0)
    for _, stride, *_, reciprocal, shift in side.run_records().tolist():
        most = (2**31 - 1) // stride
        for multiple in (1, most // 2, most - 1, most):
            for x in range(max(multiple * stride - 1, 0), min(multiple * stride + 2, 2**31)):
                assert (2 * x * (reciprocal % 2**32) >> 32) >> shift == x // stride, (x, stride)


@pytest.mark.parametrize(
    "name", [name for name, p in PATTERNS.items() if p.causal and name != "block-lists"]
)
def test_no_output_knows_of_later_tokens_or_other_samples(name):
    q, k, v = fused_qkv(2, 1, 1, T, 16, torch.float32)
    graph = block(PATTERNS[name], T, 1)
    o, lse = launch.attention_forward(AttentionInputs(q, k, v, graph, 0.25))
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 31:] += 1
        x[1] = -x[1]
    again_o, again_lse = launch.attention_forward(AttentionInputs(*changed, graph, 0.25))
    assert torch.equal(o[0, :, :31], again_o[0, :, :31])
    assert torch.equal(lse[0, :, :31], again_lse[0, :, :31])
    assert not torch.equal(o[0, :, 31:], again_o[0, :, 31:])


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def backward_with_squares(graph, q, k, v, do=None, squares=True, **named):
    """Gradients of the kernels, with their squares."""
    if do is None:
        do = torch.randn(q.shape, generator=torch.Generator().manual_seed(8)).to(q)
    inputs = AttentionInputs(q, k, v, graph, 0.25, **named)
    o, lse = launch.attention_forward(inputs)
    return launch.attention_backward(do, None, o, lse, inputs, squares=squares)


def assert_squares_are_of_what_is_stored(grads):
    """To far more digits than the rounding of 16 or 32 bits leaves equal."""
    parts = (grads.dq, grads.dk, grads.dv)
    expected = sum(x.double().square().sum((1, 2, 3)) for x in parts)
    assert grads.squares.dtype == torch.float64
    torch.testing.assert_close(grads.squares, expected, rtol=1e-12, atol=0)


@pytest.mark.cases(0)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["causal", "window-globals-causal", "longnet-causal"])
def test_squares_are_of_the_gradients_as_stored(name, dtype):
    q, k, v = fused_qkv(2, 2, 1, 37, 16, dtype)
    assert_squares_are_of_what_is_stored(
        backward_with_squares(block(PATTERNS[name], 37, 2), q, k, v)
    )


@pytest.mark.cases(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("head_dim", [5, 40, 80, 96])
def test_squares_take_every_part_of_a_head_dim_once(head_dim, dtype):
    q, k, v = fused_qkv(2, 2, 1, 35, head_dim, dtype)
    graph = block(Dense(causal=True), 35, 2)
    assert_squares_are_of_what_is_stored(backward_with_squares(graph, q, k, v))


@pytest.mark.cases(0)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_squares_of_heads_that_are_added_later_are_of_their_sum(dtype):
    pattern = Dilated(segment_lengths=(24, 40), dilation_rates=(2, 3), causal=True)
    q, k, v = fused_qkv(2, 4, 2, 41, 16, dtype)
    graph = block(pattern, 41, 4)
    assert not graph.heads_share_cols(2)
    assert_squares_are_of_what_is_stored(backward_with_squares(graph, q, k, v))


@pytest.mark.cases(0)
def test_squares_of_padded_blind_and_chosen_rows_are_of_the_gradients_as_stored():
    q, k, v = fused_qkv(3, 2, 1, 29, 40, torch.bfloat16)
    key_range = torch.tensor([[0, 29], [5, 21], [11, 11]], dtype=torch.int32, device=DEVICE)
    grads = backward_with_squares(
        block(PATTERNS["window-globals"], 29, 2), q, k, v, key_range=key_range
    )
    assert_squares_are_of_what_is_stored(grads)
    assert grads.squares[2] == 0
    q, k, v = fused_qkv(2, 2, 1, 53, 16, torch.float32)
    assert_squares_are_of_what_is_stored(
        backward_with_squares(block(PATTERNS["block-lists"], 53, 2), q, k, v)
    )
    pattern = Adaptive(block_size=16, keep=2, causal=True)
    blocks, gates = pattern.choose(q, k, 0.25)
    graph = runtime_graph(blocks, gates.float(), pattern, 53)
    assert_squares_are_of_what_is_stored(backward_with_squares(graph, q, k, v))


@pytest.mark.cases(0)
def test_squares_match_the_reference_repeat_bit_for_bit_and_change_no_gradient():
    q, k, v = fused_qkv(2, 2, 1, 21, 16, torch.float32)
    graph = block(PATTERNS["window-globals-causal"], 21, 2)
    found, expected = run(graph, q, k, v, squares=True, token_sums=True)
    torch.testing.assert_close(found["squares"], expected["squares"], rtol=1e-6, atol=0)
    grads, again, without = (
        backward_with_squares(graph, q, k, v, squares=squares) for squares in (True, True, False)
    )
    assert torch.equal(grads.squares, again.squares) and without.squares is None
    assert all(torch.equal(x, y) for x, y in zip(grads[:3], without[:3], strict=True))


@pytest.mark.cases(0)
def test_squares_of_huge_zero_and_unusable_samples_stay_each_ones_own():
    q, k, v = fused_qkv(6, 2, 1, 21, 16, torch.float32)
    factors = torch.tensor([1.0, 1e6, 0.0, 1e30, torch.nan, torch.inf], device=DEVICE)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(8)).to(q)
    do = do * factors.view(-1, 1, 1, 1)
    graph = block(Dense(causal=True), 21, 2)
    grads = backward_with_squares(graph, q, k, v, do)
    finite = grads._replace(
        **{name: x[:4] for name, x in grads._asdict().items() if x is not None}
    )
    assert_squares_are_of_what_is_stored(finite)
    assert grads.squares[2] == 0 and grads.squares[3] > 1e58
    assert not grads.squares[4:].isfinite().any()
    alone = backward_with_squares(graph, q[:1], k[:1], v[:1], do[:1])
    torch.testing.assert_close(grads.squares[:1], alone.squares, rtol=1e-14, atol=0)


_BEYOND_INT32 = """
import torch
from dpflash.kernels import attention_launch as launch
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.patterns import Dense
far = torch.empty(31 * 2**27 + 16, dtype=torch.float16)  # 8 GB that are never touched
strided = far.as_strided((1, 1, 32, 16), (0, 0, 2**27, 1))
near = torch.randn(1, 1, 32, 16).half()
strided.copy_(near)
graph = Dense(causal=True).graph(32, 1)
of_strided = AttentionInputs(strided, strided, strided, graph, 0.25)
of_near = AttentionInputs(near, near, near, graph, 0.25)
o, lse = launch.attention_forward(of_strided)
expected, expected_lse = launch.attention_forward(of_near)
assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
found = launch.attention_backward(strided, None, o, lse, of_strided)
expected = launch.attention_backward(near, None, o, lse, of_near)
assert all(torch.equal(x, y) for x, y in zip(found[:3], expected[:3]))
print("exact")
"""


@pytest.mark.cases(0)
@pytest.mark.skipif(DEVICE.type != "cpu", reason="would allocate 8 GB of device memory")
def test_token_offsets_beyond_int32_are_exact():
    done = subprocess.run(
        [sys.executable, "-c", _BEYOND_INT32], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.strip() == "exact", done.stderr


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 32, 40, 48, 64, 72, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_kernels_match_the_reference_at_odd_lengths(head_dim, dtype, causal):
    q, k, v = fused_qkv(2, 4, 2, 997, head_dim, dtype)
    found, expected = run(block(Dense(causal=causal), 997, 4), q, k, v, token_sums=True)
    tolerance = 5e-6 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert_close(found, expected, tolerance)


def test_a_head_dim_is_split_only_where_rows_are_aligned():
    x = torch.zeros(2, 35, 4, 81)
    assert is_aligned(x[..., :80].contiguous()) and not is_aligned(x[..., :80])
    assert not is_aligned(torch.zeros(2, 35, 4, 96)[..., 1:81])
    assert launch._parts(80, aligned=True) == (64, 16)
    assert launch._parts(80, aligned=False) == (128, 0)


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 128, 192, 256])
def test_compiled_kernels_match_the_reference_where_rows_are_not_aligned(head_dim, dtype):
    q, k, v = fused_qkv(2, 4, 2, 499, head_dim, dtype, more=17)
    found, expected = run(block(Dense(causal=True), 499, 4), q, k, v, token_sums=True)
    assert_close(found, expected, 5e-6 if dtype == torch.float32 else 2e-2)


@GPU
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 256])
def test_compiled_squares_are_of_the_gradients_as_stored(head_dim, dtype):
    q, k, v = fused_qkv(2, 4, 2, 997, head_dim, dtype)
    grads = backward_with_squares(block(GPU_PATTERNS["longnet"], 997, 4), q, k, v)
    assert_squares_are_of_what_is_stored(grads)


GPU_PATTERNS = {
    "window": SlidingWindow(window=200, global_tokens=5, causal=True),
    "documents": Documents(cu_seqlens=(0, 300, 301, 1000, 2011), causal=True),
    "longnet": Dilated(segment_lengths=(256, 512, 1024), dilation_rates=(1, 2, 4), causal=True),
    "longnet-6": Dilated(segment_lengths=(250, 999), dilation_rates=(3, 6), offset="group"),
    "block-sparse": BlockSparse(block_size=64, stride_blocks=4, random_blocks=2, causal=True),
    "hierarchical": Hierarchical(levels=((64, 256), (256, -1)), block_size=64),
}


@GPU
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", GPU_PATTERNS)
def test_compiled_kernels_match_the_reference_for_every_pattern(name, head_dim):
    q, k, v = fused_qkv(1, 4, 2, 2011, head_dim, torch.bfloat16)
    graph = block(GPU_PATTERNS[name], 2011, 4)
    found, expected = run(graph, q, k, v, token_sums=True)
    assert_close(found, expected, 2e-2)


@GPU
def test_compiled_kernels_repeat_bit_for_bit():
    q, k, v = fused_qkv(2, 4, 2, 1999, 64, torch.bfloat16)
    graph = block(GPU_PATTERNS["longnet"], 1999, 4)
    inputs = AttentionInputs(q, k, v, graph, 0.125)
    o, lse = launch.attention_forward(inputs)
    first = launch.attention_backward(o, lse, o, lse, inputs)
    for _ in range(50):
        inputs = AttentionInputs(q, k, v, graph, 0.125)
        again_o, again_lse = launch.attention_forward(inputs)
        again = launch.attention_backward(o, lse, o, lse, inputs)
        assert torch.equal(o, again_o) and torch.equal(lse, again_lse)
        assert all(torch.equal(x, y) for x, y in zip(first[:3], again[:3], strict=True))


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    "pattern, queries, keys, head_dim, value_dim, dtype",
    [
        (None, 33, 50, 80, 32, torch.float32),
        (None, 1, 39, 32, 48, torch.float16),
        (Dense(causal=True), 35, 35, 48, 80, torch.float16),
        (SlidingWindow(window=9, global_tokens=2), 40, 40, 16, 24, torch.float32),
    ],
)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_softcap_bias_and_values_of_another_head_dim(
    pattern, queries, keys, head_dim, value_dim, dtype, softcap, with_bias
):
    generator = torch.Generator().manual_seed(3)

    def make(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    q, k, v = (
        make(2, 4, queries, head_dim),
        make(2, 2, keys, head_dim),
        make(2, 2, keys, value_dim),
    )
    bias = None
    if with_bias:
        bias = make(1, 4, queries, keys).float()
        bias[..., 0, :] = -torch.inf
        bias = bias.expand(2, -1, -1, -1)
    found, expected = run(
        cross_graph(queries, keys, 4, DEVICE) if pattern is None else block(pattern, queries, 4),
        *(3 * q, k, v),
        softcap=softcap,
        bias=bias,
        slopes=torch.rand(2, 4, generator=generator).to(DEVICE) if with_bias else None,
        sinks=torch.rand(2, 4, generator=generator).to(DEVICE),
        bias_grad=with_bias,
        token_sums=True,
        squares=True,
    )
    if with_bias:
        assert (found["dbias"][:, :, 0] == 0).all()
    assert_close(found, expected, 2e-5 if dtype == torch.float32 else 4e-3)

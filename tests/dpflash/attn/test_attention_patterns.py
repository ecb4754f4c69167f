"""`dpflash.attention` with every pattern, against softmax over the pattern's own definition."""

import math
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dpflash import PrivateRefusal, attention
from dpflash.patterns import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Documents,
    Hierarchical,
    SlidingWindow,
)

T = 45
PATTERNS = {
    "dense": Dense(),
    "causal": Dense(causal=True),
    "window": SlidingWindow(window=5, global_tokens=2),
    "window-causal": SlidingWindow(window=0, global_tokens=3, causal=True),
    "documents": Documents(cu_seqlens=(0, 7, 7, 30, T)),
    "documents-causal": Documents(cu_seqlens=(0, 1, T), causal=True),
    "dilated": Dilated(segment_lengths=(8, 16, 64), dilation_rates=(1, 2, 3)),
    "dilated-causal": Dilated(
        segment_lengths=(8, 16, 64), dilation_rates=(1, 2, 4), causal=True, offset="group"
    ),
    "dilated-set": Dilated(
        segment_lengths=(7, 20), dilation_rates=(2, 3), overlap="set", causal=True
    ),
    "dilated-grouped": Dilated(
        segment_lengths=(8, 32), dilation_rates=(1, 2), causal=True, heads="grouped"
    ),
    "block-sparse": BlockSparse(block_size=8, stride_blocks=3, random_blocks=1),
    "block-sparse-causal": BlockSparse(
        block_size=4, global_blocks=1, random_blocks=2, seed=3, causal=True
    ),
    "hierarchical": Hierarchical(levels=((8, 16), (16, -1)), block_size=8),
    "hierarchical-causal": Hierarchical(levels=((16, 32), (32, -1)), block_size=8, causal=True),
}
ADAPTIVE = {
    "adaptive": Adaptive(block_size=16, keep=2),
    "adaptive-causal": Adaptive(block_size=16, keep=2, causal=True),
}


def make_qkv(batch=2, heads=4, groups=2, tokens=T, head_dim=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, tokens, head_dim)] + 2 * [(batch, groups, tokens, head_dim)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def from_definition(q, k, v, mask, scale=None, sinks=None, slopes=None):
    """(o, lse) by a softmax over all pairs, weighted by the multiplicity `mask` `[H, T, T]`."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    heads_per_group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(heads_per_group, 1) for x in (k, v))
    scores = scale * q @ keys.mT
    if slopes is not None:
        position = torch.arange(q.shape[2])
        scores = scores - slopes[..., None, None] * (position[:, None] - position).abs()
    weights = mask.to(q.dtype) * scores.exp()
    total = weights.sum(3)
    if sinks is not None:
        total = total + sinks[..., None].exp()
    o = (weights / total.where(total > 0, 1.0).unsqueeze(3)) @ values
    lse = torch.where(total > 0, total.where(total > 0, 1.0).log(), -math.inf)
    return o, lse


def loss_of(o, lse):
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape)
    return (o * weights).sum() + torch.where(lse.isfinite(), lse, 0.0).square().sum()


@pytest.mark.parametrize("name", PATTERNS)
def test_attention_and_its_gradients_match_the_definition(name):
    q, k, v = make_qkv()
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    slopes = (torch.rand(4, generator=generator, dtype=torch.float64) / 4).requires_grad_()
    pattern = PATTERNS[name]
    mask = pattern.mask(T, 4)
    for extra in ({}, {"sinks": sinks}, {"sinks": sinks, "alibi_slopes": slopes}):
        o, lse = attention(q, k, v, pattern=pattern, return_lse=True, **extra)
        expected = from_definition(
            q, k, v, mask, sinks=extra.get("sinks"), slopes=extra.get("alibi_slopes")
        )
        torch.testing.assert_close((o, lse), expected, rtol=1e-9, atol=1e-11)
        leaves = [q, k, v, *extra.values()]
        torch.testing.assert_close(
            torch.autograd.grad(loss_of(o, lse), leaves),
            torch.autograd.grad(loss_of(*expected), leaves),
            rtol=1e-8,
            atol=1e-10,
        )


def longnet_by_branches(q, k, v, pattern):
    """LongNet as the paper mixes it: each branch by itself, weighted by softmax denominators."""
    outputs, lses = [], []
    heads, tokens = q.shape[1:3]
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        o = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
        width = min(length, tokens)
        for start in range(0, tokens, width):
            for head in range(heads):
                live = range(start + head % rate, min(start + width, tokens), rate)
                if not live:
                    continue
                picked = [x[:, head, list(live)] for x in (q, k, v)]
                scores = picked[0] @ picked[1].mT / math.sqrt(q.shape[3])
                if pattern.causal:
                    hidden = torch.ones(len(live), len(live)).triu(1).bool()
                    scores = scores.masked_fill(hidden, -math.inf)
                branch = F.scaled_dot_product_attention(*picked, is_causal=pattern.causal)
                o[:, head, list(live)] = branch
                lse[:, head, list(live)] = scores.logsumexp(2)
        outputs.append(o)
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)
    return sum(w.unsqueeze(3) * o for w, o in zip(weights, outputs, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [64, 53, 7])
def test_dilated_is_longnet_mixed_branch_by_branch_in_output_and_exact_gradient(tokens, causal):
    pattern = Dilated(segment_lengths=(8, 24, 64), dilation_rates=(1, 2, 6), causal=causal)
    qkv = make_qkv(heads=4, groups=4, tokens=tokens)
    o = attention(*qkv, pattern=pattern)
    expected = longnet_by_branches(*qkv, pattern)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(o.square().sum(), qkv),
        torch.autograd.grad(expected.square().sum(), qkv),
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.parametrize("name", [n for n, p in {**PATTERNS, **ADAPTIVE}.items() if p.causal])
@settings(max_examples=10)
@given(at=st.integers(1, T - 1))
def test_no_causal_output_depends_on_a_later_token(name, at):
    pattern = {**PATTERNS, **ADAPTIVE}[name]
    qkv = make_qkv()
    changed = [torch.cat((x[:, :, :at], 3 - x[:, :, at:]), dim=2) for x in qkv]
    before = attention(*qkv, pattern=pattern, return_lse=True)
    after = attention(*changed, pattern=pattern, return_lse=True)
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x[:, :, :at], y[:, :, :at], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [*PATTERNS, *ADAPTIVE])
def test_no_sample_depends_on_another_in_output_or_gradient(name):
    pattern = {**PATTERNS, **ADAPTIVE}[name]
    qkv = make_qkv(batch=3)
    together = torch.autograd.grad(attention(*qkv, pattern=pattern).square().sum(), qkv)
    alone = [x[1:2].detach().requires_grad_() for x in qkv]
    by_itself = torch.autograd.grad(attention(*alone, pattern=pattern).square().sum(), alone)
    for x, y in zip(together, by_itself, strict=True):
        torch.testing.assert_close(x[1:2], y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["causal", "window", "dilated-causal", "block-sparse"])
def test_padding_is_as_if_the_sample_were_shorter_or_its_keys_were_masked(name):
    pattern = PATTERNS[name]
    q, k, v = make_qkv(batch=3)
    ranges = [(0, T), (4, 30), (0, 17)]
    padding = torch.ones(3, T, dtype=torch.bool)
    for sample, (begin, end) in enumerate(ranges):
        padding[sample, begin:end] = False
    mask = pattern.mask(T, 4).expand(3, -1, -1, -1) * ~padding[:, None, None, :]
    o, lse = attention(q, k, v, pattern=pattern, key_padding_mask=padding, return_lse=True)
    expected = from_definition(q, k, v, mask)
    torch.testing.assert_close((o, lse), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss_of(o, lse), (q, k, v)),
        torch.autograd.grad(loss_of(*expected), (q, k, v)),
        rtol=1e-9,
        atol=1e-11,
    )


def chosen_by_hand(q, k, v, pattern):
    """Adaptive attention in loops: (o) from means, the best blocks and their gates."""
    size, keep, scale = pattern.block_size, pattern.keep, q.shape[3] ** -0.5
    tokens, rows = q.shape[2], []
    blocks = range(-(-tokens // size))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            means_k = [k[b, g, j * size : (j + 1) * size].mean(0) for j in blocks]
            means_q = [q[b, h, i * size : (i + 1) * size].mean(0) for i in blocks]
            for t in range(tokens):
                own = t // size
                others = (
                    [j for j in blocks if j < own]
                    if pattern.causal
                    else [j for j in blocks if j != own]
                )
                pooled = means_q[own - 1 if pattern.causal else own]
                gates = {j: scale * pooled @ means_k[j] for j in others}
                best = sorted(others, key=lambda j: -gates[j].item())[: keep - 1]
                scores, values = [], []
                for j in [own, *best]:
                    for s in range(j * size, min((j + 1) * size, tokens)):
                        if pattern.causal and s > t:
                            continue
                        score = scale * q[b, h, t] @ k[b, g, s]
                        scores.append(score if j == own else score + F.logsigmoid(gates[j]))
                        values.append(v[b, g, s])
                rows.append(torch.stack(scores).softmax(0) @ torch.stack(values))
    return torch.stack(rows).reshape(q.shape)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_matches_its_definition_in_loops_and_its_scorer_gets_the_exact_gradient(name):
    pattern = ADAPTIVE[name]
    qkv = make_qkv(batch=2, heads=2, groups=1, tokens=53)
    o, expected = attention(*qkv, pattern=pattern), chosen_by_hand(*qkv, pattern)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(o.square().sum(), qkv),
        torch.autograd.grad(expected.square().sum(), qkv),
        rtol=1e-9,
        atol=1e-11,
    )


def test_adaptive_chooses_by_sample_and_head_and_gives_its_gates_a_gradient():
    q, k, _ = make_qkv(batch=4, heads=4, groups=4, tokens=160)
    pattern = Adaptive(block_size=16, keep=3)
    blocks, gates = pattern.choose(q, k, 1.0)
    assert blocks.shape == gates.shape == (4, 4, 10, 3)
    assert len({tuple(x.flatten().tolist()) for x in blocks.flatten(0, 1)}) == 16
    dq, dk = torch.autograd.grad(gates.sum(), (q, k))
    assert (dq != 0).any() and (dk != 0).any()
    alone, _ = pattern.choose(q[2:3], k[2:3], 1.0)
    assert torch.equal(alone, blocks[2:3])


@pytest.mark.parametrize("name", ["dilated-causal", "window", "adaptive-causal"])
def test_patterns_work_compiled_whole_and_under_vmap_of_grad(name):
    pattern = {**PATTERNS, **ADAPTIVE}[name]
    qkv = make_qkv()

    def loss(q, k, v):
        return attention(q, k, v, pattern=pattern).square().sum()

    expected = torch.autograd.grad(loss(*qkv), qkv)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*qkv), qkv)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    one = [x.detach().unsqueeze(1) for x in qkv]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*one)
    torch.testing.assert_close(
        [x.squeeze(1) for x in mapped], list(expected), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_pattern_made_or_chosen_while_compiling_is_the_one_that_runs(causal):
    qkv = [x.detach() for x in make_qkv()]
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(*qkv, causal=causal), from_definition(*qkv, Dense(causal=causal).mask(T, 4))[0]
    )


def test_a_compiled_function_sees_that_its_pattern_is_another_one():
    qkv = [x.detach() for x in make_qkv()]
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    for pattern in (SlidingWindow(window=3), SlidingWindow(window=9), Dense()):
        expected = from_definition(*qkv, pattern.mask(T, 4))[0]
        torch.testing.assert_close(compiled(*qkv, pattern=pattern), expected)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "all-inputs"])
def test_operators_pass_opcheck(extras):
    q, k, v = (x.detach() for x in make_qkv())
    more = [None] * 6
    pattern = Dense(causal=True)
    if extras:
        pattern = Adaptive(block_size=16, keep=2, causal=True)
        padding = torch.zeros(2, T, dtype=torch.bool)
        padding[1, 20:] = True
        chosen = pattern.choose(q, k, 0.4)
        more = [torch.zeros(2, 4).double(), torch.ones(2, 4).double(), padding, *chosen]
        more.append(torch.ones(2, 4, T, T).double())
    arguments = (q, k, v, *more, pattern.key, 0.4, 2.0 if extras else None)
    torch.library.opcheck(torch.ops.dpflash.attention.default, arguments)
    o, lse = torch.ops.dpflash.attention(*arguments)
    backward = torch.ops.dpflash.attention_backward.default
    torch.library.opcheck(backward, (o, lse, o, lse, *arguments, "own", extras))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 4, 45)}, r"q has shape \(2, 4, 45\)"),
        ({"k": (2, 2, 44, 5)}, "k has shape"),
        ({"q": (3, 4, 45, 5)}, "q has shape"),
        ({"all": 577}, "head_dim 577"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"position_bias": torch.zeros(4, 45, 45)}, "position_bias has shape"),
        ({"position_bias": torch.zeros(2, 1, 45, 44)}, "position_bias has shape"),
        ({"position_bias": torch.zeros(1, 1, 1, 45).bool()}, "position_bias is torch.bool"),
        ({"pattern": Documents(cu_seqlens=(0, 44))}, "cu_seqlens"),
        ({"pattern": Dense(), "causal": True}, "build it with causal=True"),
        ({"causal": 1}, "causal=1"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.int64)}, "alibi_slopes is torch.int64"),
        ({"key_padding_mask": torch.zeros(2, 44, dtype=torch.bool)}, "key_padding_mask has shape"),
        ({"key_padding_mask": torch.arange(90).reshape(2, 45) % 2 == 0}, "has a hole"),
        (
            {"pattern": ADAPTIVE["adaptive"], "key_padding_mask": torch.zeros(2, T).bool()},
            "use another pattern",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_what_does_not_fit_is_refused_by_name_value_and_remedy(change, message):
    change = dict(change)
    q, k, v = (x.detach() for x in make_qkv())
    if "q" in change:
        q = torch.zeros(change.pop("q"), dtype=torch.float64)
    if "k" in change:
        k = torch.zeros(change.pop("k"), dtype=torch.float64)
    if "all" in change:
        q, k, v = (torch.zeros(*x.shape[:3], change["all"]) for x in (q, k, v))
        change.pop("all")
    kind = PrivateRefusal if "hole" in message else ValueError
    with pytest.raises(kind, match=message):
        attention(q, k, v, **change)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("name", ["causal", "window", "dilated-causal", "adaptive-causal"])
def test_no_tensor_of_the_size_of_the_score_matrix_is_ever_held(name):
    tokens = 4096
    pattern = {
        "causal": Dense(causal=True),
        "window": SlidingWindow(window=256, global_tokens=4, causal=True),
        "dilated-causal": Dilated(
            segment_lengths=(256, 512, 1024), dilation_rates=(1, 2, 4), causal=True
        ),
        "adaptive-causal": Adaptive(block_size=64, keep=4, causal=True),
    }[name]
    qkv = make_qkv(batch=1, heads=1, groups=1, tokens=tokens, head_dim=16, dtype=torch.float32)
    with LargestTensor() as largest:
        torch.autograd.grad(attention(*qkv, pattern=pattern).sum(), qkv)
    assert largest.elements <= tokens**2 // 4


def test_second_derivatives_are_refused_rather_than_wrong():
    qkv = make_qkv()
    o = attention(*qkv)
    for loss in (o.sum(), o.square().sum()):
        (gradient, *_) = torch.autograd.grad(loss, qkv, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            (gradient.square().sum() + o.square().sum()).backward()

    def penalty(q):
        inner = torch.func.grad(lambda x: attention(x, x, x, causal=True).square().sum())
        return inner(q).square().sum()

    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.grad(penalty)(qkv[0].detach())


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("name", ["causal", "window-causal", "dilated", "adaptive-causal"])
def test_a_scale_may_be_negative_or_zero(name, scale):
    qkv = make_qkv()
    pattern = {**PATTERNS, **ADAPTIVE}[name]
    found = attention(*qkv, pattern=pattern, softmax_scale=scale, return_lse=True)
    if isinstance(pattern, Adaptive):
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss_of(*found), qkv))
        return
    expected = from_definition(*qkv, pattern.mask(T, 4), scale=scale)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss_of(*found), qkv),
        torch.autograd.grad(loss_of(*expected), qkv),
        rtol=1e-9,
        atol=1e-11,
    )


def test_a_row_without_key_gives_no_gradient_even_for_a_nan_from_above():
    qkv = make_qkv(batch=1)
    padding = torch.zeros(1, T, dtype=torch.bool)
    padding[:, :9] = True
    pattern = SlidingWindow(window=2, causal=True)
    o, lse = attention(*qkv, pattern=pattern, key_padding_mask=padding, return_lse=True)
    masked = lse == -math.inf
    assert masked.any()
    do, dlse = torch.ones_like(o), torch.ones_like(lse)
    clean = torch.autograd.grad((o, lse), qkv, (do, dlse), retain_graph=True)
    do[masked] = math.nan
    dlse[masked] = math.nan
    assert all(map(torch.equal, clean, torch.autograd.grad((o, lse), qkv, (do, dlse))))


def test_padding_may_be_mapped_too():
    q, k, v = (x.detach() for x in make_qkv(batch=3))
    padding = torch.zeros(3, T, dtype=torch.bool)
    padding[1, 30:] = True

    def one(q, k, v, padding):
        return attention(q[None], k[None], v[None], key_padding_mask=padding[None])[0]

    mapped = torch.func.vmap(one)(q, k, v, padding)
    torch.testing.assert_close(mapped, attention(q, k, v, key_padding_mask=padding))


def test_contexts_of_the_first_caller_do_not_stay_in_the_cache():
    pattern = SlidingWindow(window=3, global_tokens=1)
    q = torch.randn(1, 2, 71, 8)
    with torch.device("meta"):
        pattern.graph(71, 2)
        assert pattern.density(71, 2) < 1
    with torch._subclasses.FakeTensorMode():
        pattern.graph(71, 2).edges()
    with torch.inference_mode():
        attention(q, q, q, pattern=pattern)
    q.requires_grad_()
    attention(q, q, q, pattern=pattern).sum().backward()


def test_plans_may_be_made_by_several_threads_at_once():
    pattern = SlidingWindow(window=5, causal=True)
    q = torch.randn(2, 1, 90, 8)
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            end = int(torch.randint(1, 90, (1,), generator=generator))
            padding = (torch.arange(90) >= end).expand(2, -1)
            try:
                attention(q, q, q, pattern=pattern, key_padding_mask=padding)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures


def test_adaptive_scores_near_ties_alike_whatever_the_batch():
    pattern = Adaptive(block_size=16, keep=8)
    generator = torch.Generator().manual_seed(0)
    q_means = 0.3 * torch.randn(4, 1, 256, 64, generator=generator)
    k_means = torch.randn(1, 1, 1, 64, generator=generator).repeat(4, 1, 256, 1)
    together = pattern._top(q_means, k_means, 0.125)
    alone = torch.cat(
        [pattern._top(q_means[i : i + 1], k_means[i : i + 1], 0.125) for i in range(4)]
    )
    assert torch.equal(together, alone)

"""Softcap, values of another head dim, the last queries of a sequence, biases on the scores.

Errors are measured against float64: at most twice those of the same formula in plain torch and the
inputs' dtype, or 1e-5.
"""

import itertools
import random
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import dpflash
from dpflash import PrivateRefusal, attention
from dpflash.patterns import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Documents,
    Hierarchical,
    SlidingWindow,
    from_key,
)

FLOOR = 1e-5


def formula(q, k, v, bias=None, seen=None, softcap=None, sinks=None, slopes=None):
    """Attention as transformers' eager functions write it, in the dtype of its arguments.

    A query that sees no key has o = 0.
    """
    heads, groups = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if slopes is not None:
        gap = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        gap = (gap - torch.arange(k.shape[2])).abs()
        scores = scores - slopes.view(-1, 1, 1) * gap.to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), 3)
    p = scores.softmax(3, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    p = p[..., : k.shape[2]]
    if seen is not None:
        p = p * seen.any(-1, keepdim=True).to(p.dtype)
    return p @ v


def gradients(function, tensors):
    """o and the gradients of a loss of it with respect to the tensors."""
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o = function(**tensors)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad((o * weights.to(o.dtype)).sum(), list(tensors.values()))
    return {"o": o.detach(), **dict(zip(tensors, found, strict=True))}


def assert_rule(ours, plain, tensors):
    """The error rule, for o and every gradient."""
    found, narrow = gradients(ours, tensors), gradients(plain, tensors)
    exact = gradients(plain, {name: x.double() for name, x in tensors.items()})
    for name, value in exact.items():
        error = (found[name].double() - value).abs().max()
        allowed = 2 * (narrow[name].double() - value).abs().max() + FLOOR
        assert found[name].dtype == tensors.get(name, tensors["q"]).dtype, name
        assert error <= allowed, (name, float(error), float(allowed))


def make(queries, keys, dims, heads, dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = {"q": (heads[0], queries, dims[0]), "k": (heads[1], keys, dims[0])}
    shapes["v"] = (heads[1], keys, dims[1])
    return {
        name: torch.randn(2, *shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


SHAPES = [(113, 203), (1, 239), (799, 3), (64, 64)]
DIMS = [(32, 32), (192, 128), (64, 256), (48, 80)]
HEADS = [(4, 4), (4, 1), (4, 2)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_o_and_every_gradient_keep_the_error_rule(dtype, heads, dims, shape, softcap, with_bias):
    tensors = make(*shape, dims, heads, dtype)
    tensors["q"] *= 2
    if with_bias:
        tensors["bias"] = torch.randn(1, heads[0], *shape).to(dtype)
    causal = shape[0] <= shape[1]
    seen = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0]) if causal else None

    def ours(q, k, v, bias=None):
        return attention(q, k, v, causal=causal, softcap=softcap, position_bias=bias)

    def plain(q, k, v, bias=None):
        return formula(q, k, v, bias, seen, softcap)

    assert_rule(ours, plain, tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(113, 203), (799, 799)], ids=str)
def test_gradients_of_sinks_and_slopes_keep_the_error_rule(dtype, shape):
    tensors = make(*shape, (32, 32), (4, 2), dtype)
    tensors["sinks"] = torch.randn(4, generator=torch.Generator().manual_seed(2)).to(dtype)
    tensors["slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625]).to(dtype)
    seen = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])

    def ours(q, k, v, sinks, slopes):
        return attention(q, k, v, causal=True, sinks=sinks, alibi_slopes=slopes)

    def plain(q, k, v, sinks, slopes):
        return formula(q, k, v, seen=seen, sinks=sinks, slopes=slopes)

    assert_rule(ours, plain, tensors)


def test_latent_attention_of_576_and_512_is_that_of_the_formula():
    tensors = make(5, 9, (576, 512), (4, 1), torch.float64)
    expected = gradients(formula, tensors)
    torch.testing.assert_close(gradients(attention, tensors), expected, rtol=1e-9, atol=1e-12)


PATTERNS = [
    Dense(causal=True),
    SlidingWindow(window=3, global_tokens=2),
    SlidingWindow(left=4, right=1, global_tokens=1),
    SlidingWindow(left=1, right=5, causal=True),
    Dilated(segment_lengths=(8, 16, 64), dilation_rates=(1, 2, 4), overlap="set"),
    Dilated(
        segment_lengths=(8, 16), dilation_rates=(1, 2), causal=True, heads="grouped", overlap="set"
    ),
    BlockSparse(block_size=8, local_blocks=1, stride_blocks=2),
    Hierarchical(levels=((8, 16), (16, 32)), block_size=8),
]
BORDERS = (0, 5, 5, 30, 31, 64)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("queries", [1, 7, 40])
def test_the_last_queries_of_a_cache_whose_samples_differ_in_length(pattern, documents, queries):
    if documents:
        pattern = Documents(cu_seqlens=BORDERS) & pattern
    tensors = make(queries, 64, (8, 12), (4, 2), torch.float64)
    padding = torch.arange(64) >= torch.tensor([[64], [50]])
    seen = (pattern.mask(64, 4)[:, -queries:] > 0) & ~padding[:, None, None]

    def ours(q, k, v):
        return attention(q, k, v, pattern=pattern, key_padding_mask=padding)

    def plain(q, k, v):
        return formula(q, k, v, seen=seen)

    expected = gradients(plain, tensors)
    torch.testing.assert_close(gradients(ours, tensors), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pattern", [*PATTERNS, Adaptive(block_size=16, keep=2)], ids=str)
def test_documents_and_a_pattern_are_the_pattern_on_each_document_alone(pattern):
    packed = Documents(cu_seqlens=BORDERS) & pattern
    assert packed == pattern & Documents(cu_seqlens=BORDERS) == from_key(packed.key)
    tensors = make(64, 64, (8, 8), (4, 2), torch.float64)

    def ours(q, k, v):
        return attention(q, k, v, pattern=packed)

    def alone(q, k, v):
        parts = [slice(*pair) for pair in itertools.pairwise(BORDERS)]
        return torch.cat(
            [attention(*(x[:, :, part] for x in (q, k, v)), pattern=pattern) for part in parts], 2
        )

    expected = gradients(alone, tensors)
    torch.testing.assert_close(gradients(ours, tensors), expected, rtol=1e-9, atol=1e-12)


def test_documents_that_are_causal_make_the_pattern_causal():
    borders = Documents(cu_seqlens=(0, 6, 9), causal=True)
    both = borders & SlidingWindow(left=2, right=2)
    assert both.causal and torch.equal(both.mask(9), both.mask(9).tril())
    finer = borders & Documents(cu_seqlens=(0, 2, 9))
    assert finer == Documents(cu_seqlens=(0, 2, 6, 9), causal=True)
    with pytest.raises(PrivateRefusal, match="cu_seqlens"):
        borders & Documents(cu_seqlens=(0, 10))
    with pytest.raises(PrivateRefusal, match="some of the pattern's borders"):
        borders & (Documents(cu_seqlens=(0, 7, 9)) & Dense())


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"left": 1},
        {"right": 1},
        {"window": 2, "left": 1},
        {"window": 2, "left": 1, "right": 1},
    ],
    ids=str,
)
def test_a_window_has_one_reach_for_each_side(arguments):
    with pytest.raises(ValueError, match="window="):
        SlidingWindow(**arguments)
    assert SlidingWindow(left=3, right=3) == SlidingWindow(window=3)
    assert SlidingWindow(window=3).key == SlidingWindow(left=3, right=3).key


def test_a_shared_bias_has_its_gradient_for_each_sample():
    tensors = make(9, 9, (8, 8), (4, 4), torch.float64)
    bias = torch.randn(1, 4, 9, 9, dtype=torch.float64)

    def loss(bias, q, k, v):
        return attention(q[None], k[None], v[None], position_bias=bias).square().sum()

    alone = [torch.func.grad(loss)(bias, *(x[i] for x in tensors.values())) for i in range(2)]
    mapped = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(bias, *tensors.values())
    torch.testing.assert_close(mapped, torch.stack(alone))
    for samples in (1, 2):
        own = bias.expand(samples, -1, -1, -1).clone().requires_grad_()
        total = attention(*tensors.values(), position_bias=own).square().sum()
        (found,) = torch.autograd.grad(total, own)
        expected = torch.cat(alone) if samples == 2 else sum(alone)
        torch.testing.assert_close(found, expected)


def test_a_bias_of_minus_infinity_masks():
    tensors = make(7, 9, (8, 8), (4, 4), torch.float64)
    bias = torch.zeros(1, 1, 7, 9).double()
    bias[..., 2:] = -torch.inf
    bias[..., 0, :] = -torch.inf  # a query that sees nothing

    def ours(q, k, v):
        return attention(q, k, v, position_bias=bias)

    def two_keys(q, k, v):
        o = attention(q, k[:, :, :2], v[:, :, :2])
        return torch.cat((torch.zeros_like(o[:, :, :1]), o[:, :, 1:]), 2)

    torch.testing.assert_close(gradients(ours, tensors), gradients(two_keys, tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_autocast_converts_as_for_torchs_own_attention(dtype):
    q, k, v = make(5, 5, (8, 8), (2, 2), dtype).values()
    k = k.float() if dtype == torch.float16 else k
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v)
        found = attention(q, k, v)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def watched(call):
    """The result of a call, and whether torch's own attention made it."""
    with patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as f:
        return call(), f.called


@pytest.mark.cases(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [1, 7])
def test_a_short_sample_gets_from_torch_what_the_own_kernels_give(queries, dtype, causal):
    tensors = {k: x[:1] for k, x in make(queries, queries, (8, 8), (4, 2), dtype).items()}

    def ours(q, k, v):
        return attention(q, k, v, causal=causal, softmax_scale=0.3)

    found, in_torch = watched(lambda: gradients(ours, tensors))
    assert in_torch
    with dpflash.attention_backend("own"):
        expected, in_torch = watched(lambda: gradients(ours, tensors))
    assert not in_torch
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(ours, tensors), found, rtol=0, atol=0)


def test_torchs_own_attention_is_for_short_samples_alone():
    def run(samples=1, tokens=7, keys=None, dtype=torch.float32, **named):
        q, k, v = make(tokens, keys or tokens, (8, 8), (2, 2), dtype).values()
        return watched(lambda: attention(*(x[:samples] for x in (q, k, v)), **named))[1]

    assert run()
    assert run(keys=9)
    assert run(2, tokens=1, keys=9, dtype=torch.bfloat16)
    assert not run(2)
    assert not run(tokens=400)
    assert not run(dtype=torch.bfloat16)
    # torch's causal queries are the first ones, not the last.
    assert not run(keys=9, causal=True)
    assert run(tokens=1, keys=9, causal=True)
    assert not run(pattern=SlidingWindow(left=9, right=0))
    assert not run(softcap=2.0)
    with dpflash.attention_backend("own"):
        assert not run()
        assert not run(2, tokens=1)


def test_a_private_model_attends_by_the_own_kernels():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 8)

        def forward(self, x):
            x = self.proj(x).unsqueeze(1)
            return attention(x, x, x, causal=True).sum((1, 2, 3))

    model, batch = Model(), torch.randn(1, 5, 8)
    _, in_torch = watched(lambda: model(batch).sum().backward())
    assert in_torch
    model.zero_grad()
    engine = dpflash.PrivacyEngine()
    private, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(batch, batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )

    def step():
        engine.backward(private(next(iter(loader))))

    assert not watched(step)[1]
    # After it, plain calls run in torch again, unless a backward runs them once more.
    assert watched(lambda: Model()(batch).sum().backward())[1]
    again = torch.utils.checkpoint.checkpoint(Model(), batch, use_reentrant=False)
    assert not watched(lambda: again.sum().backward())[1]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("seed", range(100))
def test_random_cases_are_those_of_flex_attention(seed):
    """o and lse in float64; on the CPU flex_attention has no backward."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    rng = random.Random(seed)
    keys = rng.randint(1, 70)
    queries = rng.choice((keys, rng.randint(1, keys)))
    groups = rng.choice((1, 2, 3))
    heads = groups * rng.choice((1, 2, 4))
    dims = rng.randint(1, 40), rng.randint(1, 40)
    tensors = make(queries, keys, dims, (heads, groups), torch.float64)
    softcap = rng.choice((None, 0.5, 4.0))
    bias = torch.randn(2, heads, queries, keys).double() if rng.random() < 0.5 else None
    slopes = torch.rand(heads).double() if rng.random() < 0.5 else None
    kind = rng.choice(("dense", "causal", "window", "documents"))
    left, right = rng.randint(0, keys), rng.randint(0, keys)
    borders = (0, *sorted({rng.randint(1, keys) for _ in range(3)} - {keys}), keys)
    document = torch.bucketize(torch.arange(keys), torch.tensor(borders), right=True)
    pattern = {
        "dense": None,
        "causal": Dense(causal=True),
        "window": SlidingWindow(left=left, right=right),
        "documents": Documents(cu_seqlens=borders) & SlidingWindow(left=left, right=right),
    }[kind]

    # Queries of a pattern are the last tokens.
    shift = 0 if pattern is None else keys - queries

    def score(x, b, h, i, j):
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        x = x if bias is None else x + bias[b, h, i, j]
        return x if slopes is None else x - slopes[h] * (i + shift - j).abs()

    def seen(b, h, i, j):
        at = i + shift
        in_window = (at - left <= j) & (j <= at + right)
        return {
            "dense": j >= 0,
            "causal": j <= at,
            "window": in_window,
            "documents": in_window & (document[at] == document[j]),
        }[kind]

    mask = flex.create_block_mask(seen, None, None, queries, keys, device="cpu")
    o, aux = flex.flex_attention(
        *tensors.values(),
        score,
        mask,
        enable_gqa=groups != heads,
        return_aux=flex.AuxRequest(lse=True),
    )
    options = {"softcap": softcap, "position_bias": bias, "alibi_slopes": slopes}
    found = attention(*tensors.values(), pattern=pattern, return_lse=True, **options)
    torch.testing.assert_close(found, (o, aux.lse), rtol=1e-9, atol=1e-12)

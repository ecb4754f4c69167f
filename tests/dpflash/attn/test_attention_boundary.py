"""`attention(..., boundary=...)`: one node clips by the norm that its own backward took."""

import math

import pytest
import torch

from dpflash import Boundary, attention
from dpflash.attn import boundary
from dpflash.kernels import attention as kernels
from dpflash.patterns import Adaptive, Dense, Dilated, SlidingWindow

PATTERNS = {
    "dense": Dense(),
    "causal": Dense(causal=True),
    "window": SlidingWindow(window=5, global_tokens=2),
    "longnet": Dilated(segment_lengths=(8, 16), dilation_rates=(1, 2), causal=True),
}
NO_NOISE = Boundary(max_grad_norm=0.5, noise_multiplier=0.0)


@pytest.fixture(params=["cpu", "kernels"])
def executor(request, monkeypatch):
    """The CPU path, and the kernels, in Triton's interpreter unless there is a GPU."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        from dpflash.kernels import attention_launch

        monkeypatch.setattr(kernels, "_backend", lambda q: attention_launch)
    return request.param


def make_qkv(batch=4, tokens=19, head_dim=16, dtype=torch.float32):
    torch.manual_seed(0)
    return [
        torch.randn(batch, heads, tokens, head_dim, dtype=dtype, requires_grad=True)
        for heads in (2, 1, 1)
    ]


def gradients(qkv, factors, limit=None, **named):
    """Of a loss that weights the samples' random projections of o and lse by factors."""
    o, lse = attention(*qkv, boundary=limit, return_lse=True, **named)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).to(x) for x in (o, lse))
    weights = factors.to(o.dtype)
    up = (do * weights.view(-1, 1, 1, 1)).to(o.dtype), dlse * weights.view(-1, 1, 1)
    return torch.autograd.grad((o, lse), qkv, up)


def norms(grads):
    return sum(g.double().square().sum((1, 2, 3)) for g in grads).sqrt()


def clipped(grads, bound):
    """The definition, in float64."""
    of_samples = norms(grads)
    factors = torch.where(of_samples > bound, bound / of_samples, 1.0)
    return [factors.view(-1, 1, 1, 1) * g.double() for g in grads]


def from_definition(qkv, factors, pattern):
    """`gradients` in float64, every score at once."""
    q, k, v = wide = [x.detach().double().requires_grad_() for x in qkv]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ keys.mT / math.sqrt(q.shape[3])
    scores = scores + pattern.mask(q.shape[2], q.shape[1]).double().log()
    outputs = scores.softmax(3) @ values, scores.logsumexp(3)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).double() for x in outputs)
    up = do * factors.view(-1, 1, 1, 1), dlse * factors.view(-1, 1, 1)
    return torch.autograd.grad(outputs, wide, up)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_released_gradient_is_the_definition_in_float64(name, executor):
    qkv = make_qkv()
    factors = torch.tensor([1e-4, 1.0, 30.0, 0.0])
    found = gradients(qkv, factors, NO_NOISE, pattern=PATTERNS[name])
    expected = clipped(from_definition(qkv, factors, PATTERNS[name]), 0.5)
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    assert (norms(found) <= 0.5).all()
    torch.testing.assert_close(
        norms(found)[1:3], torch.full((2,), 0.5).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_is_clipped_as_by_a_boundary_around_the_three_tensors(dtype):
    qkv = make_qkv(dtype=dtype)
    factors = torch.tensor([1e-3, 1.0, 20.0, 0.0])
    found = gradients(qkv, factors, NO_NOISE, causal=True)
    around = torch.autograd.grad(
        boundary.cross(NO_NOISE, *qkv), qkv, gradients(qkv, factors, causal=True)
    )
    for got, expected in zip(found, around, strict=True):
        torch.testing.assert_close(got, expected)


def test_padding_goes_through_and_a_sample_without_key_gets_nothing(executor):
    qkv = make_qkv(batch=3)
    padding = torch.zeros(3, 19, dtype=torch.bool)
    padding[1, 11:] = True
    padding[2] = True
    found = gradients(qkv, torch.full((3,), 9.0), NO_NOISE, key_padding_mask=padding)
    ordinary = gradients(qkv, torch.full((3,), 9.0), key_padding_mask=padding)
    for got, exact in zip(found, clipped(ordinary, 0.5), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-7)
        assert (got[2] == 0).all()


def test_no_sample_however_large_zero_or_broken_passes_the_bound_or_moves_another(executor):
    qkv = make_qkv(batch=6)
    factors = torch.tensor([1.0, 1e6, 0.0, math.nan, 1e30, math.inf])
    found = gradients(qkv, factors, NO_NOISE)
    assert all(g.isfinite().all() for g in found)
    released = norms(found)
    assert (released <= 0.5).all()
    assert torch.allclose(released[[0, 1, 4]], torch.tensor(0.5).double(), rtol=1e-6, atol=0)
    assert (released[[2, 3, 5]] == 0).all()
    calm = gradients(qkv, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), NO_NOISE)
    for got, alone in zip(found, calm, strict=True):
        torch.testing.assert_close(got[0], alone[0], rtol=1e-6, atol=0)


def test_the_norm_is_the_backwards_own_and_repeats_bit_for_bit(executor, monkeypatch):
    def refuse(grad):
        raise AssertionError("one more pass over the gradients")

    monkeypatch.setattr(boundary, "squared_norm", refuse)
    qkv = make_qkv()
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
    first, again = (gradients(qkv, factors, NO_NOISE, causal=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_gradients_of_a_choice_of_blocks_are_clipped_with_the_rest():
    pattern = Adaptive(block_size=16, keep=2, causal=True)
    qkv = make_qkv(tokens=64, dtype=torch.float64)
    factors = torch.tensor([1e-3, 1.0, 30.0, 1.0])
    found = gradients(qkv, factors, NO_NOISE, pattern=pattern)
    expected = clipped(gradients(qkv, factors, pattern=pattern), 0.5)
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-9)
    assert (norms(found) <= 0.5).all()


def test_only_the_gradient_through_this_attention_is_clipped():
    qkv = make_qkv()
    through = gradients(qkv, torch.full((4,), 50.0), NO_NOISE)
    o, lse = attention(*qkv, boundary=NO_NOISE, return_lse=True)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (50 * torch.randn(x.shape, generator=generator) for x in (o, lse))
    found = torch.autograd.grad(
        (o, lse, *(7 * x.sum() for x in qkv)), qkv, (do, dlse, *[None] * 3)
    )
    for got, released in zip(found, through, strict=True):
        torch.testing.assert_close(got, released + 7)


def test_one_tensor_as_q_k_and_v_gets_the_sum_of_three_released_gradients():
    x = torch.randn(2, 2, 9, 8, requires_grad=True)
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    together = gradients([x, x, x], torch.tensor([1.0, 40.0]), NO_NOISE)[0]
    expected = sum(gradients(apart, torch.tensor([1.0, 40.0]), NO_NOISE))
    torch.testing.assert_close(together, expected)


class _Swallow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_noise_leaves_for_each_tensor_anew_even_where_no_gradient_arrives():
    qkv = make_qkv(batch=16, tokens=16)
    limit = Boundary(max_grad_norm=2.0, noise_multiplier=1.5)
    draws = []
    for _ in range(2):
        o = attention(*qkv, boundary=limit)
        draws += torch.autograd.grad(_Swallow.apply(o).sum(), qkv)
    for draw in draws:
        # At least 4096 normals: the standard error of their std is 1.1 %; 5 of them, false alarm
        # 6e-7 for each of 6 draws.
        assert draw.std().item() == pytest.approx(3.0, rel=0.056)
    firsts = [draw[:, :1] for draw in draws]
    assert not any(torch.equal(x, y) for i, x in enumerate(firsts) for y in firsts[:i])


@pytest.mark.parametrize("shape", [(0, 2, 8, 64), (2, 2, 0, 64)], ids=["no-sample", "no-token"])
def test_an_empty_batch_or_sequence_goes_through(shape):
    qkv = [torch.zeros(shape, requires_grad=True) for _ in range(3)]
    limit = Boundary(max_grad_norm=1.0, noise_multiplier=1.0)
    attention(*qkv, boundary=limit).sum().backward()
    assert all(x.grad.shape == shape for x in qkv)


def test_the_backward_operator_with_squares_passes_opcheck():
    q, k, v = (x.detach() for x in make_qkv())
    arguments = (q, k, v, *[None] * 6, Dense(causal=True).key, 0.25)
    o, lse = torch.ops.dpflash.attention(*arguments)
    backward = torch.ops.dpflash.attention_backward.default
    torch.library.opcheck(backward, (o, lse, o, lse, *arguments, 2.0, "own", False, True))


def test_differentiating_twice_mapping_and_compiling_are_refused():
    qkv = make_qkv(batch=2, tokens=5)
    o = attention(*qkv, boundary=NO_NOISE)
    with pytest.raises(RuntimeError, match="asked for with create_graph=True"):
        torch.autograd.grad(o.square().sum(), qkv, create_graph=True)

    def loss(q, k, v):
        return attention(q, k, v, boundary=NO_NOISE).sum()

    plain = [x.detach() for x in qkv]
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(*plain)
    with pytest.raises(Exception, match="its noise would be compiled in"):
        torch.compile(loss, fullgraph=True, backend="eager")(*qkv)

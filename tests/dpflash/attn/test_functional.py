import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpflash.attn.functional import attention


def explicit_attention(q, k, v, causal=False, softmax_scale=None):
    """Row by row in the dtype of its arguments, from the definition: (o, lse)."""
    (batch, heads, queries, head_dim), groups = q.shape, k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    rows_o, rows_lse = [], []
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // groups)
            for t in range(queries):
                last = t + 1 if causal else k.shape[2]
                scores = scale * (k[b, group, :last] @ q[b, h, t])
                weights = scores.exp() / scores.exp().sum()
                rows_o.append(weights @ v[b, group, :last])
                rows_lse.append(scores.exp().sum().log())
    return torch.stack(rows_o).reshape(q.shape), torch.stack(rows_lse).reshape(q.shape[:3])


def make_qkv(batch=2, heads=4, groups=2, queries=7, keys=7, head_dim=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, queries, head_dim)] + 2 * [(batch, groups, keys, head_dim)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_lse_and_its_gradient_match_explicit_softmax(causal):
    qkv = make_qkv()
    expected_o, expected_lse = explicit_attention(*qkv, causal=causal)
    o, lse = attention(*qkv, causal=causal, return_lse=True)
    torch.testing.assert_close((o, lse), (expected_o, expected_lse), rtol=1e-10, atol=1e-12)
    weights = torch.randn(lse.shape, dtype=torch.float64)
    loss = (lse * weights).sum() + o.square().sum()
    expected_loss = (expected_lse * weights).sum() + expected_o.square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, qkv),
        torch.autograd.grad(expected_loss, qkv),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lse_is_float32_and_accurate_for_narrow_inputs(dtype):
    q, k, v = [x.detach().to(dtype) for x in make_qkv(queries=63, keys=63, head_dim=17)]
    _, expected = explicit_attention(q.double(), k.double(), v.double())
    o, lse = attention(q, k, v, return_lse=True)
    assert o.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


def test_lse_stays_finite_where_the_exponential_overflows():
    q, k, v = make_qkv(dtype=torch.float32)
    o, lse = attention(q * 1000, k, v, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert lse.isfinite().all() and o.isfinite().all() and q.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q has shape \(4, 7, 5\): expected 4 dimensions"),
        (lambda q, k, v: (q, k, v.float()), r"v is torch\.float32.*v\.to\(q\)"),
        (lambda q, k, v: (q, k.to("meta"), v), r"k is torch\.float64 on meta"),
        (lambda q, k, v: (q.long(), k, v), r"q has dtype torch\.int64.*q\.float\(\)"),
        (lambda q, k, v: (q, k, v[:, :, :3]), r"the same batch, heads and tokens"),
        (lambda q, k, v: (q[:, :, :, :4], k, v), r"head_dim"),
        (lambda q, k, v: (q[:1], k, v), r"the same batch"),
        (lambda q, k, v: (q[:, :3], k, v), r"q has 3 heads and k has 2"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), r"q has 4 heads and k has 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        attention(*change(*[x.detach() for x in make_qkv()]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "dilated"}, "expected None or a pattern"),
        ({"softmax_scale": math.nan}, "softmax_scale=nan"),
        ({"softmax_scale": math.inf}, "softmax_scale=inf"),
        ({"softmax_scale": True}, "softmax_scale=True"),
    ],
    ids=str,
)
def test_arguments_that_have_no_meaning_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(*make_qkv(), **arguments)


def test_causal_attention_of_more_queries_than_keys_is_refused_rather_than_guessed():
    with pytest.raises(ValueError, match="causal=True with 7 queries and 5 keys"):
        attention(*make_qkv(keys=5), causal=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_works_under_compile_and_per_sample_vmap(return_lse):
    qkv = [x.detach().float() for x in make_qkv()]

    def total(q, k, v):
        result = attention(q, k, v, causal=True, return_lse=return_lse)
        return sum(x.square().sum() for x in (result if return_lse else (result,)))

    compiled = torch.compile(total, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv), total(*qkv))
    one = [x.unsqueeze(1) for x in qkv]
    per_sample = torch.func.vmap(torch.func.grad(total))(*one)
    torch.testing.assert_close(per_sample.squeeze(1), torch.func.grad(total)(*qkv))


class SeenOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_call_past_the_operators_gives_their_bits_and_a_mode_still_sees_them():
    plain, seen = make_qkv(dtype=torch.float32), make_qkv(dtype=torch.float32)
    o = attention(*plain, causal=True)
    o.square().sum().backward()
    with SeenOperators() as mode:
        same = attention(*seen, causal=True)
        same.square().sum().backward()
    assert {"dpflash::attention", "dpflash::attention_backward"} <= set(mode.names)
    assert torch.equal(o, same)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, seen, strict=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_computes_and_does_not_repeat_what_it_saw():
    def function(q, k, v):
        return attention(q, k, v, causal=True)

    q, k, v = (x.detach() for x in make_qkv(dtype=torch.float32))
    traced = torch.jit.trace(function, (q, k, v), check_trace=False)
    assert torch.equal(
        traced(v.repeat(1, 2, 1, 1), k, q[:, :2]), function(v.repeat(1, 2, 1, 1), k, q[:, :2])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float64_bias_of_the_least_number_alone_gives_the_mean_of_v(dtype):
    q, k, v = (x.detach() for x in make_qkv(groups=4, dtype=dtype))
    least = torch.finfo(torch.float64).min
    bias = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    bias[..., 1, :] = least
    bias[..., 2, 3:] = least
    bias[..., 3, :] = -math.inf
    o = attention(q, k, v, position_bias=bias)
    eager = (q.double() @ k.double().transpose(2, 3) / 5**0.5 + bias).softmax(3) @ v.double()
    rest = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(o[:, :, rest].double(), eager[:, :, rest], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(o[:, :, 1], v.mean(2), rtol=1e-5, atol=1e-6)
    assert (o[:, :, 3] == 0).all()

"""Rotary positions: the kernels have the bits of the reference, and are differentiable like it.

Without a GPU the Triton kernel runs in Triton's interpreter.
"""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from dpflash.kernels import apply_rotary, native, rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")
# (B, H, G, T, D), dtype, back
CASES = [
    ((2, 6, 2, 37, 64), torch.float32, False),
    ((2, 5, 5, 33, 40), torch.float32, True),
    ((2, 5, 5, 33, 40), torch.bfloat16, False),
    ((3, 3, 1, 1, 6), torch.bfloat16, True),
    ((1, 2, 2, 70, 2), torch.float16, True),
    ((2, 3, 1, 5, 40), torch.float64, True),
    ((0, 2, 1, 5, 4), torch.float32, False),
]
SHAPE = CASES[0][0]


def every(cases):
    """A test of all cases, on two processors."""
    names = ["B{}-H{}-G{}-T{}-D{}-".format(*shape) + str(dtype)[6:] for shape, dtype, _ in cases]

    def decorate(test):
        marked = pytest.mark.cases(2 * len(cases))(test)
        return pytest.mark.parametrize(("shape", "dtype", "back"), cases, ids=names)(marked)

    return decorate


def inputs(shape, dtype, device="cpu"):
    """A packed projection whose values are NaN, q and k in it, and the tables of their angles."""
    batch, heads, key_heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, heads + 2 * key_heads, dim, generator=generator)
    x[:, :, heads + key_heads :] = math.nan
    angles = torch.randn(tokens, dim // 2, dtype=torch.float64, generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    packed = x.to(device, dtype)
    return (
        packed,
        split(packed, shape),
        (angles.cos().to(device, wide), angles.sin().to(device, wide)),
    )


def split(packed, shape):
    q, k, _ = packed.transpose(1, 2).split((shape[1], shape[2], shape[2]), dim=1)
    return q, k


def expected(q, k, cos, sin, back):
    return tuple(rotary.rotate(x, cos, sin, back=back) for x in (q, k))


def assert_bits(found, want):
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.fixture
def no_reference(monkeypatch):
    """The kernel alone: where the reference implementation would run, the test fails."""
    monkeypatch.setattr(rotary, "rotate", None)


@pytest.mark.parametrize("back", [False, True])
def test_the_reference_multiplies_each_pair_as_a_complex_number(back):
    _, (q, _), (cos, sin) = inputs(SHAPE, torch.float64)
    turn = torch.complex(cos, -sin if back else sin)
    product = torch.complex(*q.chunk(2, dim=3)) * turn
    found = rotary.rotate(q, cos, sin, back=back)
    torch.testing.assert_close(found, torch.cat((product.real, product.imag), dim=3))


@needs_compiler
@every(CASES)
def test_the_cpu_kernel_has_the_bits_of_the_reference(
    shape, dtype, back, processor, poisoned_memory, monkeypatch
):
    monkeypatch.setattr(rotary, "_WORK_OF_A_THREAD", 1)
    packed, (q, k), tables = inputs(shape, dtype)
    want = expected(q, k, *tables, back)
    if dtype != torch.float16:
        monkeypatch.setattr(rotary, "rotate", None)
    assert_bits(apply_rotary(q, k, *tables, back=back), want)
    rest, version = packed.clone(), packed._version
    assert_bits(apply_rotary(q, k, *tables, back=back, out=(q, k)), want)
    assert_bits((q, k), want)
    assert packed._version > version
    heads = shape[1] + shape[2]
    torch.testing.assert_close(packed[:, :, heads:], rest[:, :, heads:], equal_nan=True)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@every([case for case in CASES if case[1] != torch.float64])
def test_the_gpu_kernel_has_the_bits_of_the_reference(shape, dtype, back, poisoned_memory):
    pytest.importorskip("triton")
    launch = pytest.importorskip("dpflash.kernels.rotary_triton").launch
    packed, (q, k), tables = inputs(shape, dtype, DEVICE)
    want = expected(q, k, *tables, back)
    new = torch.empty_like(q), torch.empty_like(k)
    launch(q, k, *tables, back, *new)
    launch(q, k, *tables, back, q, k)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter rounds toward zero
        for x, y in zip((*new, q, k), (*want, *want), strict=True):
            torch.testing.assert_close(x, y, rtol=2.0**-7, atol=0)
    else:
        assert_bits((*new, q, k), (*want, *want))
    assert packed[:, :, shape[1] + shape[2] :].isnan().all()


@needs_compiler
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf, 3.0])
def test_a_sample_has_its_own_bits_whatever_the_others_hold(value, no_reference):
    _, (q, k), tables = inputs((3, 4, 2, 65, 12), torch.bfloat16)
    alone = apply_rotary(q[1:2], k[1:2], *tables)
    q[0], k[2] = value, value
    assert_bits([x[1:2] for x in apply_rotary(q, k, *tables)], alone)


def test_bfloat16_is_rounded_as_torch_rounds_it():
    """Ties, values that become infinite, subnormal numbers and NaN."""
    bits = [0x3F808000, 0x3F818000, 0x3F818001, 0x7F7FFFFF, 0x00008001, 0x7FFFFFFF, 0x7F800001]
    signed = torch.tensor([b | s for b in bits for s in (0, -(1 << 31))], dtype=torch.int32)
    exact = signed.view(torch.float32)
    # 1 * cos - 0 * sin and 0 * cos + 1 * sin, of which the first is the number itself.
    q = torch.cat((torch.ones(14), torch.zeros(14))).bfloat16().view(1, 1, 1, 28)
    cos = exact.view(1, 14)
    (found, _) = apply_rotary(q, q, cos, torch.zeros_like(cos))
    want = exact.bfloat16()
    assert torch.equal(found[0, 0, 0, :14].nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(found[0, 0, 0, :14].isnan(), want.isnan())


@needs_compiler
@pytest.mark.parametrize("layout", ["packed", "contiguous"])
def test_results_have_the_memory_layout_of_their_inputs(layout, no_reference):
    _, (q, k), tables = inputs(SHAPE, torch.float32)
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    for x in apply_rotary(q, k, *tables):
        assert (x if layout == "contiguous" else x.transpose(1, 2)).is_contiguous()


@pytest.mark.parametrize("back", [False, True])
def test_gradients_turn_back_and_have_gradients(back):
    _, (q, k), tables = inputs((2, 4, 2, 3, 6), torch.float64)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()

    def turned(q, k):
        return apply_rotary(q, k, *tables, back=back)

    assert torch.autograd.gradcheck(turned, leaves)
    assert torch.autograd.gradgradcheck(lambda q, k: [x**3 for x in turned(q, k)], leaves)
    # The gradient of a sum is one number, expanded, which no kernel reads.
    (found,) = torch.autograd.grad(turned(*leaves)[0].sum(), leaves[0])
    torch.testing.assert_close(found, rotary.rotate(torch.ones_like(q), *tables, back=not back))


@needs_compiler
def test_the_backward_is_one_call_of_the_kernel(no_reference):
    _, (q, k), tables = inputs(SHAPE, torch.float32)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    found = torch.autograd.grad(apply_rotary(*leaves, *tables), leaves, [q, k])
    assert_bits(found, apply_rotary(q, k, *tables, back=True))


def test_what_is_recorded_in_place_or_has_trained_tables_is_differentiable():
    _, (q, k), (cos, sin) = inputs((2, 4, 2, 3, 6), torch.float64)
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()

    def written(q, k):
        out = q.clone(), k.clone()
        apply_rotary(q, k, cos, sin, out=out)
        return out

    assert_bits(written(q, k), expected(q, k, cos, sin, False))
    assert torch.autograd.gradcheck(written, (q, k))
    trained = cos.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: apply_rotary(*x, sin), (q, k, trained))


def test_transforms_see_the_operations():
    _, (q, k), tables = inputs((3, 2, 2, 5, 4), torch.float64)
    want = expected(q, k, *tables, False)

    def turned(q, k):
        return apply_rotary(q, k, *tables)

    stacked = torch.func.vmap(turned)(q.unsqueeze(1), k.unsqueeze(1))
    torch.testing.assert_close([x.squeeze(1) for x in stacked], list(want))
    _, tangents = torch.func.jvp(turned, (q, k), (q, k))
    torch.testing.assert_close(tangents, want)
    with forward_ad.dual_level():
        dual = turned(forward_ad.make_dual(q, q), k)[0]
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, want[0])
    leaf = q.clone().requires_grad_()
    (found,) = torch.autograd.grad(
        turned(leaf, k)[0], leaf, torch.stack((q, -q)), is_grads_batched=True
    )
    back = rotary.rotate(q, *tables, back=True)
    torch.testing.assert_close(found, torch.stack((back, -back)))
    torch.testing.assert_close(torch.compile(turned, fullgraph=True, backend="eager")(q, k), want)
    torch.testing.assert_close(checkpoint(turned, leaf, k, use_reentrant=False), want)

"""Squared norms that attention's backward gives beside its gradients, on any device."""

import pytest
import torch

from dpflash.kernels import attention as kernels
from dpflash.kernels import attention_reference as reference
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.patterns import Dense, Dilated, SlidingWindow

PATTERNS = {
    "causal": Dense(causal=True),
    "window": SlidingWindow(window=5, global_tokens=2),
    "longnet": Dilated(segment_lengths=(8, 16), dilation_rates=(1, 2), causal=True),
}
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def backward(module, graph, scale, dtype=torch.float32, batch=3, factor=1.0, **named):
    """Gradients of random tensors, of T 27, H 4, G 2 and D 16."""
    torch.manual_seed(0)
    q, do = (torch.randn(batch, 4, 27, 16).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, 2, 27, 16).to(dtype) for _ in range(2))
    inputs = AttentionInputs(q, k, v, graph, scale)
    o, lse = module.attention_forward(inputs)
    return module.attention_backward(factor * do, None, o, lse, inputs, squares=True, **named)


def of_stored(grads):
    return sum(x.double().square().sum((1, 2, 3)) for x in (grads.dq, grads.dk, grads.dv))


@pytest.mark.parametrize("module", [kernels, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_squares_are_of_the_gradients_as_returned(name, dtype, module):
    grads = backward(module, PATTERNS[name].graph(27, 4), 0.25, dtype)
    assert grads.squares.dtype == torch.float64
    torch.testing.assert_close(grads.squares, of_stored(grads), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [-0.25, 0.0], ids=str)
def test_squares_follow_dq_where_the_scale_is_not_positive(scale):
    grads = backward(kernels, Dense().graph(27, 4), scale)
    assert (grads.dq == 0).all() == (scale == 0)
    torch.testing.assert_close(grads.squares, of_stored(grads), rtol=1e-12, atol=0)


def test_squares_of_huge_gradients_do_not_overflow():
    grads = backward(kernels, Dense().graph(27, 4), 0.25, factor=1e30)
    assert (grads.squares > 1e60).all()
    torch.testing.assert_close(grads.squares, of_stored(grads), rtol=1e-12, atol=0)


def test_an_empty_batch_has_no_squares_and_nobody_gets_any_unasked():
    graph = Dense().graph(27, 4)
    assert backward(kernels, graph, 0.25, batch=0).squares.shape == (0,)
    q = torch.randn(1, 4, 27, 16)
    inputs = AttentionInputs(q, q, q, graph, 0.25)
    o, lse = kernels.attention_forward(inputs)
    assert kernels.attention_backward(o, None, o, lse, inputs).squares is None

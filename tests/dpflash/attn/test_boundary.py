import math
import os
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from dpflash import Boundary, attention, private_boundary
from dpflash.attn import boundary


def gradient(x, factors, **named):
    """What leaves through private_boundary when the gradient behind it is factors * ones."""
    x = x.detach().requires_grad_()
    (private_boundary(x, **named) * factors.view(-1, *[1] * (x.ndim - 1))).sum().backward()
    return x.grad


def test_each_row_is_clipped_by_its_own_norm_and_the_forward_is_the_identity():
    x = torch.randn(4, 3, 5)
    factors = torch.tensor([1e-3, 1.0, 1e3, 0.0])
    named = {"max_grad_norm": 1.0, "noise_multiplier": 0.0}
    assert torch.equal(private_boundary(x, **named), x)
    norms = gradient(x, factors, **named).flatten(1).norm(dim=1)
    expected = (factors * math.sqrt(15)).clamp(max=1.0)
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    assert (norms <= 1.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_leaves_as_noise_alone_and_harms_no_other(bad):
    x = torch.randn(3, 8)
    clean = gradient(x, torch.ones(3), max_grad_norm=0.5, noise_multiplier=0.0)
    grad = gradient(x, torch.tensor([1.0, bad, 1.0]), max_grad_norm=0.5, noise_multiplier=0.0)
    assert (grad[1] == 0).all()
    assert torch.equal(grad[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_has_its_standard_deviation_on_every_coordinate_and_never_repeats(dtype):
    x = torch.zeros(40, 500, dtype=dtype)
    draws = [
        gradient(x, torch.zeros(40, dtype=dtype), max_grad_norm=2.0, noise_multiplier=1.5).double()
        for _ in range(2)
    ]
    for draw in draws:
        # 20000 normals: the standard error of their std is 0.5 %; 5 of them, false alarm 6e-7.
        assert draw.std().item() == pytest.approx(3.0, rel=0.025)
        assert abs(draw.mean().item()) < 5 * 3.0 / math.sqrt(draw.numel())
    correlation = torch.corrcoef(torch.stack([draw.flatten() for draw in draws]))[0, 1]
    assert abs(correlation.item()) < 5 / math.sqrt(20000)


def test_three_tensors_of_one_boundary_get_unequal_noise():
    tensors = [torch.zeros(2, 50, requires_grad=True) for _ in range(3)]
    limit = Boundary(max_grad_norm=1.0, noise_multiplier=1.0)
    sum(x.sum() for x in boundary.cross(limit, *tensors)).backward()
    draws = [x.grad for x in tensors]
    assert not any(torch.equal(draws[i], draws[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_draws_noise_of_its_own():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, pickle.dumps(boundary._key))
        os._exit(0)
    os.waitpid(child, 0)
    assert pickle.loads(os.read(reader, 1000)) != boundary._key
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"max_grad_norm": 0.0, "noise_multiplier": 1.0}, "max_grad_norm=0.0"),
        ({"max_grad_norm": 1.0, "noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"max_grad_norm": math.inf, "noise_multiplier": 0.0}, "max_grad_norm=inf"),
        ({"max_grad_norm": 1e38, "noise_multiplier": 10.0}, r"max_grad_norm=1e\+38 with noise"),
        ({"max_grad_norm": 1e-45, "noise_multiplier": 1.0}, "max_grad_norm=1e-45 with noise"),
        ({"max_grad_norm": 1.0, "noise_multiplier": 10**400}, "noise_multiplier: expected"),
    ],
    ids=str,
)
def test_bad_numbers_are_refused_by_name(named, message):
    with pytest.raises(ValueError, match=message):
        private_boundary(torch.ones(2, 3), **named)


def test_numbers_of_other_kinds_are_taken():
    x = torch.ones(2, 3, requires_grad=True)
    numbers = {"max_grad_norm": Fraction(1, 3), "noise_multiplier": np.float32(2.0)}
    private_boundary(x, **numbers).sum().backward()
    assert x.grad.isfinite().all()


def test_what_is_no_batch_is_refused():
    for x in (None, 1.0, [1.0]):
        with pytest.raises(ValueError, match=rf"x={type(x).__name__}: expected a tensor"):
            private_boundary(x, max_grad_norm=1.0, noise_multiplier=1.0)
    for x in (torch.tensor(1.0), torch.arange(3)):
        with pytest.raises(ValueError, match="first dimension is the batch"):
            private_boundary(x, max_grad_norm=1.0, noise_multiplier=1.0)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="boundary=1.0"):
        attention(q, q, q, boundary=1.0)
    limit = Boundary(max_grad_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="together with sinks"):
        attention(q, q, q, boundary=limit, sinks=torch.zeros(2))

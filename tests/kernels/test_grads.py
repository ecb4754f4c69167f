"""What grads.py refuses and whom it calls; the results are tested beside twins and kernels."""

import math
import re
import subprocess
import sys

import pytest
import torch

from dpflash import kernels
from dpflash.kernels import grads

X, DY = torch.zeros(3, 4, 5), torch.zeros(3, 4, 6)
FACTORS, INDICES = torch.ones(3), torch.zeros(3, 4, dtype=torch.int64)
END = kernels.NoiseStream(
    std=1.0, key=bytes(32), step=0, parameter_id=0, offset=2**35 - 29, generator="chacha20"
)
REFUSED = {
    "bound-zero": ("block_clipped_grad", (X, DY, 0.0), {}, "bound is 0.0"),
    "bound-negative": ("block_clipped_grad", (X, DY, -1.0), {}, "bound is -1.0"),
    "bound-nan": ("block_clipped_grad", (X, DY, math.nan), {}, "bound is nan"),
    "bound-tensor": ("block_clipped_grad", (X, DY, torch.ones(3)), {}, "give a number"),
    "bound-of-stored": ("block_clip_reduce", (X, math.nan), {}, "bound is nan"),
    "block-odd": ("block_clipped_grad", (X, DY, 1.0), {"block": (16, 100)}, r"block is (16, 100)"),
    "block-large": ("block_clipped_grad", (X, DY, 1.0), {"block": (16, 256)}, "16 to 128"),
    "form": ("grad_norm", (X, DY), {"form": "gramm"}, "form is 'gramm'"),
    "factors-short": ("clipped_grad", (X, DY, torch.ones(2)), {}, "factors has shape (2,)"),
    "factors-wide": ("clip_reduce", (X, torch.ones(3, 1)), {}, "for each of the 3 samples"),
    "factors-integer": ("clip_reduce", (X, INDICES[:, 0]), {}, "factors has dtype torch.int64"),
    "factors-of-table": (
        "embedding_clipped_grad",
        (INDICES, DY, torch.ones(4), 9),
        {},
        "factors has shape (4,)",
    ),
    "divisor-zero": ("clip_reduce", (X, FACTORS), {"divisor": 0.0}, "divisor is 0.0"),
    "divisor-nan": ("clip_reduce", (X, FACTORS), {"divisor": math.nan}, "divisor is nan"),
    "divisor-inf": ("clip_reduce", (X, FACTORS), {"divisor": math.inf}, "divisor is inf"),
    "noise-number": ("clip_reduce", (X, FACTORS), {"noise": 1.0}, "noise is a float: give a"),
    "noise-key": ("clipped_grad", (X, DY, FACTORS), {"noise": bytes(32)}, "noise is a bytes:"),
    "noise-of-blocks": ("block_clip_reduce", (X, 1.0), {"noise": {}}, "noise is a dict:"),
    "noise-at-the-end": (
        "block_clipped_grad",
        (X, DY, 1.0),
        {"noise": END},
        "with 30 elements of out it leaves the stream's 34359738368; split the parameter",
    ),
    "dtype": ("per_sample_grad", (X.to(torch.float8_e5m2), DY), {}, "x has dtype"),
    "complex": ("per_sample_grad", (X, DY.to(torch.complex64)), {}, "dy has dtype"),
    "integer": ("squared_norm", (INDICES,), {}, "grads has dtype torch.int64"),
    "tokens": ("grad_norm", (X, DY[:, 1:]), {}, "(3, 4, 5) and (3, 3, 6)"),
    "samples": ("clipped_grad", (X[1:], DY, FACTORS), {}, "(2, 4, 5) and (3, 4, 6)"),
    "two-dimensions": ("per_sample_grad", (X[0], DY), {}, "x has shape (4, 5)"),
    "bias": ("per_sample_bias_grad", (DY[0],), {}, "dy has shape (4, 6)"),
    "indices": ("embedding_grad_norm", (INDICES.float(), DY), {}, "indices has shape (3, 4)"),
    "devices": ("grad_norm", (X.to("meta"), DY), {}, "meta and cpu"),
    "normalised": (
        "layer_norm_backward",
        (X, X, X[..., :1], X[..., :1], None, 3),
        {},
        "ndim is 3",
    ),
    "norm-shapes": ("rms_norm_backward", (DY, X, X[..., :1], None, 1), {}, "dy and x have shapes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case):
    name, args, named, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(kernels, name)(*args, **named)


def test_tensors_of_a_device_without_triton_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpflash.kernels.grad_launch", None)
    monkeypatch.delattr(kernels, "grad_launch", raising=False)
    x, dy = X.to("meta"), DY.to("meta")
    with pytest.raises(ImportError, match="device meta need triton.*move the tensors to the CPU"):
        kernels.grad_norm(x, dy)


def test_float64_runs_in_plain_torch_on_every_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpflash.kernels.grad_launch", None)
    found = kernels.per_sample_grad(X.double().to("meta"), DY.double().to("meta"))
    assert found.dtype == torch.float64 and found.shape == (3, 6, 5)


def test_every_operation_of_the_launcher_has_the_signature_of_its_twin():
    pytest.importorskip("triton")
    code = (
        "import inspect\n"
        "from dpflash.kernels import block_reference, grad_launch, grads, reference\n"
        "def own(m): return {n: f for n, f in vars(m).items() if inspect.isfunction(f)\n"
        "    and f.__module__ == m.__name__ and not n.startswith('_')}\n"
        "twins = {**own(reference), **own(block_reference)}\n"
        "launched = {n: f for n, f in own(grad_launch).items()\n"
        "    if n not in ('precision', 'noise_width')}\n"
        "assert set(launched) == set(own(grads)), set(launched) ^ set(own(grads))\n"
        "for n, f in launched.items():\n"
        "    s = inspect.signature(f)\n"
        "    assert s == inspect.signature(twins[n]) == inspect.signature(own(grads)[n]), n\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_dispatch_is_public():
    names = [n for n in vars(grads) if not n.startswith("_") and callable(getattr(grads, n))]
    own = [n for n in names if getattr(grads, n).__module__ == grads.__name__]
    assert own and set(own) <= set(kernels.__all__)
    assert all(getattr(kernels, name) is getattr(grads, name) for name in own)


def test_the_twin_s_new_results_agree_with_what_they_stand_for():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 9, n, generator=generator) for n in (7, 8))
    stored, squares = kernels.per_sample_grad(x, dy, return_squares=True)
    assert torch.equal(stored, kernels.per_sample_grad(x, dy))
    for form in (None, "gram", "tile"):
        torch.testing.assert_close(kernels.grad_norm(x, dy, form=form), squares, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        kernels.per_sample_bias_grad(dy.bfloat16()), dy.bfloat16().float().sum(1)
    )
    factors = torch.tensor([1.0, 0.0, 0.5])
    torch.testing.assert_close(
        kernels.clip_reduce(stored, factors, divisor=4.0),
        kernels.clip_reduce(stored, factors) / 4,
    )

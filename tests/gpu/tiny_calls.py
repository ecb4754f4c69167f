"""One small call of each family of Triton kernels, for a memory checker to watch."""

from __future__ import annotations

import sys

import torch

import dpflash
from dpflash import kernels, patterns

device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
torch.manual_seed(0)
attention = [
    patterns.Dense(causal=True),
    patterns.Dilated(segment_lengths=(64, 130), dilation_rates=(1, 3), causal=True),
]
for pattern in attention:
    # Of 80 = 64 + 16 the kernels make two parts.
    for head_dim in (64, 80):
        qkv = [torch.randn(2, heads, 201, head_dim, device=device) for heads in (4, 2, 2)]
        q, k, v = (x.bfloat16().requires_grad_() for x in qkv)
        dpflash.attention(q, k, v, pattern=pattern).float().square().sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
print("attention: done", flush=True)

q, k = torch.randn(2, 201, 6, 80, device=device).transpose(1, 2).split((4, 2), dim=1)
tables = torch.rand(2, 201, 40, device=device)
kernels.apply_rotary(q, k, *tables, out=(q, k))
assert all(x.isfinite().all() for x in kernels.apply_rotary(q, k, *tables, back=True))
print("rotary: done", flush=True)

x, dy = (torch.randn(3, 77, size, device=device).bfloat16() for size in (150, 132))
factors = torch.rand(3, device=device)
grid = kernels.grid_of(1.0)
noise = kernels.NoiseStream(std=0.7, grid=grid, key=bytes(range(32)), step=3, parameter_id=1)
stored = kernels.per_sample_grad(x, dy)
kernels.clip_reduce(stored, factors, grid=grid, noise=noise)
kernels.clipped_grad(x, dy, factors)
for form in ("gram", "tile"):
    assert kernels.grad_norm(x, dy, form=form).isfinite().all()
print("gradients: done", flush=True)

out = noise.add_to_(torch.zeros(10_007, device=device))
assert out.isfinite().all() and out.std() > 0.5
print("noise: done")

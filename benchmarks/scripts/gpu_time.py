"""Where the time goes on this GPU: ceilings, attention beside others, gradient kernels, steps.

    python benchmarks/scripts/gpu_time.py attention --json runs/gpu-time.json

Each figure is the median of calls which take turns with what they are compared with; the JSON is
written again after each. With --device cpu everything is tiny: a dry run whose figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

import dpflash
from dpflash import kernels, patterns
from dpflash.bench.environment import environment
from dpflash.bench.private import AUTO, NONPRIVATE, make_training
from dpflash.bench.private_tasks import bytes_task
from dpflash.bench.timing import Effort, Stopwatch, time_steps

Call = Callable[[], Any]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
}
CAUSAL = patterns.Dense(causal=True)
# Tokens are 16,384 in all and heads 2048 / D, as in FlashAttention's figures.
TOKENS = 16384
PROVIDERS = (
    NONPRIVATE,
    AUTO,
    "dpflash-per_layer",
    "dpflash-per_block",
    "dpflash-flat-book_keeping",
)
# Width, layers, batch and tokens of a step.
SHAPES = ((1024, 12, 8, 4096), (512, 4, 4, 1024))
LONG_SHAPES = ((1024, 12, 4, 4096), (1024, 12, 1, 16384), (1024, 12, 1, 32768))


class Bench:
    """Runs calls on one device and writes the figures to a file of all parts."""

    def __init__(self, path: Path, part: str, device: torch.device):
        self.path, self.device = path, device
        self.is_dry, self.has_failed = device.type != "cuda", False
        path.parent.mkdir(parents=True, exist_ok=True)
        held = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        about = {**environment(device.type, 1), "dry_run": self.is_dry}
        self.held = {"environment": about, "parts": {**held["parts"], part: []}}
        self.rows: list[dict[str, Any]] = self.held["parts"][part]
        self.stopwatch = Stopwatch(device)

    def size(self, size: int) -> int:
        """A length or a width, which is small in a dry run."""
        return min(size, 64) if self.is_dry else size

    def randn(self, *shape: int) -> Tensor:
        """bf16; in a dry run fp32, since kernels of the CPU stand in."""
        x = torch.randn(shape, device=self.device)
        return x if self.is_dry else x.bfloat16()

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.path.write_text(json.dumps(self.held, indent=1) + "\n")
        print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))

    def in_turns(self, calls: dict[str, Call], trials: int = 20) -> dict[str, float]:
        """Median milliseconds of each call, the calls taking turns."""
        effort = Effort(1, 1) if self.is_dry else Effort(3, trials)
        seconds = time_steps(calls, effort=effort, stopwatch=self.stopwatch)
        return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def ceilings(bench: Bench) -> None:
    """Bytes/s of a copy, FLOP/s of a product."""
    source = torch.randn(bench.size(1 << 29), device=bench.device)
    target = torch.empty_like(source)
    side = bench.size(8192)
    a, b = bench.randn(side, side), bench.randn(side, side)
    found = bench.in_turns({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b})
    bench.add(what="copy, TB/s", value=2 * source.nbytes / found["copy"] / 1e9)
    bench.add(what=f"matmul {side}, TFLOP/s", value=2 * side**3 / found["matmul"] / 1e9)


def attention(bench: Bench) -> None:
    """Every pattern; torch's attention beside the dense ones."""
    lengths = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
    documents = tuple(range(0, bench.size(TOKENS) + 1, bench.size(2048)))
    blocks = {"block_size": 128, "local_blocks": 4, "stride_blocks": 8}
    sparse: dict[str, Any] = {
        "full": patterns.Dense(),
        "window 1024": patterns.SlidingWindow(window=1023, causal=True),
        "longnet": patterns.Dilated(**lengths, causal=True),
        "documents": patterns.Documents(cu_seqlens=documents, causal=True),
        "block-sparse": patterns.BlockSparse(**blocks, causal=True),
    }
    cases = [("causal", CAUSAL, dim, tokens) for dim in (64, 128) for tokens in (4096, TOKENS)]
    cases += [(name, pattern, 128, TOKENS) for name, pattern in sparse.items()]
    for name, pattern, head_dim, tokens in cases:
        forwards: dict[str, Forward] = {"dpflash": partial(dpflash.attention, pattern=pattern)}
        if name in ("causal", "full") and not bench.is_dry:
            for provider, backend in BACKENDS.items():
                forwards[provider] = partial(sdpa, backend=backend, causal=name == "causal")
        compare_attention(bench, name, pattern, head_dim, tokens, forwards)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, backend: SDPBackend, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flex(bench: Bench) -> None:
    """FlexAttention, in a part of its own because compiling it takes long."""
    compiled: Any = flex_attention if bench.is_dry else torch.compile(flex_attention)
    tokens = bench.size(TOKENS)
    local = patterns.SlidingWindow(window=1023, causal=True)
    for name, pattern, window in (("causal", CAUSAL, tokens), ("window 1024", local, 1024)):

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, window: int = window) -> Tensor:
            return (i >= j) & (i - j < window)

        mask = create_block_mask(seen, None, None, tokens, tokens, device=bench.device.type)
        forwards: dict[str, Forward] = {
            "flex": partial(compiled, block_mask=mask),
            "dpflash": partial(dpflash.attention, pattern=pattern),
        }
        compare_attention(bench, name, pattern, 128, TOKENS, forwards)


def compare_attention(
    bench: Bench,
    name: str,
    pattern: Any,
    head_dim: int,
    tokens: int,
    forwards: dict[str, Forward],
) -> None:
    """Forward, and forward and backward, of several providers in turns."""
    batch, heads = TOKENS // tokens, 2048 // head_dim
    tokens = bench.size(tokens)
    q, k, v, do = (bench.randn(batch, heads, tokens, head_dim) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    flops = 4 * batch * head_dim * pattern.graph(tokens, heads).edges()
    for direction, factor in (("forward", 1.0), ("forward and backward", 3.5)):
        calls: dict[str, Call] = {}
        for provider, forward in forwards.items():

            def call(forward: Forward = forward, backward: bool = factor > 1) -> object:
                with torch.set_grad_enabled(backward):
                    o = forward(q, k, v)
                return torch.autograd.grad(o, leaves, do) if backward else o

            try:
                call()
                calls[provider] = call
            except Exception as error:  # a provider that cannot is no reason to stop
                bench.has_failed |= provider == "dpflash"
                print(f"{provider}: {str(error)[:200]}", flush=True)
        of = {"what": name, "D": head_dim, "T": tokens, "direction": direction}
        for provider, ms in bench.in_turns(calls).items():
            bench.add(**of, provider=provider, ms=ms, tflops=factor * flops / ms / 1e9)


def gradients(bench: Bench) -> None:
    """Products, norms, clipped sums and noise, beside torch's batched product."""
    batch, grid = 8, kernels.grid_of(1.0)
    for inputs, outputs in ((1024, 1024), (1024, 4096)):
        tokens, inputs, outputs = (bench.size(n) for n in (4096, inputs, outputs))
        x, dy = bench.randn(batch, tokens, inputs), bench.randn(batch, tokens, outputs)
        factors = torch.rand(batch, device=bench.device)
        products: dict[str, Call] = {
            "torch.bmm": partial(torch.bmm, dy.mT, x),
            "per_sample_grad": partial(kernels.per_sample_grad, x, dy),
            "with squares": partial(kernels.per_sample_grad, x, dy, return_squares=True),
            "grad_norm tile": partial(kernels.grad_norm, x, dy, form="tile"),
            "clipped_grad": partial(kernels.clipped_grad, x, dy, factors),
            "block_clipped_grad": partial(kernels.block_clipped_grad, x, dy, 1.0),
        }
        flops = 2 * batch * tokens * inputs * outputs
        for name, ms in bench.in_turns(products).items():
            bench.add(what=name, I=inputs, O=outputs, ms=ms, tflops=flops / ms / 1e9)
        short = x[:, :512], dy[:, :512]
        forms = {form: partial(kernels.grad_norm, *short, form=form) for form in ("gram", "tile")}
        for form, ms in bench.in_turns(forms).items():
            bench.add(what=f"grad_norm {form}, T=512", I=inputs, O=outputs, ms=ms)
        grads: Any = kernels.per_sample_grad(x, dy)
        sums = torch.zeros(outputs, inputs, dtype=torch.float64, device=bench.device)
        noise = kernels.NoiseStream(std=1.0, grid=grid, key=bytes(32), step=1, parameter_id=1)
        reduce = partial(kernels.clip_reduce, grads, factors)
        reduces: dict[str, Call] = {
            "clip_reduce": reduce,
            "exact": partial(reduce, grid=grid),
            "exact into": partial(reduce, grid=grid, into=sums),
            "exact with noise": partial(reduce, grid=grid, noise=noise),
            "noise alone": partial(noise.add_to_, sums),
        }
        for name, ms in bench.in_turns(reduces).items():
            bench.add(what=name, I=inputs, O=outputs, ms=ms, gb_per_s=grads.nbytes / ms / 1e6)


def steps(bench: Bench) -> None:
    """Steps of each clipping, and a profile of each."""
    time_training(bench, SHAPES, PROVIDERS)


def long(bench: Bench) -> None:
    """Private over non-private as sequences grow."""
    time_training(bench, LONG_SHAPES, PROVIDERS[:2])


def time_training(bench: Bench, shapes: Sequence[Sequence[int]], providers: Sequence[str]) -> None:
    """Host and device time of whole steps in bf16 autocast."""
    for shape in shapes:
        plain = float("nan")
        width, layers, batch, tokens = map(bench.size, shape)
        for provider in providers:
            row = {"what": provider, "D": width, "L": layers, "B": batch, "T": tokens}
            try:
                step = training_step(bench, width, layers, batch, tokens, provider)
                host, device = [], []
                if not bench.is_dry:
                    torch.cuda.reset_peak_memory_stats()
                for _ in range(2 if bench.is_dry else 13):
                    start = time.perf_counter()
                    step()
                    host.append((time.perf_counter() - start) * 1e3)
                    if not bench.is_dry:
                        torch.cuda.synchronize()
                    device.append((time.perf_counter() - start) * 1e3)
                ms, host_ms = (statistics.median(each[-8:]) for each in (device, host))
                plain = ms if provider == NONPRIVATE else plain
                peak = 0.0 if bench.is_dry else torch.cuda.max_memory_allocated() / 2**30
                bench.add(**row, ms=ms, over_plain=ms / plain, host_ms=host_ms, peak_gib=peak)
                print_profile(step, bench.is_dry)
            except Exception:  # the other providers are still worth their time
                bench.has_failed = True
                bench.add(**row, error=traceback.format_exc()[-400:])
            step = None
            if not bench.is_dry:
                torch.cuda.empty_cache()


def training_step(
    bench: Bench, width: int, layers: int, batch: int, tokens: int, provider: str
) -> Call | None:
    vocabulary, heads = bench.size(32000), max(1, width // 128)
    task = bytes_task(
        lambda: dpflash.nn.LongContextLM(
            vocabulary, width, layers, heads, max_seq_len=tokens, pattern=CAUSAL
        ),
        batch=batch,
        tokens=tokens,
        device=bench.device.type,
        seed=0,
        dtype="bfloat16",
        vocab=vocabulary,
    )
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    return make_training(task, provider, noise_multiplier=1.0, optimize=adamw).step


def print_profile(step: Call, is_dry: bool) -> None:
    """Prints what took longest in a step, on the GPU and on the host."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not is_dry)]
    with profile(activities=activities) as profiled:
        step()
    for order in ("self_cuda_time_total", "self_cpu_time_total")[is_dry:]:
        print(profiled.key_averages().table(sort_by=order, row_limit=14))


PARTS = (ceilings, attention, flex, gradients, steps, long)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--json", type=Path, required=True, help="the file of all parts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args.json, args.part, torch.device(args.device))
    next(part for part in PARTS if part.__name__ == args.part)(bench)
    return int(bench.has_failed)


if __name__ == "__main__":
    raise SystemExit(main())

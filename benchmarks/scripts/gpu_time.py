"""Where the time goes on this GPU: ceilings, attention beside others, gradient kernels, steps.

    python benchmarks/scripts/gpu_time.py attention --json runs/gpu-time.json

Each measurement is the median of CUDA events around calls, which take turns with what they are
compared with; the JSON is written again after each. With --device cpu everything is tiny and runs
once: a dry run without a GPU, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import kernels, patterns

Call = Callable[[], Any]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
VOCABULARY = 32000
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
}
CAUSAL = patterns.Dense(causal=True)
# Tokens are 16,384 in all and heads 2048 / D, as in FlashAttention's figures.
TOKENS = 16384
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat auto": {"clipping": "flat"},
    "per_layer": {"clipping": "per_layer"},
    "per_block": {"clipping": "per_block"},
    "book_keeping": {"clipping": "flat", "grad_sample_mode": "book_keeping"},
}
# Width, layers, batch and tokens of a step.
SHAPES = ((1024, 12, 8, 4096), (512, 4, 4, 1024))
LONG_SHAPES = ((1024, 12, 4, 4096), (1024, 12, 1, 16384), (1024, 12, 1, 32768))


class Bench:
    """Runs calls on one device and keeps what was measured in a file of all parts."""

    def __init__(self, path: Path, part: str, device: torch.device):
        self.path = path
        self.device = device
        self.is_dry = device.type != "cuda"
        self.has_failed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        held = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        self.held = {"environment": self.environment(), "parts": {**held["parts"], part: []}}
        self.rows: list[dict[str, Any]] = self.held["parts"][part]

    def environment(self) -> dict[str, str]:
        return {
            "device": "none: a dry run" if self.is_dry else torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "torch": torch.__version__,
            "triton": version("triton"),
        }

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
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print("  ".join(shown), flush=True)

    def in_turns(self, calls: dict[str, Call], seconds: float = 0.4) -> dict[str, float]:
        """Median milliseconds of each call, the calls taking turns."""
        for call in calls.values():
            for _ in range(1 if self.is_dry else 3):
                call()
        if self.is_dry:
            return dict.fromkeys(calls, 1.0)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
        torch.cuda.synchronize()
        begin, rounds = time.monotonic(), 0
        while rounds < 5 or (time.monotonic() - begin < seconds * len(calls) and rounds < 100):
            for name, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
            rounds += 1
        return {
            name: statistics.median(start.elapsed_time(end) for start, end in pairs)
            for name, pairs in events.items()
        }

    def synchronize(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()


def ceilings(bench: Bench) -> None:
    source = torch.randn(bench.size(1 << 29), device=bench.device)
    target = torch.empty_like(source)
    side = bench.size(8192)
    a, b = bench.randn(side, side), bench.randn(side, side)
    found = bench.in_turns({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b})
    bench.add(what="copy, TB/s", value=2 * source.nbytes / found["copy"] / 1e9)
    bench.add(what=f"matmul {side}, TFLOP/s", value=2 * side**3 / found["matmul"] / 1e9)


def attention(bench: Bench) -> None:
    """Every pattern; torch's attention beside the dense ones."""
    sparse: dict[str, Any] = {
        "full": patterns.Dense(),
        "window 1024": patterns.SlidingWindow(window=1023, causal=True),
        "longnet": patterns.Dilated(
            segment_lengths=(2048, 4096, 8192), dilation_rates=(1, 2, 4), causal=True
        ),
        "documents": patterns.Documents(
            cu_seqlens=tuple(range(0, bench.size(TOKENS) + 1, bench.size(2048))), causal=True
        ),
        "block-sparse": patterns.BlockSparse(
            block_size=128, local_blocks=4, stride_blocks=8, causal=True
        ),
    }
    cases = [("causal", CAUSAL, dim, tokens) for dim in (64, 128) for tokens in (4096, TOKENS)]
    cases += [(name, pattern, 128, TOKENS) for name, pattern in sparse.items()]
    for name, pattern, head_dim, tokens in cases:
        forwards: dict[str, Forward] = {"dpflash": partial(dpflash.attention, pattern=pattern)}
        if name in ("causal", "full") and not bench.is_dry:
            for provider, backend in BACKENDS.items():
                forwards[provider] = partial(sdpa, backend=backend, causal=name == "causal")
        compare_attention(bench, name, pattern, head_dim, tokens, forwards)


def flex(bench: Bench) -> None:
    """FlexAttention, in a part of its own because compiling it takes long."""
    compiled: Any = flex_attention if bench.is_dry else torch.compile(flex_attention)
    tokens = bench.size(TOKENS)
    windows = {
        "causal": (CAUSAL, tokens),
        "window 1024": (patterns.SlidingWindow(window=1023, causal=True), 1024),
    }
    for name, (pattern, window) in windows.items():

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
    q, k, v = (bench.randn(batch, heads, tokens, head_dim) for _ in range(3))
    flops = 4 * batch * head_dim * pattern.graph(tokens, heads).edges()
    for direction, factor in (("forward", 1.0), ("forward and backward", 3.5)):
        calls: dict[str, Call] = {}
        for provider, forward in forwards.items():
            call = partial(forward, q, k, v) if factor == 1 else with_backward(forward, q, k, v)
            try:
                call()
                calls[provider] = call
            except Exception as error:  # a provider that cannot is no reason to stop
                bench.has_failed |= provider == "dpflash"
                print(f"{provider}: {str(error)[:200]}", flush=True)
        for provider, ms in bench.in_turns(calls).items():
            bench.add(
                what=name, D=head_dim, T=tokens, direction=direction, provider=provider,
                ms=ms, tflops=factor * flops / ms / 1e9,
            )  # fmt: skip


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, backend: SDPBackend, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def with_backward(forward: Forward, *qkv: Tensor) -> Call:
    leaves = [x.detach().requires_grad_() for x in qkv]
    do = torch.randn_like(qkv[0])
    return lambda: torch.autograd.grad(forward(*leaves), leaves, do)


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
        grads = kernels.per_sample_grad(x, dy)
        assert isinstance(grads, Tensor)
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


class Steps:
    """A training step in bf16 autocast, private or not, on batches from memory."""

    def __init__(self, bench: Bench, shape: Sequence[int], **options: Any):
        width, layers, batch, tokens = map(bench.size, shape)
        self.device = bench.device
        self.is_private = bool(options)
        vocabulary = bench.size(VOCABULARY)
        generator = torch.Generator().manual_seed(1)
        data = torch.randint(0, vocabulary, (64, tokens + 1), generator=generator)
        rows = TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        loader: Any = DataLoader(rows, batch_size=batch)
        torch.manual_seed(0)
        self.model: nn.Module = dpflash.nn.LongContextLM(
            vocabulary, embed_dim=width, num_layers=layers, num_heads=max(1, width // 128),
            max_seq_len=tokens, pattern=CAUSAL,
        ).to(self.device)  # fmt: skip
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if self.is_private:
            self.engine = dpflash.PrivacyEngine()
            self.model, self.optimizer, loader = self.engine.make_private(
                module=self.model, optimizer=self.optimizer, data_loader=loader,
                noise_multiplier=1.0, max_grad_norm=1.0,
                physical_batch_size=batch, max_batch_size=batch, **options,
            )  # fmt: skip
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def __call__(self) -> None:
        x, y = (z.to(self.device, non_blocking=True) for z in next(self.batches))
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = self.model(x, y)
        if self.is_private:
            self.engine.backward(losses)
        else:
            losses.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """Until the first batches have proved the model."""
        for count in range(40):
            self()
            if count >= 5 and (not self.is_private or self.engine.verified is True):
                return


def steps(bench: Bench) -> None:
    """Steps of each clipping, and what they wait for."""
    time_steps(bench, SHAPES, list(WAYS))


def long(bench: Bench) -> None:
    """Private over plain as sequences grow."""
    time_steps(bench, LONG_SHAPES, ["plain", "flat auto"])


def time_steps(bench: Bench, shapes: Sequence[Sequence[int]], ways: Sequence[str]) -> None:
    """Host and device time of whole steps, after the proof of the first batches."""
    for shape in shapes:
        plain = float("nan")
        for way in ways:
            row = {"what": way, **dict(zip("DLBT", map(bench.size, shape), strict=True))}
            try:
                step = Steps(bench, shape, **WAYS[way])
                step.warm_up()
                bench.synchronize()
                if not bench.is_dry:
                    torch.cuda.reset_peak_memory_stats()
                times, launches = [], []
                for _ in range(2 if bench.is_dry else 8):
                    start = time.perf_counter()
                    step()
                    launches.append((time.perf_counter() - start) * 1e3)
                    bench.synchronize()
                    times.append((time.perf_counter() - start) * 1e3)
                ms = statistics.median(times)
                plain = ms if way == "plain" else plain
                peak = 0.0 if bench.is_dry else torch.cuda.max_memory_allocated() / 2**30
                bench.add(
                    **row, ms=ms, over_plain=ms / plain, host_ms=statistics.median(launches),
                    peak_gib=peak,
                )  # fmt: skip
                look(bench, step, way)
            except Exception:  # the other ways are still worth their time
                bench.has_failed = True
                bench.add(**row, error=traceback.format_exc()[-400:])
            step = None
            if not bench.is_dry:
                torch.cuda.empty_cache()


def look(bench: Bench, step: Steps, way: str) -> None:
    """Prints the waits of one step, where they are, and what host and GPU did."""
    activities = [ProfilerActivity.CPU]
    if not bench.is_dry:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        torch.cuda.set_sync_debug_mode("default")
        where = collections.Counter(
            f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
        )
        print(f"{way}: {sum(where.values())} waits: {dict(where.most_common(12))}")
    with profile(activities=activities) as profiled:
        step()
        bench.synchronize()
    found = profiled.key_averages()
    on_gpu = [x for x in found if x.self_device_time_total > 0 and x.device_type.name == "CUDA"]
    total = sum(x.self_device_time_total for x in on_gpu)
    print(
        f"{way}: GPU busy {total / 1e3:.2f} ms in {sum(x.count for x in on_gpu)} kernels, copies"
    )
    for x in sorted(on_gpu, key=lambda x: -x.self_device_time_total)[:14]:
        print(f"    {x.self_device_time_total / 1e3:8.3f} ms {x.count:5d}  {x.key[:90]}")
    for x in sorted(found, key=lambda x: -x.self_cpu_time_total)[:12]:
        print(f"    host {x.self_cpu_time_total / 1e3:8.3f} ms {x.count:5d}  {x.key[:80]}")
    print(flush=True)


PARTS = (ceilings, attention, flex, gradients, steps, long)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--json", type=Path, required=True, help="the file of all parts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    part = next(part for part in PARTS if part.__name__ == args.part)
    bench = Bench(args.json, args.part, torch.device(args.device))
    part(bench)
    return int(bench.has_failed)


if __name__ == "__main__":
    raise SystemExit(main())

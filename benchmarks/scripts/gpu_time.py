"""Where the time goes on this GPU: ceilings, kernels beside others, private steps.

    python benchmarks/scripts/gpu_time.py attention --json runs/gpu-time.json

Calls that are compared take turns, and each figure is a median; the JSON is written again after
each row. DEVICE=cpu in the environment is a dry run: sizes are tiny and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpflash
from dpflash import patterns
from dpflash.attn.rotary import Turns
from dpflash.bench.attention import DIRECTIONS, case_subject
from dpflash.bench.isolated import brief
from dpflash.bench.output import write_text
from dpflash.bench.private import AUTO, DPFLASH, NONPRIVATE, make_training
from dpflash.bench.private_tasks import Task
from dpflash.bench.timing import Effort, Step, Stopwatch, time_steps
from dpflash.bench.work import measured_roofs
from dpflash.kernels.rotary import apply_rotary, rotate

Row = dict[str, Any]
Rows = Iterator[Row]
DEVICE = torch.device(os.environ.get("DEVICE", "cuda"))
DRY = DEVICE.type == "cpu"
DTYPE = "float32" if DRY else "bfloat16"
CAUSAL = patterns.Dense(causal=True)
WINDOW = patterns.SlidingWindow(window=1023, causal=True)
# Tokens are 16,384 in all and heads 2048 / D, as in FlashAttention's figures.
TOKENS = 16384


def size(size: int) -> int:
    return min(size, 64) if DRY else size


def medians(calls: dict[str, Step]) -> dict[str, float]:
    """Median milliseconds of each call, the calls taking turns."""
    effort = Effort(1, 1) if DRY else Effort()
    found = time_steps(calls, effort=effort, stopwatch=Stopwatch(DEVICE))
    return {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}


def ceilings() -> Rows:
    """The measured roofs: of memory and of products."""
    roofs = measured_roofs(DEVICE, quick=DRY)
    yield {"what": "memory, TB/s", "value": roofs.bandwidth / 1e12}
    for dtype, rate in roofs.flops.items():
        yield {"what": f"matmul {dtype}, TFLOP/s", "value": rate / 1e12}


def attention(cases: Sequence[tuple[str, Any, int, int, Sequence[str]]]) -> Rows:
    """This library and others in turns, each after a check of its result."""
    for name, pattern, head_dim, tokens, others in cases:
        given: dict[str, Any] = {"batch": TOKENS // tokens, "heads": 2048 // head_dim, "seed": 0}
        given.update(tokens=size(tokens), head_dim=head_dim, device=DEVICE.type, dtype=DTYPE)
        for direction in DIRECTIONS:
            row = {"what": name, "D": head_dim, "T": size(tokens), "direction": direction}
            calls: dict[str, Step] = {}
            for operator in ("dpflash", *others):
                try:
                    subject = case_subject(pattern, operator, direction=direction, **given)
                    if not (error := subject.error()) <= subject.tolerance:
                        raise ArithmeticError(f"wrong result: error {error:.1e}")
                    assert subject.work is not None
                    calls[operator], flops = subject.step, subject.work().flops
                except Exception as error:  # the others are still timed
                    problem = "error" if operator == "dpflash" else "error of a peer"
                    yield {**row, "provider": operator, problem: str(error)[:200]}
            for operator, ms in medians(calls).items():
                yield {**row, "provider": operator, "ms": ms, "tflops": flops / ms / 1e9}


def rotate_both(q: Tensor, k: Tensor, turns: Turns, back: bool) -> list[Tensor]:
    return [rotate(x, *turns, back=back) for x in (q, k)]


def rotary(cases: Sequence[tuple[int, int, int]]) -> Rows:
    """Queries and keys turned by the kernel and by torch's operations, after a check."""
    for heads, key_heads, head_dim in cases:
        tokens, dtype = size(TOKENS), getattr(torch, DTYPE)
        packed = torch.randn(1, tokens, heads + 2 * key_heads, head_dim, device=DEVICE)
        q, k, _ = packed.to(dtype).transpose(1, 2).split((heads, key_heads, key_heads), dim=1)
        turns = Turns.of(q, head_dim)
        for back in (False, True):
            kernel = partial(apply_rotary, q, k, *turns, back=back)
            calls: dict[str, Step] = {
                "kernel": kernel,
                "in place": partial(kernel, out=(q, k)),
                "torch": partial(rotate_both, q, k, turns, back),
            }
            row = {"D": head_dim, "H": heads, "G": key_heads, "T": tokens, "back": back}
            for found, expected in zip(kernel(), calls["torch"](), strict=True):
                torch.testing.assert_close(found, expected)
            moved = 2 * (q.numel() + k.numel()) * q.itemsize
            for name, ms in medians(calls).items():
                yield {"what": name, **row, "ms": ms, "tbps": moved / ms / 1e9}


def training(shapes: Sequence[Sequence[int]], providers: Sequence[str]) -> Rows:
    """Training steps in bf16 autocast, the first provider's to be compared with."""
    for shape in shapes:
        first = math.nan
        for provider in providers:
            sizes = list(map(size, shape))
            row: dict[str, Any] = {"what": provider, **dict(zip("DLBT", sizes, strict=True))}
            try:
                row |= time_training(provider, *sizes)
                first = row["ms"] if provider == providers[0] else first
                yield {**row, "over_plain": row["ms"] / first}
            except Exception as error:  # the others are still timed
                yield {**row, "error": brief(error)[:400]}
            torch.cuda.empty_cache()


def time_training(provider: str, width: int, layers: int, batch: int, tokens: int) -> Row:
    """Median time until the GPU is done and until the host has queued the step; peak memory."""
    vocabulary, heads = size(32000), max(1, width // 128)
    x, y = torch.randint(0, vocabulary, (2, batch, tokens), device=DEVICE)

    def build() -> nn.Module:
        shape = (vocabulary, width, layers, heads)
        return dpflash.nn.LongContextLM(*shape, max_seq_len=tokens, pattern=CAUSAL).to(DEVICE)

    # The model returns losses: the logits of all tokens are never in memory together.
    task = Task(build, x, y, lambda losses, y: losses, lambda model, x, y: model(x, y), "bfloat16")
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    step = make_training(task, provider, noise_multiplier=1.0, optimize=adamw).step
    times, host_times = [], []
    for number in range(2 if DRY else 25):
        if number == 5:  # those before it are warm-ups
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        host_times.append(1e3 * (time.perf_counter() - start))
        if not DRY:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    ms, host_ms = (statistics.median(each[-20:]) for each in (times, host_times))
    return {"ms": ms, "host_ms": host_ms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


SDPA, FLEX = ("sdpa-flash", "sdpa-cudnn"), ("flex",)
SEGMENTS: Any = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
# Name, pattern, head dim, tokens and the other operators of a case.
PATTERNS = (
    *(("causal", CAUSAL, dim, tokens, SDPA) for dim in (64, 128) for tokens in (4096, TOKENS)),
    ("full", patterns.Dense(), 128, TOKENS, SDPA),
    ("window 1024", WINDOW, 128, TOKENS, ()),
    ("longnet", patterns.Dilated(**SEGMENTS, causal=True), 128, TOKENS, ()),
)
# FlexAttention is a part of its own because compiling it takes long.
WITH_FLEX = (("causal", CAUSAL, 128, TOKENS, FLEX), ("window 1024", WINDOW, 128, TOKENS, FLEX))
# Width, layers, batch and tokens of a step.
SHAPES = ((1024, 12, 8, 4096), (512, 4, 4, 1024))
LONG_SHAPES = ((1024, 12, 4, 4096), (1024, 12, 1, 16384), (1024, 12, 1, 32768))
PARTS: dict[str, Callable[[], Rows]] = {
    "ceilings": ceilings,
    "attention": partial(attention, PATTERNS),
    "flex": partial(attention, WITH_FLEX),
    "rotary": partial(rotary, ((16, 16, 128), (32, 8, 64))),
    "steps": partial(training, SHAPES, (NONPRIVATE, *DPFLASH)),
    "long": partial(training, LONG_SHAPES, (NONPRIVATE, AUTO)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True, help="the file of all parts")
    args = parser.parse_args()
    torch.manual_seed(0)
    result = json.loads(args.json.read_text()) if args.json.exists() else {"parts": {}}
    name = "none: a dry run" if DRY else torch.cuda.get_device_name()
    versions = {library: version(library) for library in ("torch", "triton")}
    result["environment"] = {"device": name, "date": time.strftime("%Y-%m-%d"), **versions}
    rows = result["parts"][args.part] = []
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for row in PARTS[args.part]():
        rows.append(row)
        write_text(args.json, json.dumps(result, indent=1) + "\n")
        print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()), flush=True)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

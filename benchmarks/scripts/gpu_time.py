"""Times this GPU's memory and products, each kernel alone, attention, and private steps.

    python benchmarks/scripts/gpu_time.py attention --json runs/gpu-time.json

Calls that are compared take turns, and each figure is a median. The JSON is written again after
each row. DEVICE=cpu in the environment makes a dry run: sizes are tiny, the figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dpflash
from dpflash import kernels, patterns
from dpflash.attn.rotary import Turns
from dpflash.bench.attention import DIRECTIONS, case_subject
from dpflash.bench.attention_cases import Case
from dpflash.bench.isolated import brief
from dpflash.bench.output import write_text
from dpflash.bench.peers import build_run
from dpflash.bench.private import AUTO, DPFLASH, NONPRIVATE, make_training
from dpflash.bench.private_tasks import Task
from dpflash.bench.timing import FULL, QUICK, Effort, Step, Stopwatch, time_steps
from dpflash.bench.work import measured_roofs
from dpflash.kernels import attention as attention_kernels
from dpflash.kernels import attention_vendor as vendor
from dpflash.kernels import noise
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.rotary import apply_rotary, rotate

Row = dict[str, Any]
Rows = Iterator[Row]
Product = Callable[[Tensor, Tensor, Tensor], Any]
Kernel = Callable[..., Any]
DEVICE = torch.device(os.environ.get("DEVICE", "cuda"))
DRY = DEVICE.type == "cpu"
DTYPE = "float32" if DRY else "bfloat16"
CAUSAL = patterns.Dense(causal=True)
WINDOW = patterns.SlidingWindow(window=1023, causal=True)
# 16,384 tokens in total and 2048 / D heads, as in FlashAttention's figures.
TOKENS = 16384


def size(size: int) -> int:
    return min(size, 64) if DRY else size


def medians(calls: dict[str, Step]) -> dict[str, float]:
    """Return the median milliseconds of each call; the calls take turns."""
    effort = Effort(1, 1) if DRY else Effort()
    found = time_steps(calls, effort=effort, stopwatch=Stopwatch(DEVICE))
    return {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}


def ceilings() -> Rows:
    """Yield the measured roofs of memory and of matrix products."""
    roofs = measured_roofs(DEVICE, quick=DRY)
    yield {"what": "memory, TB/s", "value": roofs.bandwidth / 1e12}
    for dtype, rate in roofs.flops.items():
        yield {"what": f"matmul {dtype}, TFLOP/s", "value": rate / 1e12}


def reductions(shapes: Sequence[Sequence[int]]) -> Rows:
    """Yield times of the kernels that process all parameters of a model in one call."""
    for width, layers, batch, _ in (map(size, shape) for shape in shapes):
        with torch.device("meta"):
            given = (size(32000), width, layers, max(1, width // 128))
            model = dpflash.nn.LongContextLM(*given, max_seq_len=64)
        of_parameters = [p.shape for p in model.parameters()]
        for name, (call, moved) in reduction_calls(of_parameters, batch).items():
            row: Row = {"what": name, "D": width, "L": layers, "B": batch}
            try:
                row |= eager_and_graph(call)
                yield {**row, "tb_per_s": moved / row[KERNEL_TIME] / 1e9}
            except Exception as error:  # the others are still timed
                yield {**row, "error": brief(error)[:400]}


def reduction_calls(shapes: Sequence[torch.Size], batch: int) -> dict[str, tuple[Step, int]]:
    """Return {name: (call, number of bytes that it reads and writes)}."""
    given: dict[str, Any] = {"device": DEVICE, "dtype": torch.float64}
    count = sum(shape.numel() for shape in shapes)
    grads = [torch.randn(batch, *shape, device=DEVICE) for shape in shapes]
    sums = [torch.zeros(shape, **given) for shape in shapes]
    released = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    factors, squares = torch.rand(batch, device=DEVICE), torch.ones(batch, **given)
    grid, unsettled = kernels.grid_of(1.0), []
    address: dict[str, Any] = {"std": 1.0, "grid": grid, "key": bytes(32), "step": 0}
    streams = [
        kernels.NoiseStream(**address, parameter_id=number, unsettled=unsettled)
        for number in range(len(shapes))
    ]

    def noise() -> None:
        kernels.add_noise_(released, streams)
        unsettled.clear()

    def release() -> None:
        kernels.clip_reduce_all(grads, factors, grid=grid, noise=streams)
        unsettled.clear()

    return {
        "noise": (noise, 8 * count),
        "clip_reduce": (
            lambda: kernels.clip_reduce_all(grads, factors, grid=grid, into=sums),
            (4 * batch + 16) * count,
        ),
        "clip_reduce, noise": (release, (4 * batch + 4) * count),
        "squared_norm": (lambda: kernels.squared_norm(*grads), 4 * batch * count),
        "clip_factors": (lambda: kernels.clip_factors(squares, 1.0), 12 * batch),
    }


def products(shapes: Sequence[Sequence[int]], batches: Sequence[int]) -> Rows:
    """Yield times of linear layers' per-sample gradients and clipped sums in dpflash and torch."""
    for shape, batch in itertools.product(shapes, batches):
        tokens, inputs, outputs = map(size, shape)
        given: dict[str, Any] = {"device": DEVICE, "dtype": getattr(torch, DTYPE)}
        x, dy = (torch.randn(batch, tokens, width, **given) for width in (inputs, outputs))
        factors = torch.rand(batch, device=DEVICE)
        for name, call in product_calls(batch, inputs, outputs).items():
            row: Row = {"what": name, "B": batch, "T": tokens, "I": inputs, "O": outputs}
            is_own = name in ("per_sample_grad", "clipped_grad")
            try:
                row |= eager_and_graph(partial(call, x, dy, factors))
                row["tflops"] = 2 * x.numel() * outputs / row[KERNEL_TIME] / 1e9
                row["same_bits_alone"] = same_bits_alone(call, x, dy)
                if is_own and not row["same_bits_alone"]:
                    row["error"] = "the bits of a sample depend on the others"
                yield row
            except Exception as error:  # the others are still timed
                yield {**row, "error" if is_own else "error of a peer": brief(error)[:400]}


def product_calls(batch: int, inputs: int, outputs: int) -> dict[str, Product]:
    """Return functions of (x, dy, factors) that compute per-sample gradients or their sums."""
    wide: dict[str, Any] = {} if DRY else {"out_dtype": torch.float32}
    before = torch.zeros(batch, outputs, inputs, device=DEVICE)

    def one_by_one(x: Tensor, dy: Tensor, _: Tensor) -> list[Tensor]:
        return [torch.mm(own.T, of, **wide) for own, of in zip(dy, x, strict=True)]

    def of_all_tokens(x: Tensor, dy: Tensor, factors: Tensor) -> Tensor:
        rows = (dy * factors[:, None, None]).to(dy.dtype).flatten(0, 1)
        return torch.mm(rows.T, x.flatten(0, 1), **wide)

    return {
        "per_sample_grad": lambda x, dy, _: kernels.per_sample_grad(x, dy),
        "bmm": lambda x, dy, _: torch.bmm(dy.mT, x, **wide),
        "baddbmm": lambda x, dy, _: torch.baddbmm(before[: len(x)], dy.mT, x, **wide),
        "mm, each sample": one_by_one,
        "clipped_grad": kernels.clipped_grad,
        "mm, all tokens": of_all_tokens,
    }


def same_bits_alone(call: Product, x: Tensor, dy: Tensor) -> bool:
    """Whether the last sample's gradient has the same bits as in a batch of this sample alone."""
    last = torch.zeros(len(x), device=x.device)
    last[-1] = 1  # clipping factors with which a sum contains the last sample only
    among, alone = call(x, dy, last), call(x[-1:], dy[-1:], last[-1:])
    if isinstance(among, Tensor) and among.ndim == 2:
        return torch.equal(among, alone)
    return torch.equal(among[-1], alone[-1])


def eager_and_graph(call: Step) -> dict[str, float]:
    """Return the milliseconds per call, for REPEATS calls, eager and in a CUDA graph.

    Caches are not flushed between calls, so data that fits into the last-level cache stays there.
    """

    def calls() -> None:
        for _ in range(REPEATS):
            call()

    def wall(step: Step) -> float:
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - start

    ways: dict[str, Step] = {"eager_ms": calls}
    if not DRY:
        ways["graph_ms"] = captured(calls)
    effort = Effort(1, 1) if DRY else QUICK
    found = time_steps(ways, effort=effort, stopwatch=wall)
    return {name: 1e3 * statistics.median(own) / REPEATS for name, own in found.items()}


def captured(calls: Step) -> Step:
    """Return a function that replays a graph of the calls, with the same noise each time."""
    graph, kept, side = torch.cuda.CUDAGraph(), kernels.Kept(), torch.cuda.Stream()
    with mock.patch.object(noise, "refuse_capture", lambda reason: None):
        with torch.cuda.stream(side):
            for _ in range(3):
                calls()
        synchronize()
        with kept.capturing(), torch.cuda.graph(graph):
            calls()
    kept.write()

    def replay() -> kernels.Kept:
        graph.replay()
        return kept

    return replay


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def attention(cases: Sequence[tuple[str, Any, int, int, Sequence[str]]]) -> Rows:
    """Yield times of attention by dpflash and other libraries, after a check of each result."""
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


def vendors(cases: Sequence[tuple[bool, int, int]]) -> Rows:
    """Yield times of every kernel for dense and causal calls, and whether its bits repeat."""
    for causal, head_dim, tokens in cases:
        shape = (8, 16, size(tokens), size(head_dim))
        q, k, v, do = (torch.randn(shape, device=DEVICE).to(getattr(torch, DTYPE)) for _ in "qkvo")
        graph = patterns.Dense(causal=causal).graph(shape[2], shape[1], DEVICE)
        inputs = AttentionInputs(q, k, v, graph, shape[3] ** -0.5)
        pairs = shape[0] * graph.edges() * shape[3]
        row: Row = {"causal": causal, **dict(zip("BHTD", shape, strict=True))}
        for backend in vendor.BACKENDS:
            choice = vendor.choice_of(replace(inputs, backend=backend))
            yield {"what": backend, **row, **choice._asdict()}
        o, lse = forward_by(vendor.OWN, inputs, q, k, v)
        saved = (q, k, v, do, o, lse)
        calls: list[tuple[str, str, Kernel, tuple[Tensor, ...], int]] = [
            ("flex", "forward", partial(flex_forward, causal), (q, k, v), 4),
            ("flex", "forward+backward", partial(flex_both, causal), (q, k, v, do), 14),
        ]
        for name in (vendor.OWN, vendor.CUDNN, vendor.FA4, vendor.FLASH, vendor.FA4_FAST):
            if name not in (vendor.FLASH, vendor.FA4_FAST):  # these two have only a backward
                calls.append((name, "forward", partial(forward_by, name, inputs), (q, k, v), 4))
            calls.append((name, "backward", partial(backward_by, name, inputs), saved, 10))
        for name, direction, call, given, flops in calls:
            found: Row = {"what": name, "direction": direction, **row}
            try:
                start = time.perf_counter()
                call(*given)
                synchronize()
                found["first_ms"] = 1e3 * (time.perf_counter() - start)  # including compilation
                found |= eager_and_graph(partial(call, *given))
                found["tflops"] = flops * pairs / found[KERNEL_TIME] / 1e9
                yield found | bits_of(call, given)
            except Exception as error:  # the others are still timed
                problem = "error" if name == vendor.OWN else "error of a peer"
                yield {**found, problem: brief(error)[:400]}


def forward_by(name: str, inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    inputs = replace(inputs, q=q, k=k, v=v, backend=vendor.OWN)
    if name == vendor.OWN:
        return attention_kernels.attention_forward(inputs)
    return vendor.attention_forward(inputs, name)


def backward_by(name: str, inputs: AttentionInputs, *saved: Tensor) -> Any:
    q, k, v, do, o, lse = saved
    inputs = replace(inputs, q=q, k=k, v=v, backend=vendor.OWN)
    if name == vendor.OWN:
        return attention_kernels.attention_backward(do, None, o, lse, inputs)[:3]
    return vendor.attention_backward(do, None, o, lse, inputs, name)[:3]


def flex_forward(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    with torch.no_grad():
        return (flex_of(causal, *q.shape)(q, k, v),)


def flex_both(causal: bool, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Any:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(flex_of(causal, *q.shape)(*leaves), leaves, do)


@functools.cache
def flex_of(causal: bool, batch: int, heads: int, tokens: int, head_dim: int) -> Any:
    shape: dict[str, Any] = {"batch": batch, "heads": heads, "tokens": tokens}
    case = Case(
        patterns.Dense(causal=causal), **shape, head_dim=head_dim, device=DEVICE.type, dtype=DTYPE
    )
    return build_run("flex", case)


def bits_of(call: Kernel, given: Sequence[Tensor]) -> Row:
    """Return whether a call repeats bit for bit, and whether other samples change its bits."""

    def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        return all(map(torch.equal, found, expected))

    spoilt = [x.clone() for x in given]
    for x in spoilt:
        x[0] = math.nan
    first, beside_nan = call(*given), call(*spoilt)
    return {
        "repeats": all(same(call(*given), first) for _ in range(20)),
        "same_bits_alone": same(call(*(x[-1:] for x in given)), [x[-1:] for x in first]),
        "same_bits_beside_nan": same([x[1:] for x in beside_nan], [x[1:] for x in first]),
    }


def rotate_both(q: Tensor, k: Tensor, turns: Turns, back: bool) -> list[Tensor]:
    return [rotate(x, *turns, back=back) for x in (q, k)]


def rotary(cases: Sequence[tuple[int, int, int]]) -> Rows:
    """Yield times of rotary embeddings by the kernel and by torch's operations, after a check."""
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


def training(
    shapes: Sequence[Sequence[int]],
    providers: Sequence[str],
    *,
    adapted: bool = False,
    effort: Effort = FULL,
) -> Rows:
    """Yield times of training steps in bf16 autocast; the first provider is the baseline."""
    for shape in shapes:
        first: Row = {"ms": math.nan, "peak_gib": math.nan}
        for provider in providers:
            sizes = list(map(size, shape))
            row: Row = {"what": provider, **dict(zip("DLBT", sizes, strict=True))}
            try:
                row |= time_training(provider, *sizes, adapted=adapted, effort=effort)
                first = row if provider == providers[0] else first
                yield {**row, **over(row, first)}
            except Exception as error:  # the others are still timed
                yield {**row, "error": brief(error)[:400]}
            torch.cuda.empty_cache()


def over(row: Row, first: Row) -> Row:
    """Return time and memory relative to the row `first`; a dry run measures no memory."""
    memory = row["peak_gib"] / (first["peak_gib"] or math.nan)
    return {"over_plain": row["ms"] / first["ms"], "memory_over_plain": memory}


def time_training(
    provider: str,
    width: int,
    layers: int,
    batch: int,
    tokens: int,
    *,
    adapted: bool,
    effort: Effort,
) -> Row:
    """Return the median time of a step, the host's time to queue it, and the peak memory."""
    vocabulary, heads = size(32000), max(1, width // 128)
    x, y = torch.randint(0, vocabulary, (2, batch, tokens), device=DEVICE)

    def build() -> nn.Module:
        shape = (vocabulary, width, layers, heads)
        with DEVICE:
            model = dpflash.nn.LongContextLM(*shape, max_seq_len=tokens, pattern=CAUSAL)
            return adapt(model) if adapted else model

    # The model returns losses, so that the logits of all tokens are never in memory together.
    task = Task(build, x, y, lambda losses, y: losses, lambda model, x, y: model(x, y), "bfloat16")
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True, capturable=provider == GRAPHED)
    kind = NONPRIVATE if provider in (PLAIN, GRAPHED) else provider
    options: dict[str, Any] = {}
    if provider == CAPTURED:
        kind, options = "dpflash-flat-instantiate", {"cuda_graph": True}
    made = make_training(task, kind, noise_multiplier=1.0, optimize=adamw, **options)
    times, host_times = [], []
    with attention_of(provider):
        step = captured(made.step) if provider == GRAPHED and not DRY else made.step
        for number in range(2 if DRY else effort.calls):
            if number == effort.warm_ups:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step()
            host_times.append(1e3 * (time.perf_counter() - start))
            synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    if provider == CAPTURED and made.engine is not None and not DRY:
        changes = str(made.engine.optimization)
        if "CUDA graphs: forward" not in changes:
            raise RuntimeError(changes)
    ms, host_ms = (statistics.median(each[-effort.trials :]) for each in (times, host_times))
    return {"ms": ms, "host_ms": host_ms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


@contextlib.contextmanager
def attention_of(provider: str) -> Iterator[None]:
    """Context in which plain models use torch's attention, cuDNN's if available."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    backends = [getattr(SDPBackend, name) for name in names]
    if provider not in (PLAIN, GRAPHED):
        yield
        return
    with (
        mock.patch.object(dpflash.nn.attention, "attention", sdpa),
        sdpa_kernel(backends, set_priority=True),
    ):
        yield


class Adapted(nn.Module):
    """A frozen linear layer in 16 bit with LoRA of rank 16."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.to(getattr(torch, DTYPE))
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.up(self.down(x))
        return own + self.base(x)


def adapt(model: dpflash.nn.LongContextLM) -> nn.Module:
    """Return the model, frozen, with adapters on the linear layers of its blocks."""
    model.requires_grad_(False)
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, nn.Linear):
            model.blocks.set_submodule(name, Adapted(module))
    return model


def lora(models: Sequence[tuple[str, int, int]], lengths: Sequence[int]) -> Rows:
    """Yield times of LoRA on random weights: measured with few layers, extrapolated to all."""
    (few, many), providers = (2, 4), (PLAIN, AUTO, "dpflash-per_layer")
    for (name, width, layers), tokens in itertools.product(models, lengths):
        shapes = [(width, depth, LORA_TOKENS // tokens, tokens) for depth in (few, many)]
        found: dict[tuple[str, int], Row] = {}
        for row in training(shapes, providers, adapted=True, effort=QUICK):
            yield {"model": name, **row}
            found |= {} if "error" in row else {(row["what"], row["L"]): row}
        first = None
        for provider in providers:
            if (provider, few) in found and (provider, many) in found:
                less, more = (found[provider, depth] for depth in (few, many))
                times = (layers - few) / (many - few)
                whole = {n: less[n] + times * (more[n] - less[n]) for n in ("ms", "peak_gib")}
                row = {"model": name, "what": f"{provider}, extrapolated", "D": width, "L": layers}
                row |= {"B": less["B"], "T": less["T"], **whole}
                first = row if provider == PLAIN else first
                yield {**row, **over(row, first)} if first else row


SDPA, FLEX = ("sdpa-flash", "sdpa-cudnn"), ("flex",)
SEGMENTS: Any = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
# Cases: (name, pattern, head dim, tokens, other operators).
PATTERNS = (
    *(("causal", CAUSAL, dim, tokens, SDPA) for dim in (64, 128) for tokens in (4096, TOKENS)),
    ("full", patterns.Dense(), 128, TOKENS, SDPA),
    ("window 1024", WINDOW, 128, TOKENS, ()),
    ("longnet", patterns.Dilated(**SEGMENTS, causal=True), 128, TOKENS, ()),
)
# FlexAttention is a separate part because compiling it takes long.
WITH_FLEX = (("causal", CAUSAL, 128, TOKENS, FLEX), ("window 1024", WINDOW, 128, TOKENS, FLEX))
# A plain step with torch's attention; NONPRIVATE uses dpflash's attention.
PLAIN = "nonprivate-sdpa"
# PLAIN in one CUDA graph; a private step with captured forward and backward.
GRAPHED, CAPTURED = "nonprivate-sdpa-graph", "dpflash-captured"
# The column from which the speed of a kernel is computed, and the number of calls in a graph.
KERNEL_TIME, REPEATS = ("eager_ms", 1) if DRY else ("graph_ms", 10)
# (tokens, inputs, outputs) of projections, MLPs and an adapter.
PRODUCTS = (
    *((4096, 1024, 1024), (1024, 512, 2048), (4096, 1024, 4096), (4096, 4096, 4096)),
    (4096, 4096, 16),
)
# (name, width, layers): 0.9 and 6.6 billion parameters with MLPs four times as wide.
MODELS = (("1B", 2048, 16), ("7B", 4096, 32))
LORA_TOKENS = 32768
# (width, layers, samples, tokens of a sample) of a step.
SHAPES = ((1024, 12, 8, 4096), (512, 4, 4, 1024))
LONG_SHAPES = ((1024, 12, 4, 4096), (1024, 12, 1, 16384), (1024, 12, 1, 32768))
PARTS: dict[str, Callable[[], Rows]] = {
    "ceilings": ceilings,
    "attention": partial(attention, PATTERNS),
    "flex": partial(attention, WITH_FLEX),
    "vendors": partial(vendors, ((True, 128, TOKENS // 4), (True, 64, 4096), (False, 128, 4096))),
    "reductions": partial(reductions, SHAPES),
    "products": partial(products, PRODUCTS, (4, 8, 16)),
    "rotary": partial(rotary, ((16, 16, 128), (32, 8, 64))),
    "steps": partial(training, SHAPES, (PLAIN, GRAPHED, NONPRIVATE, *DPFLASH, CAPTURED)),
    "long": partial(training, LONG_SHAPES, (PLAIN, NONPRIVATE, AUTO)),
    "lora": partial(lora, MODELS, (1024, 4096, 32768)),
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

"""Opacus' ghost clipping with and without `dpflash.integrations.opacus.register()`.

The model is an embedding, two layers (LayerNorm, Linear, GELU) and a head, D = 256, without
attention, so that the norms of the linear layers are what is compared. Time: the providers take
turns in one process (A B C A B C ...); a figure is the median over the rounds of stock ghost's
time over that round's time with register(). Memory: each provider runs alone in a fresh process;
the figure is its peak resident memory during one step less what was resident before. A provider
that exceeds the memory limit is reported as out of memory.

    python benchmarks/bench_opacus_ghost.py --json runs/bench_opacus_ghost.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import opacus
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.integrations import opacus as integration

VOCABULARY = WIDTH = 256
LAYERS = 2
BATCH = 1
# Tokens -> counted rounds: stock ghost's step takes time and memory T^2.
ROUNDS = {512: 15, 1024: 15, 2048: 10, 4096: 6, 8192: 4, 16384: 2}
PROVIDERS = ("nonprivate", "ghost", "ghost+register")
LIMIT_GIB = 8
OUT_OF_MEMORY = "out of memory"

Step = Callable[[], None]


class PerSampleMean(nn.CrossEntropyLoss):
    """Mean over a sample's tokens."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = dpflash.losses.cross_entropy(logits, targets)
        return losses if self.reduction == "none" else losses.mean()


def build_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, WIDTH)]
    for _ in range(LAYERS):
        layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, VOCABULARY))


def build_batch(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCABULARY, (2, BATCH, tokens), generator=generator)
    return x, y


def build_step(provider: str, tokens: int) -> Step:
    """A closure that makes one whole training step of a provider."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = build_batch(tokens)
    criterion = PerSampleMean()
    wrapped = model
    if provider != "nonprivate":
        wrapped, optimizer, criterion, _ = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="ghost",
            poisson_sampling=False,
        )

    def step() -> None:
        if provider == "ghost+register":
            integration.register()
        try:
            criterion(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            integration.unregister()

    return step


def check(tokens: int) -> None:
    """Refuse to time a wrong step: the norms are those of autograd on single samples."""
    model = build_model()
    plain = copy.deepcopy(model)
    x, y = build_batch(tokens)
    wrapped = GradSampleModuleFastGradientClipping(model)
    integration.register()
    PerSampleMean()(wrapped(x), y).backward()
    integration.unregister()
    norms = wrapped.get_norm_sample()
    for i in range(BATCH):
        loss = dpflash.losses.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        exact = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
        error = abs(norms[i].item() / exact.item() - 1)
        if not error < 1e-4:
            raise RuntimeError(f"the norm is off by {error:.1e}: no figure is reported")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def time_providers(tokens: int) -> dict[str, list[float] | str]:
    """Seconds of each counted round for each provider, interleaved, or that it ran out."""
    steps = {provider: build_step(provider, tokens) for provider in PROVIDERS}
    seconds: dict[str, list[float] | str] = {provider: [] for provider in PROVIDERS}
    for number in range(1 + ROUNDS.get(tokens, 2)):
        # The order turns, so that nobody always follows the same neighbour.
        shift = number % len(PROVIDERS)
        for provider in PROVIDERS[shift:] + PROVIDERS[:shift]:
            counted = seconds[provider]
            if isinstance(counted, str):
                continue
            gc.collect()
            start = time.perf_counter()
            try:
                steps[provider]()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                seconds[provider] = OUT_OF_MEMORY
                continue
            if number:
                counted.append(time.perf_counter() - start)
    return seconds


def measure_memory(provider: str, tokens: int) -> float | str:
    """MiB that a step adds to what was resident before it."""
    step = build_step(provider, tokens)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    before = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
    try:
        step()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return OUT_OF_MEMORY
    # Not ru_maxrss: a new process starts with its parent's.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 2**10 - before


def in_a_child(*arguments: str) -> object:
    """What this script prints as JSON with these arguments, in a fresh process."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def environment(limit_gib: float) -> dict[str, object]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"CPU {model}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "dpflash": dpflash.__version__,
        "commit": commit,
        "model": f"Embedding, {LAYERS} x (LayerNorm, Linear, GELU), Linear; D={WIDTH}, fp32",
        "batch": BATCH,
        "memory_limit_gib": limit_gib,
    }


def measure(tokens: int, options: list[str]) -> dict[str, object]:
    check(tokens)
    row: dict[str, object] = {"tokens": tokens, "correct": True}
    size = ["--tokens", str(tokens), *options]
    seconds = in_a_child("--child", "time", *size)
    assert isinstance(seconds, dict)
    for provider in PROVIDERS:
        own = seconds[provider]
        row[f"{provider}_ms"] = own if isinstance(own, str) else 1e3 * statistics.median(own)
        row[f"{provider}_mib"] = in_a_child("--child", provider, *size)
    stock, ours = seconds["ghost"], seconds["ghost+register"]
    if not isinstance(stock, str) and not isinstance(ours, str):
        ratios = [a / b for a, b in zip(stock, ours, strict=True)]
        row["rounds"] = len(ratios)
        row["speedup"] = statistics.median(ratios)
        row["speedup_range"] = [min(ratios), max(ratios)]
    return row


def format_row(row: dict[str, object]) -> str:
    names = [f"{p}_{unit}" for unit in ("ms", "mib") for p in PROVIDERS]
    cells = [row["tokens"], *(row[name] for name in names), row.get("speedup", "")]
    return "| " + " | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_opacus_ghost.json"))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--limit-gib", type=float, default=LIMIT_GIB, help="of each process")
    # More threads than idle cores wait for each other, which no ratio shows.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", choices=("time", *PROVIDERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    if args.child:
        limit = int(args.limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        (tokens,) = args.tokens
        timing = args.child == "time"
        result = time_providers(tokens) if timing else measure_memory(args.child, tokens)
        print(json.dumps(result))
        return
    print("| T | " + " | ".join(f"{p} {u}" for u in ("ms", "MiB") for p in PROVIDERS) + " | x |")
    print("|" + "---|" * (2 + 2 * len(PROVIDERS)))
    options = ["--limit-gib", str(args.limit_gib), "--threads", str(args.threads)]
    rows = []
    for tokens in args.tokens:
        rows.append(measure(tokens, options))
        print(format_row(rows[-1]), flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment(args.limit_gib), "rows": rows}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()

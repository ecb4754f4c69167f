"""One training step: non-private, dpflash (each clipping and way), Opacus (hooks, ghost).

All providers train the same transformer LM on the same batch. Time: the providers take turns in
one process (A B C A B C ...), so that a drift of the machine's speed hits all alike; a figure is
the median over the rounds of each provider's time over that round's non-private time. Memory:
each provider runs alone in a fresh process; the figure is its peak resident memory during two
steps over the non-private one's, and the same with the memory before the first step taken off.
"secure-noise-alone" is no step: it draws the ChaCha20 noise of one, so its time ratio is what
noise costs.

    python benchmarks/bench_private_step.py --json runs/bench_private_step.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.kernels import gaussian_noise_

VOCABULARY = 256
CONFIGS = {"B4-T2048": (4, 2048), "B16-T256": (16, 256)}
PROVIDERS = (
    "nonprivate",
    "dpflash-flat-auto",
    "dpflash-flat-stored",
    "dpflash-flat-book_keeping",
    "dpflash-flat-two_pass",
    "dpflash-per_layer",
    "dpflash-per_block",
    "secure-noise-alone",
    "opacus-hooks",
    "opacus-ghost",
)
WARM_UP = 2

Step = Callable[[], None]


def build_model(tokens: int, *, tied: bool) -> nn.Module:
    """The transformer of the comparison: D=256, 4 layers, 8 heads, SDPA."""
    torch.manual_seed(0)
    return dpflash.nn.LongContextLM(VOCABULARY, 256, 4, 8, max_seq_len=tokens, tie_embeddings=tied)


def build_batch(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)
    return x, torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)


def build_step(provider: str, batch: int, tokens: int) -> Step:
    """A closure that makes one whole training step of a provider."""
    # Opacus' ghost clipping refuses tied weights, so nobody ties them here.
    model = build_model(tokens, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = build_batch(batch, tokens)
    if provider == "nonprivate":
        return _nonprivate(model, optimizer, x, y)
    if provider == "secure-noise-alone":
        return _noise(model)
    if provider.startswith("dpflash"):
        return _dpflash(provider, model, optimizer, x, y)
    return _opacus(provider, model, optimizer, x, y)


def _nonprivate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        losses = dpflash.losses.cross_entropy(model(x), y)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _noise(model: nn.Module) -> Step:
    sums = [torch.zeros_like(p) for p in model.parameters()]
    key = os.urandom(32)
    steps = itertools.count()

    def step() -> None:
        number = next(steps)
        for parameter_id, total in enumerate(sums):
            gaussian_noise_(total, std=1.0, key=key, step=number, parameter_id=parameter_id)

    return step


def _dpflash(
    provider: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Step:
    _, clipping, *way = provider.split("-")
    engine = dpflash.PrivacyEngine()
    private, private_optimizer, _ = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=clipping,
        way=way[0] if way else "auto",
    )

    def step() -> None:
        engine.backward(dpflash.losses.cross_entropy(private(x), y))
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step


def _opacus(
    provider: str, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Step:
    import opacus

    class PerSampleMean(nn.CrossEntropyLoss):
        """Mean over a sample's tokens, the loss that the others train."""

        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            losses = dpflash.losses.cross_entropy(logits, targets)
            return losses if self.reduction == "none" else losses.mean()

    mode = provider.removeprefix("opacus-")
    engine = opacus.PrivacyEngine(accountant="rdp")
    parts = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=PerSampleMean(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        poisson_sampling=False,
    )
    private, private_optimizer = parts[0], parts[1]
    criterion = parts[2] if mode == "ghost" else PerSampleMean()

    def step() -> None:
        criterion(private(x), y).backward()
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step


def check(batch: int, tokens: int) -> None:
    """Refuse to time a wrong step: noise off, flat clipping equals a loop over single samples."""
    model = build_model(tokens, tied=False)
    x, y = build_batch(batch, tokens)
    plain = copy.deepcopy(model)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for i in range(batch):
        loss = dpflash.losses.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item()
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad, alpha=min(1.0, 1.0 / norm))
    engine = dpflash.PrivacyEngine()
    private, _, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    engine.backward(dpflash.losses.cross_entropy(private(x), y))
    for parameter, total in zip(model.parameters(), sums, strict=True):
        error = (parameter.grad - total).norm() / total.norm()
        if not error < 1e-4:
            raise RuntimeError(f"flat clipping is off by {error:.1e}: no figure is reported")


def time_providers(
    providers: list[str], batch: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round for each provider, interleaved."""
    steps = {p: build_step(p, batch, tokens) for p in providers}
    seconds: dict[str, list[float]] = {p: [] for p in providers}
    for number in range(WARM_UP + rounds):
        # The order turns, so that nobody always follows the same neighbour.
        shift = number % len(providers)
        for provider in providers[shift:] + providers[:shift]:
            gc.collect()
            start = time.perf_counter()
            steps[provider]()
            if number >= WARM_UP:
                seconds[provider].append(time.perf_counter() - start)
    return seconds


def peak_memory(provider: str, batch: int, tokens: int) -> tuple[float, float]:
    """(peak, peak minus what was resident before the first step), MiB, in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", provider]
    command += ["--batch", str(batch), "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = map(float, done.stdout.split()[-2:])
    return peak, peak - before


def print_memory(provider: str, batch: int, tokens: int) -> None:
    step = build_step(provider, batch, tokens)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    before = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
    for _ in range(2):
        step()
    # Not ru_maxrss: a new process starts with its parent's.
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 2**10
    print(before, peak)


def environment() -> dict[str, object]:
    import opacus

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
        "model": "LongContextLM D=256, 4 layers, 8 heads, V=256, untied, fp32, SDPA, AdamW",
    }


def measure(providers: list[str], rounds: int, configs: list[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in configs:
        batch, tokens = CONFIGS[name]
        check(batch, tokens)
        seconds = time_providers(providers, batch, tokens, rounds)
        base_peak, base_extra = peak_memory("nonprivate", batch, tokens)
        for provider in providers:
            ratios = [
                own / base
                for own, base in zip(seconds[provider], seconds["nonprivate"], strict=True)
            ]
            peak, extra = peak_memory(provider, batch, tokens)
            rows.append(
                {
                    "config": name,
                    "provider": provider,
                    "batch": batch,
                    "tokens": tokens,
                    "rounds": rounds,
                    "median_ms": 1e3 * statistics.median(seconds[provider]),
                    "time_ratio": statistics.median(ratios),
                    "time_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                    "peak_mb": peak,
                    "memory_ratio": peak / base_peak,
                    "memory_ratio_over_start": extra / base_extra,
                    "correct": True,
                }
            )
            print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: dict[str, object]) -> str:
    return (
        f"| {row['config']} | {row['provider']} | {row['median_ms']:.0f} | "
        f"{row['time_ratio']:.3f} | {row['peak_mb']:.0f} | {row['memory_ratio']:.3f} | "
        f"{row['memory_ratio_over_start']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_private_step.json"))
    parser.add_argument("--rounds", type=int, default=12, help="counted rounds (>= 10 to quote)")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.memory_of:
        print_memory(args.memory_of, args.batch, args.tokens)
        return
    providers = ["nonprivate"] + [p for p in args.providers if p != "nonprivate"]
    print("| config | provider | ms | time ratio | peak MiB | memory ratio | over start |")
    print("|---|---|---|---|---|---|---|")
    rows = measure(providers, args.rounds, args.configs)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()

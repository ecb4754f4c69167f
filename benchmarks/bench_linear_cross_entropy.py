"""The head of a language model, forward and backward: linear + cross_entropy, LinearCrossEntropy.

The head alone: x [B, T, E] and targets in, the gradients of x and of the weight out (privately:
the clipped sum of the weight). Every step runs alone in a fresh process, and the providers take
turns. Memory: the peak resident memory (VmHWM) of the step minus what was resident before it; the
gradients themselves are in it. Time: the median over the rounds of each provider's time over that
round's time of the dense one; a step is a first one, so it pays for its memory.

    python benchmarks/bench_linear_cross_entropy.py --json runs/bench_linear_cross_entropy.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
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

# Batch, tokens, and whether one round must do.
CONFIGS = {
    "B1-T2048": (1, 2048, False),
    "B1-T8192": (1, 8192, True),
    "B2-T8192": (2, 8192, True),
}
CLASSES, WIDTH = 50000, 256
# The first of each family is what the family's figures are relative to.
FAMILIES = {
    "nonprivate": ("dense-nonprivate", "chunked-nonprivate"),
    "flat": ("dense-auto", "chunked-auto", "chunked-book_keeping", "chunked-two_pass"),
}

Step = Callable[[], dict[str, Tensor]]


def build_head(kind: str, classes: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    if kind == "chunked":
        return dpflash.nn.LinearCrossEntropy(width, classes)
    return nn.Linear(width, classes, bias=False)


def build_step(
    provider: str,
    batch: int,
    tokens: int,
    classes: int = CLASSES,
    width: int = WIDTH,
    max_grad_norm: float = 1.0,
) -> Step:
    """A closure that runs one forward and backward and returns the gradients."""
    kind, way = provider.split("-")
    head = build_head(kind, classes, width)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, tokens, width, generator=generator, requires_grad=True)
    y = torch.randint(0, classes, (batch, tokens), generator=generator)
    engine = dpflash.PrivacyEngine()
    if way != "nonprivate":
        engine.make_private(
            module=head,
            optimizer=torch.optim.SGD(head.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(y), batch_size=batch),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            way=way,
        )

    def step() -> dict[str, Tensor]:
        losses = head(x, y) if kind == "chunked" else dpflash.losses.cross_entropy(head(x), y)
        if way == "nonprivate":
            losses.sum().backward()
        else:
            engine.backward(losses)
        return {"x": x.grad, "weight": head.weight.grad}

    return step


def check() -> None:
    """Refuse to time a wrong gradient: each family against its dense member, clipping at work."""
    for providers in FAMILIES.values():
        expected = None
        for provider in providers:
            found = build_step(provider, 3, 512, 40000, 32, max_grad_norm=0.01)()
            if expected is None:
                expected = found
            for name, grad in found.items():
                error = (grad - expected[name]).norm() / expected[name].norm()
                if not error < 1e-4:
                    raise RuntimeError(f"{provider}: {name} is off by {error:.1e}; no figures")


def run_step(provider: str, batch: int, tokens: int) -> tuple[float, float]:
    """(seconds, MiB beyond what it started with) of one step in a fresh process."""
    command = [sys.executable, __file__, "--step-of", provider]
    command += ["--batch", str(batch), "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split()[-2:])
    return seconds, peak


def print_step(provider: str, batch: int, tokens: int) -> None:
    # What a first step loads is nobody's.
    build_step(provider, 1, 4, 16, 8)()
    step = build_step(provider, batch, tokens)
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    before = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    # Not ru_maxrss: a new process starts with its parent's.
    status = Path("/proc/self/status").read_text()
    print(seconds, int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 2**10 - before)


def environment() -> dict[str, object]:
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
        "dpflash": dpflash.__version__,
        "commit": commit,
        "head": f"E={WIDTH}, V={CLASSES}, no bias, fp32",
        "memory": "VmHWM of a fresh process after one step minus its resident memory before",
    }


def measure(configs: list[str], rounds: int, path: Path) -> None:
    """Prints and writes the rows family by family, since the large ones take minutes."""
    check()
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for name in configs:
        batch, tokens, once = CONFIGS[name]
        for family, providers in FAMILIES.items():
            runs: dict[str, list[tuple[float, float]]] = {p: [] for p in providers}
            for number in range(1 if once else rounds):
                shift = number % len(providers)
                for provider in providers[shift:] + providers[:shift]:
                    runs[provider].append(run_step(provider, batch, tokens))
            seconds = {p: [run[0] for run in runs[p]] for p in providers}
            peaks = {p: statistics.median(run[1] for run in runs[p]) for p in providers}
            dense = providers[0]
            for provider in providers:
                pairs = zip(seconds[provider], seconds[dense], strict=True)
                row: dict[str, object] = {
                    "config": name,
                    "family": family,
                    "provider": provider,
                    "batch": batch,
                    "tokens": tokens,
                    "rounds": len(runs[provider]),
                    "median_s": statistics.median(seconds[provider]),
                    "time_ratio": statistics.median(own / base for own, base in pairs),
                    "peak_mb": peaks[provider],
                    "memory_ratio": peaks[provider] / peaks[dense],
                    "dense_over_peak": peaks[dense] / peaks[provider],
                    "correct": True,
                }
                rows.append(row)
                print(format_row(row), flush=True)
            found = {"environment": environment(), "rows": rows}
            path.write_text(json.dumps(found, indent=1) + "\n")


def format_row(row: dict[str, object]) -> str:
    return (
        f"| {row['config']} | {row['provider']} | {row['rounds']} | {row['median_s']:.2f} | "
        f"{row['time_ratio']:.2f} | {row['peak_mb']:.0f} | {row['dense_over_peak']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_linear_cross_entropy.json"))
    parser.add_argument("--rounds", type=int, default=10, help="of the smallest config")
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--step-of", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.step_of:
        print_step(args.step_of, args.batch, args.tokens)
        return
    print("| config | provider | rounds | s | time ratio | peak MiB | dense / peak |")
    print("|---|---|---|---|---|---|---|")
    measure(args.configs, args.rounds, args.json)
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()

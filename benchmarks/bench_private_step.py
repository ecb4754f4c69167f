"""One training step: non-private, dpflash (each clipping and way), Opacus (hooks, ghost).

All providers train the same transformer LM on the same batch; on a CPU in fp32, on a GPU under
bf16 autocast. Time: the providers take turns in one process (A B C A B C ...), so that a drift of
the machine's speed hits all alike; a figure is the median over the rounds of each provider's time
over that round's non-private time. Memory: each provider runs alone in a fresh process; the figure
is its peak memory during two steps (resident on a CPU, allocated on a GPU) over the non-private
one's, and the same with the memory before the first step taken off. A provider that runs out of
memory has no figures.

"secure-noise-alone" is no step: it draws the ChaCha20 noise of one, so its time ratio is what
noise costs, beside that of torch.normal; on a GPU its bytes per second are also told over those of
a copy. The flash_fuse rows need the fork of Opacus that has these modes in place of the package.

    python benchmarks/bench_private_step.py --json runs/bench_private_step.json
    python benchmarks/bench_private_step.py --device cuda --rounds 20
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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.kernels import gaussian_noise_

VOCABULARY = 256


@dataclass(frozen=True)
class Config:
    """One shape of model and batch."""

    batch: int
    tokens: int
    width: int
    layers: int
    heads: int


CONFIGS = {
    "cpu": {"B4-T2048": Config(4, 2048, 256, 4, 8), "B16-T256": Config(16, 256, 256, 4, 8)},
    "cuda": {
        "B4-T4096-D1024": Config(4, 4096, 1024, 12, 16),
        "B1-T16384-D1024": Config(1, 16384, 1024, 12, 16),
    },
}
PROVIDERS = (
    "nonprivate",
    "dpflash-flat-auto",
    "dpflash-flat-stored",
    "dpflash-flat-book_keeping",
    "dpflash-flat-two_pass",
    "dpflash-per_layer",
    "dpflash-per_block",
    "secure-noise-alone",
    "torch-noise-alone",
    "opacus-hooks",
    "opacus-ghost",
)
# Of a fork of Opacus, measured where it is installed and asked for.
FORK = ("opacus-flash_fuse", "opacus-flash_fuse_bk")
WARM_UP = 2

Step = Callable[[], None]


def build_model(config: Config, device: str, *, tied: bool) -> nn.Module:
    """The transformer of the comparison, the same for all."""
    torch.manual_seed(0)
    model = dpflash.nn.LongContextLM(
        VOCABULARY,
        config.width,
        config.layers,
        config.heads,
        max_seq_len=config.tokens,
        tie_embeddings=tied,
    )
    return model.to(device)


def build_batch(config: Config, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCABULARY, (2, config.batch, config.tokens), generator=generator)
    return x.to(device), y.to(device)


def build_step(provider: str, config: Config, device: str) -> Step:
    """A closure that makes one whole training step of a provider."""
    # Opacus' ghost clipping refuses tied weights, so nobody ties them here.
    model = build_model(config, device, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = build_batch(config, device)
    if provider == "nonprivate":
        return _nonprivate(model, optimizer, x, y)
    if provider.endswith("-noise-alone"):
        return _secure_noise(model) if provider.startswith("secure") else _torch_noise(model)
    if provider.startswith("dpflash"):
        return _dpflash(provider, model, optimizer, x, y)
    return _opacus(provider, model, optimizer, x, y)


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """[B], under autocast on a GPU."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    return dpflash.losses.cross_entropy(logits, y)


def _nonprivate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        losses_of(model, x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torch_noise(model: nn.Module) -> Step:
    sums = [torch.zeros_like(p) for p in model.parameters()]

    def step() -> None:
        for total in sums:
            total.add_(torch.normal(0.0, 1.0, total.shape, device=total.device))

    return step


def _secure_noise(model: nn.Module) -> Step:
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
        engine.backward(losses_of(private, x, y))
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
    criterion = PerSampleMean() if mode == "hooks" else parts[2]

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = private(x)
        criterion(logits, y).backward()
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step


def check(config: Config, device: str) -> None:
    """Refuse to time a wrong step: noise off, flat clipping equals a loop over single samples."""
    model = build_model(config, device, tied=False)
    x, y = build_batch(config, device)
    plain = copy.deepcopy(model)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for i in range(config.batch):
        loss = dpflash.losses.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item()
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad, alpha=min(1.0, 1.0 / norm))
    engine = dpflash.PrivacyEngine()
    private, _, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=config.batch),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    engine.backward(dpflash.losses.cross_entropy(private(x), y))
    for parameter, total in zip(model.parameters(), sums, strict=True):
        error = (parameter.grad - total).norm() / total.norm()
        if not error < 1e-4:
            raise RuntimeError(f"flat clipping is off by {error:.1e}: no figure is reported")


def time_providers(
    providers: list[str], config: Config, device: str, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round for each provider, interleaved; none for one without memory."""
    steps = {}
    seconds: dict[str, list[float]] = {p: [] for p in providers}
    for provider in providers:
        try:
            steps[provider] = build_step(provider, config, device)
            steps[provider]()
        except torch.OutOfMemoryError:
            print(f"{provider}: out of memory", flush=True)
            steps.pop(provider, None)
        _collect()
    running = list(steps)
    for number in range(WARM_UP + rounds):
        # The order turns, so that nobody always follows the same neighbour.
        shift = number % len(running)
        for provider in running[shift:] + running[:shift]:
            gc.collect()
            _wait(device)
            start = time.perf_counter()
            steps[provider]()
            _wait(device)
            if number >= WARM_UP:
                seconds[provider].append(time.perf_counter() - start)
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory(provider: str, name: str, device: str) -> tuple[float, float]:
    """(peak, peak minus what was there before the first step), MiB, in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", provider]
    command += ["--configs", name, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = map(float, done.stdout.split()[-2:])
    return peak, peak - before


def print_memory(provider: str, config: Config, device: str) -> None:
    step = build_step(provider, config, device)
    if device == "cuda":
        before = torch.cuda.memory_allocated() / 2**20
    else:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        before = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
    for _ in range(2):
        step()
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        # Not ru_maxrss: a new process starts with its parent's.
        status = Path("/proc/self/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 2**10
    print(before, peak)


def noise_over_copy(config: Config, seconds: float) -> float:
    """Bytes/s of the noise, which reads and writes each sum, over those of a copy on the GPU."""
    sums = [torch.zeros_like(p) for p in build_model(config, "cuda", tied=False).parameters()]
    others = [torch.empty_like(t) for t in sums]
    times = []
    for _ in range(20):
        _wait("cuda")
        start = time.perf_counter()
        for source, target in zip(sums, others, strict=True):
            target.copy_(source)
        _wait("cuda")
        times.append(time.perf_counter() - start)
    return statistics.median(times) / seconds


def environment(device: str) -> dict[str, object]:
    import opacus

    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    name = f"CPU {name}, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "dpflash": dpflash.__version__,
        "commit": commit,
        "model": "LongContextLM, V=256, untied, AdamW; "
        + ("fp32" if device == "cpu" else "fp32 parameters, bf16 autocast"),
    }


def measure(
    providers: list[str], rounds: int, configs: list[str], device: str
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in configs:
        config = CONFIGS[device][name]
        check(config, device)
        _collect()
        seconds = time_providers(providers, config, device, rounds)
        _collect()
        base_peak, base_extra = peak_memory("nonprivate", name, device)
        for provider in providers:
            row: dict[str, object] = {"config": name, "provider": provider, **vars(config)}
            rows.append({**row, "rounds": rounds, "correct": True})
            if not seconds[provider]:
                rows[-1]["error"] = "out of memory"
                continue
            ratios = [
                own / base
                for own, base in zip(seconds[provider], seconds["nonprivate"], strict=True)
            ]
            peak, extra = peak_memory(provider, name, device)
            rows[-1].update(
                median_ms=1e3 * statistics.median(seconds[provider]),
                time_ratio=statistics.median(ratios),
                time_ratio_quartiles=statistics.quantiles(ratios, n=4)[::2],
                peak_mb=peak,
                memory_ratio=peak / base_peak,
                memory_ratio_over_start=extra / base_extra,
            )
            if provider == "secure-noise-alone" and device == "cuda":
                median = statistics.median(seconds[provider])
                rows[-1]["bytes_over_copy"] = noise_over_copy(config, median)
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
    parser.add_argument(
        "--providers", nargs="+", default=list(PROVIDERS), choices=[*PROVIDERS, *FORK]
    )
    parser.add_argument("--configs", nargs="+", help="of the device; all of them by default")
    parser.add_argument("--device", default="cpu", choices=list(CONFIGS))
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = CONFIGS[args.device]
    configs = args.configs or list(known)
    if not set(configs) <= set(known):
        parser.error(f"--configs {' '.join(configs)}: expected some of {', '.join(known)}")
    warnings.filterwarnings("ignore")
    if args.memory_of:
        print_memory(args.memory_of, known[configs[0]], args.device)
        return
    providers = ["nonprivate"] + [p for p in args.providers if p != "nonprivate"]
    print("| config | provider | ms | time ratio | peak MiB | memory ratio | over start |")
    print("|---|---|---|---|---|---|---|")
    rows = measure(providers, args.rounds, configs, args.device)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"environment": environment(args.device), "rows": rows}
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()

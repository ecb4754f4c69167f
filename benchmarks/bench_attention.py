"""Attention: dpflash beside SDPA (backend pinned), compiled FlexAttention and flash-attn.

A row is one pattern, shape, direction and provider. Before anything is timed, the provider's
output and gradients are compared with the definition in float64, written without the library's
tile graphs: at every query row up to T = 2048, at a random subset beyond (do is 0 at the others,
so dq, dk and dv are exact everywhere). A row whose error is too large is marked "failed" and has
no figures; one that cannot run is marked "skipped" and says why.

Time: the providers of a case take turns (A B C, B C A, ...); a figure is the median over the
rounds with its 95% interval, a speed-up the median over the rounds of the peer's time over
dpflash's. On GPUs by CUDA events, after the L2 cache was overwritten and behind a pause in which
the host queues the call; on one CPU thread by its CPU time, which other jobs disturb less than
the wall's. TFLOP/s count real edges only, 4 D for each (of each sample and head) forward, 2.5
times as many backward. Memory: on GPUs the peak that the allocator gave out, less what the inputs
take; on the CPU the growth of the peak resident memory, in a fresh process.

    python benchmarks/bench_attention.py --json runs/bench_attention.json
    python benchmarks/bench_attention.py --million --json runs/bench_attention_million.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _attention_cases as cases
import torch
from _attention_cases import Case, Run, Unsupported
from _attention_timing import (
    FEWEST_ROUNDS,
    WARM_UP,
    Step,
    Stopwatch,
    build_step,
    median_interval,
    peak_on_cpu,
    peak_on_gpu,
    planned_rounds,
    time_steps,
)
from tqdm import tqdm

import dpflash

DIRECTIONS = ("forward", "backward", "both")
COLUMNS = ("pattern", "causal", "direction", "T", "D", "B", "H", "provider", "status", "error")
FIGURES = ("ms", "95%", "TFLOP/s", "peak MiB", "speed-up over")

Row = dict[str, Any]


class Bench:
    """Measures cases; remembers how long the shorter ones took."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stopwatch = Stopwatch(args.device)
        self.started = time.monotonic()
        self.setup: dict[str, float] = {}
        self.known: dict[tuple[object, ...], tuple[float, float]] = {}

    def measure(self, case: Case) -> list[Row]:
        """All rows of a case, whatever happens."""
        args = self.args
        if time.monotonic() - self.started > args.budget_seconds:
            return self._skipped(
                case, f"--budget-seconds {args.budget_seconds:.0f} were spent before"
            )
        try:
            return self._measure(case)
        except Exception as error:  # noqa: BLE001  what else was measured must not be lost
            return self._skipped(case, _brief(error))
        finally:
            _release(case)

    def _measure(self, case: Case) -> list[Row]:
        args = self.args
        reasons = {p: self._too_long(case, p) for p in args.providers}
        tried = [p for p in args.providers if reasons[p] is None]
        runs, errors = self._checked(case, tried, reasons) if tried else ({}, {})
        rows = []
        for direction in args.directions:
            rows += self._direction(case, direction, runs, errors, reasons)
        return rows

    def _too_long(self, case: Case, provider: str) -> str | None:
        """Why a case is not even tried, by the time of a shorter one."""
        for direction in self.args.directions:
            known = self.known.get(_series(case, provider, direction))
            if known is None:
                continue
            seconds = known[0] * case.flops(direction) / known[1]
            calls = WARM_UP + min(FEWEST_ROUNDS, self.args.rounds)
            if seconds * calls > self.args.max_seconds:
                return (
                    f"{calls} calls ({direction}) would take about {seconds * calls:.0f} s, "
                    f"judged by a shorter T; --max-seconds is {self.args.max_seconds:g}"
                )
        return None

    def _checked(
        self, case: Case, providers: list[str], reasons: dict[str, str | None]
    ) -> tuple[dict[str, Run], dict[str, dict[str, float]]]:
        """The providers that run, with their errors; notes the reasons of the others."""
        inputs = case.inputs()
        try:
            reference = cases.reference(case, *inputs, self.args.directions != ["forward"])
        except torch.OutOfMemoryError as error:
            reasons |= dict.fromkeys(providers, f"reference: {_brief(error)}")
            return {}, {}
        runs, errors = {}, {}
        for provider in providers:
            begin = time.perf_counter()
            try:
                run = cases.build(provider, case)
                errors[provider] = cases.check(case, run, inputs, reference)
                runs[provider] = run
                self.setup[provider] = time.perf_counter() - begin
            except Unsupported as reason:
                reasons[provider] = str(reason)
            except Exception as error:  # noqa: BLE001  a peer's failure must not end the others
                reasons[provider] = _brief(error)
            _release(case)
        return runs, errors

    def _direction(
        self,
        case: Case,
        direction: str,
        runs: dict[str, Run],
        errors: dict[str, dict[str, float]],
        reasons: dict[str, str | None],
    ) -> list[Row]:
        steps, single, reasons = self._prepare(case, direction, runs, errors, reasons)
        rounds = 0
        if steps:
            mean = statistics.mean(single.values())
            rounds = planned_rounds(mean, len(steps), self.args.rounds, self.args.max_seconds)
        seconds = time_steps(steps, rounds, self.stopwatch) if rounds else {}
        rows = []
        for provider in self.args.providers:
            row = _row(case, direction, provider)
            row["errors"] = errors.get(provider)
            if provider in seconds:
                self._figures(row, case, seconds, steps[provider])
            elif reasons[provider] is not None:
                row |= {"status": "skipped", "reason": reasons[provider]}
            elif provider in steps:
                limit = f"--max-seconds {self.args.max_seconds:g}"
                row |= {"status": "skipped", "reason": f"too few rounds fit {limit}"}
            else:
                limit = f"{cases.TOLERANCES[case.dtype]:g}"
                row |= {"status": "failed", "reason": f"relative error above {limit}"}
            rows.append(row)
        return rows

    def _prepare(
        self,
        case: Case,
        direction: str,
        runs: dict[str, Run],
        errors: dict[str, dict[str, float]],
        reasons: dict[str, str | None],
    ) -> tuple[dict[str, Step], dict[str, float], dict[str, str | None]]:
        """What is timed, of the providers that are right; seconds of one call; all reasons."""
        inputs = case.inputs()
        steps, single, reasons = {}, {}, dict(reasons)
        for provider, run in runs.items():
            if not acceptable(errors[provider], case.dtype):
                continue
            try:
                step = build_step(direction, run, inputs)
                self.stopwatch(step)
                steps[provider], single[provider] = step, self.stopwatch(step)
            except Exception as error:  # noqa: BLE001
                reasons[provider] = _brief(error)
                continue
            known = single[provider], case.flops(direction)
            self.known[_series(case, provider, direction)] = known
        return steps, single, reasons

    def _figures(self, row: Row, case: Case, seconds: dict[str, list[float]], step: Step) -> None:
        provider, direction = row["provider"], row["direction"]
        own = seconds[provider]
        median = statistics.median(own)
        row |= {"status": "ok", "rounds": len(own), "clock": self.stopwatch.name}
        # Building and checking, a peer's compilation included.
        row["setup_seconds"] = self.setup[provider]
        row |= {"ms": 1e3 * median, "ms_interval": [1e3 * x for x in median_interval(own)]}
        row["tflops"] = case.flops(direction) / median / 1e12
        if not self.args.no_memory:
            gpu = case.device != "cpu"
            row["peak_mb"] = peak_on_gpu(step) if gpu else peak_on_cpu(case, provider, direction)
        if provider == "dpflash":
            row["speedup_over"] = {}
            for peer in seconds.keys() - {"dpflash"}:
                ratios = [theirs / ours for theirs, ours in zip(seconds[peer], own, strict=True)]
                figures = {"median": statistics.median(ratios)}
                row["speedup_over"][peer] = figures | {"interval": median_interval(ratios)}

    def _skipped(self, case: Case, reason: str) -> list[Row]:
        pairs = itertools.product(self.args.directions, self.args.providers)
        skipped = {"errors": None, "status": "skipped", "reason": reason}
        return [_row(case, *pair) | skipped for pair in pairs]


def acceptable(errors: dict[str, float], dtype: str) -> bool:
    """Whether a provider's results may be timed."""
    # Not by max(), which lets a NaN pass or fail by its place.
    return all(error <= cases.TOLERANCES[dtype] for error in errors.values())


def _row(case: Case, direction: str, provider: str) -> Row:
    return {
        "pattern": case.pattern,
        "causal": case.causal,
        "direction": direction,
        "provider": provider,
        "dtype": case.dtype,
        "batch": case.batch,
        "heads": case.heads,
        "tokens": case.tokens,
        "head_dim": case.head_dim,
        "edges": case.edges,
        "density": case.edges / (case.batch * case.heads * case.tokens**2),
        "checked_rows": len(case.checked_rows()),
    }


def _series(case: Case, provider: str, direction: str) -> tuple[object, ...]:
    """What cases of different T have in common."""
    return case.pattern, case.causal, case.head_dim, provider, direction


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _release(case: Case) -> None:
    gc.collect()
    if case.device != "cpu":
        torch.cuda.empty_cache()


def environment(args: argparse.Namespace) -> dict[str, object]:
    if args.device == "cpu":
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"model name\s*:\s*(.*)", text)
        name = found.group(1) if found else platform.processor()
        device = f"CPU {name}, {torch.get_num_threads()} threads"
    else:
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda or torch.version.hip}"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash_attn"):
        if package in sys.modules:
            versions[package] = sys.modules[package].__version__
    cpu = args.device == "cpu"
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        **versions,
        "dpflash": dpflash.__version__,
        "commit": commit,
        "memory": "growth of VmHWM, fresh process" if cpu else "max_memory_allocated, growth",
        "tolerances": cases.TOLERANCES,
        "dilated": "multiset (a key counts once for each branch), also in FlexAttention",
        "command": " ".join(["bench_attention.py", *sys.argv[1:]]),
    }


def format_row(row: Row) -> str:
    """A line of the Markdown table."""
    errors = row["errors"]
    cells = [row["pattern"], "yes" if row["causal"] else "no", row["direction"]]
    cells += [str(row[name]) for name in ("tokens", "head_dim", "batch", "heads", "provider")]
    cells += [row["status"], f"{max(errors.values()):.1e}" if errors else ""]
    if row["status"] != "ok":
        return f"| {' | '.join(cells)} | {row['reason']} | | | | |"
    low, high = row["ms_interval"]
    peak = f"{row['peak_mb']:.0f}" if "peak_mb" in row else ""
    peers = row.get("speedup_over", {})
    ratios = ", ".join(f"{peer} {peers[peer]['median']:.2f}" for peer in sorted(peers))
    figures = [f"{row['ms']:.3g}", f"{low:.3g}-{high:.3g}", f"{row['tflops']:.3g}", peak, ratios]
    return f"| {' | '.join(cells + figures)} |"


def all_cases(args: argparse.Namespace) -> list[Case]:
    """The grid; of each series the short sequences first, which tell how long the others take."""
    grid = itertools.product(args.head_dims, args.patterns, args.causal, sorted(args.lengths))
    return [
        Case(
            pattern,
            causal == "yes",
            tokens,
            max(1, args.batch_tokens // tokens),
            args.heads or (4 if args.device == "cpu" else 2048 // head_dim),
            head_dim,
            args.dtype,
            args.device,
        )
        for head_dim, pattern, causal, tokens in grid
    ]


def million_cases(args: argparse.Namespace) -> list[Case]:
    """Causal LongNet at T = 2^20; on the CPU at three lengths that show how memory grows."""
    gpu = args.device != "cpu"
    lengths = args.lengths if args.lengths else [2**20] if gpu else [2**13, 2**14, 2**15]
    heads = args.heads or 8
    return [
        Case("million", True, tokens, 1, heads, 64, args.dtype, args.device) for tokens in lengths
    ]


def write(path: Path, args: argparse.Namespace, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(args), "rows": rows}, indent=1) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, default=Path("runs/bench_attention.json"))
    add("--quick", action="store_true", help="few short cases and rounds: does it run at all")
    add("--million", action="store_true", help="one causal LongNet at T = 1048576 (CPU: shorter)")
    add("--lengths", type=int, nargs="+", help="T; without: 512 to 131072")
    add("--head-dims", type=int, nargs="+", default=[64, 128])
    add("--patterns", nargs="+", default=list(cases.PATTERNS), choices=cases.PATTERNS)
    add("--causal", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    add("--directions", nargs="+", default=["forward", "both"], choices=DIRECTIONS)
    choices = [*cases.PROVIDERS, "sdpa"]
    add("--providers", nargs="+", default=list(cases.PROVIDERS), choices=choices)
    add("--dtype", choices=list(cases.DTYPES), help="without: bf16 on GPUs, fp32 on the CPU")
    add("--device", choices=["cuda", "cpu"], help="without: cuda where there is one")
    add("--batch-tokens", type=int, default=16384, help="B = max(1, this // T)")
    add("--heads", type=int, help="without: 2048 // D on GPUs, 4 on the CPU, 8 for --million")
    add("--rounds", type=int, default=20, help="counted rounds of a case")
    add("--max-seconds", type=float, default=60.0, help="of timing, for a case and direction")
    add("--budget-seconds", type=float, default=math.inf, help="no case begins after so many")
    add("--no-memory", action="store_true", help="leave the peak memory out")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    if args.quick:
        args.rounds, args.head_dims = min(args.rounds, FEWEST_ROUNDS), args.head_dims[:1]
        args.lengths = args.lengths or ([256] if args.device == "cpu" else [1024, 4096])
        if args.device == "cpu":
            args.batch_tokens = min(args.batch_tokens, 512)
    if args.million:
        args.rounds, args.max_seconds = min(args.rounds, 5), max(args.max_seconds, 300.0)
    else:
        args.lengths = args.lengths or [2**n for n in range(9, 18)]
    expanded = [["sdpa-flash", "sdpa-cudnn"] if p == "sdpa" else [p] for p in args.providers]
    args.providers = list(dict.fromkeys(itertools.chain.from_iterable(expanded)))
    return args


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore")
    bench = Bench(args)
    rows: list[Row] = []
    print(f"| {' | '.join(COLUMNS + FIGURES)} |")
    print("|" + "---|" * len(COLUMNS + FIGURES))
    work = million_cases(args) if args.million else all_cases(args)
    for case in tqdm(work, desc="cases", file=sys.stderr):
        for row in bench.measure(case):
            rows.append(row)
            print(format_row(row), flush=True)
        # After each case, so that a run which is cut short leaves what it has.
        write(args.json, args, rows)
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()

"""Chooses the tile sizes of the attention kernels on this GPU and writes them into the table.

For each kernel, head dim and width of dtype, every candidate below is tried by a process
apart: compiled, run, and compared with the plain twin in float64, at lengths that are no
multiple of any tile too. Candidates that need too much shared memory, fail to compile or are
wrong drop out. The others are timed one after the other in this process, interleaved with the
sizes that the table has, on dense causal attention with T = 4096 and on a causal LongNet with
T = 16384; the one with the least geometric mean replaces the old one if it is faster by more
than --margin. Of a backward kernel the whole backward is timed, the other kernel held fixed.

    python benchmarks/scripts/tune_attention.py --json runs/tune_attention.json

DEVICE=cpu in the environment is a dry run of the script itself: Triton interprets the kernels,
sizes are tiny, and what it chooses means nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dpflash import patterns
from dpflash.bench.attention_cases import band_error
from dpflash.bench.timing import Effort, Step, Stopwatch, time_steps
from dpflash.kernels import attention_configs, attention_reference
from dpflash.kernels.attention_configs import HEAD_DIMS, Config, architecture, entry, table
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.kernels.tile_graph import TileGraph

TABLE = Path(attention_configs.__file__).resolve().with_name("attention_configs.json")
DEVICE = os.environ.get("DEVICE", "cuda")
DRY = DEVICE == "cpu"
KERNELS = ("forward", "dq", "dkdv")
DTYPES = {16: torch.bfloat16, 32: torch.float32}
TOLERANCES = {16: 2e-2, 32: 1e-4}
# (block_m, block_n, num_warps) by kernel, head dim and bits; each with the stages behind them.
SHAPES = {
    ("forward", 64, 16): ((128, 64, 4), (128, 128, 4), (128, 128, 8), (64, 64, 4), (128, 32, 4)),
    ("forward", 128, 16): ((128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (128, 32, 8)),
    ("forward", 256, 16): ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8), (64, 64, 8)),
    ("dq", 64, 16): ((128, 64, 4), (128, 64, 8), (128, 32, 4), (64, 64, 4), (128, 128, 8)),
    ("dq", 128, 16): ((128, 32, 8), (128, 64, 8), (64, 64, 4), (64, 32, 4), (64, 64, 8)),
    ("dq", 256, 16): ((64, 32, 8), (64, 64, 8), (64, 32, 4), (128, 32, 8)),
    ("dkdv", 64, 16): ((128, 32, 4), (128, 64, 8), (128, 64, 4), (64, 64, 4), (128, 32, 8)),
    ("dkdv", 128, 16): ((128, 32, 8), (128, 64, 8), (64, 64, 4), (64, 32, 4), (64, 64, 8)),
    ("dkdv", 256, 16): ((64, 32, 8), (64, 64, 8), (64, 16, 4), (128, 32, 8)),
    ("forward", 64, 32): ((64, 32, 4), (128, 32, 8), (64, 64, 4), (128, 32, 4)),
    ("forward", 128, 32): ((64, 32, 8), (64, 32, 4), (32, 32, 4), (128, 32, 8)),
    ("forward", 256, 32): ((32, 16, 8), (32, 32, 8), (64, 16, 8)),
    ("dq", 64, 32): ((32, 32, 4), (64, 32, 4), (64, 32, 8), (64, 64, 8)),
    ("dq", 128, 32): ((32, 32, 8), (32, 32, 4), (64, 32, 8), (64, 16, 8)),
    ("dq", 256, 32): ((16, 16, 8), (32, 16, 8), (32, 32, 8)),
    ("dkdv", 64, 32): ((32, 32, 4), (64, 32, 4), (64, 32, 8), (64, 16, 4)),
    ("dkdv", 128, 32): ((32, 32, 8), (32, 32, 4), (64, 32, 8), (64, 16, 8)),
    ("dkdv", 256, 32): ((16, 16, 8), (32, 16, 8), (32, 32, 8)),
}
STAGES = {16: (1, 2, 3, 4), 32: (1, 2)}
LONGNET = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4), "causal": True}
SMALL = {"segment_lengths": (64, 256), "dilation_rates": (1, 4), "causal": True}
TIMED = (
    ("dense", patterns.Dense(causal=True), 4, 4096),
    ("longnet", patterns.Dilated(**LONGNET), 1, 16384),
)
CHECKED = (
    (patterns.Dense(causal=True), 499),
    (patterns.Dense(causal=False), 512),
    (patterns.Dilated(**SMALL), 641),
)
if DRY:
    TIMED = (("dense", patterns.Dense(causal=True), 1, 16),)
    CHECKED = ((patterns.Dense(causal=True), 17),)
TRY_SECONDS = 240
# Kernel, head dim and bits: an entry of the table.
Key = tuple[str, int, int]
Job = tuple[str, int, int, list[Config]]


def candidates(
    kernel: str, head_dim: int, bits: int, stages: Sequence[int] | None = None
) -> list[Config]:
    """What is tried for an entry of the table; stages other than the list's on request."""
    shapes, stages = SHAPES[kernel, head_dim, bits], stages or STAGES[bits]
    # Deep pipelines of wide heads exceed any shared memory.
    kept = [depth for depth in stages if depth * head_dim <= 512 or depth == 1]
    return [Config(*shape, depth) for shape, depth in itertools.product(shapes, kept)]


def arch() -> str:
    """The column of the table."""
    return "sm_90" if DRY else architecture(torch.device(DEVICE))


def entries(head_dims: Sequence[int], bits: Sequence[int]) -> list[Key]:
    return list(itertools.product(KERNELS, head_dims, bits))


def name_of(kernel: str, head_dim: int, bits: int) -> str:
    return entry(kernel, head_dim, DTYPES[bits])


def inputs(batch: int, heads: int, tokens: int, head_dim: int, bits: int) -> list[Tensor]:
    """q, k, v and do, `[B, H, T, D]`."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (batch, heads, tokens, head_dim)
    return [
        torch.randn(shape, device=DEVICE, dtype=DTYPES[bits], generator=generator)
        for _ in range(4)
    ]


def build(kernel: str, graph: TileGraph, tensors: Sequence[Tensor]) -> Step:
    """A call of the launcher in which the kernel takes part, with the table's sizes."""
    from dpflash.kernels import attention_launch

    q, k, v, do = tensors
    given = AttentionInputs(q, k, v, graph, 1 / math.sqrt(q.shape[3]))
    if kernel == "forward":
        return lambda: attention_launch.attention_forward(given)
    arguments = (do, None, *attention_launch.attention_forward(given), given)
    return lambda: attention_launch.attention_backward(*arguments)


def error_of(kernel: str, head_dim: int, bits: int) -> float:
    """The greatest error against the plain twin in float64, with the table's sizes."""
    worst = 0.0
    for pattern, tokens in CHECKED:
        graph = pattern.graph(tokens, 2, DEVICE)
        tensors = inputs(2, 2, tokens, head_dim, bits)
        result = build(kernel, graph, tensors)()
        q, k, v, do = (x.double() for x in tensors)
        given = AttentionInputs(q, k, v, graph, 1 / math.sqrt(head_dim))
        o, lse = attention_reference.attention_forward(given)
        if kernel == "forward":
            pairs = [(result[0], o)]
        else:
            grads = attention_reference.attention_backward(do, None, o, lse, given)
            pairs = list(zip(result[:3], grads[:3], strict=True))
        for ours, theirs in pairs:
            for x, y in zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True):
                worst = max(worst, band_error(x, y))
    return worst


def timed_steps(kernel: str, head_dim: int, bits: int) -> dict[str, Step]:
    steps = {}
    for name, pattern, batch, tokens in TIMED:
        heads = 2048 // head_dim
        graph = pattern.graph(tokens, heads, DEVICE)
        steps[name] = build(kernel, graph, inputs(batch, heads, tokens, head_dim, bits))
    return steps


def try_here(kernel: str, head_dim: int, bits: int, tried: Sequence[Config]) -> None:
    """Prints a line of JSON for each candidate: whether it works, and its error."""
    rows = table()[arch()]
    for config in tried:
        rows[name_of(kernel, head_dim, bits)] = config
        line: dict[str, Any] = {"config": list(config)}
        try:
            line["error"] = error_of(kernel, head_dim, bits)
            # Compiles what will be timed, into the cache on disk.
            for step in timed_steps(kernel, head_dim, bits).values():
                step()
            if not DRY:
                torch.cuda.synchronize()
            right = line["error"] <= TOLERANCES[bits]
            line["reason"] = None if right else f"wrong: error {line['error']:.1e}"
        except Exception as error:  # noqa: BLE001  many candidates do not compile
            text = str(error).strip().splitlines() or [""]
            line["reason"] = f"{type(error).__name__}: {text[0][:160]}"
        print(json.dumps(line), flush=True)
        if line["reason"] and "CUDA error" in line["reason"]:
            # Nothing works in a process after this; the caller starts another for the rest.
            return


def try_apart(job: Job) -> list[dict[str, Any]]:
    """Lines of `try_here`, from other processes; a new one after each that breaks down."""
    kernel, head_dim, bits, waiting = job
    found: list[dict[str, Any]] = []
    while waiting:
        command = [sys.executable, __file__, "--try", kernel, str(head_dim), str(bits)]
        command.append(json.dumps(waiting))
        reason = "the process broke down"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_SECONDS)
            output = done.stdout
            reason += f" (exit status {done.returncode})"
        except subprocess.TimeoutExpired as error:
            output = error.stdout or ""
            output = output.decode() if isinstance(output, bytes) else output
            reason = f"took longer than {TRY_SECONDS} s"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if not lines:
            lines = [{"config": list(waiting[0]), "reason": reason}]
        found += lines
        waiting = waiting[len(lines) :]
    return found


def times(key: Key, tried: Sequence[Config], rounds: int) -> list[list[float]]:
    """Median milliseconds of each config on each of `TIMED`."""
    rows, name = table()[arch()], name_of(*key)
    old, stopwatch = rows[name], Stopwatch(torch.device(DEVICE))

    def with_sizes(config: Config, step: Step) -> Step:
        def run() -> object:
            rows[name] = config
            return step()

        return run

    found: list[list[float]] = [[] for _ in tried]
    effort = Effort(trials=rounds)
    for step in timed_steps(*key).values():
        steps = {str(n): with_sizes(config, step) for n, config in enumerate(tried)}
        for number, seconds in time_steps(steps, effort=effort, stopwatch=stopwatch).items():
            found[int(number)].append(1e3 * statistics.median(seconds))
    rows[name] = old
    return found


def choose(old: Config, measured: dict[Config, list[float]], margin: float) -> Config:
    """The config with the least geometric mean, the old one unless that is clearly slower."""

    def cost(config: Config) -> float:
        return statistics.geometric_mean(measured[config])

    best = min(measured, key=cost)
    if old in measured and cost(old) <= (1 + margin) * cost(best):
        return old
    return best


def tune(key: Key, lines: list[dict[str, Any]], args: argparse.Namespace) -> Any:
    """Chooses one entry, puts it into the table in memory and returns its row of the report."""
    rows, name = table()[arch()], name_of(*key)
    old = rows[name]
    working = [Config(*line["config"]) for line in lines if line["reason"] is None]
    measured: dict[Config, list[float]] = {}
    if working:
        measured = dict(zip(working, times(key, working, args.rounds), strict=True))
        rows[name] = choose(old, measured, args.margin)
    return {
        "entry": name,
        "old": list(old),
        "new": list(rows[name]),
        "cases": [case[0] for case in TIMED],
        "old_ms": measured.get(old),
        "new_ms": measured.get(rows[name]),
        "tried": [
            {**line, "ms": measured.get(Config(*line["config"]))} for line in lines
        ],
    }  # fmt: skip


def format_row(row: dict[str, Any]) -> str:
    def cell(values: list[float] | None) -> str:
        return " / ".join(f"{x:.3f}" for x in values) if values else "does not run"

    working = sum(line["reason"] is None for line in row["tried"])
    cells = [row["entry"], str(row["old"]), cell(row["old_ms"]), str(row["new"])]
    cells += [cell(row["new_ms"]), f"{working}/{len(row['tried'])}"]
    return f"| {' | '.join(cells)} |"


def format_table(configs: dict[str, dict[str, Sequence[int]]]) -> str:
    """The table as its file has it: one entry a line."""
    columns = []
    for arch, rows in configs.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(list(c))}" for name, c in rows.items()]
        columns.append(f"  {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(columns) + "\n}\n"


def write_table(path: Path, arch: str, chosen: dict[str, Sequence[int]]) -> None:
    """Replaces entries of one architecture, and nothing else."""
    configs = json.loads(TABLE.read_text(encoding="utf-8"))
    configs[arch] |= {name: list(config) for name, config in chosen.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_table(configs), encoding="utf-8")


def jobs_of(key: Key, old: Config, stages: Sequence[int] | None = None) -> list[Job]:
    """The candidates of an entry, the old sizes first, in portions for a process each."""
    tried = list(dict.fromkeys([old, *candidates(*key, stages)]))[: 2 if DRY else None]
    return [(*key, tried[first : first + 5]) for first in range(0, len(tried), 5)]


def try_all(keys: Sequence[Key], args: argparse.Namespace) -> dict[Key, list[dict[str, Any]]]:
    """The lines of all candidates of all entries."""
    rows = table()[arch()]
    of_keys = [jobs_of(key, rows[name_of(*key)], args.stages) for key in keys]
    # The first portion of every entry before the second of any, should time run out.
    jobs = [job for portion in itertools.zip_longest(*of_keys) for job in portion if job]
    end = time.monotonic() + args.try_seconds

    def try_in_time(job: Job) -> list[dict[str, Any]]:
        if time.monotonic() < end:
            return try_apart(job)
        reason = f"not tried: --try-seconds {args.try_seconds:g} were spent before"
        return [{"config": list(config), "reason": reason} for config in job[3]]

    lines: dict[Key, list[dict[str, Any]]] = {key: [] for key in keys}
    with ThreadPoolExecutor(args.jobs) as pool:
        results = tqdm(pool.map(try_in_time, jobs), total=len(jobs), desc="tried", file=sys.stderr)
        for job, found in zip(jobs, results, strict=True):
            lines[job[:3]] += found
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, default=Path("runs/tune_attention.json"), help="all that was tried")
    add("--write", type=Path, default=TABLE, help="the table to write")
    add("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), choices=HEAD_DIMS)
    add("--bits", type=int, nargs="+", default=[16, 32], choices=[16, 32])
    add("--rounds", type=int, default=20)
    add("--margin", type=float, default=0.01, help="part by which a new config must be faster")
    add("--jobs", type=int, default=8, help="processes that compile and check at a time")
    add("--stages", type=int, nargs="+", help="pipeline depths to try instead of the list's")
    add("--try-seconds", type=float, default=math.inf, help="no trial begins after so many")
    add("--try", dest="attempt", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if not DRY and not torch.cuda.is_available():
        sys.exit("tune_attention.py measures on a GPU, and torch sees none: nothing was changed.")
    if args.attempt:
        kernel, head_dim, bits, tried = args.attempt
        try_here(kernel, int(head_dim), int(bits), [Config(*c) for c in json.loads(tried)])
        return
    keys = entries(args.head_dims, args.bits)
    lines = try_all(keys, args)
    print("| entry | old | ms (dense / longnet) | new | ms | work |\n|---|---|---|---|---|---|")
    report = []
    for key in tqdm(keys, desc="timed", file=sys.stderr):
        report.append(tune(key, lines[key], args))
        print(format_row(report[-1]), flush=True)
        write_table(args.write, arch(), {row["entry"]: row["new"] for row in report})
    name = "cpu, a dry run" if DRY else torch.cuda.get_device_name()
    described = {"device": name, "arch": arch(), "torch": torch.__version__}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"environment": described, "rows": report}, indent=1) + "\n")
    print(f"written to {args.json} and, column {arch()}, to {args.write}")


if __name__ == "__main__":
    main()

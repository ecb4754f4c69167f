"""Chooses the tile sizes of the attention kernels on this GPU and writes them into the table.

Each candidate for a kernel, head dim and width of dtype is tried by a process of its own:
compiled, run, and compared with the reference in float64, also at lengths that are no multiple of
a tile. Those that work are timed in turns, with the sizes that the table has, on dense causal
attention with T = 4096 and on a causal LongNet with T = 16384. The least geometric mean replaces
the old sizes if it is faster by more than --margin. Of a backward kernel the whole backward is
timed, the other kernel held fixed.

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
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dpflash import patterns
from dpflash.bench.attention_cases import band_error
from dpflash.bench.isolated import brief, run_isolated
from dpflash.bench.timing import Effort, Step, Stopwatch, time_steps
from dpflash.kernels import attention_configs, attention_reference
from dpflash.kernels.attention_configs import HEAD_DIMS, Config, architecture, entry, table
from dpflash.kernels.attention_reference import AttentionInputs

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


def arch() -> str:
    """The column of the table."""
    return "sm_90" if DRY else architecture(torch.device(DEVICE))


def name_of(key: Key) -> str:
    kernel, head_dim, bits = key
    return entry(kernel, head_dim, DTYPES[bits])


def candidates(key: Key, old: Config, stages: Sequence[int] | None = None) -> list[Config]:
    """The configs to try for an entry, the old one first."""
    # Deep pipelines of wide heads exceed any shared memory.
    depths = [n for n in stages or STAGES[key[2]] if n * key[1] <= 512 or n == 1]
    tried = [Config(*shape, depth) for shape, depth in itertools.product(SHAPES[key], depths)]
    return list(dict.fromkeys([old, *tried]))[: 2 if DRY else None]


def run(module: Any, key: Key, inputs: AttentionInputs, do: torch.Tensor) -> Step:
    """A call in which the kernel takes part; it returns the kernel's results."""
    if key[0] == "forward":
        return lambda: module.attention_forward(inputs)[:1]
    o, lse = module.attention_forward(inputs)
    return lambda: module.attention_backward(do, None, o, lse, inputs)[:3]


def problem(
    key: Key, pattern: Any, batch: int, heads: int, tokens: int
) -> tuple[AttentionInputs, torch.Tensor]:
    """Random inputs of attention, and the gradient of its output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (4, batch, heads, tokens, key[1])
    drawn = torch.randn(shape, device=DEVICE, generator=generator).to(DTYPES[key[2]])
    q, k, v, do = drawn.unbind()
    graph = pattern.graph(tokens, heads, DEVICE)
    return AttentionInputs(q, k, v, graph, 1 / math.sqrt(key[1])), do


def error_of(key: Key) -> float:
    """The greatest error against the reference in float64, with the table's sizes."""
    from dpflash.kernels import attention_launch

    worst = 0.0
    for pattern, tokens in CHECKED:
        inputs, do = problem(key, pattern, 2, 2, tokens)
        wide = replace(inputs, q=inputs.q.double(), k=inputs.k.double(), v=inputs.v.double())
        found = run(attention_launch, key, inputs, do)()
        expected = run(attention_reference, key, wide, do.double())()
        for ours, theirs in zip(found, expected, strict=True):
            for x, y in zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True):
                worst = max(worst, band_error(x, y))
    return worst


def timed_steps(key: Key) -> dict[str, Step]:
    from dpflash.kernels import attention_launch

    heads = 2048 // key[1]
    return {
        name: run(attention_launch, key, *problem(key, pattern, batch, heads, tokens))
        for name, pattern, batch, tokens in TIMED
    }


def try_here(key: Key, config: Config) -> float:
    """The error of a candidate; compiles what will be timed, into the cache on disk."""
    table()[arch()][name_of(key)] = config
    error = error_of(key)
    for step in timed_steps(key).values():
        step()
    if not DRY:
        torch.cuda.synchronize()
    return error


def try_all(keys: Sequence[Key], args: argparse.Namespace) -> dict[Key, list[dict[str, Any]]]:
    """A line for each candidate of each entry: whether it works, and its error."""
    rows, end = table()[arch()], time.monotonic() + args.try_seconds
    of_keys = [
        [(key, config) for config in candidates(key, rows[name_of(key)], args.stages)]
        for key in keys
    ]
    # The first candidate of every entry before the second of any, should time run out.
    tried = [one for turn in itertools.zip_longest(*of_keys) for one in turn if one]

    def attempt(one: tuple[Key, Config]) -> dict[str, Any]:
        key, config = one
        line: dict[str, Any] = {"config": list(config), "reason": None}
        if time.monotonic() >= end:
            return {**line, "reason": f"not tried: --try-seconds {args.try_seconds:g} are spent"}
        try:
            given = {"key": key, "config": config}
            line["error"] = run_isolated(try_here, timeout=TRY_SECONDS, **given)
            if not line["error"] <= TOLERANCES[key[2]]:
                line["reason"] = f"wrong: error {line['error']:.1e}"
        except Exception as error:  # many candidates do not compile
            line["reason"] = brief(error).splitlines()[0][:200]
        return line

    lines: dict[Key, list[dict[str, Any]]] = {key: [] for key in keys}
    with ThreadPoolExecutor(args.jobs) as pool:
        found = tqdm(pool.map(attempt, tried), total=len(tried), desc="tried", file=sys.stderr)
        for (key, _), line in zip(tried, found, strict=True):
            lines[key].append(line)
    return lines


def times(key: Key, tried: Sequence[Config], rounds: int) -> dict[Config, list[float]]:
    """Median milliseconds of each config on each of `TIMED`."""
    rows, name = table()[arch()], name_of(key)
    old, stopwatch = rows[name], Stopwatch(torch.device(DEVICE))
    found: dict[Config, list[float]] = {config: [] for config in tried}
    for step in timed_steps(key).values():

        def with_sizes(config: Config, step: Step = step) -> Step:
            def call() -> object:
                rows[name] = config
                return step()

            return call

        steps = {str(tuple(config)): with_sizes(config) for config in tried}
        seconds = time_steps(steps, effort=Effort(trials=rounds), stopwatch=stopwatch)
        for config in tried:
            found[config].append(1e3 * statistics.median(seconds[str(tuple(config))]))
    rows[name] = old
    return found


def choose(old: Config, measured: dict[Config, list[float]], margin: float) -> Config:
    """The config with the least geometric mean, the old one unless that is clearly slower."""
    cost = {config: statistics.geometric_mean(each) for config, each in measured.items()}
    best = min(cost, key=lambda config: cost[config])
    return old if old in cost and cost[old] <= (1 + margin) * cost[best] else best


def tune(key: Key, lines: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Chooses one entry, puts it into the table in memory and returns its row of the report."""
    rows, name = table()[arch()], name_of(key)
    old = rows[name]
    working = [Config(*line["config"]) for line in lines if line["reason"] is None]
    measured = times(key, working, args.rounds) if working else {}
    if measured:
        rows[name] = choose(old, measured, args.margin)
    tried = [{**line, "ms": measured.get(Config(*line["config"]))} for line in lines]
    new = rows[name]
    found = {"entry": name, "old": list(old), "new": list(new), "tried": tried}
    return {**found, "old_ms": measured.get(old), "new_ms": measured.get(new)}


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
    return parser.parse_args()


def main() -> None:
    args = parse()
    if not DRY and not torch.cuda.is_available():
        sys.exit("tune_attention.py measures on a GPU, and torch sees none: nothing was changed.")
    keys = list(itertools.product(KERNELS, args.head_dims, args.bits))
    lines = try_all(keys, args)
    device = "cpu, a dry run" if DRY else torch.cuda.get_device_name()
    report: dict[str, Any] = {
        "environment": {"device": device, "arch": arch(), "torch": torch.__version__},
        "rows": [],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for key in keys:
        row = tune(key, lines[key], args)
        works = f"{sum(one['reason'] is None for one in row['tried'])}/{len(row['tried'])} work"
        print(
            row["entry"], row["old"], row["old_ms"], row["new"], row["new_ms"], works, flush=True
        )
        report["rows"].append(row)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        write_table(args.write, arch(), {one["entry"]: one["new"] for one in report["rows"]})
    print(f"written to {args.json} and, column {arch()}, to {args.write}")


if __name__ == "__main__":
    main()

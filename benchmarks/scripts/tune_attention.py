"""Chooses the tile sizes of the attention kernels on this GPU and writes them into the table.

    python benchmarks/scripts/tune_attention.py --json runs/tune_attention.json

Candidates are the sizes in the table, and variants with one size halved or doubled. Run the script
again to try further sizes. A separate process compares each candidate with the definition in
float64. Correct candidates are timed in turns on dense causal attention and LongNet. The candidate
with the smallest geometric mean replaces the old sizes if it is more than 1% faster. For a
backward kernel, forward and backward are timed, with the other kernels' sizes fixed. DEVICE=cpu
makes a dry run with the CPU's kernels, which have no tile sizes; the choice then means nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpflash import patterns
from dpflash.bench.attention import DIRECTIONS, case_subject
from dpflash.bench.isolated import brief, run_isolated
from dpflash.bench.output import write_text
from dpflash.bench.suite import Subject
from dpflash.bench.timing import Effort, Step, Stopwatch, time_steps
from dpflash.kernels import attention_configs
from dpflash.kernels.attention_configs import HEAD_DIMS, Config, architecture, entry, table

TABLE = Path(attention_configs.__file__).resolve().with_name("attention_configs.json")
DEVICE = os.environ.get("DEVICE", "cuda")
DRY = DEVICE == "cpu"
KERNELS = ("forward", "dq", "dkdv")
DTYPES = {16: "bfloat16", 32: "float32"}
STAGES = {16: (2, 3), 32: (1, 2)}
MARGIN = 0.01
CAUSAL = patterns.Dense(causal=True)
SEGMENTS: Any = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
SMALL = patterns.Dilated(segment_lengths=(64, 256), dilation_rates=(1, 4), causal=True)
# An entry of the table: (kernel, head dim, bits of the dtype).
Key = tuple[str, int, int]
# (pattern, tokens, samples) of each case.
Cases = Sequence[tuple[Any, int, int]]
CHECKED: Cases = [(CAUSAL, 499, 2), (patterns.Dense(), 512, 2), (SMALL, 641, 2)]
LONG: Cases = [(CAUSAL, 4096, 4), (patterns.Dilated(**SEGMENTS, causal=True), 16384, 1)]
TIMED: Cases = [(CAUSAL, 65, 1)] if DRY else LONG


def entry_of(key: Key) -> tuple[dict[str, Config], str]:
    """Return (the table's column for this GPU, the name of the entry in that column)."""
    arch = "sm_90" if DRY else architecture(torch.device(DEVICE))
    kernel: Any = key[0]
    return table()[arch], entry(kernel, key[1], getattr(torch, DTYPES[key[2]]))


def candidates(key: Key) -> list[Config]:
    """Return the configs to try for an entry, the old config first."""
    rows, name = entry_of(key)
    m, n, warps, _ = old = rows[name]
    # Matrix products need at least 16 rows.
    tiles = [(m, n), (2 * m, n), (max(16, m // 2), n), (m, 2 * n), (m, max(16, n // 2))]
    shapes = [*((*tile, warps) for tile in tiles), (m, n, 4 if warps == 8 else 8)]
    # Deep pipelines with wide heads need more shared memory than any GPU has.
    depths = [n for n in STAGES[key[2]] if n * key[1] <= 512 or n == 1]
    tried = [Config(*shape, depth) for shape, depth in itertools.product(shapes, depths)]
    return list(dict.fromkeys([old, *tried]))[: 2 if DRY else None]


def subjects(key: Key, cases: Cases) -> list[Subject]:
    """Return subjects whose calls use the kernel."""
    kernel, head_dim, bits = key
    given: dict[str, Any] = {"direction": DIRECTIONS[kernel != "forward"], "seed": 0}
    given.update(heads=2048 // head_dim, head_dim=head_dim, dtype=DTYPES[bits], device=DEVICE)
    return [
        case_subject(pattern, "dpflash", tokens=tokens, batch=batch, **given)
        for pattern, tokens, batch in cases
    ]


def try_here(key: Key, config: Config) -> str | None:
    """Return why a candidate does not work, or None; compile its calls into the disk cache."""
    rows, name = entry_of(key)
    rows[name] = config
    for subject in subjects(key, CHECKED):
        if not (error := subject.error()) <= subject.tolerance:
            return f"wrong: error {error:.1e}"
    for subject in subjects(key, TIMED):
        subject.step()
    if not DRY:
        torch.cuda.synchronize()
    return None


def try_all(keys: Sequence[Key], jobs: int, seconds: float) -> dict[Key, dict[Config, str | None]]:
    """Return {entry: {candidate: reason why it does not work, or None}}."""
    end = time.monotonic() + seconds
    of_keys = [[(key, config) for config in candidates(key)] for key in keys]
    # Try the first candidate of every entry before second candidates, in case time runs out.
    tried = [one for turn in itertools.zip_longest(*of_keys) for one in turn if one]

    def attempt(one: tuple[Key, Config]) -> str | None:
        if time.monotonic() > end:
            return f"not tried: --try-seconds {seconds:g} are spent"
        given: dict[str, Any] = {"key": one[0], "config": one[1]}
        try:
            reason: str | None = run_isolated(try_here, timeout=240, **given)
        except Exception as error:  # many candidates do not compile
            return brief(error).splitlines()[0][:200]
        return reason

    found: dict[Key, dict[Config, str | None]] = {key: {} for key in keys}
    with ThreadPoolExecutor(jobs) as pool:
        for (key, config), reason in zip(tried, pool.map(attempt, tried), strict=True):
            found[key][config] = reason
    return found


def times(key: Key, tried: Sequence[Config]) -> dict[Config, list[float]]:
    """Return the median milliseconds of each config for each case of `TIMED`."""
    rows, name = entry_of(key)

    def call(config: Config, step: Step) -> None:
        rows[name] = config
        step()

    found: dict[Config, list[float]] = {config: [] for config in tried}
    for subject in subjects(key, TIMED):
        steps = {str(config): partial(call, config, subject.step) for config in tried}
        stopwatch = Stopwatch(torch.device(DEVICE))
        seconds = time_steps(steps, effort=Effort(trials=10), stopwatch=stopwatch)
        for config in tried:
            found[config].append(1e3 * statistics.median(seconds[str(config)]))
    return found


def choose(old: Config, measured: dict[Config, list[float]]) -> Config:
    """Return the config with the smallest geometric mean, or `old` if it is at most 1% slower."""
    cost = {config: statistics.geometric_mean(each) for config, each in measured.items()}
    best = min(cost, key=lambda config: cost[config], default=old)
    return old if not cost or cost.get(old, math.inf) <= (1 + MARGIN) * cost[best] else best


def write_table(path: Path, configs: dict[str, dict[str, Config]]) -> None:
    """Write the whole table, one entry per line."""
    text = re.sub(r",\s+(?=\d)", ", ", json.dumps(configs, indent=2))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, re.sub(r"(?<=\[)\s+|\s+(?=\])", "", text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, default=Path("runs/tune_attention.json"), help="file of all trials")
    add("--write", type=Path, default=TABLE, help="the table to write")
    add("--head-dims", type=int, nargs="+", default=[64, 128], choices=HEAD_DIMS)
    add("--bits", type=int, nargs="+", default=[16], choices=[16, 32])
    add("--jobs", type=int, default=8, help="processes that compile and check at a time")
    add("--try-seconds", type=float, default=math.inf, help="seconds after which no trial begins")
    args = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        sys.exit("tune_attention.py measures on a GPU, and torch sees none: nothing was changed.")
    device = "cpu, a dry run" if DRY else torch.cuda.get_device_name()
    found = []
    args.json.parent.mkdir(parents=True, exist_ok=True)
    keys = list(itertools.product(KERNELS, args.head_dims, args.bits))
    for key, tried in try_all(keys, args.jobs, args.try_seconds).items():
        rows, name = entry_of(key)
        measured = times(key, [config for config, reason in tried.items() if reason is None])
        old = rows[name]
        rows[name] = choose(old, measured)
        print(name, old, "->", rows[name], f"{len(measured)}/{len(tried)} work", flush=True)
        lines = [(config, reason, measured.get(config)) for config, reason in tried.items()]
        found.append({"entry": name, "old": old, "new": rows[name], "tried": lines})
        report = {"device": device, "torch": torch.__version__, "rows": found}
        write_text(args.json, json.dumps(report, indent=1) + "\n")
        write_table(args.write, table())


if __name__ == "__main__":
    main()

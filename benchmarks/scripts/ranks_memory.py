r"""Measures peak memory of plain and private training steps, on one rank and context parallel.

- The longest sequence for which two steps add at most 256 MiB per rank, for the model of
  longest.py with a sliding window.
- The memory that a step on one sample adds to a rank. The model has many weights (W), and a
  private step on P ranks should need 4 W / P bytes more than a plain step. It also needs memory
  for the data that is sent at a time (25 MiB, or one larger weight).
- The memory that dense causal ring attention, forward and backward, adds to a rank.

By default glibc keeps freed blocks of up to 32 MiB, so that a peak depends on the order of
allocations. Here glibc returns blocks of 64 KiB or more; --keep restores the default.

    python benchmarks/scripts/ranks_memory.py --json benchmarks/results/cpu-xeon/ranks-memory.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from longest import KEYS, SECONDS, step_of

from dpflash.bench.environment import environment
from dpflash.bench.isolated import Place, run_ranks
from dpflash.bench.memory import peak_growth
from dpflash.bench.output import write_text
from dpflash.bench.scaling_tasks import (
    AttentionCase,
    PrivateTraining,
    TrainingCase,
    attention_step,
    plain_step,
)
from dpflash.patterns import SlidingWindow

LIMIT, GRAIN = 256, 512  # MiB per rank; T is a multiple of GRAIN
STEP = TrainingCase("context", batch=1, tokens=256, width=1024, layers=2, heads=4)
RING = AttentionCase("dense causal", tokens=16384, sharding="zigzag")


def growth(place: Place, tokens: int, is_private: bool) -> float | None:
    """Return the peak growth of this rank's resident memory in two steps, in MiB."""
    step = step_of(place, tokens, is_private, SlidingWindow(window=KEYS, causal=True))
    return peak_growth(lambda: [step(), step()], place.device)


def longest(ranks: int, is_private: bool) -> int:
    """Return the largest multiple T of GRAIN for which no rank's memory grows beyond the limit."""

    def fits(grains: int) -> bool:
        given = {"tokens": grains * GRAIN, "is_private": is_private}
        return max(run_ranks(growth, ranks, device="cpu", timeout=SECONDS, **given)) <= LIMIT

    good, bad = 0, 64
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good * GRAIN


def growth_of_step(place: Place, is_private: bool) -> float | None:
    step = PrivateTraining(place, STEP).step if is_private else plain_step(place, STEP)
    step()
    step()
    return peak_growth(step, place.device)


def growth_of_ring(place: Place) -> float | None:
    step = attention_step(place, RING)
    step()
    return peak_growth(step, place.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--keep", action="store_true", help="glibc keeps freed blocks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.keep:  # the ranks' processes inherit the setting
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    rows: list[dict[str, Any]] = []

    def note(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    def peak(function: Any, ranks: int, **given: Any) -> float:
        return max(run_ranks(function, ranks, device="cpu", timeout=SECONDS, **given))

    for ranks in (1, 2, 4):
        note(what="ring attention", ranks=ranks, peak_memory_mb=peak(growth_of_ring, ranks))
    for private in (False, True):
        found = peak(growth_of_step, 2, is_private=private)
        note(what="one sample", ranks=2, is_private=private, peak_memory_mb=found)
    for ranks in (1, 2):
        for private in (False, True):
            tokens = longest(ranks, private)
            note(what="longest", ranks=ranks, is_private=private, max_tokens=tokens)
    config = {"limit_mb": LIMIT, "keeps_freed_blocks": args.keep, "keys": KEYS}
    config |= {"step": vars(STEP), "ring": vars(RING)}
    found = {"environment": environment("cpu", 1), "config": config, "rows": rows}
    write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

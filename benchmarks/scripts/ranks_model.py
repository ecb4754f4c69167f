"""Computes bytes sent and FLOP of a private step on many ranks, by the planner's formulas.

Nothing is timed and no weights are allocated. The model has the shape of Llama 7B. One sequence of
131,072 tokens is divided over all ranks, 8 GPUs per node. Bytes and FLOP are the busiest rank's.

    python benchmarks/scripts/ranks_model.py --json benchmarks/results/ranks-model.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dpflash.bench.output import write_text
from dpflash.distributed.exchange_plan import ShardedPattern
from dpflash.distributed.layout import Layout
from dpflash.distributed.traffic import ModeCall, cheapest_mode, mode_costs
from dpflash.patterns import Dense, Dilated, Pattern, SlidingWindow

NODES, GPUS = (1, 2, 4, 8), 8
TOKENS, LAYERS, WIDTH, HIDDEN, HEADS, HEAD_DIM, VOCABULARY = 2**17, 32, 4096, 11008, 32, 128, 32000
WEIGHTS = 2 * VOCABULARY * WIDTH + LAYERS * (4 * WIDTH**2 + 3 * WIDTH * HIDDEN + 2 * WIDTH) + WIDTH
PATTERNS: dict[str, tuple[Pattern, str]] = {
    "dense causal": (Dense(causal=True), "zigzag"),
    "sliding window 4,096": (SlidingWindow(window=4096, causal=True), "contiguous"),
    "LongNet": (
        Dilated(
            segment_lengths=(2048, 16384, TOKENS),
            dilation_rates=(1, 8, TOKENS // 2048),
            causal=True,
        ),
        "contiguous",
    ),
}


def row_of(name: str, ranks: int) -> dict[str, Any]:
    """Return the costs of attention and of the gradients' exchange, for a step on one sample."""
    pattern, sharding = PATTERNS[name]
    sharded = ShardedPattern(pattern, TOKENS, HEADS, HEADS, Layout(TOKENS, ranks, sharding))
    call = ModeCall(sharded, HEAD_DIM, torch.bfloat16, 1, "cuda")
    taken, costs = cheapest_mode(call), mode_costs(call)
    share = WEIGHTS * (ranks - 1) / ranks
    products = 6 * (WEIGHTS - VOCABULARY * WIDTH) * TOKENS / ranks
    return {
        "pattern": name,
        "nodes": ranks // GPUS,
        "ranks": ranks,
        "mode": taken,
        "attention_sent_bytes": {x.mode: LAYERS * sum(x.sent) for x in costs},
        "attention_flops": LAYERS * next(x.flops for x in costs if x.mode == taken),
        "linear_flops": products,
        # Each element of the sums is sent once in float64, and of the release once in float32.
        "sums_sent_bytes": int(8 * share),
        "release_sent_bytes": int(4 * share),
        "slices_bytes": 8 * -(-WEIGHTS // ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    rows = [row_of(name, nodes * GPUS) for name in PATTERNS for nodes in NODES]
    config = {"tokens": TOKENS, "layers": LAYERS, "weights": WEIGHTS, "heads": HEADS}
    found = {"is_model": True, "config": config, "rows": rows}
    write_text(parser.parse_args().json, json.dumps(found, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()

"""Memory and time of training steps on up to 1,048,576 tokens, plain and private, on one core.

A LongContextLM with LongNet's attention, one sample a step, activation checkpointing and a loss in
chunks. Each row is a fresh process; seconds are processor time of the second of two steps.

    python benchmarks/scripts/longest.py --json benchmarks/results/cpu-epyc/longest.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.bench.environment import environment
from dpflash.bench.isolated import run_isolated
from dpflash.bench.memory import peak_growth
from dpflash.bench.output import write_text
from dpflash.bench.private import endless
from dpflash.patterns import Dilated

LENGTHS = (2**17, 2**18, 2**19, 2**20)
WIDTH, LAYERS, HEADS, VOCABULARY, KEYS = 32, 2, 2, 64, 256


def two_steps(tokens: int, is_private: bool) -> dict[str, float | None]:
    """Peak memory of two steps in MiB, and processor seconds of the second."""
    torch.manual_seed(0)
    # Each query has at most KEYS keys in each branch, so that work is linear in T.
    pattern = Dilated(
        segment_lengths=(KEYS, 16 * KEYS, tokens),
        dilation_rates=(1, 16, tokens // KEYS),
        causal=True,
    )
    model = dpflash.nn.LongContextLM(
        VOCABULARY,
        WIDTH,
        LAYERS,
        HEADS,
        max_seq_len=tokens,
        pattern=pattern,
        activation_checkpointing=True,
        chunked_loss=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = torch.randint(0, VOCABULARY, (1, tokens + 1))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=1)
    backward = torch.Tensor.backward
    if is_private:
        engine = dpflash.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            verify_first_batch=False,
        )
        backward = engine.backward
    batches, seconds = endless(loader), 0.0

    def step() -> None:
        nonlocal seconds
        for _ in range(2):
            x, y = next(batches)
            begin = time.process_time()
            backward(model(x, y))
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.process_time() - begin

    peak = peak_growth(step, torch.device("cpu"))
    return {"peak_memory_mb": peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "vocabulary": VOCABULARY}
    rows: list[dict[str, Any]] = []
    for tokens in LENGTHS:
        for is_private in (False, True):
            given = {"tokens": tokens, "is_private": is_private}
            rows.append({**given, **run_isolated(two_steps, **given)})
            print(json.dumps(rows[-1]), flush=True)
    found = {"environment": environment("cpu", 1), "config": {**config, "keys": KEYS}}
    write_text(args.json, json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

r"""Measures memory and time of training steps on very long sequences, plain and private.

The model is a LongContextLM with LongNet's attention, activation checkpointing and a loss computed
in chunks. A fresh process with one core makes two steps on one sample; `seconds` is the processor
time of the second step.

    python benchmarks/scripts/longest.py --json benchmarks/results/cpu-epyc/longest.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.bench.environment import environment
from dpflash.bench.isolated import Place, run_ranks
from dpflash.bench.memory import peak_growth
from dpflash.bench.output import write_text
from dpflash.bench.private import endless
from dpflash.distributed import context_parallel
from dpflash.patterns import Dilated, Pattern

LENGTHS = (2**17, 2**18, 2**19, 2**20)
WIDTH, LAYERS, HEADS, VOCABULARY, KEYS = 32, 2, 2, 64, 256
SECONDS = 600.0  # time limit of a call


def longnet(tokens: int) -> Pattern:
    """Return LongNet's attention with at most KEYS keys per query and branch, linear in T."""
    return Dilated(
        segment_lengths=(KEYS, 16 * KEYS, tokens),
        dilation_rates=(1, 16, tokens // KEYS),
        causal=True,
    )


def step_of(place: Place, tokens: int, is_private: bool, pattern: Pattern) -> Callable[[], None]:
    """Return a training step on one sample by all ranks."""
    torch.manual_seed(0)
    model: Any = dpflash.nn.LongContextLM(
        VOCABULARY,
        WIDTH,
        LAYERS,
        HEADS,
        max_seq_len=tokens,
        pattern=pattern,
        activation_checkpointing=True,
        chunked_loss=True,
    )
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = torch.randint(0, VOCABULARY, (1, tokens + 1))
    loader: Any = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=1)
    backward: Any = torch.Tensor.backward
    mesh, parallel = None, None
    if place.world_size > 1:
        mesh = init_device_mesh("cpu", (place.world_size,), mesh_dim_names=("context",))
        parallel = context_parallel(model, mesh).context_parallel
    if is_private:
        engine = dpflash.PrivacyEngine(mesh=mesh)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sampling="fixed_size",
            verify_first_batch=False,
        )
        backward = engine.backward
    elif parallel is not None:
        model = DistributedDataParallel(model)
    batches = endless(loader)

    def step() -> None:
        x, y = next(batches)
        if parallel is not None:
            x, y = parallel.shard(x), parallel.shard(y)
        loss = model(x, y)
        backward(loss if is_private else loss.sum())
        optimizer.step()
        optimizer.zero_grad()

    return step


def two_steps(place: Place, tokens: int, is_private: bool) -> dict[str, float | None]:
    """Return the peak memory of two steps in MiB, and the processor seconds of the second step."""
    step, seconds = step_of(place, tokens, is_private, longnet(tokens)), 0.0

    def twice() -> None:
        nonlocal seconds
        for _ in range(2):
            begin = time.process_time()
            step()
            seconds = time.process_time() - begin

    return {"peak_memory_mb": peak_growth(twice, place.device), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for tokens in LENGTHS:
        for is_private in (False, True):
            given: dict[str, Any] = {"tokens": tokens, "is_private": is_private}
            (own,) = run_ranks(two_steps, 1, device="cpu", timeout=SECONDS, **given)
            rows.append({**given, **own})
            print(json.dumps(rows[-1]), flush=True)
    config = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "vocabulary": VOCABULARY}
    config |= {"keys": KEYS}
    found = {"environment": environment("cpu", 1), "config": config, "rows": rows}
    write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

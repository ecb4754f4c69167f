"""Measures a private step's time with banded noise, divided by its time with independent noise.

The steps take turns in one process with one thread, timed by process time, on equal batch sizes.

    python benchmarks/scripts/banded_time.py --json benchmarks/results/DEVICE/banded.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.bench.environment import environment
from dpflash.bench.output import write_text
from dpflash.bench.private import endless
from dpflash.bench.timing import Effort, Stopwatch, speedup, summarize, time_steps
from dpflash.noise import Banded
from dpflash.sampling import CyclicPoissonBatchSampler, PoissonBatchSampler

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 256, 2, 8  # the model of the suite "private-step"
BATCH, TOKENS, BANDS = 4, 2048, (4, 16)
PARTS = max(BANDS)


def make_step(bands: int | None, batch: int, tokens: int) -> Callable[[], None]:
    """Return a private step with banded noise, or with independent noise if `bands` is None."""
    torch.manual_seed(0)
    shape = (VOCABULARY, WIDTH, LAYERS, HEADS)
    model: Any = dpflash.nn.LongContextLM(*shape, max_seq_len=tokens, tie_embeddings=False)
    x, y = torch.randint(0, VOCABULARY, (2, batch * PARTS, tokens))
    banded = {"sampling": "cyclic_poisson", "noise_mechanism": Banded(bands=bands or 1)}
    engine = dpflash.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        verify_first_batch=False,
        **({} if bands is None else banded),
    )
    batches = endless(loader)

    def step() -> None:
        for inputs, targets in batches:
            assert loader.is_real.all()
            engine.backward(dpflash.losses.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                return

    return step


def _draw(sampler: Any, index: int) -> list[int]:
    size = sampler.num_samples // PARTS
    return list(range(index % PARTS * size, (index % PARTS + 1) * size))


def measured(effort: Effort, *, batch: int = BATCH, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Return a row for each number of bands: the step's time over its time without bands."""
    with (
        patch.object(PoissonBatchSampler, "draw", _draw),
        patch.object(CyclicPoissonBatchSampler, "draw", _draw),
    ):
        numbers = (None, *BANDS)
        steps = {str(bands): make_step(bands, batch, tokens) for bands in numbers}
        stopwatch = Stopwatch(torch.device("cpu"))
        seconds = time_steps(steps, effort=effort, stopwatch=stopwatch)
    independent, rows = seconds.pop("None"), []
    for bands, own in seconds.items():
        ratio = speedup(independent, own)  # speed-up of independent noise
        rows.append(
            {
                "bands": int(bands),
                "batch": batch,
                "tokens": tokens,
                "over_independent": ratio.median,
                "ci95": list(ratio.ci95),
                "timer": stopwatch.name,
                "step": asdict(summarize(own)),
                "independent_step": asdict(summarize(independent)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--trials", type=int, default=40, help="timed steps of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # More warm-ups than bands, so that each timed step adds the noise of all bands.
    rows = measured(Effort(warm_ups=PARTS + 4, trials=args.trials))
    for row in rows:
        low, high = row["ci95"]
        print(f"{row['bands']} bands: {row['over_independent']:.3f} ({low:.3f} to {high:.3f})")
    report = {"environment": environment("cpu", 1), "rows": rows}
    write_text(args.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

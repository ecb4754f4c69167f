r"""Held-out bits a byte of one language model trained in float32, bfloat16 and float8.

Plain (no noise, no bound) and private at epsilon 8, from the same weights and draws for each seed.
"bf16" is optimize="balanced", "fp8" is that with fp8=True. Trained models are detached, so all are
evaluated in float32. A run that JSON has already is not made again: call it until all are there.

    python benchmarks/scripts/fp8_quality.py --minutes 15 \
        --json benchmarks/results/cpu-epyc/fp8-quality.json --seeds 5 --steps 1000 5000
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.accounting import get_noise_multiplier
from dpflash.bench.environment import environment
from dpflash.bench.output import write_text
from dpflash.bench.private import endless
from dpflash.bench.quality import batch_of, windows_of
from dpflash.nn import LongContextLM
from dpflash.train.data import VOCAB_SIZE

TOKENS, BATCH, EPSILON, DELTA = 64, 16, 8.0, 1e-5
WIDTH, LAYERS, HEADS = 64, 2, 1
ARITHMETIC: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"optimize": "balanced"},
    "fp8": {"optimize": "balanced", "fp8": True},
}
# The bound and Adam's learning rate, without and with privacy.
KINDS = {"plain": (math.inf, 3e-3), "private": (1.0, 1e-2)}


def train(data: TensorDataset, arithmetic: str, kind: str, noise: float, seed: int, steps: int):
    """The model after so many steps, which is plain again."""
    torch.manual_seed(seed)
    model = LongContextLM(VOCAB_SIZE, WIDTH, LAYERS, HEADS, max_seq_len=TOKENS)
    bound, rate = KINDS[kind]
    engine = dpflash.PrivacyEngine(seed=seed)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=noise,
        max_grad_norm=bound,
        verify_first_batch=False,
        **ARITHMETIC[arithmetic],
    )
    for x, y in endless(loader):
        engine.backward(dpflash.losses.cross_entropy(private(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.releases == steps:
            return engine.detach(private)


def bits_a_byte(model: LongContextLM, data: TensorDataset) -> float:
    """Of the held-out windows, in float32."""
    losses = []
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=64):
            losses.append(dpflash.losses.cross_entropy(model(x), y))
    return float(torch.cat(losses).double().mean()) / math.log(2)


def differences(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of fp8 and fp32 from bf16, over the seeds that have both, by kind and number of steps."""
    values = {tuple(r[k] for k in ("kind", "steps", "seed", "arithmetic")): r for r in runs}
    found: dict[str, Any] = {}
    for kind, steps, seed, arithmetic in values:
        other = values.get((kind, steps, seed, "bf16"))
        if arithmetic != "bf16" and other is not None:
            own = values[kind, steps, seed, arithmetic]["bits_a_byte"]
            name = f"{kind}, {steps} steps, {arithmetic} - bf16"
            found.setdefault(name, []).append(own - other["bits_a_byte"])
    return {name: {"mean": sum(x) / len(x), "of each seed": x} for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = time.monotonic()
    data, held_out = (
        TensorDataset(*batch_of(windows, range(len(windows)), 0))
        for windows in windows_of(TOKENS, 0)
    )
    runs = json.loads(args.json.read_text())["runs"] if args.json.exists() else []
    made = [{k: r[k] for k in ("steps", "seed", "kind", "arithmetic")} for r in runs]
    for steps, seed, kind, arithmetic in itertools.product(
        args.steps, range(args.seeds), KINDS, ARITHMETIC
    ):
        run = {"steps": steps, "seed": seed, "kind": kind, "arithmetic": arithmetic}
        if run in made or time.monotonic() - begin > 60 * args.minutes:
            continue
        noise = 0.0
        if kind == "private":
            rate = BATCH / len(data)
            noise = get_noise_multiplier(
                target_epsilon=EPSILON, target_delta=DELTA, sample_rate=rate, steps=steps
            )
        model = train(data, arithmetic, kind, noise, seed, steps)
        runs.append(
            {**run, "noise_multiplier": noise, "bits_a_byte": bits_a_byte(model, held_out)}
        )
        print(json.dumps(runs[-1]), flush=True)
        config = {
            "documents": len(data),
            "held_out": len(held_out),
            "tokens": TOKENS,
            "expected_batch_size": BATCH,
            "width, layers, heads": [WIDTH, LAYERS, HEADS],
            "epsilon": EPSILON,
            "delta": DELTA,
            "max_grad_norm, learning_rate": {k: [str(b), rate] for k, (b, rate) in KINDS.items()},
        }
        found = {"environment": environment("cpu", 1), "config": config}
        found |= {"differences": differences(runs), "runs": runs}
        write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

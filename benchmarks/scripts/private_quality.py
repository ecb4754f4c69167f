r"""Measures held-out bits per byte of a language model trained without and with privacy.

Runs differ in arithmetic (float32, bfloat16, float8) or in the attention pattern. For each seed
and setting, a model is trained plainly (no noise, no bound) and privately at epsilon 8, from equal
weights and logical batches. "bf16" is optimize="balanced", and "fp8" adds fp8=True. Trained models
are detached and evaluated in float32. If the command is repeated, it makes the missing runs.

    python benchmarks/scripts/private_quality.py arithmetic \
        --json benchmarks/results/cpu-epyc/fp8-quality.json --seeds 5 --steps 1000 5000
    python benchmarks/scripts/private_quality.py patterns \
        --json benchmarks/results/cpu-epyc/pattern-quality.json --seeds 3 --steps 500
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.accounting import get_noise_multiplier
from dpflash.bench.environment import environment
from dpflash.bench.output import write_text
from dpflash.bench.private import endless
from dpflash.bench.quality import batch_of, contestants, windows_of
from dpflash.nn import LongContextLM
from dpflash.patterns import Dense, Pattern
from dpflash.train.data import VOCAB_SIZE

BATCH, EPSILON, DELTA = 16, 8.0, 1e-5
WIDTH, LAYERS, HEADS = 64, 2, 1
DENSE: Pattern = Dense(causal=True)


class Comparison(NamedTuple):
    """Settings to compare, for training on windows of `tokens` tokens."""

    tokens: int
    baseline: str  # the setting from which differences are computed
    ways: Mapping[str, tuple[Pattern, dict[str, Any]]]  # pattern, and options of make_private


COMPARISONS = {
    "arithmetic": Comparison(
        64,
        "bf16",
        {
            "fp32": (DENSE, {}),
            "bf16": (DENSE, {"optimize": "balanced"}),
            "fp8": (DENSE, {"optimize": "balanced", "fp8": True}),
        },
    ),
    "patterns": Comparison(
        512,
        "dense",
        {one.name: (one.pattern, {}) for one in contestants(512) if not one.seeds_on},
    ),
}
# (clipping bound, Adam's learning rate) without and with privacy.
KINDS = {"plain": (math.inf, 3e-3), "private": (1.0, 1e-2)}


def train(
    data: TensorDataset,
    pattern: Pattern,
    bound: float,
    rate: float,
    seed: int,
    steps: int,
    **given: Any,
) -> nn.Module:
    """Train for `steps` steps and return the detached model."""
    torch.manual_seed(seed)
    tokens = data.tensors[0].shape[1]
    model = LongContextLM(VOCAB_SIZE, WIDTH, LAYERS, HEADS, max_seq_len=tokens, pattern=pattern)
    engine = dpflash.PrivacyEngine(seed=seed)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        data_loader=DataLoader(data, batch_size=BATCH),
        max_grad_norm=bound,
        verify_first_batch=False,
        **given,
    )
    batches = endless(loader)
    while optimizer.releases < steps:
        x, y = next(batches)
        engine.backward(dpflash.losses.cross_entropy(private(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return engine.detach(private)


def bits_a_byte(model: nn.Module, data: TensorDataset) -> float:
    """Return the bits per byte of the held-out windows, in float32."""
    losses = []
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=64):
            losses.append(dpflash.losses.cross_entropy(model(x), y))
    return float(torch.cat(losses).double().mean()) / math.log(2)


def differences(runs: Sequence[dict[str, Any]], baseline: str) -> dict[str, Any]:
    """Return each setting's difference to the baseline: the mean over seeds, and every seed's."""
    values = {tuple(r[k] for k in ("kind", "steps", "seed", "way")): r for r in runs}
    found: dict[str, Any] = {}
    for kind, steps, seed, way in values:
        other = values.get((kind, steps, seed, baseline))
        if way != baseline and other is not None:
            own = values[kind, steps, seed, way]["bits_a_byte"]
            name = f"{kind}, {steps} steps, {way} - {baseline}"
            found.setdefault(name, []).append(own - other["bits_a_byte"])
    return {name: {"mean": sum(x) / len(x), "of each seed": x} for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("comparison", choices=tuple(COMPARISONS), help="difference of the runs")
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default 5)")
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument(
        "--without", nargs="+", default=[], help="kinds or settings to leave out: plain, fp32, ..."
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tokens, baseline, ways = COMPARISONS[args.comparison]
    data, held_out = (
        TensorDataset(*batch_of(windows, range(len(windows)), 0))
        for windows in windows_of(tokens, 0)
    )
    runs = json.loads(args.json.read_text())["runs"] if args.json.exists() else []
    made = [{k: r[k] for k in ("steps", "seed", "kind", "way")} for r in runs]
    for steps, seed, kind, way in itertools.product(args.steps, range(args.seeds), KINDS, ways):
        run = {"steps": steps, "seed": seed, "kind": kind, "way": way}
        if run in made or {kind, way} & {*args.without}:
            continue
        noise = 0.0
        if kind == "private":
            noise = get_noise_multiplier(
                target_epsilon=EPSILON,
                target_delta=DELTA,
                sample_rate=BATCH / len(data),
                steps=steps,
            )
        pattern, options = ways[way]
        model = train(data, pattern, *KINDS[kind], seed, steps, noise_multiplier=noise, **options)
        runs.append(
            {**run, "noise_multiplier": noise, "bits_a_byte": bits_a_byte(model, held_out)}
        )
        print(json.dumps(runs[-1]), flush=True)
        config = {
            "documents": len(data),
            "held_out": len(held_out),
            "tokens": tokens,
            "expected_batch_size": BATCH,
            "width, layers, heads": [WIDTH, LAYERS, HEADS],
            "epsilon": EPSILON,
            "delta": DELTA,
            "max_grad_norm, learning_rate": {k: [str(b), rate] for k, (b, rate) in KINDS.items()},
        }
        found = {"environment": environment("cpu", 1), "config": config}
        found |= {"differences": differences(runs, baseline), "runs": runs}
        write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The time share of a private step that compares batches, weights and options, or seeds.

Each comparison is timed inside of ordinary steps, in CPU time of their thread, so that other
processes disturb the parts little. The tests of the first batches are over by then.

    python benchmarks/scripts/comparison_time.py --json benchmarks/results/DEVICE/comparisons.json
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.bench.environment import environment
from dpflash.bench.output import write_text
from dpflash.bench.private import endless
from dpflash.bench.private_tasks import adapted_llama
from dpflash.optimize import wrapper
from dpflash.privacy.seeds import LoopSeeds
from dpflash.sampling.entries import FittingCollate
from dpflash.sampling.row_order import RowOrder
from dpflash.sampling.tracker import BatchTracker
from dpflash.step import ReleaseOptions
from dpflash.verification.contents import EVERY
from dpflash.verification.rewritten import Rewritten
from dpflash.verification.unchanged import Unchanged
from dpflash.verification.uncovered import Uncovered

COMPARISONS: list[tuple[Any, Callable[..., Any]]] = [
    (Uncovered, Uncovered.refusal),
    (Uncovered, Uncovered._note_output),
    (Unchanged, Unchanged.before_backward),
    (Unchanged, Unchanged.structure),
    (Rewritten, Rewritten._marks),
    (Rewritten, Rewritten._digests),
    (RowOrder, RowOrder.observe),
    (RowOrder, RowOrder.check),
    (FittingCollate, FittingCollate._refuse_moved),
    (BatchTracker, BatchTracker.before_backward),
    (ReleaseOptions, ReleaseOptions.note),
    (ReleaseOptions, ReleaseOptions.refuse_changed),
    (wrapper, wrapper.refuse_transforms),
    (LoopSeeds, LoopSeeds.seed),
    (LoopSeeds, LoopSeeds.end),
]
# Contents are compared in one of EVERY steps.
STEPS, WARM_UP, ENTRIES, VOCABULARY = EVERY, 10, 1024, 256


def language_model() -> nn.Module:
    """The model of the suite "private-step"."""
    return dpflash.nn.LongContextLM(VOCABULARY, 256, 2, 8, max_seq_len=256, tie_embeddings=False)


CASES: list[tuple[str, Callable[[], nn.Module], int, int]] = [  # name, model, B, tokens
    ("lm", language_model, 16, 256),
    ("lm", language_model, 1, 256),
    ("llama-lora", lambda: adapted_llama(512, 8, 4), 8, 128),
    ("llama-lora", lambda: adapted_llama(512, 8, 4), 1, 64),
]


def measured(make: Callable[[], nn.Module], batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, and the part of it that each comparison takes."""
    torch.manual_seed(0)
    model = make()
    x, y = torch.randint(0, VOCABULARY, (2, ENTRIES, tokens))
    engine = dpflash.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    batches = endless(loader)
    spent: dict[str, float] = {}
    for owner, function in COMPARISONS:
        _time(owner, function, spent)
    try:
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                spent.update(dict.fromkeys(spent, 0.0))
                begin = time.thread_time()
            inputs, targets = next(batches)
            engine.backward(dpflash.losses.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        whole = time.thread_time() - begin
    finally:
        for owner, function in COMPARISONS:
            setattr(owner, function.__name__, function)
    parts = {name: seconds / whole for name, seconds in spent.items()}
    return {"step_ms": 1e3 * whole / steps, "part": sum(parts.values()), "parts": parts}


def _time(owner: Any, function: Callable[..., Any], spent: dict[str, float]) -> None:
    """Add the time of a function to `spent` from now on."""
    spent[key := f"{owner.__name__}.{function.__name__}"] = 0.0

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[key] += time.thread_time() - begin

    setattr(owner, function.__name__, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, make, batch, tokens in CASES:
        found = measured(make, batch, tokens, args.steps)
        rows.append({"model": name, "batch": batch, "tokens": tokens, **found})
        print(f"{name} B={batch} T={tokens}: {found['part']:.2%} of {found['step_ms']:.1f} ms")
    report = {"environment": environment("cpu", 1), "rows": rows}
    write_text(args.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

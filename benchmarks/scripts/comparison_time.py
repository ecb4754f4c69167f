"""Measures the time of a private step's comparisons and of its isolation tests (trials).

The first batches run trials. The steps after them are timed, as a whole and in parts: seeding, and
the comparisons of batches, weights and options. The time of a step with trials is divided by the
time of a step without trials. Logical batches have equal sizes. Times are the thread's CPU times.

    python benchmarks/scripts/comparison_time.py --json benchmarks/results/DEVICE/comparisons.json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
from dpflash.sampling import PoissonBatchSampler
from dpflash.sampling.entries import FittingCollate
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
    (FittingCollate, FittingCollate._refuse_moved),
    (BatchTracker, BatchTracker.before_backward),
    (ReleaseOptions, ReleaseOptions.note),
    (ReleaseOptions, ReleaseOptions.refuse_changed),
    (wrapper, wrapper.refuse_transforms),
    (LoopSeeds, LoopSeeds.seed),
    (LoopSeeds, LoopSeeds.end),
]
# dpflash compares the contents of weights in one of EVERY steps.
STEPS, WARM_UP, ENTRIES, VOCABULARY = EVERY, 10, 1024, 256


def language_model(width: int = 256, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """Return a language model; the default is the model of the suite "private-step"."""
    return dpflash.nn.LongContextLM(
        VOCABULARY, width, layers, 8, max_seq_len=256, tie_embeddings=False, dropout=dropout
    )


CASES: list[tuple[str, Callable[[], nn.Module], int, int]] = [  # name, model, B, tokens
    ("lm", language_model, 16, 256),
    ("lm", language_model, 1, 256),
    ("llama-lora", lambda: adapted_llama(512, 8, 4), 8, 128),
    ("llama-lora", lambda: adapted_llama(512, 8, 4), 1, 64),
]
# name, width, dropout, B, loss_reduction; all have 4 layers and 64 tokens
TRIALS: list[tuple[str, int, float, int, str | None]] = [
    ("losses [B]", 512, 0.0, 8, None),
    ("dropout", 512, 0.1, 8, None),
    ("declared mean", 512, 0.0, 8, "mean"),
    ("declared mean, dropout", 512, 0.1, 8, "mean"),
    ("one sample", 512, 0.0, 1, None),
    ("small model", 128, 0.0, 8, None),
    ("small model, dropout", 128, 0.1, 8, None),
]
# Number of releases whose trials also move samples to other rows, and of timed releases.
FIRST, RELEASES = 2, 40


def measured(make: Callable[[], nn.Module], batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and the fraction of them that each comparison takes."""
    engine, model, optimizer, loader = private(make, batch, tokens)
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


def private(make: Callable[[], nn.Module], batch: int, tokens: int, **options: Any) -> Any:
    """Return (engine, model, optimizer, loader) for random tokens."""
    torch.manual_seed(0)
    model = make()
    engine = dpflash.PrivacyEngine()
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        data_loader=DataLoader(
            TensorDataset(*torch.randint(0, VOCABULARY, (2, ENTRIES, tokens))), batch_size=batch
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def with_trials(
    width: int, dropout: float, batch: int, reduction: str | None, releases: int
) -> dict[str, Any]:
    """Return the milliseconds of a step without trials, and time ratios of steps with trials."""
    make = functools.partial(language_model, width, 4, dropout)
    engine, model, optimizer, loader = private(make, batch, 64, loss_reduction=reduction)
    reduce = getattr(torch, reduction or "clone")
    is_tried, tried, plain, begin = False, [], [], time.thread_time()
    with patch.object(PoissonBatchSampler, "draw", lambda sampler, index: list(range(batch))):
        for inputs, targets in endless(loader):
            is_tried |= not loader.is_real.any()
            engine.backward(reduce(dpflash.losses.cross_entropy(model(inputs), targets)))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.releases > len(tried) + len(plain):
                now = time.thread_time()
                (tried if is_tried else plain).append(now - begin)
                is_tried, begin = False, now
            if optimizer.releases == releases:
                break
    step = statistics.median(plain[len(plain) // 2 :])
    return {
        "step_ms": 1e3 * step,
        "first": statistics.mean(tried[:FIRST]) / step,
        "others": statistics.median(tried[FIRST:]) / step,
        "tried": len(tried),
    }


def _time(owner: Any, function: Callable[..., Any], spent: dict[str, float]) -> None:
    """Replace a function of `owner` by a wrapper that adds its time to `spent`."""
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
    parser.add_argument(
        "--releases", type=int, default=RELEASES, help="releases with trials, and after"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, make, batch, tokens in CASES:
        found = measured(make, batch, tokens, args.steps)
        rows.append({"model": name, "batch": batch, "tokens": tokens, **found})
        print(f"{name} B={batch} T={tokens}: {found['part']:.2%} of {found['step_ms']:.1f} ms")
    trials = []
    for name, *case in TRIALS:
        trial = with_trials(*case, args.releases)
        trials.append({"case": name, "width": case[0], "batch": case[2], **trial})
        print(f"{name}, width {case[0]}: {trial['first']:.2f}, {trial['others']:.2f} with trials")
    report = {"environment": environment("cpu", 1), "rows": rows, "trials": trials}
    write_text(args.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

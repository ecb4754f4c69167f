"""The held-out loss of attention patterns: a small language model is trained with each pattern.

All models start from the same weights and see the same bytes in the same order. T is the number of
tokens of a window.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

import dpflash
from dpflash.nn import LongContextLM
from dpflash.patterns import Adaptive, Dense, Dilated, Hierarchical, Pattern, SlidingWindow
from dpflash.train.data import VOCAB_SIZE, ByteDocuments, TrainWindows, default_data_dir

from . import output
from .attention import sparse_pattern
from .attention_cases import TOLERANCES, Case, check
from .document import Row, columns, with_interval
from .peers import build_run
from .suite import Request, worst

DENSE = "dense"
_DTYPE = "float32"


@dataclass(frozen=True)
class Size:
    """The size of a model and of its training."""

    tokens: int = 512
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 2  # windows per step
    steps: int = 400
    learning_rate: float = 3e-3  # learning rate after a warm-up of five steps
    held_out: int = 96  # number of held-out windows, each of another document


FULL, QUICK = Size(), Size(steps=25, held_out=24)


@dataclass(frozen=True)
class Contestant:
    """A model to train."""

    name: str
    pattern: Pattern
    baseline: str | None = DENSE  # name of the model whose loss is subtracted
    seeds_on: int = 0  # number added to the seed of initial weights and batches


def contestants(tokens: int) -> list[Contestant]:
    """Return the models to train on windows of `tokens` tokens, each after its baseline.

    All patterns are causal. The suites "variants" and "attention" time them at T = 8192. Here
    their lengths are scaled to the window, so that `dpflash.recommend` finds a pattern's loss.
    The blocks of Adaptive are not scaled, since they cannot be that small.
    """
    dense = Dense(causal=True)
    dilated = Dilated(
        segment_lengths=(tokens // 4, tokens // 2, tokens), dilation_rates=(1, 2, 4), causal=True
    )
    block = tokens // 128
    levels = ((block, tokens // 16), (tokens // 16, tokens // 2), (tokens // 2, -1))
    sparse = {p: sparse_pattern(tokens, True, p, False, tokens // 64) for p in (50, 75, 90)}
    return [
        Contestant(DENSE, dense, baseline=None),
        Contestant("dense, another seed", dense, seeds_on=1),
        Contestant("sliding window", SlidingWindow(window=tokens // 8, causal=True)),
        Contestant("dilated", dilated),
        *(Contestant(f"sparse {percent}%", pattern) for percent, pattern in sparse.items()),
        Contestant("hierarchical", Hierarchical(levels=levels, block_size=block, causal=True)),
        Contestant("adaptive", Adaptive(block_size=32, keep=4, causal=True)),
    ]


def quality_rows(request: Request, size: Size | None = None) -> Iterator[dict[str, Any]]:
    """Train a model with each pattern and compare them on held-out documents.

    A row has "held_out_loss" (nats per byte), and its difference to the baseline's loss on the
    same windows with a 95% interval. A row is correct if its attention passes the check at this T
    and training lowered the held-out loss; other rows have no figures.
    """
    size = size or (QUICK if request.quick else FULL)
    losses: dict[str, np.ndarray] = {}
    for contestant in contestants(size.tokens):
        row, found = _trained(contestant, size, request)
        if row["correct"]:
            losses[contestant.name] = found
            row.update(_figures(found, losses.get(contestant.baseline or "")))
        yield row


def _trained(
    contestant: Contestant, size: Size, request: Request
) -> tuple[dict[str, Any], np.ndarray]:
    pattern, seed = contestant.pattern, request.seed + contestant.seeds_on
    head_dim = size.width // size.heads
    case = Case(pattern, size.tokens, 1, size.heads, head_dim, _DTYPE, request.where.type)
    run, inputs = build_run("dpflash", case), case.inputs(request.seed)
    error = worst(check(case, run, inputs, with_grads=True).values())
    model = _initial_model(pattern, size, seed).to(request.where)
    before = _evaluate(model, size, request).mean()
    _train(model, size, seed)
    after = _evaluate(model, size, request)
    pairs, of_dense = (p.edges(size.tokens, size.heads) for p in (pattern, Dense(causal=True)))
    row = output.row(
        f"quality/{contestant.name}",
        {"pattern": repr(pattern), **asdict(size), "seed": seed},
        section="quality",
        what=contestant.name,
        pattern_key=pattern.key,
        correct=error <= TOLERANCES[_DTYPE] and bool(after.mean() < before),
        error=error,
        sparsity=1 - pairs / of_dense,
        steps=size.steps,
        parameters=sum(p.numel() for p in model.parameters()),
        baseline=contestant.baseline,
        loss_before=float(before),
    )
    return row, after


def _figures(found: np.ndarray, baseline: np.ndarray | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "held_out_windows": len(found),
        "held_out_loss": float(found.mean()),
        "held_out_loss_error": float(scipy.stats.sem(found)),
    }
    if baseline is not None:
        difference, interval = _paired(found, baseline)
        figures.update(
            difference=difference,
            difference_ci95=interval,
            relative_difference=difference / float(baseline.mean()),
        )
    return figures


def _paired(own: np.ndarray, other: np.ndarray) -> tuple[float, list[float]]:
    mean, error = float((own - other).mean()), float(scipy.stats.sem(own - other))
    reach = float(scipy.stats.t.ppf(0.975, len(own) - 1)) * error
    return mean, [mean - reach, mean + reach]


def _initial_model(pattern: Pattern, size: Size, seed: int) -> LongContextLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = (VOCAB_SIZE, size.width, size.layers, size.heads)
        return LongContextLM(*shape, max_seq_len=size.tokens, pattern=pattern)


@functools.cache
def windows_of(tokens: int, seed: int) -> tuple[TrainWindows, TrainWindows]:
    """Return (training windows, held-out windows) of documents that fill a window."""
    documents = ByteDocuments.read(default_data_dir(), suffixes=(".py",))
    key = int(seed).to_bytes(32, "little")
    train, held_out = (
        TrainWindows([text for text in part.contents if len(text) >= tokens], tokens, key=key)
        for part in documents.split()
    )
    return train, held_out


def batch_of(windows: TrainWindows, rows: Any, step: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets) of the windows of documents `rows` in a step."""
    pairs = [windows.window(int(row), step) for row in rows]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def _train(model: LongContextLM, size: Size, seed: int) -> None:
    windows, _ = windows_of(size.tokens, seed)
    # Betas as in `dpflash train`; the learning rate rises over the first five steps.
    optimizer = torch.optim.Adam(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
    device = next(model.parameters()).device
    for step in range(size.steps):
        # The rows depend on seed and step only, so that all models see the same windows.
        rows = np.random.default_rng([seed, step]).choice(len(windows), size.batch, replace=False)
        inputs, targets = (x.to(device) for x in batch_of(windows, rows, step))
        model(inputs, targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _evaluate(model: LongContextLM, size: Size, request: Request) -> np.ndarray:
    """Return nats per byte of one window of each held-out document, the same for all models."""
    _, windows = windows_of(size.tokens, request.seed)
    losses = []
    with torch.no_grad():
        for rows in torch.arange(min(size.held_out, len(windows))).split(8):
            inputs, targets = (x.to(request.where) for x in batch_of(windows, rows, 0))
            losses.append(dpflash.losses.cross_entropy(model(inputs), targets))
    found: np.ndarray = torch.cat(losses).double().cpu().numpy()
    return found


def _loss(row: Row) -> str | None:
    if row.get("held_out_loss") is None:
        return None
    return f"{row['held_out_loss']:.4f} ± {row['held_out_loss_error']:.4f}"


QUALITY = columns(
    "what: attention",
    [("sparsity", lambda row: f"{max(0.0, row['sparsity']):.1%}")],
    [("held-out loss, nats a byte", _loss)],
    "baseline",
    [with_interval("difference", "difference", "+.4f")],
    "relative_difference: relative | batch | steps | parameters | correct",
)

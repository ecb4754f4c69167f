"""What attention patterns cost in quality: one small language model, trained with each of them.

All models begin with the same weights and see the same bytes in the same order. T is the tokens of
a window.
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
from torch.utils.data import DataLoader

import dpflash
from dpflash.accounting import get_noise_multiplier
from dpflash.nn import LongContextLM
from dpflash.patterns import (
    Adaptive,
    Dense,
    Dilated,
    Hierarchical,
    Pattern,
    SlidingWindow,
)
from dpflash.train.data import VOCAB_SIZE, ByteDocuments, TrainWindows, default_data_dir

from . import output as results
from .attention_cases import TOLERANCES, Case, check, reference
from .named_variants import sparse_pattern
from .peers import build_run
from .suite import Request, Row

DENSE = "dense"
_BETAS = (0.9, 0.95)  # as in `dpflash train`
_WARM_UP = 5  # steps in which the learning rate rises
_DELTA = 1e-5
_HELD_OUT_BATCH = 8
_DTYPE = "float32"


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        tokens: T.
        width, layers, heads: of the model.
        batch: windows of a step; expected, where it is private.
        steps: of each model.
        learning_rate: of Adam, which rises over the first steps.
        held_out: windows, each of a document of its own.
        epsilon: of private models, at delta 1e-5.
    """

    tokens: int = 512
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 2
    steps: int = 400
    learning_rate: float = 3e-3
    held_out: int = 96
    epsilon: float = 8.0


@dataclass(frozen=True)
class Sizes:
    """Of the models that are compared, and of those compared under privacy.

    Noise drowns a small batch, so private models, and what they are compared with, take fewer
    steps of larger ones; T is the same.
    """

    plain: Size = Size()
    private: Size = Size(batch=32, steps=20, learning_rate=1e-2)


FULL = Sizes()
QUICK = Sizes(
    Size(steps=25, held_out=24),
    Size(batch=8, steps=5, learning_rate=1e-2, held_out=24),
)


@dataclass(frozen=True)
class Contestant:
    """A model to be trained.

    Attributes:
        name: of its row.
        pattern: of its attention.
        baseline: whose loss is taken from its own; None for none.
        large_batches: of the size that private models have.
        private: trained with noise.
        seeds_on: added to the seed of its weights and batches: by how much models differ that
            differ in nothing else.
    """

    name: str
    pattern: Pattern
    baseline: str | None = DENSE
    large_batches: bool = False
    private: bool = False
    seeds_on: int = 0


def quality_rows(request: Request, sizes: Sizes | None = None) -> Iterator[Row]:
    """Trains a model with each pattern and compares them on held-out documents.

    Args:
        request: how to measure; quick trains smaller models for a moment.
        sizes: how much is trained; None for what the request says.

    Yields:
        A row for each model: "held_out_loss" (nats a byte) and its standard error, the bytes
        guessed right, and the differences to the baseline on the same windows with 95% intervals.
        A row is correct where the attention is what its definition says, at this T, and training
        lowered the held-out loss.
    """
    sizes = sizes or (QUICK if request.quick else FULL)
    told: dict[str, _Told] = {}
    for contestant in contestants(sizes.plain.tokens):
        size = sizes.private if contestant.large_batches else sizes.plain
        row, found = _measured(contestant, size, request)
        if row["correct"]:
            told[contestant.name] = found
            row.update(_figures(found, told.get(contestant.baseline or "")))
        yield row


def contestants(tokens: int) -> list[Contestant]:
    """What is trained for windows of so many tokens, all causal; each after its baseline.

    The patterns are those which the suites "variants" and "attention" time at T = 8192, their
    lengths scaled to these windows: so `dpflash.recommend` finds the loss of a pattern. Not
    Adaptive's, whose blocks cannot be so small.
    """
    dense = Dense(causal=True)
    dilated = Dilated(
        segment_lengths=(tokens // 4, tokens // 2, tokens), dilation_rates=(1, 2, 4), causal=True
    )
    block = tokens // 128
    levels = ((block, tokens // 16), (tokens // 16, tokens // 2), (tokens // 2, -1))
    return [
        Contestant(DENSE, dense, baseline=None),
        Contestant("dense, another seed", dense, seeds_on=1),
        Contestant("dense, a third seed", dense, seeds_on=2),
        Contestant("two tokens", SlidingWindow(window=1, causal=True)),
        Contestant("sliding window", SlidingWindow(window=tokens // 8, causal=True)),
        Contestant("dilated", dilated),
        *(
            Contestant(f"sparse {s}%", sparse_pattern(tokens, True, s, False, tokens // 64))
            for s in (50, 75, 90)
        ),
        Contestant("hierarchical", Hierarchical(levels=levels, block_size=block, causal=True)),
        Contestant("adaptive", Adaptive(block_size=32, keep=4, causal=True)),
        Contestant("dense, large batches", dense, baseline=None, large_batches=True),
        Contestant(
            "dense, private", dense, "dense, large batches", large_batches=True, private=True
        ),
        Contestant(
            "dilated, private", dilated, "dense, private", large_batches=True, private=True
        ),
    ]


def _sparsity(pattern: Pattern, tokens: int, heads: int) -> float:
    """The part of all causal pairs that is left out."""
    return 1 - pattern.edges(tokens, heads) / (heads * tokens * (tokens + 1) // 2)


@dataclass(frozen=True)
class _Told:
    """Of each held-out window: nats a byte, and the part of its bytes that was guessed right."""

    losses: np.ndarray
    accuracies: np.ndarray


def _measured(contestant: Contestant, size: Size, request: Request) -> tuple[Row, _Told]:
    pattern, device = contestant.pattern, request.where
    error = _attention_error(pattern, size, request)
    seed = request.seed + contestant.seeds_on
    model = _initial_model(pattern, size, seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    before = _evaluate(model, size, request)
    told: dict[str, Any] = {}
    if contestant.private:
        told = _train_privately(model, size, seed)
    else:
        _train(model, size, seed)
    after = _evaluate(model, size, request)
    fell = bool(after.losses.mean() < before.losses.mean())
    row = results.row(
        f"quality/{contestant.name}",
        {
            "pattern": repr(pattern),
            **asdict(size),
            "epsilon": told.get("epsilon"),
            "seed": seed,
        },
        section="quality",
        what=contestant.name,
        pattern_key=pattern.key,
        correct=error <= TOLERANCES[_DTYPE] and fell,
        error=error,
        sparsity=_sparsity(pattern, size.tokens, size.heads),
        steps=size.steps,
        parameters=parameters,
        baseline=contestant.baseline,
        loss_before=float(before.losses.mean()),
        **told,
    )
    return row, after


def _attention_error(pattern: Pattern, size: Size, request: Request) -> float:
    """Of the attention that the models have, at their T."""
    head_dim = size.width // size.heads
    case = Case(pattern, size.tokens, 1, size.heads, head_dim, _DTYPE, request.where.type)
    inputs = case.inputs(request.seed)
    expected = reference(case, *inputs, with_grads=True)
    return max(check(build_run("dpflash", case), inputs, expected).values())


def _figures(found: _Told, baseline: _Told | None) -> dict[str, Any]:
    """The columns of a model that learnt."""
    loss, loss_error = _mean(found.losses)
    accuracy, accuracy_error = _mean(found.accuracies)
    figures: dict[str, Any] = {
        "held_out_loss": loss,
        "held_out_loss_error": loss_error,
        "accuracy": accuracy,
        "accuracy_error": accuracy_error,
        "held_out_windows": len(found.losses),
    }
    if baseline is not None:
        difference, interval = _paired(found.losses, baseline.losses)
        points, points_interval = _paired(found.accuracies, baseline.accuracies)
        figures.update(
            difference=difference,
            difference_ci95=interval,
            relative_difference=difference / float(baseline.losses.mean()),
            accuracy_difference=points,
            accuracy_difference_ci95=points_interval,
        )
    return figures


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean, and its standard error."""
    return float(values.mean()), float(scipy.stats.sem(values))


def _paired(own: np.ndarray, other: np.ndarray) -> tuple[float, list[float]]:
    """The mean difference of the same windows, and its 95% interval by Student's t."""
    mean, error = _mean(own - other)
    reach = float(scipy.stats.t.ppf(0.975, len(own) - 1)) * error
    return mean, [mean - reach, mean + reach]


def _initial_model(pattern: Pattern, size: Size, seed: int) -> LongContextLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LongContextLM(
            VOCAB_SIZE,
            size.width,
            size.layers,
            size.heads,
            max_seq_len=size.tokens,
            pattern=pattern,
        )


@functools.cache
def _windows(tokens: int, seed: int) -> tuple[TrainWindows, TrainWindows]:
    """To train on and held out, of documents that fill a window."""
    documents = ByteDocuments.from_folder(default_data_dir(), suffixes=(".py",))
    key = int(seed).to_bytes(32, "little")
    train, held_out = (
        TrainWindows([text for text in part.contents if len(text) >= tokens], tokens, key=key)
        for part in documents.split()
    )
    return train, held_out


def _batch(windows: TrainWindows, rows: Any, step: int) -> tuple[Tensor, Tensor]:
    pairs = [windows.window(int(row), step) for row in rows]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def _optimizer(
    model: LongContextLM, size: Size
) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LambdaLR]:
    adam = torch.optim.Adam(model.parameters(), lr=size.learning_rate, betas=_BETAS)
    return adam, torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min(1.0, (step + 1) / _WARM_UP)
    )


def _train(model: LongContextLM, size: Size, seed: int) -> None:
    windows, _ = _windows(size.tokens, seed)
    optimizer, schedule = _optimizer(model, size)
    device = next(model.parameters()).device
    for step in range(size.steps):
        # A function of seed and step alone, so that all models see the same.
        rows = np.random.default_rng([seed, step]).choice(len(windows), size.batch, replace=False)
        inputs, targets = (x.to(device) for x in _batch(windows, rows, step))
        model(inputs, targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _train_privately(model: LongContextLM, size: Size, seed: int) -> dict[str, Any]:
    """Poisson draws, flat clipping and noise; what the accountant says of them."""
    windows, _ = _windows(size.tokens, seed)
    noise_multiplier = get_noise_multiplier(
        target_epsilon=size.epsilon,
        target_delta=_DELTA,
        sample_rate=size.batch / len(windows),
        steps=size.steps,
    )
    engine = dpflash.PrivacyEngine(seed=seed)
    adam, schedule = _optimizer(model, size)
    device = next(model.parameters()).device
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=adam,
        data_loader=DataLoader(windows, batch_size=size.batch),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
    )
    while optimizer.releases < size.steps:
        windows.set_step(optimizer.releases)
        for inputs, targets in loader:
            engine.backward(private(inputs.to(device), targets.to(device)))
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                schedule.step()
            windows.set_step(optimizer.releases)
            if optimizer.releases == size.steps:
                break
    return {
        "epsilon": engine.get_epsilon(_DELTA),
        "delta": _DELTA,
        "noise_multiplier": noise_multiplier,
    }


def _evaluate(model: LongContextLM, size: Size, request: Request) -> _Told:
    """On one window of each held-out document, the same whatever was trained."""
    _, windows = _windows(size.tokens, request.seed)
    losses, accuracies = [], []
    with torch.no_grad():
        count = min(size.held_out, len(windows))
        for start in range(0, count, _HELD_OUT_BATCH):
            rows = range(start, min(start + _HELD_OUT_BATCH, count))
            inputs, targets = (x.to(request.where) for x in _batch(windows, rows, 0))
            logits = model(inputs)
            losses.append(dpflash.losses.cross_entropy(logits, targets))
            accuracies.append((logits.argmax(2) == targets).double().mean(1))
    return _Told(*(torch.cat(parts).double().cpu().numpy() for parts in (losses, accuracies)))

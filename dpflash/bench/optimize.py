"""The optimization levels of `make_private`, each over none, on the workloads of report S0.4.

The model is a transformer of one block with the workload's heads, over bytes. On a CPU, and where
a batch is larger than a physical one, what is timed is a step on the first physical batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash.engine import PrivacyEngine
from dpflash.losses import cross_entropy
from dpflash.planner import LEVELS

from .document import CORRECT, FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config
from .private import TOLERANCES, VOCABULARY, GradientKeeper, Task, built, clipped_sums, lm
from .results import row
from .suite import Comparison, Measurement, Request, Row, Subject, Suite, worst
from .work import count_work

# Batch, tokens, heads, head dim.
WORKLOADS = ((8, 512, 12, 64), (32, 512, 12, 64), (64, 1024, 16, 64), (16, 2048, 20, 80))
# Tokens of a physical batch, of 8 to 15 heads; fewer of more heads.
_PHYSICAL = {"cpu": 4096, "cuda": 2**17}
_QUICK = (4, 64, 4, 16)
_MAX_GRAD_NORM = 0.1
_SIXTEEN_BITS = ("balanced", "aggressive")


def optimize_subject(
    *,
    level: str,
    batch: int,
    physical_batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    device: str,
    seed: int,
) -> Subject:
    """A private training step at a level, on a physical batch of a workload."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, physical_batch, tokens)
    x, y = torch.randint(0, VOCABULARY, shape, generator=generator).to(device)
    task = Task(
        built(lambda: lm(tokens, heads, head_dim, 1), device, seed),
        x,
        y,
        cross_entropy,
        dtype="bfloat16" if level in _SIXTEEN_BITS else "float32",
    )
    model = task.build()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, engine = _training(task, level, model, optimizer, 1.0)

    def error() -> float:
        given: list[Tensor] = []
        model = task.build()
        keeper = GradientKeeper(list(model.parameters()), given)
        own, _ = _training(task, level, model, keeper, 0.0)
        own()
        clipping = engine.optimization.clipping
        pairs = zip(given, clipped_sums(task, clipping), strict=True)
        return worst(float((len(x) * g - e).norm() / e.norm()) for g, e in pairs)

    asked_for = engine.optimization

    def told() -> dict[str, Any]:
        used = engine.optimization
        # A compiler that fails says so last.
        fell_back = used.changes[-1] if used.compiled != asked_for.compiled else None
        return {"changes": list(used.changes), "summary": used.summary, "fell_back": fell_back}

    return Subject(
        step,
        error,
        TOLERANCES[task.dtype],
        tokens=physical_batch * tokens,
        work=lambda: count_work(step),
        dtype=task.dtype,
        told=told,
    )


def _training(
    task: Task,
    level: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    noise_multiplier: float,
) -> tuple[Any, PrivacyEngine]:
    engine = PrivacyEngine()
    private, private_optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(task.x, task.y), batch_size=task.batch),
        noise_multiplier=noise_multiplier,
        max_grad_norm=_MAX_GRAD_NORM,
        optimize=level,
    )
    batches = _endless(loader)

    def step() -> None:
        x, y = next(batches)
        engine.backward(task.loss(private(x), y))
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step, engine


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _plan(request: Request) -> Iterator[Comparison]:
    workloads = (_QUICK,) if request.quick else WORKLOADS
    for batch, tokens, heads, head_dim in workloads:
        physical = min(batch, max(1, _PHYSICAL[request.where.type] // tokens // (heads // 8 or 1)))
        name = f"optimize/B{batch}-T{tokens}-H{heads}-D{head_dim}"
        shared = {
            "batch": batch,
            "physical_batch": physical,
            "tokens": tokens,
            "heads": heads,
            "head_dim": head_dim,
        }
        levels = [
            Measurement(
                f"{name}/{level}",
                optimize_subject,
                {"level": level, **shared},
                {"section": "levels"},
            )
            for level in LEVELS
        ]
        yield Comparison(levels, baseline=f"{name}/none")


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    seen: dict[str, list[str]] = {}
    for one in rows:
        if one.get("changes") is not None:
            seen.setdefault(one["config"]["level"], one["changes"])
    for level, changes in seen.items():
        for number, change in enumerate(changes):
            yield row(
                f"changes/{level}/{number}", {"level": level}, section="changes", text=change
            )
    gains: dict[str, list[float]] = {}
    for one in rows:
        if one.get("speedup") is not None:
            gains.setdefault(one["config"]["level"], []).append(one["speedup"])
    for level, found in gains.items():
        yield row(
            f"gain/{level}",
            {"level": level},
            section="gains",
            least=min(found),
            most=max(found),
            workloads=len(found),
        )


SUITE = Suite(
    name="optimize",
    title="Optimization levels of private training",
    about="`make_private(optimize=LEVEL)` on the workloads (B, N, H, D) of report S0.4: a "
    "transformer of one block over bytes (V 256, E = H D, AdamW), one training step with clipping "
    "and noise. *physical* is the batch that is timed; a larger logical batch is made of such "
    "ones. *speed-up* is over `none`, in the same rounds. Each level's sum of clipped gradients "
    "is compared with a loop over single samples (in bfloat16 where the level computes in it). "
    "Where torch.compile failed on the way, *fell back* says so: the row is without it.",
    plan=_plan,
    tables=[
        Table(
            "levels",
            "Steps",
            [
                config("batch", "B"),
                config("physical_batch", "physical"),
                config("tokens", "N"),
                config("heads", "H"),
                config("head_dim", "D"),
                config("level"),
                *FIGURES,
                SPEEDUP,
                *ROOFS,
                column("fell_back", "fell back"),
                *CORRECT,
            ],
        ),
        Table(
            "gains",
            "Gain over none",
            [config("level"), column("least"), column("most"), column("workloads")],
            "Over the workloads that ran here.",
        ),
        Table("changes", "What a level changes", [config("level"), column("text", "change")]),
    ],
    charts=[
        Chart(
            "levels",
            "Speed-up over none",
            ("level", lambda row: row["config"]["level"]),
            column("speedup", "speed-up"),
            lambda row: row["name"].split("/")[1],
            logarithmic=False,
        ),
        Chart(
            "levels",
            "Peak memory",
            ("level", lambda row: row["config"]["level"]),
            column("peak_memory_mb", "MiB"),
            lambda row: row["name"].split("/")[1],
            logarithmic=False,
        ),
    ],
    derive=_derive,
)

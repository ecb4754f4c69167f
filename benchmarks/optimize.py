"""The optimization levels of `make_private`, each over none.

The model is a transformer of one block with the workload's heads, over bytes. On a CPU, and where
a batch is larger than a physical one, what is timed is a step on the first physical batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash.clipping.planner import LEVELS
from dpflash.engine import PrivacyEngine

from .document import CORRECT, FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config
from .output import row
from .private import TOLERANCES, GradientKeeper, clipped_sums, endless
from .private_tasks import Task, make_task
from .suite import Comparison, Measurement, Request, Row, Subject, Suite, needs, worst
from .work import count_work

# Batch, tokens, heads, head dim.
WORKLOADS = ((8, 512, 12, 64), (32, 512, 12, 64), (64, 1024, 16, 64), (16, 2048, 20, 80))
# Tokens of a physical batch, of 8 to 15 heads; fewer of more heads.
_PHYSICAL = {"cpu": 2048, "cuda": 2**17}
_QUICK = (4, 64, 4, 16)
_MAX_GRAD_NORM = 0.1
# A "NO" would look like something wrong.
_YES_NO = {True: "yes", False: "no", None: None}
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
    task = make_task(
        model="lm",
        batch=physical_batch,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        dtype="bfloat16" if level in _SIXTEEN_BITS else "float32",
        device=device,
        seed=seed,
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
        return worst(float((task.batch * g - e).norm() / e.norm()) for g, e in pairs)

    asked_for = engine.optimization

    def told() -> dict[str, Any]:
        used = engine.optimization
        # A compiler that fails says so last.
        fell_back = used.changes[-1] if used.compiled != asked_for.compiled else None
        return {
            "dtype": "bfloat16" if used.autocast else "float32",
            "clipping": used.clipping,
            "compiled": used.compiled,
            "changes": list(used.changes),
            "summary": used.summary,
            "fell_back": fell_back,
        }

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
        # What runs once, with the first batches, is no part of a step.
        verify_first_batch=False,
    )
    batches = endless(loader)

    def step() -> None:
        x, y = next(batches)
        engine.backward(task.loss(private(x), y))
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step, engine


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Iterable[Row]]]:
    workloads = (_QUICK,) if request.quick else WORKLOADS
    names: dict[tuple[int, ...], str] = {}
    for batch, tokens, heads, head_dim in workloads:
        physical = min(batch, max(2, _PHYSICAL[request.where.type] // tokens // (heads // 8 or 1)))
        name = f"B{batch}-T{tokens}-H{heads}-D{head_dim}"
        shared = {
            "batch": batch,
            "physical_batch": physical,
            "tokens": tokens,
            "heads": heads,
            "head_dim": head_dim,
        }
        levels = [
            Measurement(
                f"optimize/{name}/{level}",
                optimize_subject,
                {"level": level, **shared},
                {"section": "levels"},
            )
            for level in LEVELS
        ]
        same = names.setdefault((physical, tokens, heads, head_dim), name)
        if same == name:
            yield Comparison(levels, baseline=f"optimize/{name}/none")
        else:
            yield functools.partial(_same_step, levels, same)


def _same_step(levels: Sequence[Measurement], other: str, request: Request) -> Iterator[Row]:
    reason = f"a larger physical batch: here its step would be the one of {other} again"
    for one in levels:
        yield needs(one.name, one.config, reason, **one.columns)


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    ran = [one for one in rows if one.get("changes") is not None]
    seen = {one["config"]["level"]: one["changes"] for one in reversed(ran)}
    shared = [
        change
        for change in next(iter(seen.values()), [])
        if len(seen) > 1 and all(change in changes for changes in seen.values())
    ]
    yield from _told("every level", shared)
    for level in LEVELS:
        own = [change for change in seen.get(level, ()) if change not in shared]
        yield from _told(level, own)
    gains: dict[str, list[float]] = {}
    for one in rows:
        if one.get("speedup") is not None and one.get("fell_back") is None:
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


def _told(level: str, changes: Sequence[str]) -> Iterator[Row]:
    """A row for each thing that changes, such as numerics."""
    about: dict[str, list[str]] = {}
    for change in changes:
        what, _, text = change.partition(": ")
        about.setdefault(what, []).append(text)
    for what, texts in about.items():
        text = f"{what}: {'. '.join(texts)}"
        yield row(f"changes/{level}/{what}", {"level": level}, section="changes", text=text)


SUITE = Suite(
    name="optimize",
    title="Optimization levels of private training: time and memory",
    about=(
        "`make_private(optimize=LEVEL)`: one training step with clipping and noise of a "
        "transformer of one block over bytes (V 256, E = H D, AdamW), at the sizes (B, N, H, D) "
        "of a table that an earlier library (dp-flash-attention) published with gains that it "
        "had not measured. *speed-up* is over `none`, in the same rounds. Each level's sum of "
        "clipped gradients is compared with a loop over single samples before it is timed, in "
        "bfloat16 where the level computes in it, clipped as the row says. *dtype*, *clipping* "
        "and *compiled* are what really ran: where torch.compile failed on the way, *fell back* "
        "says why and the row is without it. Compiling takes up to minutes before the first step; "
        "that is warm-up here, and in no time of this page."
    ),
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
                column("dtype"),
                column("clipping"),
                ("compiled", lambda row: _YES_NO[row.get("compiled")]),
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
            "Over the workloads that ran here as the level has it; those that fell back do not "
            "count. Which level to take: `conservative` changes no result but for rounding, and "
            "bounds the memory: begin there. `balanced` where the processor multiplies faster in "
            "bfloat16 than in float32, and the model trains in it. `aggressive` for runs that are "
            "worth minutes of compiling; its clipping (per_layer) is another estimate of the "
            "gradient and may want its own learning rate. `none` is there to compare with.",
        ),
        Table("changes", "What a level changes", [config("level"), column("text", "change")]),
    ],
    charts=[
        Chart(
            "levels",
            title,
            ("level", lambda row: row["config"]["level"]),
            column(key, label),
            lambda row: row["name"].split("/")[1],
            logarithmic=False,
        )
        for title, key, label in (
            ("Speed-up over none", "speedup", "speed-up"),
            ("Peak memory", "peak_memory_mb", "MiB"),
        )
    ],
    derive=_derive,
)

"""Attention, its memory and private training steps, as each rank of a benchmark runs them.

Each function runs on all ranks at once and returns plain values. Letters: B samples, T tokens, H
heads, D head dim, P ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import (
    Layout,
    context_parallel,
    count_traffic,
    edges_per_rank,
    ring_attention,
    sent_bytes,
)
from dpflash.nn import LongContextLM
from dpflash.patterns import Dense, Dilated, Pattern, SlidingWindow

from .isolated import Place
from .memory import peak_growth, saved_bytes
from .private import MAX_GRAD_NORM, GradientKeeper, Optimize, clipped_sums
from .private_tasks import Task, bytes_task
from .suite import worst
from .timing import Effort, Step, Stopwatch, time_steps

PATTERNS: dict[str, Pattern] = {
    "dense causal": Dense(causal=True),
    "dilated": Dilated(segment_lengths=(512, 1024), dilation_rates=(1, 2)),
    "sliding window": SlidingWindow(window=512, causal=True),
}
# Pattern and sharding of the calls that are measured.
SPREADS = (
    ("dense causal", "contiguous"),
    ("dense causal", "zigzag"),
    ("dilated", "contiguous"),
    ("sliding window", "contiguous"),
)
MODES = ("ring", "all_gather", "ulysses")
SCHEMES = ("replicated", "fsdp2", "context")

_DTYPE = torch.float32
_MIB = 2**20
_TOLERANCE = 1e-4
_CHECKED_TOKENS = 64


def _sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    # A small learning rate: noise must not let weights grow, which makes numbers slow to compute.
    return torch.optim.SGD(parameters, lr=1e-3)


def spread(pattern: str, sharding: str) -> str:
    """The name of one of SPREADS."""
    return pattern if sharding == "contiguous" else f"{pattern}, {sharding}"


@dataclass(frozen=True)
class AttentionCase:
    """One call of `ring_attention` by all ranks."""

    pattern: str  # of PATTERNS
    tokens: int  # T, over all ranks
    heads: int
    head_dim: int
    batch: int = 1
    sharding: str = "contiguous"  # or "zigzag"
    mode: str = "ring"  # of MODES, how keys and values travel
    backward: bool = True  # the call computes gradients too
    checked_tokens: int = 2051  # T of the smaller call that is compared with one process


@dataclass(frozen=True)
class TrainingCase:
    """One private training step of a LongContextLM by all ranks.

    In scheme "replicated" every rank has the model and some samples, in "fsdp2" a shard of each
    parameter and some samples, in "context" the model and some tokens of all samples.
    """

    scheme: str
    batch: int  # B, over all ranks
    tokens: int  # T, over all ranks
    vocab: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 4


def measure_attention(
    place: Place, cases: Sequence[AttentionCase], tokens_alone: int, effort: Effort | None
) -> list[dict[str, Any]]:
    """Checks, counts and times calls, which take turns with rank 0 by itself.

    Args:
        place: where this runs.
        cases: the calls.
        tokens_alone: T of the same call by rank 0 alone, while the others wait.
        effort: how often each is made; None to measure memory alone.

    Returns:
        For each case "error" (of the check, relative) and "correct"; where it is correct also
        "peak_memory_mb" of a call and either "saved_mb", or the figures for `ranks.fill`:
        "seconds" of each trial, "alone_seconds" (rank 0 of several), "tokens", "tokens_alone",
        "counted" and "predicted" bytes that this rank sent, and further "columns" of the row.
    """
    found = [_checked(place, _attention_error(place, case)) for case in cases]
    steps: dict[str, Step] = {}
    alone: dict[str, Callable[[], Step]] = {}
    by_itself = Place(0, 1, place.device)
    for number, (case, figures) in enumerate(zip(cases, found, strict=True)):
        if not figures["correct"]:
            continue
        step = _attention_step(place, case, case.tokens)
        place.barrier()
        if effort is None:
            figures.update(peak_memory_mb=peak_growth(step, place.device), columns={})
            place.barrier()
            figures["saved_mb"] = saved_bytes(step) / _MIB
            continue
        with count_traffic() as count:
            step()
        place.barrier()
        figures.update(
            **_work(place, case, tokens_alone),
            counted=[count.forward, count.backward],
            peak_memory_mb=peak_growth(step, place.device),
        )
        steps[str(number)] = step
        # The modes are the same call on one rank.
        alone[f"alone {case.backward}"] = functools.partial(
            _attention_step, by_itself, case, tokens_alone
        )
    if effort is not None:
        seconds = _timed(place, steps, alone, effort)
        for number, (case, figures) in enumerate(zip(cases, found, strict=True)):
            if figures["correct"]:
                figures["seconds"] = seconds[str(number)]
                if place.world_size > 1:
                    figures["alone_seconds"] = seconds[f"alone {case.backward}"]
    return found


def _checked(place: Place, error: float) -> dict[str, Any]:
    return {"error": error, "correct": place.all_true(error <= _TOLERANCE)}


def _timed(
    place: Place, steps: dict[str, Step], alone: Mapping[str, Callable[[], Step]], effort: Effort
) -> dict[str, list[float]]:
    """Seconds of steps of all ranks, and of those that rank 0 of several makes by itself."""

    def wait() -> None:
        pass

    if place.world_size > 1:
        own = {name: make() if place.rank == 0 else wait for name, make in alone.items()}
        steps = {**steps, **own}
    stopwatch = Stopwatch(place.device, wall=True)
    return time_steps(steps, effort=effort, stopwatch=stopwatch, before=place.barrier)


def _work(place: Place, case: AttentionCase, tokens_alone: int) -> dict[str, Any]:
    """The bytes that a call sends by the formula, and the pairs that each rank computes."""
    count = functools.partial(edges_per_rank, PATTERNS[case.pattern])
    edges = count(case.tokens, case.heads, place.world_size, case.sharding)
    forward, backward = sent_bytes(
        PATTERNS[case.pattern],
        case.tokens,
        case.heads,
        head_dim=case.head_dim,
        dtype=_DTYPE,
        batch=case.batch,
        world_size=place.world_size,
        sharding=case.sharding,
        mode=case.mode,
        rank=place.rank,
    )
    return {
        "tokens": case.batch * case.tokens,
        "tokens_alone": case.batch * tokens_alone,
        "predicted": [forward, backward if case.backward else 0],
        "columns": {
            "edges_per_rank": [case.batch * number for number in edges],
            "edges_alone": case.batch * sum(count(tokens_alone, case.heads, 1)),
        },
    }


def _call(place: Place, q: Tensor, k: Tensor, v: Tensor, case: AttentionCase) -> Tensor:
    pattern = PATTERNS[case.pattern]
    if place.world_size == 1:
        return dpflash.attention(q, k, v, pattern=pattern)
    return ring_attention(q, k, v, pattern=pattern, mode=case.mode, sharding=case.sharding)


def _shards(place: Place, case: AttentionCase, tokens: int) -> list[Tensor]:
    """q, k, v and do of this rank; times do not depend on their values."""
    own = Layout(tokens, place.world_size, case.sharding).local_length(place.rank)
    shape = (case.batch, case.heads, own, case.head_dim)
    drawn = [torch.randn(shape, dtype=_DTYPE, device=place.device) for _ in range(4)]
    return [*(x.requires_grad_(case.backward) for x in drawn[:3]), drawn[3]]


def _attention_step(place: Place, case: AttentionCase, tokens: int) -> Step:
    q, k, v, do = _shards(place, case, tokens)

    def step() -> object:
        if case.backward:
            return torch.autograd.grad(_call(place, q, k, v, case), (q, k, v), do)
        with torch.no_grad():
            return _call(place, q, k, v, case)

    return step


def _attention_error(place: Place, case: AttentionCase) -> float:
    """The error of o, dq, dk and dv of a smaller call, compared with those of one process."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, case.heads, case.checked_tokens, case.head_dim)
    q, k, v, do = (
        torch.randn(shape, generator=generator, dtype=_DTYPE).to(place.device) for _ in range(4)
    )
    layout = Layout(case.checked_tokens, place.world_size, case.sharding)
    at = layout.positions(place.rank, place.device)

    def results(place: Place, inputs: Sequence[Tensor], do: Tensor) -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        o = _call(place, q, k, v, case)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    expected = results(Place(0, 1, place.device), (q, k, v), do)
    found = results(place, [x[:, :, at] for x in (q, k, v)], do[:, :, at])
    return worst(
        float((x - y[:, :, at]).abs().max() / y.abs().max())
        for x, y in zip(found, expected, strict=True)
    )


def measure_training(
    place: Place, case: TrainingCase, alone: TrainingCase, effort: Effort
) -> list[dict[str, Any]]:
    """Checks and times private steps, which take turns with `alone` on rank 0 by itself.

    Returns:
        One item, as of `measure_attention` without bytes; "error" is that of a noiseless step
        against a loop over single samples.
    """
    with warnings.catch_warnings():
        # One is that of the rank that trains by itself while others exist.
        warnings.simplefilter("ignore")
        figures = _checked(place, _training_error(place, case))
        if not figures["correct"]:
            return [figures]
        trained = _Training(place, case)
        trained.step()
        place.barrier()
        figures["peak_memory_mb"] = peak_growth(trained.step, place.device)
        by_itself = Place(0, 1, place.device)
        others = {"alone_seconds": lambda: _Training(by_itself, alone).step}
        figures.update(_timed(place, {"seconds": trained.step}, others, effort))
    return [
        {
            **figures,
            "tokens": case.batch * case.tokens,
            "tokens_alone": alone.batch * alone.tokens,
            "columns": {"parameters": trained.parameters},
        }
    ]


class _Training:
    """A private model, its engine, and this rank's part of a batch."""

    def __init__(
        self,
        place: Place,
        case: TrainingCase,
        noise_multiplier: float = 1.0,
        optimize: Optimize = _sgd,
    ) -> None:
        task = _task(case, place.device)
        model: Any = task.build()
        self.parameters = sum(p.numel() for p in model.parameters())
        mesh = None
        if place.world_size > 1:
            name = "context" if case.scheme == "context" else "data"
            size = (place.world_size,)
            mesh = init_device_mesh(place.device.type, size, mesh_dim_names=(name,))
            if case.scheme == "context":
                context_parallel(model, mesh, mode="ring", sharding="zigzag")
            elif case.scheme == "fsdp2":
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
        self.engine = dpflash.PrivacyEngine(mesh=mesh)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=optimize(list(model.parameters())),
            data_loader=DataLoader(TensorDataset(task.x, task.y), batch_size=case.batch),
            sampling="fixed_size",  # of all samples, so that all steps are of one size
            noise_multiplier=noise_multiplier,
            max_grad_norm=MAX_GRAD_NORM,
            grad_sample_mode="instantiate" if case.scheme == "context" else "auto",
            # The checks of the first batches are no part of a step.
            verify_first_batch=False,
        )

    def step(self) -> None:
        """An epoch, which is one step."""
        for x, y in self.loader:
            parallel = getattr(self.model, "context_parallel", None)
            if parallel is not None:
                x, y = parallel.shard(x), parallel.shard(y)
            self.engine.backward(self.model(x, y))
            self.optimizer.step()
            self.optimizer.zero_grad()


def _task(case: TrainingCase, device: torch.device) -> Task:
    """The same model and batch on all ranks."""
    shape = (case.vocab, case.width, case.layers, case.heads)
    return bytes_task(
        lambda: LongContextLM(*shape, max_seq_len=case.tokens),
        batch=case.batch,
        tokens=case.tokens,
        vocab=case.vocab,
        device=str(device),
        seed=0,
    )


def _training_error(place: Place, case: TrainingCase) -> float:
    """Largest error of a small noiseless step against a loop over samples, relative."""
    size, given = place.world_size, list[Tensor]()
    small = replace(case, batch=max(4, size), tokens=max(_CHECKED_TOKENS, 2 * size))
    _Training(place, small, 0.0, functools.partial(GradientKeeper, given=given)).step()
    expected = clipped_sums(_task(small, place.device), "flat")
    greatest = max(float(total.abs().max()) for total in expected)
    wholes = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in given]
    return worst(
        float((small.batch * grad - total).abs().max()) / greatest
        for grad, total in zip(wholes, expected, strict=True)
    )

"""The functions that each rank of a benchmark runs: attention, its memory, private training.

Each function runs on all ranks at once and returns plain values. Letters: B samples, T tokens, H
heads, D head dim, P ranks.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import Layout, context_parallel, ring_attention
from dpflash.nn import LongContextLM
from dpflash.patterns import Dense, Dilated, Pattern, SlidingWindow

from .communication import SentBytes
from .isolated import Place
from .memory import peak_growth
from .private import MAX_GRAD_NORM, GradientKeeper, Optimize, clipped_sums, trained
from .private_tasks import Task, bytes_task
from .suite import worst
from .timing import Effort, Step, Stopwatch, time_steps

PATTERNS: dict[str, Pattern] = {
    "dense causal": Dense(causal=True),
    "dilated": Dilated(segment_lengths=(512, 1024), dilation_rates=(1, 2)),
    "sliding window": SlidingWindow(window=512, causal=True),
}
# (pattern, sharding) of the calls that are measured.
SPREADS = (
    ("dense causal", "contiguous"),
    ("dense causal", "zigzag"),
    ("dilated", "contiguous"),
    ("sliding window", "contiguous"),
)
MODES = ("ring", "all_gather", "ulysses")

_DTYPE = torch.float32
_TOLERANCE = 1e-4
# T of the attention calls and of the training steps that are checked against a single process.
_CHECKED_ATTENTION, _CHECKED_TOKENS = 2051, 64


def _sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    # A small learning rate, so that noise does not make weights so large that arithmetic is slow.
    return torch.optim.SGD(parameters, lr=1e-3)


def spread(pattern: str, sharding: str) -> str:
    """Return the name of a (pattern, sharding) of SPREADS."""
    return pattern if sharding == "contiguous" else f"{pattern}, {sharding}"


@dataclass(frozen=True)
class AttentionCase:
    """One call of `ring_attention` by all ranks."""

    pattern: str  # a key of PATTERNS
    tokens: int  # T, over all ranks
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    sharding: str = "contiguous"  # or "zigzag"
    mode: str = "ring"  # one of MODES: how keys and values are exchanged
    backward: bool = True  # whether the call computes gradients too


@dataclass(frozen=True)
class TrainingCase:
    """One training step of a LongContextLM by all ranks.

    With scheme "context" each rank has some tokens of every sample, else some samples. With
    "fsdp2" it has a shard of each parameter, else the whole model.
    """

    scheme: str  # "replicated", "fsdp2" or "context"
    batch: int  # B, over all ranks
    tokens: int  # T, over all ranks
    vocab: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 4


def measure_attention(
    place: Place, cases: Sequence[AttentionCase], tokens_alone: int, effort: Effort | None
) -> list[dict[str, Any]]:
    """Check calls of different modes and time them, in turns with a call by rank 0 alone.

    In the call by rank 0 alone, `tokens_alone` tokens are computed. If `effort` is None, nothing
    is timed. Returns a dict for each case, with "error" (relative) and "correct". Correct cases
    also have "peak_memory_mb", "tokens", "edges" (pairs) and, if timed, "seconds" of each trial.
    "tokens_alone", "edges_alone" and "alone_seconds" describe the call by rank 0 alone.
    """
    found = [_checked(place, _attention_error(place, case)) for case in cases]
    steps: dict[str, Step] = {}
    for case, figures in zip(cases, found, strict=True):
        if not figures["correct"]:
            continue
        step = steps[case.mode] = attention_step(place, case)
        step()
        place.barrier()
        figures["peak_memory_mb"] = peak_growth(step, place.device)
        for key, tokens in (("", case.tokens), ("_alone", tokens_alone)):
            edges = PATTERNS[case.pattern].edges(tokens, case.heads)
            figures.update(
                {f"tokens{key}": case.batch * tokens, f"edges{key}": case.batch * edges}
            )
    if effort is None or not steps:
        return found
    # On one rank, all modes are the same call.
    alone = functools.partial(
        attention_step, Place(0, 1, place.device), replace(cases[0], tokens=tokens_alone)
    )
    times = _timed(place, steps, alone, effort)
    for case, figures in zip(cases, found, strict=True):
        if figures["correct"]:
            figures["seconds"] = times[case.mode].wall
            figures["alone_seconds"] = times["alone"].wall if "alone" in times else None
    return found


def _checked(place: Place, error: float) -> dict[str, Any]:
    return {"error": error, "correct": place.all_true(error <= _TOLERANCE)}


class _Times(NamedTuple):
    """The seconds of each trial of a step."""

    wall: list[float]
    cpu: list[float]  # processor time of all threads of this rank


def _timed(
    place: Place, steps: Mapping[str, Step], alone: Callable[[], Step], effort: Effort
) -> dict[str, _Times]:
    """Time the steps of all ranks. On several ranks, also time the step `alone` on rank 0."""
    if place.world_size > 1:
        steps = {**steps, "alone": alone() if place.rank == 0 else _wait}
    stopwatch = Stopwatch(place.device, wall=True)

    def clocks(step: Step) -> tuple[float, float]:
        begin = time.process_time()
        wall = stopwatch(step)
        return wall, time.process_time() - begin

    found = time_steps(steps, effort=effort, stopwatch=clocks, before=place.barrier)
    return {name: _Times(*map(list, zip(*own, strict=True))) for name, own in found.items()}


def _wait() -> None:
    """Do nothing while another rank has its turn."""


def _call(place: Place, q: Tensor, k: Tensor, v: Tensor, case: AttentionCase) -> Tensor:
    pattern = PATTERNS[case.pattern]
    if place.world_size == 1:
        return dpflash.attention(q, k, v, pattern=pattern)
    return ring_attention(q, k, v, pattern=pattern, mode=case.mode, sharding=case.sharding)


def attention_step(place: Place, case: AttentionCase) -> Step:
    """Return a call of attention by all ranks."""
    # Times do not depend on values.
    own = Layout(case.tokens, place.world_size, case.sharding).local_length(place.rank)
    shape = (case.batch, case.heads, own, case.head_dim)
    q, k, v, do = (torch.randn(shape, dtype=_DTYPE, device=place.device) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def step() -> object:
        if case.backward:
            return torch.autograd.grad(_call(place, q, k, v, case), (q, k, v), do)
        with torch.no_grad():
            return _call(place, q, k, v, case)

    return step


def _attention_error(place: Place, case: AttentionCase) -> float:
    """Return the largest error of o, dq, dk, dv of a smaller call, compared with one process."""
    generator = torch.Generator().manual_seed(0)
    tokens = min(case.tokens, _CHECKED_ATTENTION)
    shape = (1, case.heads, tokens, case.head_dim)
    q, k, v, do = (
        torch.randn(shape, generator=generator, dtype=_DTYPE).to(place.device) for _ in range(4)
    )
    layout = Layout(tokens, place.world_size, case.sharding)
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
    """Check private and plain steps and time them, in turns with private steps by rank 0 alone.

    Returns a list of one dict. It has the keys of `measure_attention`, except "edges...". The key
    "error" is the larger of two errors: of a private step without noise, against a loop over
    samples, and of a plain step. "collectives" and "sent_bytes" count one step, see `SentBytes`.
    "cpu_seconds" is added on a CPU. Keys that begin with "plain_" describe the plain step.
    """
    with warnings.catch_warnings():
        # dpflash warns if a rank trains alone while others exist.
        warnings.simplefilter("ignore")
        error = worst((_training_error(place, case), _plain_error(place, case)))
        figures = _checked(place, error)
        if not figures["correct"]:
            return [figures]
        private = PrivateTraining(place, case).step
        private()
        place.barrier()
        figures["peak_memory_mb"] = peak_growth(private, place.device)
        steps = {"": private, "plain_": plain_step(place, case)}
        for name, step in steps.items():
            # DDP rebuilds its buckets in its second step.
            for _ in range(2):
                step()
            with SentBytes(place) as sent:
                step()
            figures.update({f"{name}collectives": sent.calls, f"{name}sent_bytes": sent.bytes})

        def by_itself() -> Step:
            return PrivateTraining(Place(0, 1, place.device), alone).step

        times = _timed(place, steps, by_itself, effort)
    for name in steps:
        figures[f"{name}seconds"] = times[name].wall
        if place.device.type == "cpu":
            figures[f"{name}cpu_seconds"] = times[name].cpu
    figures["alone_seconds"] = times["alone"].wall if "alone" in times else None
    tokens, tokens_alone = (one.batch * one.tokens for one in (case, alone))
    return [{**figures, "tokens": tokens, "tokens_alone": tokens_alone}]


def _sharded_model(
    place: Place, case: TrainingCase, task: Task
) -> tuple[nn.Module, DeviceMesh | None]:
    """Return (this rank's model, mesh); the mesh is None on a single rank."""
    model: Any = task.build()
    if place.world_size == 1:
        return model, None
    name = "context" if case.scheme == "context" else "data"
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=(name,))
    if case.scheme == "context":
        context_parallel(model, mesh, sharding="zigzag")
    elif case.scheme == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, mesh


def plain_step(place: Place, case: TrainingCase, optimize: Optimize = _sgd) -> Step:
    """Return a step like `PrivateTraining.step`, but without privacy and on the mean loss."""
    task = _task(case, place.device)
    model, _ = _sharded_model(place, case, task)
    parallel: Any = getattr(model, "context_parallel", None)
    optimizer = optimize(trained(model))
    if place.world_size > 1 and case.scheme != "fsdp2":
        # The ranks of a context sum the parameters' gradients too.
        model = DistributedDataParallel(model)
    own = slice(None) if parallel else slice(place.rank, None, place.world_size)
    loader = DataLoader(TensorDataset(task.x[own], task.y[own]), batch_size=case.batch)
    # DDP and FSDP2 divide by the number of ranks.
    scale = place.world_size / case.batch

    def step() -> None:
        for x, y in loader:
            if parallel:
                x, y = parallel.shard(x), parallel.shard(y)
            (scale * model(x, y).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


class PrivateTraining:
    """Private training of a case on all ranks; `step` takes one step of the whole batch."""

    def __init__(
        self,
        place: Place,
        case: TrainingCase,
        noise_multiplier: float = 1.0,
        optimize: Optimize = _sgd,
    ) -> None:
        task = _task(case, place.device)
        model, mesh = _sharded_model(place, case, task)
        self.engine = dpflash.PrivacyEngine(mesh=mesh)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=optimize(list(model.parameters())),
            data_loader=DataLoader(TensorDataset(task.x, task.y), batch_size=case.batch),
            sampling="fixed_size",  # each batch has all samples, so that all steps are equal
            noise_multiplier=noise_multiplier,
            max_grad_norm=MAX_GRAD_NORM,
            grad_sample_mode="instantiate" if case.scheme == "context" else "auto",
            # Steps are timed without the isolation test of the first batches.
            verify_first_batch=False,
        )

    def step(self) -> None:
        for x, y in self.loader:
            parallel = getattr(self.model, "context_parallel", None)
            if parallel is not None:
                x, y = parallel.shard(x), parallel.shard(y)
            self.engine.backward(self.model(x, y))
            self.optimizer.step()
            self.optimizer.zero_grad()


def _task(case: TrainingCase, device: torch.device) -> Task:
    shape = (case.vocab, case.width, case.layers, case.heads)
    return bytes_task(
        lambda: LongContextLM(*shape, max_seq_len=case.tokens),
        batch=case.batch,
        tokens=case.tokens,
        vocab=case.vocab,
        device=str(device),
        seed=0,
    )


def _small(place: Place, case: TrainingCase) -> TrainingCase:
    """Return a small case to compare with one process: two samples for each rank, few tokens."""
    size = place.world_size
    return replace(case, batch=2 * size, tokens=max(_CHECKED_TOKENS, 2 * size))


def _training_error(place: Place, case: TrainingCase) -> float:
    """Return the largest relative error of a small noiseless step against a loop over samples."""
    small, given = _small(place, case), list[Tensor]()
    PrivateTraining(place, small, 0.0, functools.partial(GradientKeeper, given=given)).step()
    sums = clipped_sums(_task(small, place.device), "flat")
    return _gradient_error(given, [total / small.batch for total in sums])


def _plain_error(place: Place, case: TrainingCase) -> float:
    """Return the largest relative error of a small plain step's gradients against one process."""
    small, given = _small(place, case), list[Tensor]()
    plain_step(place, small, functools.partial(GradientKeeper, given=given))()
    task = _task(small, place.device)
    model = task.build()
    loss = task.losses(model, task.x, task.y).mean()
    return _gradient_error(given, torch.autograd.grad(loss, trained(model)))


def _gradient_error(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    greatest = max(float(grad.abs().max()) for grad in expected)
    wholes = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in given]
    return worst(
        float((own - grad).abs().max()) / greatest
        for own, grad in zip(wholes, expected, strict=True)
    )

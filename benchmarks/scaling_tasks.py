"""What the workers of the scaling benchmark do: attention, its memory, private training steps.

Each function runs on every worker at once and returns plain values. Letters: B samples, T tokens,
H heads, D head dim, P workers.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import (
    Layout,
    context_parallel,
    count_traffic,
    ring_attention,
    sent_bytes,
)
from dpflash.nn import LongContextLM
from dpflash.patterns import Dense, Dilated, Pattern, SlidingWindow

from .memory import peak_growth, saved_bytes
from .timing import Effort, Stopwatch, time_steps
from .workers import Place

PATTERNS: dict[str, Pattern] = {
    "dense causal": Dense(causal=True),
    # The configuration of the second report, see `reports_scaling`.
    "dilated": Dilated(segment_lengths=(512, 1024), dilation_rates=(1, 2)),
    "sliding window": SlidingWindow(window=512, causal=True),
}
DTYPE = torch.float32
# Noise must not carry a timed model off: weights that grow make numbers that are slow to compute.
_TIMED_RATE = 1e-3
MODES = ("ring", "all_gather", "ulysses")
SCHEMES = ("replicated", "fsdp2", "context")

_TOLERANCE = 1e-4
_WARM_TOKENS = 64


@dataclass(frozen=True)
class AttentionCase:
    """One call of `ring_attention` by all workers.

    Attributes:
        pattern: of PATTERNS.
        tokens: T, over all workers.
        heads: H.
        head_dim: D.
        batch: B.
        sharding: "contiguous" or "zigzag".
        mode: how keys and values travel.
        backward: whether the call has a backward pass.
        checked_tokens: T of the smaller instance that is compared with one process.
    """

    pattern: str
    tokens: int
    heads: int
    head_dim: int
    batch: int = 1
    sharding: str = "contiguous"
    mode: str = "ring"
    backward: bool = True
    checked_tokens: int = 2051


@dataclass(frozen=True)
class TrainingCase:
    """One private training step by all workers.

    Attributes:
        scheme: "replicated" (every worker has the model and some samples), "fsdp2" (a part of
            each parameter, and some samples) or "context" (the model and some tokens of all
            samples).
        batch: B, over all workers.
        tokens: T, over all workers.
        vocab, width, layers, heads: of the LongContextLM.
    """

    scheme: str
    batch: int
    tokens: int
    vocab: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 4


def measure_attention(
    place: Place, cases: Sequence[AttentionCase], tokens_alone: int, effort: Effort
) -> list[dict[str, Any]]:
    """Checks, counts and times some calls, which take turns with one worker by itself.

    Args:
        place: where this runs.
        cases: the calls.
        tokens_alone: T of the same call by worker 0 alone, while the others wait.
        effort: how often each is made.

    Returns:
        For each case: "error" (of the check, relative), "correct", "counted" and "predicted"
        bytes (forward, backward) that this worker sent, "peak_memory_mb", "seconds" of each
        trial and, on worker 0 of several, "alone_seconds"; of a case that is not correct the
        first two alone.
    """
    found = [_checked(place, case) for case in cases]
    steps: dict[str, Callable[[], object]] = {}
    for number, case in enumerate(cases):
        if not found[number]["correct"]:
            continue
        step = _attention_step(place, case, case.tokens)
        place.barrier()
        with count_traffic() as count:
            step()
        predicted = _predicted(place, case)
        place.barrier()
        found[number].update(
            counted=[count.forward, count.backward],
            predicted=[predicted[0], predicted[1] if case.backward else 0],
            peak_memory_mb=peak_growth(step, place.device),
        )
        steps[str(number)] = step
    if place.world_size > 1:
        for case in cases:
            steps[_alone(case)] = _step_alone(place, case, tokens_alone)
    seconds = time_steps(
        steps, effort=effort, stopwatch=Stopwatch(place.device, wall=True), before=place.barrier
    )
    for number, case in enumerate(cases):
        if str(number) in seconds:
            found[number]["seconds"] = seconds[str(number)]
            if place.world_size > 1 and place.rank == 0:
                found[number]["alone_seconds"] = seconds[_alone(case)]
    return found


def _alone(case: AttentionCase) -> str:
    return f"alone, backward {case.backward}"


def _step_alone(place: Place, case: AttentionCase, tokens: int) -> Callable[[], object]:
    """The same call by worker 0; nothing on the others."""
    if place.rank:
        return lambda: None
    return _attention_step(Place(0, 1, place.device), case, tokens)


def measure_attention_memory(place: Place, case: AttentionCase) -> dict[str, Any]:
    """What one call takes on this worker, in a process that did next to nothing before.

    Returns:
        "error" and "correct" of the check, "peak_memory_mb" of forward and backward, "saved_mb"
        that autograd keeps between them, MiB.
    """
    found = _checked(place, case)
    if not found["correct"]:
        return found
    step = _attention_step(place, case, case.tokens)
    place.barrier()
    found["peak_memory_mb"] = peak_growth(step, place.device)
    q, k, v, _ = _shards(place, case, case.tokens)
    place.barrier()
    found["saved_mb"] = saved_bytes(lambda: _call(place, q, k, v, case)) / 2**20
    return found


def _call(place: Place, q: Tensor, k: Tensor, v: Tensor, case: AttentionCase) -> Tensor:
    pattern = PATTERNS[case.pattern]
    if place.world_size == 1:
        return dpflash.attention(q, k, v, pattern=pattern)
    return ring_attention(q, k, v, pattern=pattern, mode=case.mode, sharding=case.sharding)


def _shards(place: Place, case: AttentionCase, tokens: int) -> list[Tensor]:
    """q, k, v and do of this worker, drawn here: what is timed does not depend on values."""
    own = Layout(tokens, place.world_size, case.sharding).local_length(place.rank)
    shape = (case.batch, case.heads, own, case.head_dim)
    drawn = [torch.randn(shape, dtype=DTYPE, device=place.device) for _ in range(4)]
    return [*(x.requires_grad_(case.backward) for x in drawn[:3]), drawn[3]]


def _attention_step(place: Place, case: AttentionCase, tokens: int) -> Callable[[], object]:
    q, k, v, do = _shards(place, case, tokens)

    def step() -> object:
        if case.backward:
            return torch.autograd.grad(_call(place, q, k, v, case), (q, k, v), do)
        with torch.no_grad():
            return _call(place, q, k, v, case)

    return step


def _predicted(place: Place, case: AttentionCase) -> tuple[int, int]:
    return sent_bytes(
        PATTERNS[case.pattern],
        case.tokens,
        case.heads,
        head_dim=case.head_dim,
        dtype=DTYPE,
        batch=case.batch,
        world_size=place.world_size,
        sharding=case.sharding,
        mode=case.mode,
        rank=place.rank,
    )


def _checked(place: Place, case: AttentionCase) -> dict[str, Any]:
    """Compares o, dq, dk and dv of a smaller instance with those of one process."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, case.heads, case.checked_tokens, case.head_dim)
    q, k, v, do = (
        torch.randn(shape, generator=generator, dtype=DTYPE).to(place.device) for _ in range(4)
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    o = dpflash.attention(*whole, pattern=PATTERNS[case.pattern])
    expected = [o.detach(), *torch.autograd.grad(o, whole, do)]
    layout = Layout(case.checked_tokens, place.world_size, case.sharding)
    at = layout.positions(place.rank, place.device)
    own = [x[:, :, at].requires_grad_() for x in (q, k, v)]
    part = _call(place, own[0], own[1], own[2], case)
    found = [part.detach(), *torch.autograd.grad(part, own, do[:, :, at])]
    error = max(
        float((x - y[:, :, at]).abs().max() / y.abs().max())
        for x, y in zip(found, expected, strict=True)
    )
    return {"error": error, "correct": place.all_say(error <= _TOLERANCE)}


def measure_training(
    place: Place, case: TrainingCase, alone: TrainingCase, effort: Effort
) -> dict[str, Any]:
    """Checks, counts and times private steps, which take turns with one worker by itself.

    Args:
        place: where this runs.
        case: the step.
        alone: the step of worker 0 alone, with the plain model, while the others wait.
        effort: how often each is made.

    Returns:
        "error" (of a noiseless step against a loop over single samples, relative), "correct",
        "counted" and "predicted" bytes that this worker hands to torch.distributed in a step,
        "parameters", "peak_memory_mb", "seconds" of each trial and, on worker 0 of several,
        "alone_seconds"; of a case that is not correct the first two alone.
    """
    with warnings.catch_warnings():
        # Such as that of the one worker that trains by itself meanwhile.
        warnings.simplefilter("ignore")
        error = _training_error(place, case)
        correct = place.all_say(error <= _TOLERANCE)
        if not correct:
            return {"error": error, "correct": correct}
        trained = _Training(place, case, noise_multiplier=1.0, rate=_TIMED_RATE)
        trained.step()
        place.barrier()
        with count_traffic() as traffic, _Collectives() as collectives:
            trained.step()
        place.barrier()
        peak = peak_growth(trained.step, place.device)
        steps: dict[str, Callable[[], object]] = {"step": trained.step}
        if place.world_size > 1:
            steps["alone"] = lambda: None
            if place.rank == 0:
                steps["alone"] = _Training(Place(0, 1, place.device), alone, 1.0, _TIMED_RATE).step
        seconds = time_steps(
            steps,
            effort=effort,
            stopwatch=Stopwatch(place.device, wall=True),
            before=place.barrier,
        )
    told = {"alone_seconds": seconds["alone"]} if "alone" in seconds and not place.rank else {}
    return {
        **told,
        "error": error,
        "correct": correct,
        "counted": collectives.sent + traffic.forward + traffic.backward,
        "predicted": sum(predicted_training_bytes(trained.plain_shapes, case, place).values()),
        "by_purpose": predicted_training_bytes(trained.plain_shapes, case, place),
        "parameters": sum(shape.numel() for shape in trained.plain_shapes.values()),
        "peak_memory_mb": peak,
        "seconds": seconds["step"],
    }


def predicted_training_bytes(
    shapes: dict[str, torch.Size], case: TrainingCase, place: Place
) -> dict[str, int]:
    """Bytes of numbers that a worker sends in one private step, by what they are for.

    What workers agree on (some words of 8 bytes for each call, and the payment) is left out.

    Args:
        shapes: of the model's parameters, by name.
        case: of one physical batch, flat clipping with stored per-sample gradients.
        place: the worker.
    """
    size, item = place.world_size, DTYPE.itemsize
    if size == 1:
        return {}
    numels = {name: shape.numel() for name, shape in shapes.items()}
    if case.scheme == "replicated":
        return {
            "sum over samples (all-reduce)": 2 * (size - 1) * sum(numels.values()) * _SUMS // size
        }
    if case.scheme == "fsdp2":
        padded = {name: -(-s[0] // size) * (s.numel() // s[0]) for name, s in shapes.items()}
        everything = (size - 1) * sum(padded.values()) * item
        blocks = (size - 1) * sum(n for name, n in padded.items() if "blocks." in name) * item
        return {
            "parameters (all-gather, forward)": everything,
            "parameters of blocks again (all-gather, backward)": blocks,
            # One number with each tells of which parameter it is.
            "sum over samples (reduce-scatter)": (size - 1)
            * (sum(padded.values()) + len(padded))
            * _SUMS,
        }
    shares = {name: -(-numel // size) for name, numel in numels.items()}
    # The tied embedding is used as a table of tokens and as the head's matrix.
    uses = sum(shares.values()) + shares[_EMBEDDING]
    attention = sent_bytes(
        Dense(causal=True),
        case.tokens,
        case.heads,
        head_dim=case.width // case.heads,
        dtype=DTYPE,
        batch=case.batch,
        world_size=size,
        sharding="zigzag",
        mode="ring",
        rank=place.rank,
    )
    return {
        # One number with each tells of which parameter it is.
        "per-sample gradients (reduce-scatter)": (size - 1)
        * (case.batch * uses + len(shares) + 1)
        * item,
        "norms (all-reduce)": 2 * (size - 1) * case.batch * 8 // size,
        "clipped sums (all-gather)": (size - 1) * sum(shares.values()) * _SUMS,
        "ring attention": case.layers * sum(attention),
        "valid targets (all-reduce)": 2 * (size - 1) * case.batch * 8 // size,
    }


_EMBEDDING = "token_embedding.weight"
# Bytes of a number of an exact sum.
_SUMS = 8


class _Collectives(TorchDispatchMode):
    """Counts the bytes of floating-point numbers that collectives send from this worker."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        peers = dist.get_world_size() - 1
        if name == "c10d::allreduce_":
            for x in args[0]:
                if x.is_floating_point():
                    self.sent += 2 * peers * x.nbytes // (peers + 1)
        elif name == "c10d::_allgather_base_" and args[1].is_floating_point():
            self.sent += peers * args[1].nbytes
        elif name == "c10d::_reduce_scatter_base_" and args[0].is_floating_point():
            self.sent += peers * args[0].nbytes


class _Training:
    """A private model, its engine, and this worker's part of a batch."""

    def __init__(
        self, place: Place, case: TrainingCase, noise_multiplier: float, rate: float
    ) -> None:
        size = place.world_size
        model = build_model(case).to(place.device)
        self.plain_shapes = {n: p.shape for n, p in model.named_parameters()}
        self.device, self.mesh = place.device, None
        if size > 1:
            name = "context" if case.scheme == "context" else "data"
            self.mesh = init_device_mesh(place.device.type, (size,), mesh_dim_names=(name,))
            _spread(model, self.mesh, case)
        self.engine = dpflash.PrivacyEngine(mesh=self.mesh)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=rate),
            data_loader=DataLoader(TensorDataset(*build_batch(case)), batch_size=case.batch),
            sampling="fixed_size",  # of all samples, so that all steps are of one size
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            way="stored" if case.scheme == "context" else "auto",
            # What runs once, with the first batches, is no part of a step.
            verify_first_batch=False,
        )

    def step(self) -> None:
        """A pass over the loader, which is one step."""
        for x, y in self.loader:
            x, y = x.to(self.device), y.to(self.device)
            parallel = getattr(self.model, "context_parallel", None)
            if parallel is not None:
                x, y = parallel.shard(x), parallel.shard(y)
            self.engine.backward(self.model(x, y))
            self.optimizer.step()
            self.optimizer.zero_grad()


def _spread(model: LongContextLM, mesh: DeviceMesh, case: TrainingCase) -> None:
    """Leaves this worker its part of the model."""
    if case.scheme == "context":
        context_parallel(model, mesh, mode="ring", sharding="zigzag")
    elif case.scheme == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def build_model(case: TrainingCase) -> LongContextLM:
    """The same model on all workers."""
    torch.manual_seed(0)
    return LongContextLM(case.vocab, case.width, case.layers, case.heads, max_seq_len=case.tokens)


@functools.cache
def build_batch(case: TrainingCase) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[B, T]`, the same on all workers."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(case.vocab, (2, case.batch, case.tokens), generator=generator)
    return x, y


def _training_error(place: Place, case: TrainingCase) -> float:
    """Of a step without noise, for at most 4 samples of 64 tokens, over its greatest value."""
    small = TrainingCase(
        case.scheme,
        max(4, place.world_size),
        max(_WARM_TOKENS, 2 * place.world_size),
        case.vocab,
        case.width,
        case.layers,
        case.heads,
    )
    plain = build_model(small).to(place.device)
    parameters = list(plain.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    x, y = (t.to(place.device) for t in build_batch(small))
    for i in range(small.batch):
        loss = dpflash.losses.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item()
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad, alpha=min(1.0, 1.0 / norm) / small.batch)
    trained = _Training(place, small, noise_multiplier=0.0, rate=1.0)
    trained.step()
    greatest = max(float(total.abs().max()) for total in sums)
    error = 0.0
    for before, total, after in zip(parameters, sums, trained.model.parameters(), strict=True):
        whole = after.full_tensor() if isinstance(after, DTensor) else after
        moved = (before - whole).detach()  # the learning rate is 1
        error = max(error, float((moved - total).abs().max()) / greatest)
    return error

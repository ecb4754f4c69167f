"""One training step of a private model as benchmarks measure it: who makes it, and whether right.

Providers train the same model on the same batch, drawn anew by the loader of each at sample rate
1, so that a step is loader, forward, backward, clipping, noise and optimizer. Letters: B samples,
T tokens.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash.clipping.groups import Group
from dpflash.engine import PrivacyEngine
from dpflash.grad_rules.convert import make_groups

from .private_tasks import Task, make_task
from .suite import Subject, Unsupported, worst
from .timing import Step
from .work import Work, count_work

NONPRIVATE = "nonprivate"
DPFLASH = (
    "dpflash-flat-auto",
    "dpflash-flat-stored",
    "dpflash-flat-book_keeping",
    "dpflash-flat-two_pass",
    "dpflash-per_layer",
    "dpflash-per_block",
)
AUTO = DPFLASH[0]
OPACUS = ("opacus-hooks", "opacus-ghost", "opacus-ghost-registered")
PROVIDERS = (NONPRIVATE, *DPFLASH, *OPACUS)

# Below the norms of all samples, in all layers, so that each of them is clipped.
_MAX_GRAD_NORM = 0.1
_TILE = 128
# Relative errors of gradients, of the parameter that is farthest off.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
# Norms that dpflash does not take of gradients it holds are upper bounds: what products round is
# added. By so much of the norm at most; on a GPU more, in the Gram form.
_HIGHEST_BOUND = {"cpu": 1e-3, "cuda": 0.05}


Optimize = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def private_subject(
    *,
    model: str,
    provider: str,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    layers: int = 1,
    noise_multiplier: float = 1.0,
    dtype: str = "float32",
    device: str,
    seed: int,
) -> Subject:
    """A training step.

    Args:
        model: "attention" (a causal `MultiheadAttention` of width heads * head_dim, and the
            squared error of its output) or "lm" (a `LongContextLM` over bytes, untied).
        provider: one of PROVIDERS.
        batch: B.
        tokens: T of each sample.
        heads, head_dim: of attention.
        layers: of the lm.
        noise_multiplier: of the private providers.
        dtype: "float32", or "bfloat16" for autocast with parameters of float32.
        device: "cpu" or "cuda".
        seed: of weights and data.

    Raises:
        Unsupported: a peer is not installed.
    """
    task = make_task(
        model=model,
        batch=batch,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        layers=layers,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    return subject_of(task, provider, tokens=batch * tokens, noise_multiplier=noise_multiplier)


def subject_of(
    task: Task, provider: str, *, tokens: int, noise_multiplier: float = 1.0
) -> Subject:
    """A training step of a task; its error is of the sum of clipped gradients without noise."""

    def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    training = make_training(task, provider, noise_multiplier=noise_multiplier, optimize=adamw)

    def work() -> Work:
        if task.x.is_cuda and training.engine is not None:
            plain = make_training(task, NONPRIVATE, noise_multiplier=0.0, optimize=adamw)
            return _beyond(count_work(plain.step), training.engine)
        return count_work(training.step)

    return Subject(
        training.step,
        lambda: gradient_error(task, provider),
        TOLERANCES[task.dtype],
        tokens=tokens,
        work=work,
        dtype=task.dtype,
    )


@dataclass(frozen=True)
class Training:
    """A private or other training.

    Attributes:
        step: one whole training step.
        engine: of dpflash; None for the others.
    """

    step: Step
    engine: PrivacyEngine | None = None


def make_training(
    task: Task, provider: str, *, noise_multiplier: float, optimize: Optimize
) -> Training:
    """The training of a task.

    Args:
        task: what is trained.
        provider: one of PROVIDERS.
        noise_multiplier: of the private ones.
        optimize: makes the optimizer of the parameters.

    Raises:
        Unsupported: a peer is not installed.
    """
    model = task.build()
    optimizer = optimize(list(model.parameters()))
    loader = DataLoader(TensorDataset(task.x, task.y), batch_size=task.batch)
    if provider == NONPRIVATE:
        return _nonprivate(task, model, optimizer, loader)
    make = _dpflash if provider in DPFLASH else _opacus
    return make(task, provider, model, optimizer, loader, noise_multiplier)


def gradient_error(task: Task, provider: str) -> float:
    """Relative error of a provider's sum of clipped gradients, of the worst parameter.

    Of flat clipping by dpflash, the sum is that by its own norms, and these are compared with the
    gradients' norms: infinite where one is less, or more than what rounding allows.
    """
    given: list[Tensor] = []

    def keep(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return GradientKeeper(parameters, given)

    training = make_training(task, provider, noise_multiplier=0.0, optimize=keep)
    training.step()
    clipping = clipping_of(provider)
    raised = None
    if training.engine is not None and clipping == "flat":
        raised = raised_norms(task, training.engine.diagnostics()["per_sample_norms"])
        if raised is None:
            return math.inf
    expected = clipped_sums(task, clipping, raised)
    pairs = zip(given, expected, strict=True)
    return worst(float((task.batch * g - e).norm() / e.norm()) for g, e in pairs)


def clipping_of(provider: str) -> str | None:
    """What a provider clips: "flat", "per_layer", "per_block", or None for nothing."""
    if provider == NONPRIVATE:
        return None
    return provider.split("-")[1] if provider in DPFLASH else "flat"


def raised_norms(task: Task, norms: Tensor) -> list[float] | None:
    """By what factor each sample's norm was raised; None where one is no such bound.

    Args:
        task: whose samples are meant.
        norms: [B], of its samples, in any order.
    """
    if len(norms) != task.batch:
        return None
    model = task.build()
    exact = []
    for i in range(task.batch):
        loss = task.losses(model, task.x[i : i + 1], task.y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        exact.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads)))
    order = sorted(range(task.batch), key=exact.__getitem__)
    raised = [math.nan] * task.batch
    for i, norm in zip(order, sorted(norms.tolist()), strict=True):
        raised[i] = norm / exact[i] if exact[i] else math.inf if norm else 1.0
    # The loop's own gradients, and 16-bit ones, are rounded too.
    rounding = TOLERANCES[task.dtype]
    highest = 1 + rounding + _HIGHEST_BOUND[task.x.device.type]
    if not all(1 - rounding <= x <= highest for x in raised):
        return None
    return [max(1.0, x) for x in raised]


def clipped_sums(
    task: Task, clipping: str | None, raised: Sequence[float] | None = None
) -> list[Tensor]:
    """The sum of clipped gradients of each parameter, by a loop over single samples.

    Args:
        task: whose samples are meant.
        clipping: "flat", "per_layer", "per_block", or None for nothing.
        raised: factors of the samples' norms in flat clipping, see `raised_norms`.
    """
    model = task.build()
    parameters = list(model.parameters())
    index = {parameter: number for number, parameter in enumerate(parameters)}
    groups = [] if clipping is None else make_groups(model, parameters, clipping)
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for i in range(task.batch):
        loss = task.losses(model, task.x[i : i + 1], task.y[i : i + 1]).sum()
        grads = list(torch.autograd.grad(loss, parameters))
        for group in groups:
            members = [grads[index[parameter]] for parameter in group.parameters]
            _clip_(members, group, 1.0 if raised is None else raised[i])
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad)
    return sums


def _clip_(grads: Sequence[Tensor], group: Group, raised: float) -> None:
    """Scales one sample's gradients of a group, in place."""
    bound = _MAX_GRAD_NORM * group.share / raised
    if not group.tiled:
        _scale_(grads, bound)
        return
    (grad,) = grads
    for rows in grad.split(_TILE):
        for tile in rows.split(_TILE, dim=1):
            _scale_([tile], bound * math.sqrt(tile.numel() / grad.numel()))


def _scale_(grads: Sequence[Tensor], bound: float) -> None:
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    if norm > bound:
        for grad in grads:
            grad.mul_(bound / norm)


class GradientKeeper(torch.optim.SGD):
    """Keeps what it is given instead of making a step."""

    def __init__(self, parameters: Sequence[nn.Parameter], given: list[Tensor]) -> None:
        super().__init__(parameters, lr=0.0)
        self._given = given

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keeps the gradients."""
        for parameter in self.param_groups[0]["params"]:
            self._given.append(parameter.grad.detach().float().clone())


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, pass after pass."""
    while True:
        yield from loader


def _nonprivate(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
) -> Training:
    batches = endless(loader)

    def step() -> None:
        x, y = next(batches)
        task.losses(model, x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step)


def _dpflash(
    task: Task,
    provider: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    noise_multiplier: float,
) -> Training:
    _, clipping, *way = provider.split("-")
    engine = PrivacyEngine()
    private, private_optimizer, private_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=_MAX_GRAD_NORM,
        clipping=clipping,
        way=way[0] if way else "auto",
        # What runs once, with the first batches, is no part of a step.
        verify_first_batch=False,
    )
    batches = endless(private_loader)

    def step() -> None:
        x, y = next(batches)
        engine.backward(task.losses(private, x, y))
        private_optimizer.step()
        private_optimizer.zero_grad()

    return Training(step, engine)


class _SampleMean(nn.Module):
    """A task's loss as Opacus wants it: "mean" over samples, or "none"."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.reduction = "mean"
        self._loss = loss

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        found = self._loss(output, y)
        return found if self.reduction == "none" else found.mean()


def _opacus(
    task: Task,
    provider: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    noise_multiplier: float,
) -> Training:
    try:
        import opacus
    except ImportError:
        raise Unsupported("Opacus: pip install opacus") from None
    mode = provider.split("-")[1]
    with _quiet():
        engine = opacus.PrivacyEngine(accountant="rdp")
        parts = engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=_SampleMean(task.loss),
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=_MAX_GRAD_NORM,
            grad_sample_mode=mode,
        )
    private, private_optimizer, private_loader = parts[0], parts[1], parts[-1]
    criterion = _SampleMean(task.loss) if mode == "hooks" else parts[2]
    batches = endless(private_loader)
    is_registered = provider.endswith("-registered")

    def step() -> None:
        x, y = next(batches)
        with _quiet(), _registered() if is_registered else contextlib.nullcontext():
            with task.precision():
                output = private(x)
            criterion(output, y).backward()
        private_optimizer.step()
        private_optimizer.zero_grad()

    return Training(step)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Opacus says of its noise, and torch of Opacus' hooks, in each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    """Opacus with this library's norms, which it takes from a registry of its own."""
    from dpflash.integrations import opacus as integration

    integration.register()
    try:
        yield
    finally:
        integration.unregister()


def _beyond(plain: Work, engine: PrivacyEngine) -> Work:
    """The work of a private step by the planner's formulas, since Triton kernels are not seen.

    What "two_pass" does in attention's second backward is missing.
    """
    uses = list(engine.plan())
    return Work(
        plain.flops + sum(use.flops for use in uses),
        plain.moved_bytes + sum(use.moved_bytes for use in uses),
    )

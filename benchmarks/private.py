"""Private training steps by each provider, and the check of their clipped gradients.

A provider is an implementation, such as Opacus. All providers train the same model on the same
batch of all samples. A step has loader, forward, backward, clipping, noise and optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash.engine import PrivacyEngine
from dpflash.grad_rules.convert import layers_of, make_groups

from .private_tasks import Task, make_task
from .suite import Subject, Unsupported, worst
from .timing import Step
from .work import Work, count_work

NONPRIVATE = "nonprivate"
AUTO = "dpflash-flat-auto"
# Provider -> (clipping, grad_sample_mode).
DPFLASH = {
    AUTO: ("flat", "auto"),
    "dpflash-flat-instantiate": ("flat", "instantiate"),
    "dpflash-flat-book_keeping": ("flat", "book_keeping"),
    "dpflash-flat-ghost": ("flat", "ghost"),
    "dpflash-per_layer": ("per_layer", "auto"),
}
OPACUS = ("opacus-hooks", "opacus-ghost")
OPAKE = "opake"
PEERS = (*OPACUS, OPAKE)
PROVIDERS = (NONPRIVATE, *DPFLASH, *PEERS)

# Smaller than each sample's gradient norm in each layer, so that every sample is clipped.
MAX_GRAD_NORM = 0.1
# Allowed relative errors of the gradient of the parameter with the largest error.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
# If dpflash computes norms without per-sample gradients, it adds a bound of the rounding error,
# which is at most this fraction of the norm. The bound of Gram matrices on a GPU is larger.
_HIGHEST_BOUND = {"cpu": 1e-3, "cuda": 0.05}

Optimize = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the timed steps."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def private_subject(*, provider: str, **given: Any) -> Subject:
    """Return a training step of one of PROVIDERS; `given` goes to `private_tasks.make_task`.

    `Subject.error` checks the sum of clipped gradients, without noise.
    """
    return private_step(provider=provider, **given)[0]


def private_step(*, provider: str, **given: Any) -> tuple[Subject, PrivacyEngine | None]:
    """Return the subject of `private_subject`, and the engine if the step is dpflash's."""
    task = make_task(**given)
    step, engine = make_training(task, provider, noise_multiplier=1.0, optimize=adamw)

    def work() -> Work:
        if task.x.is_cuda and engine is not None:
            plain, _ = make_training(task, NONPRIVATE, noise_multiplier=0.0, optimize=adamw)
            return add_planned_work(count_work(plain), engine)
        return count_work(step)

    def error() -> float:
        return gradient_error(task, provider)

    tokens, tolerance = task.batch * task.x.shape[1], TOLERANCES[task.dtype]
    return Subject(step, error, tolerance, tokens, work, task.dtype), engine


class Training(NamedTuple):
    """A whole training step, and its engine if dpflash computes the step."""

    step: Step
    engine: PrivacyEngine | None = None


def make_training(
    task: Task, provider: str, *, noise_multiplier: float, optimize: Optimize, **options: Any
) -> Training:
    """Return a training step on a task by one of PROVIDERS, or by "optimize-LEVEL".

    The provider "optimize-LEVEL" is `make_private(optimize=LEVEL)`. `options` are further
    arguments of make_private. Raises Unsupported if the provider is not installed.
    """
    if provider == OPAKE:
        return Training(_opake_step(task, noise_multiplier, optimize))
    model = task.build()
    optimizer = optimize(trained(model))
    loader: Iterable[Any] = DataLoader(TensorDataset(task.x, task.y), batch_size=task.batch)
    given: dict[str, Any] = {"module": model, "optimizer": optimizer, "data_loader": loader}
    given.update(noise_multiplier=noise_multiplier, max_grad_norm=MAX_GRAD_NORM)
    losses, engine = task.losses, None
    backward: Callable[[Tensor], object] = _backward
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if provider in OPACUS:
        model, optimizer, loader, losses = _make_opacus(task, provider.split("-")[1], given)
        context = _inside_opacus
    elif provider != NONPRIVATE:
        if provider in DPFLASH:
            given["clipping"], given["grad_sample_mode"] = DPFLASH[provider]
        else:
            given["optimize"] = provider.removeprefix("optimize-")
            # The optimization level sets autocast itself.
            losses = replace(task, dtype="float32").losses
        engine = PrivacyEngine()
        backward = engine.backward
        # Steps are timed without the isolation test of the first batches.
        model, optimizer, loader = engine.make_private(
            **given, **options, verify_first_batch=False
        )
    batches = endless(loader)

    def step() -> None:
        x, y = next(batches)
        with context():
            backward(losses(model, x, y))
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, engine)


def gradient_error(task: Task, provider: str) -> float:
    """Return the largest relative error of a parameter's sum of clipped gradients.

    dpflash's flat clipping may use upper bounds in place of exact norms. The expected sum is then
    clipped by the same bounds. The error is infinite if a bound is below the exact norm, or
    exceeds the exact norm by more than rounding explains.
    """
    given: list[Tensor] = []
    keep = functools.partial(GradientKeeper, given=given)
    training = make_training(task, provider, noise_multiplier=0.0, optimize=keep)
    training.step()
    engine, clipping, raised = training.engine, clipping_of(provider), None
    if engine is not None and clipping is None:
        clipping = engine.optimization.clipping
    elif engine is not None and clipping == "flat":
        raised = raised_norms(task, engine.diagnostics()["per_sample_norms"])
        if raised is None:
            return math.inf
    expected = clipped_sums(task, clipping, raised)
    pairs = zip(given, expected, strict=True)
    return worst(float((task.batch * g - e).norm() / e.norm()) for g, e in pairs)


def clipping_of(provider: str) -> str | None:
    """Return "flat" or "per_layer". None: no clipping, or the optimization level chooses it."""
    if provider in DPFLASH:
        return DPFLASH[provider][0]
    return "flat" if provider in PEERS else None


def raised_norms(task: Task, norms: Tensor) -> list[float] | None:
    """Return norm / exact norm for each sample, or None if a norm is wrong; sorts `norms`."""
    exact = [_norm(grads) for grads in _sample_gradients(task, task.build())]
    if len(norms) != len(exact):
        return None
    order = sorted(range(task.batch), key=exact.__getitem__)
    raised = [math.nan] * task.batch
    for i, norm in zip(order, sorted(norms.tolist()), strict=True):
        raised[i] = norm / exact[i] if exact[i] else math.inf if norm else 1.0
    # The "exact" norms come from a loop over samples whose gradients are rounded too.
    rounding = TOLERANCES[task.dtype]
    highest = 1 + rounding + _HIGHEST_BOUND[task.x.device.type]
    is_right = all(1 - rounding <= x <= highest for x in raised)
    return [max(1.0, x) for x in raised] if is_right else None


def clipped_sums(
    task: Task, clipping: str | None, raised: Sequence[float] | None = None
) -> list[Tensor]:
    """Return each parameter's sum of clipped gradients, computed by a loop over single samples.

    With flat clipping, the samples' norms are multiplied by `raised`, see `raised_norms`.
    """
    model = task.build()
    parameters = trained(model)
    index = {parameter: number for number, parameter in enumerate(parameters)}
    groups = [] if clipping is None else make_groups(layers_of(model), parameters, clipping)
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for i, grads in enumerate(_sample_gradients(task, model)):
        for group in groups:
            members = [grads[index[parameter]] for parameter in group.parameters]
            bound = MAX_GRAD_NORM * group.share / (raised[i] if raised else 1.0)
            for grad in members if (norm := _norm(members)) > bound else ():
                grad.mul_(bound / norm)
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad)
    return sums


def _sample_gradients(task: Task, model: nn.Module) -> Iterator[list[Tensor]]:
    for x, y in zip(task.x.split(1), task.y.split(1), strict=True):
        loss = task.losses(model, x, y).sum()
        yield list(torch.autograd.grad(loss, trained(model)))


def _norm(grads: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


class GradientKeeper(torch.optim.SGD):
    """An optimizer whose step copies the gradients into a list."""

    def __init__(self, parameters: Sequence[nn.Parameter], given: list[Tensor]) -> None:
        super().__init__(parameters, lr=0.0)
        self._given = given

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy the gradients."""
        grads = (parameter.grad for parameter in self.param_groups[0]["params"])
        self._given += [grad.detach().float().clone() for grad in grads]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def _backward(losses: Any) -> None:
    (losses.mean() if isinstance(losses, Tensor) else losses).backward()


class _SampleMean:
    """A task's loss with the attribute `reduction`, "mean" or "none", which Opacus sets."""

    reduction = "mean"

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss = loss

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        found = self._loss(output, y)
        return found if self.reduction == "none" else found.mean()


def _make_opacus(task: Task, mode: str, given: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return Opacus' (model, optimizer, loader, loss function of (model, x, y))."""
    try:
        import opacus
    except ImportError:
        raise Unsupported("Opacus: pip install opacus") from None
    criterion: Any = _SampleMean(task.loss)
    with _inside_opacus():
        model, optimizer, *rest, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            **given, criterion=criterion, grad_sample_mode=mode
        )
    if mode == "ghost":
        (criterion,) = rest

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        with task.precision():
            output = model(x)
        return criterion(output, y)

    return model, optimizer, loader, loss


def _opake_step(task: Task, noise_multiplier: float, optimize: Optimize) -> Step:
    """Return a step of opake, which computes gradients and noise by pure functions."""
    try:
        from opake.dpsgd.clipping import clipped_grad
        from opake.dpsgd.noise import gaussian_noise
        from opake.random import key
    except ImportError:
        raise Unsupported("opake: pip install opake") from None
    model = task.build()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimize(list(named.values()))
    batches = endless(DataLoader(TensorDataset(task.x, task.y), batch_size=task.batch))

    def loss(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with task.precision():
            output = torch.func.functional_call(model, dict(parameters), (x[None],))
        return task.loss(output, y[None])[0]

    clipping: Any
    noised: Any = None
    noise: Any = None
    clipped, clipping = clipped_grad(
        loss, clipping_norm=MAX_GRAD_NORM, batch_argnums=(1, 2), normalize_by=task.batch
    )
    if noise_multiplier:
        noised, noise = gaussian_noise(noise_multiplier=noise_multiplier, key=key(0))

    def step() -> None:
        nonlocal clipping, noise
        x, y = next(batches)
        values = {name: parameter.detach() for name, parameter in named.items()}
        gradients: Any
        gradients, clipping = clipped(values, x, y, state=clipping)
        if noised is not None:
            gradients, noise = noised(gradients, noise)
        for name, parameter in named.items():
            parameter.grad = gradients.pytree[name]
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _inside_opacus() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def add_planned_work(plain: Work, engine: PrivacyEngine) -> Work:
    """Return a private step's work: `plain`, and what privacy adds by the planner's formulas.

    Triton kernels cannot be counted. The formulas omit attention's second backward with "ghost".
    """
    uses = list(engine.plan())
    return Work(
        plain.flops + sum(use.flops for use in uses),
        plain.moved_bytes + sum(use.moved_bytes for use in uses),
    )

"""Private training steps as subjects: who makes the step, and whether its gradients are right.

All providers train the same model on the same batch, which each one's loader draws at sample rate
1, so that a step is loader, forward, backward, clipping, noise and optimizer. Letters: B samples,
T tokens.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash import losses
from dpflash.accounting import get_noise_multiplier
from dpflash.clipping.groups import Group
from dpflash.engine import PrivacyEngine
from dpflash.grad_rules.convert import make_groups
from dpflash.kernels import gaussian_noise_
from dpflash.nn import LinearCrossEntropy

from .private_tasks import VOCABULARY, Task, built, bytes_task, lm, make_task
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
# grad_sample_mode of the names in `DPFLASH`, which older results have too.
_MODES = {
    "auto": "auto",
    "stored": "instantiate",
    "book_keeping": "book_keeping",
    "two_pass": "ghost",
}
OPACUS = ("opacus-hooks", "opacus-ghost", "opacus-ghost-registered")
PROVIDERS = (NONPRIVATE, *DPFLASH, *OPACUS)
# Not steps: ChaCha20 noise, torch.normal, and a copy of as many numbers.
ALONE = ("secure-noise-alone", "torch-noise-alone", "copy-alone")

# Below the norms of all samples in all layers, so that each sample is clipped.
MAX_GRAD_NORM = 0.1
_TILE = 128
# Relative errors of gradients, for the worst parameter.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
# Where dpflash computes norms without the gradients, it adds a bound of the rounding: at most this
# part of the norm. The Gram form on a GPU adds more.
_HIGHEST_BOUND = {"cpu": 1e-3, "cuda": 0.05}
# Of the standard deviation and the mean of ten thousand normal numbers or more.
_NOISE_TOLERANCE = 0.03

Optimize = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the steps that are timed."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def private_subject(*, provider: str, noise_multiplier: float = 1.0, **task: Any) -> Subject:
    """A training step of one of PROVIDERS; `task` is given to `private_tasks.make_task`.

    Raises:
        Unsupported: Opacus is not installed.
    """
    return subject_of(make_task(**task), provider, noise_multiplier=noise_multiplier)


def subject_of(task: Task, provider: str, *, noise_multiplier: float = 1.0) -> Subject:
    """A training step; its error is that of the sum of clipped gradients, without noise."""
    training = make_training(task, provider, noise_multiplier=noise_multiplier, optimize=adamw)

    def work() -> Work:
        if task.x.is_cuda and training.engine is not None:
            plain = make_training(task, NONPRIVATE, noise_multiplier=0.0, optimize=adamw)
            return add_planned_work(count_work(plain.step), training.engine)
        return count_work(training.step)

    return Subject(
        training.step,
        lambda: gradient_error(task, provider),
        TOLERANCES[task.dtype],
        tokens=task.batch * task.x.shape[1],
        work=work,
        dtype=task.dtype,
    )


@dataclass(frozen=True)
class Training:
    """A whole training step, and the engine where it is dpflash's."""

    step: Step
    engine: PrivacyEngine | None = None


def make_training(
    task: Task, provider: str, *, noise_multiplier: float, optimize: Optimize
) -> Training:
    """The training of a task by one of PROVIDERS, or by `make_private(optimize=LEVEL)`.

    The name of the latter is "optimize-LEVEL".

    Raises:
        Unsupported: Opacus is not installed.
    """
    model = task.build()
    optimizer = optimize(list(model.parameters()))
    loader = DataLoader(TensorDataset(task.x, task.y), batch_size=task.batch)
    if provider in OPACUS:
        return _opacus(task, provider, model, optimizer, loader, noise_multiplier)
    if provider == NONPRIVATE:
        batches = endless(loader)

        def plain_step() -> None:
            x, y = next(batches)
            task.losses(model, x, y).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(plain_step)
    options: dict[str, Any]
    if is_level := provider.startswith("optimize-"):
        options = {"optimize": provider.removeprefix("optimize-")}
    else:
        _, clipping, *mode = provider.split("-")
        options = {"clipping": clipping, "grad_sample_mode": _MODES[mode[0] if mode else "auto"]}
    engine = PrivacyEngine()
    private, private_optimizer, private_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=MAX_GRAD_NORM,
        # The checks of the first batch are no part of a step.
        verify_first_batch=False,
        **options,
    )
    private_batches = endless(private_loader)

    def step() -> None:
        x, y = next(private_batches)
        # A level sets autocast itself.
        found = task.loss(private(x), y) if is_level else task.losses(private, x, y)
        engine.backward(found)
        private_optimizer.step()
        private_optimizer.zero_grad()

    return Training(step, engine)


def gradient_error(task: Task, provider: str) -> float:
    """Relative error of a provider's sum of clipped gradients, for the worst parameter.

    dpflash's flat clipping may use norms that are upper bounds. Its sum is compared with a sum by
    these norms, and the norms with those of the gradients: the error is infinite where a norm is
    too low, or higher than rounding explains.
    """
    given: list[Tensor] = []

    def keep(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return GradientKeeper(parameters, given)

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
    """A provider's clipping: "flat", "per_layer" or "per_block"; None for none, or by a level."""
    if provider in DPFLASH:
        return provider.split("-")[1]
    return "flat" if provider in OPACUS else None


def raised_norms(task: Task, norms: Tensor) -> list[float] | None:
    """Each sample's norm in `norms`, in any order, over its exact one; None where one is wrong."""
    if len(norms) != task.batch:
        return None
    model = task.build()
    exact = []
    for i in range(task.batch):
        loss = task.losses(model, task.x[i : i + 1], task.y[i : i + 1]).sum()
        exact.append(_norm(torch.autograd.grad(loss, list(model.parameters()))))
    order = sorted(range(task.batch), key=exact.__getitem__)
    raised = [math.nan] * task.batch
    for i, norm in zip(order, sorted(norms.tolist()), strict=True):
        raised[i] = norm / exact[i] if exact[i] else math.inf if norm else 1.0
    # The gradients of this loop are rounded too.
    rounding = TOLERANCES[task.dtype]
    highest = 1 + rounding + _HIGHEST_BOUND[task.x.device.type]
    if not all(1 - rounding <= x <= highest for x in raised):
        return None
    return [max(1.0, x) for x in raised]


def clipped_sums(
    task: Task, clipping: str | None, raised: Sequence[float] | None = None
) -> list[Tensor]:
    """The sum of clipped gradients of each parameter, by a loop over single samples.

    In flat clipping, `raised` has factors of the samples' norms, see `raised_norms`.
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
    bound = MAX_GRAD_NORM * group.share / raised
    if not group.tiled:
        _scale_(grads, bound)
        return
    (grad,) = grads
    for rows in grad.split(_TILE):
        for tile in rows.split(_TILE, dim=1):
            _scale_([tile], bound * math.sqrt(tile.numel() / grad.numel()))


def _scale_(grads: Sequence[Tensor], bound: float) -> None:
    norm = _norm(grads)
    if norm > bound:
        for grad in grads:
            grad.mul_(bound / norm)


def _norm(grads: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


class GradientKeeper(torch.optim.SGD):
    """Copies the gradients into a list instead of making a step."""

    def __init__(self, parameters: Sequence[nn.Parameter], given: list[Tensor]) -> None:
        super().__init__(parameters, lr=0.0)
        self._given = given

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keeps the gradients."""
        for parameter in self.param_groups[0]["params"]:
            self._given.append(parameter.grad.detach().float().clone())


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, epoch after epoch."""
    while True:
        yield from loader


class _SampleMean(nn.Module):
    """A task's loss as Opacus wants it: reduction "mean" over samples, or "none"."""

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
        parts = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            criterion=_SampleMean(task.loss),
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=MAX_GRAD_NORM,
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
    """Ignores the warnings of Opacus about its noise, and of torch about Opacus' hooks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    """Registers dpflash's norms with Opacus, inside the block only."""
    from dpflash.integrations import opacus as integration

    integration.register()
    try:
        yield
    finally:
        integration.unregister()


def add_planned_work(plain: Work, engine: PrivacyEngine) -> Work:
    """The work of a private step by the planner's formulas; Triton kernels cannot be counted.

    The second backward of attention in "ghost" is missing.
    """
    uses = list(engine.plan())
    return Work(
        plain.flops + sum(use.flops for use in uses),
        plain.moved_bytes + sum(use.moved_bytes for use in uses),
    )


def noise_subject(
    *,
    provider: str,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    layers: int,
    dtype: str,
    device: str,
    seed: int,
) -> Subject:
    """One of ALONE on sums of the shapes of the lm's parameters; batch and dtype do not matter."""
    model = lm(tokens, heads, head_dim, layers).to(device)
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    copies = [torch.ones_like(total) for total in sums]
    generator = torch.Generator(device).manual_seed(seed)
    key, number = seed.to_bytes(32, "little"), 0

    def secure() -> None:
        nonlocal number
        number += 1
        for parameter_id, total in enumerate(sums):
            gaussian_noise_(
                total, std=1.0, grid=2.0**-30, key=key, step=number, parameter_id=parameter_id
            )

    def plain() -> None:
        for total in sums:
            total.add_(torch.normal(0.0, 1.0, total.shape, generator=generator, device=device))

    def copy() -> None:
        for total, copied in zip(sums, copies, strict=True):
            copied.copy_(total)

    step = dict(zip(ALONE, (secure, plain, copy), strict=True))[provider]

    def error() -> float:
        before = [total.clone() for total in sums]
        step()
        if provider == "copy-alone":
            pairs = zip(copies, sums, strict=True)
            return worst(float((one - other).abs().max()) for one, other in pairs)
        return off_standard_normal([total - old for total, old in zip(sums, before, strict=True)])

    return Subject(step, error, 0.0 if provider == "copy-alone" else _NOISE_TOLERANCE)


def off_standard_normal(noise: Sequence[Tensor]) -> float:
    """How far the mean is from 0 or the standard deviation from 1, whichever is more."""
    values = torch.cat([one.flatten() for one in noise]).double()
    return worst((abs(float(values.mean())), abs(float(values.std()) - 1)))


def ghost_subject(
    *, provider: str, batch: int, tokens: int, width: int, layers: int, device: str, seed: int
) -> Subject:
    """A step of an embedding, layers (LayerNorm, Linear, GELU) and a head, without attention."""

    def make() -> nn.Module:
        parts: list[nn.Module] = [nn.Embedding(VOCABULARY, width)]
        for _ in range(layers):
            parts += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        return nn.Sequential(*parts, nn.Linear(width, VOCABULARY))

    return subject_of(bytes_task(make, batch, tokens, "float32", device, seed), provider)


def head_subject(
    *,
    head: str,
    provider: str,
    batch: int,
    tokens: int,
    classes: int,
    width: int,
    device: str,
    seed: int,
) -> Subject:
    """A step of a language model's head, with the gradient of its input `[batch, tokens, width]`.

    head is "dense" (a linear layer and its logits) or "chunked" (`LinearCrossEntropy`).
    """
    is_chunked = head == "chunked"

    def make() -> nn.Module:
        if is_chunked:
            return LinearCrossEntropy(width, classes)
        return nn.Linear(width, classes, bias=False)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        output: Tensor = model(x, y) if is_chunked else model(x)
        return output

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return output if is_chunked else losses.cross_entropy(output, y)

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, width, generator=generator)
    y = torch.randint(0, classes, (batch, tokens), generator=generator)
    task = Task(built(make, device, seed), x.to(device), y.to(device), loss, forward)
    return subject_of(task, provider)


def epsilon_subject(
    *, target_epsilon: float, target_delta: float, sample_rate: float, steps: int, **task: Any
) -> Subject:
    """A step with the noise multiplier with which a run of such steps has this epsilon."""
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
    )
    subject = private_subject(model="lm", provider=AUTO, noise_multiplier=noise_multiplier, **task)
    return replace(subject, figures={"noise_multiplier": noise_multiplier})

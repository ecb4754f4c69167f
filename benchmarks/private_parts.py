"""Parts of a private step, and steps of other models, as benchmarks' subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpflash import losses
from dpflash.accounting import get_noise_multiplier
from dpflash.kernels import gaussian_noise_
from dpflash.nn import LinearCrossEntropy

from .private import AUTO, private_subject, subject_of
from .private_tasks import VOCABULARY, Task, built, bytes_task, lm
from .suite import Subject, worst

ALONE = ("secure-noise-alone", "torch-noise-alone", "copy-alone")
# Of the standard deviation and the mean of some ten thousand normal numbers, or more.
_NOISE_TOLERANCE = 0.03
_NO_COPY_ERROR = 0.0


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
    """What a step's noise costs by itself, on sums of the shapes of the lm's parameters.

    Args:
        provider: one of ALONE: ChaCha20, torch.normal, or a copy of the sums.
        batch, tokens, heads, head_dim, layers, dtype, device: of the step beside which it stands.
        seed: of the noise.
    """
    model = lm(tokens, heads, head_dim, layers).to(device)
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    generator = torch.Generator(device).manual_seed(seed)
    key = seed.to_bytes(32, "little")
    copies = [torch.ones_like(total) for total in sums]
    number = 0

    def secure() -> None:
        nonlocal number
        number += 1
        for parameter_id, total in enumerate(sums):
            gaussian_noise_(
                total, std=1.0, grid=2.0**-30, key=key, step=number, parameter_id=parameter_id
            )

    def plain() -> None:
        for total in sums:
            shape = total.shape
            total.add_(torch.normal(0.0, 1.0, shape, generator=generator, device=device))

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
        return _off_standard_normal([total - old for total, old in zip(sums, before, strict=True)])

    return Subject(step, error, _NO_COPY_ERROR if provider == "copy-alone" else _NOISE_TOLERANCE)


def ghost_subject(
    *, provider: str, batch: int, tokens: int, width: int, layers: int, device: str, seed: int
) -> Subject:
    """A step of an embedding, layers (LayerNorm, Linear, GELU) and a head, without attention."""

    def make() -> nn.Module:
        parts: list[nn.Module] = [nn.Embedding(VOCABULARY, width)]
        for _ in range(layers):
            parts += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        return nn.Sequential(*parts, nn.Linear(width, VOCABULARY))

    task = bytes_task(make, batch, tokens, "float32", device, seed)
    return subject_of(task, provider, tokens=batch * tokens)


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
    """A step of the head of a language model, the gradient of its input included.

    Args:
        head: "dense" (a linear layer and its logits) or "chunked" (`LinearCrossEntropy`).
        provider: NONPRIVATE or one of DPFLASH.
        batch, tokens, classes, width: shape `[batch, tokens, width]` of the input, and classes.
        device: "cpu" or "cuda".
        seed: of weights and data.
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
    return subject_of(task, provider, tokens=batch * tokens)


def epsilon_subject(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    layers: int,
    dtype: str,
    device: str,
    seed: int,
) -> Subject:
    """A step of dpflash with the noise with which a run of such steps has this epsilon."""
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
    )
    subject = private_subject(
        model="lm",
        provider=AUTO,
        batch=batch,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        layers=layers,
        noise_multiplier=noise_multiplier,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    return replace(subject, figures={"noise_multiplier": noise_multiplier})


def _off_standard_normal(noise: Sequence[Tensor]) -> float:
    values = torch.cat([one.flatten() for one in noise]).double()
    return worst((abs(float(values.mean())), abs(float(values.std()) - 1)))

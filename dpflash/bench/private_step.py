"""The benchmark of private training steps: beside no privacy and Opacus, by batch and epsilon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpflash import losses
from dpflash.accounting import get_noise_multiplier
from dpflash.kernels import gaussian_noise_
from dpflash.nn import LinearCrossEntropy

from .document import FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config
from .private import (
    DPFLASH,
    NONPRIVATE,
    OPACUS,
    VOCABULARY,
    Task,
    built,
    lm,
    private_subject,
    subject_of,
)
from .private_scaling import (
    INSIGHTS,
    OPTIMAL,
    OPTIMAL_NOTE,
    insight,
    memory_limit_mb,
    optimal_batch,
    overhead,
)
from .suite import (
    Comparison,
    Measurement,
    Request,
    Row,
    Subject,
    Suite,
    needs,
    of_section,
    worst,
)

AUTO = "dpflash-flat-auto"
ALONE = ("secure-noise-alone", "torch-noise-alone", "copy-alone")
# Of a step; why it is not measured. They are not looked for.
ABSENT = {
    "opacus-flash_fuse": "not measured here: it takes a fork of Opacus in place of the package",
    "fastDP": "not measured here: fastDP of github.com/awslabs/fast-differential-privacy",
    "jax_privacy": "not measured here: it takes a model written for JAX, and none of torch",
}
EPSILONS = (1.0, 2.0, 4.0, 8.0)

# Of the standard deviation and the mean of some ten thousand normal numbers, or more.
_NOISE_TOLERANCE = 0.03
_NO_COPY_ERROR = 0.0

_Shape = dict[str, Any]


def _lm(batch: int, tokens: int, heads: int, head_dim: int, layers: int) -> _Shape:
    return {
        "batch": batch,
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "layers": layers,
    }


_QUICK_LM = _lm(4, 128, 2, 32, 1)
_ALL = (NONPRIVATE, *DPFLASH, *OPACUS[:2])
# Without the ways that the short sequences show to be slow, which take minutes on long ones.
_SOME = (NONPRIVATE, AUTO, "dpflash-per_layer", "dpflash-per_block", *OPACUS[:2])
_STEPS: dict[str, list[tuple[_Shape, Sequence[str]]]] = {
    "quick": [(_QUICK_LM, _ALL)],
    "cpu": [(_lm(16, 256, 8, 32, 4), _ALL), (_lm(4, 2048, 8, 32, 4), _SOME)],
    "cuda": [(_lm(4, 4096, 16, 64, 12), _ALL), (_lm(1, 16384, 16, 64, 12), _ALL)],
}
_GHOST_TOKENS = {
    "quick": (512,),
    "cpu": (512, 1024, 2048, 4096),
    "cuda": (512, 1024, 2048, 4096, 8192, 16384),
}
# (batch, tokens, classes)
_HEADS = {"quick": (2, 128, 2048), "cpu": (1, 2048, 16384), "cuda": (2, 8192, 50000)}
_HEAD_FAMILIES = {
    NONPRIVATE: (("dense", NONPRIVATE), ("chunked", NONPRIVATE)),
    "private": (
        ("dense", AUTO),
        ("chunked", AUTO),
        ("chunked", "dpflash-flat-book_keeping"),
        ("chunked", "dpflash-flat-two_pass"),
    ),
}
_THROUGHPUT = {
    "quick": (_QUICK_LM, (1, 4)),
    "cpu": (_lm(8, 256, 8, 32, 2), (1, 2, 4, 8, 16, 32)),
    "cuda": (_lm(8, 2048, 16, 64, 12), (1, 2, 4, 8, 16, 32)),
}
_RUN = {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 1000}


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
            gaussian_noise_(total, std=1.0, key=key, step=number, parameter_id=parameter_id)

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

    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, VOCABULARY, (2, batch, tokens), generator=generator)
    task = Task(built(make, device, seed), x.to(device), y.to(device), losses.cross_entropy)
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


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Sequence[Row]]]:
    device = request.where.type
    size = "quick" if request.quick else device
    dtype = "bfloat16" if device == "cuda" else "float32"
    for lm_shape, providers in _STEPS[size]:
        yield _steps({**lm_shape, "dtype": dtype}, providers)
    yield lambda request: [
        needs(f"step/{name}", {"provider": name}, reason, section="step")
        for name, reason in ABSENT.items()
    ]
    for tokens in _GHOST_TOKENS[size]:
        yield _ghost(tokens)
    batch, tokens, classes = _HEADS[size]
    for family in _HEAD_FAMILIES:
        yield _head(family, batch, tokens, classes)
    shape, batches = _THROUGHPUT[size]
    for batch in batches:
        yield _throughput({**shape, "batch": batch, "dtype": dtype}, memory_limit_mb(request))
    yield _epsilons({**shape, "dtype": dtype})


def _name(shape: Mapping[str, Any]) -> str:
    return f"B{shape['batch']}-T{shape['tokens']}"


def _steps(shape: _Shape, providers: Sequence[str]) -> Comparison:
    """A whole step by each provider, and noise alone."""
    columns = {"section": "step", "shape": _name(shape)}
    prefix = f"step/{_name(shape)}"
    steps = [
        Measurement(
            f"{prefix}/{provider}",
            private_subject,
            {"model": "lm", "provider": provider, **shape},
            columns,
        )
        for provider in providers
    ]
    alone = [
        Measurement(
            f"{prefix}/{provider}", noise_subject, {"provider": provider, **shape}, columns
        )
        for provider in ALONE
    ]
    return Comparison([*steps, *alone], steps[0].name)


def _ghost(tokens: int) -> Comparison:
    prefix = f"ghost/T{tokens}"
    shape = {"batch": 1, "tokens": tokens, "width": 256, "layers": 2}
    measurements = [
        Measurement(
            f"{prefix}/{provider}",
            ghost_subject,
            {"provider": provider, **shape},
            {"section": "ghost"},
        )
        for provider in (NONPRIVATE, *OPACUS[1:])
    ]
    return Comparison(measurements, f"{prefix}/opacus-ghost")


def _head(family: str, batch: int, tokens: int, classes: int) -> Comparison:
    shape = {"batch": batch, "tokens": tokens, "classes": classes, "width": 256}
    measurements = [
        Measurement(
            f"head/{head}-{provider}",
            head_subject,
            {"head": head, "provider": provider, **shape},
            {"section": "head", "family": family},
        )
        for head, provider in _HEAD_FAMILIES[family]
    ]
    return Comparison(measurements, measurements[0].name)


def _throughput(shape: _Shape, limit: float) -> Comparison:
    measurement = Measurement(
        f"throughput_batch/{_name(shape)}",
        private_subject,
        {"model": "lm", "provider": AUTO, **shape},
        {"section": "throughput_batch", "memory_limit_mb": limit},
    )
    return Comparison([measurement])


def _epsilons(shape: _Shape) -> Comparison:
    measurements = [
        Measurement(
            f"throughput_epsilon/{epsilon:g}",
            epsilon_subject,
            {"target_epsilon": epsilon, **_RUN, **shape},
            {"section": "throughput_epsilon"},
        )
        for epsilon in EPSILONS
    ]
    return Comparison(measurements, measurements[0].name)


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    yield from _best_clipping(rows)
    yield from _beside_opacus(rows)
    yield from _register_gains(rows)
    yield from _head_memory(rows)
    yield from _steady(rows)


def _timed(rows: Sequence[Row], section: str) -> list[Row]:
    return [row for row in of_section(rows, section) if row["median_ms"] is not None]


def _by_shape(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """The timed steps: shape, then provider."""
    shapes: dict[str, dict[str, Row]] = {}
    for row in _timed(rows, "step"):
        shapes.setdefault(row["shape"], {})[row["config"]["provider"]] = row
    return shapes


def _best_clipping(rows: Sequence[Row]) -> Iterator[Row]:
    for shape, own in _by_shape(rows).items():
        ours = {provider: own[provider] for provider in DPFLASH if provider in own}
        if not ours:
            continue
        fastest = min(ours, key=lambda provider: ours[provider]["median_ms"])
        text = (
            f"{shape}: {fastest} is the fastest private step, {ours[fastest]['median_ms']:.0f} ms"
        )
        over = overhead(ours[fastest])
        if over is not None:
            text += f", {over:.2f} times a nonprivate one"
        known = {p: row["peak_memory_mb"] for p, row in ours.items() if row["peak_memory_mb"]}
        if known:
            least = min(known, key=lambda provider: known[provider])
            text += f"; {least} takes the least memory, {known[least]:.0f} MiB"
        yield insight(f"clipping/{shape}", text + ".", median_ms=ours[fastest]["median_ms"])


def _beside_opacus(rows: Sequence[Row]) -> Iterator[Row]:
    for shape, own in _by_shape(rows).items():
        for peer in OPACUS[:2]:
            if AUTO in own and peer in own:
                times = own[peer]["median_ms"] / own[AUTO]["median_ms"]
                text = f"{shape}: {peer} takes {times:.2f} times as long as {AUTO}."
                yield insight(f"{peer}/{shape}", text, ratio=times)


def _register_gains(rows: Sequence[Row]) -> Iterator[Row]:
    gains = [
        (row["config"]["tokens"], row["speedup"])
        for row in _timed(rows, "ghost")
        if row["config"]["provider"] == OPACUS[2] and row.get("speedup") is not None
    ]
    if gains:
        tokens, gain = max(gains)
        text = f"register() makes Opacus' ghost clipping {gain:.2f} times as fast at T = {tokens}."
        yield insight("register", text, speedup=gain)


def _head_memory(rows: Sequence[Row]) -> Iterator[Row]:
    peaks = {
        (row["config"]["head"], row["config"]["provider"]): row["peak_memory_mb"]
        for row in _timed(rows, "head")
    }
    dense, chunked = (peaks.get((head, AUTO)) for head in ("dense", "chunked"))
    if dense and chunked:
        text = (
            f"A private step of the dense head takes {dense / chunked:.1f} times the memory of "
            "one of the chunked head."
        )
        yield insight("head", text, ratio=dense / chunked)


def _steady(rows: Sequence[Row]) -> Iterator[Row]:
    batches = list(of_section(rows, "throughput_batch"))
    if batches:
        best = optimal_batch("throughput_optimal", "lm", batches)
        yield best
        if best["batch"] is not None:
            text = f"{best['batch']} is the optimal batch of the lm, {AUTO}."
            yield insight("throughput", text, batch=best["batch"])
    speeds = {
        row["config"]["target_epsilon"]: row["tokens_per_s"]
        for row in _timed(rows, "throughput_epsilon")
    }
    if len(speeds) > 1:
        spread = max(speeds.values()) / min(speeds.values()) - 1
        text = (
            f"From epsilon {min(speeds):g} to {max(speeds):g} tokens/s differ by {spread:.1%}: "
            "the noise is drawn whatever its size."
        )
        yield insight("epsilon", text, spread=spread)


_OVER = ("time over nonprivate", overhead)

SUITE = Suite(
    name="private-step",
    title="Private training steps",
    about=(
        "One whole training step: loader, forward, backward, clipping, noise, AdamW. Providers "
        "train the same model on the same batch, which the loader of each draws anew at sample "
        "rate 1, and take turns. A row has figures only if, without noise, its sum of clipped "
        "gradients is that of a loop over single samples, clipped as the row says."
    ),
    plan=_plan,
    derive=_derive,
    tables=(
        INSIGHTS,
        Table(
            "step",
            "A step of a language model",
            (column("shape"), config("provider"), *FIGURES, _OVER, *ROOFS),
            "LongContextLM over bytes, untied; fp32 on a CPU, bf16 autocast on a GPU. "
            "'alone': no step but the noise of one, or a copy of as many numbers.",
        ),
        Table(
            "ghost",
            "Opacus' ghost clipping with dpflash.integrations.opacus.register()",
            (config("tokens"), config("provider"), *FIGURES, SPEEDUP),
            "Embedding, 2 x (LayerNorm, Linear, GELU), Linear; no attention; B = 1. Speed-up: "
            "over Opacus' own ghost clipping.",
        ),
        Table(
            "head",
            "The head of a language model",
            (
                column("family"),
                config("head"),
                config("provider"),
                config("batch"),
                config("tokens"),
                config("classes"),
                *FIGURES,
                SPEEDUP,
            ),
            "Dense: a linear layer and its logits; chunked: LinearCrossEntropy. Speed-up: over "
            "the dense one of the family.",
        ),
        Table(
            "throughput_batch",
            "Private tokens/s by batch",
            (config("batch"), config("tokens"), *FIGURES, *ROOFS),
        ),
        Table("throughput_optimal", "Optimal batch", OPTIMAL, OPTIMAL_NOTE),
        Table(
            "throughput_epsilon",
            "Private tokens/s by epsilon",
            (
                config("target_epsilon", "epsilon"),
                config("target_delta", "delta"),
                config("sample_rate"),
                config("steps"),
                column("noise_multiplier"),
                *FIGURES,
                SPEEDUP,
            ),
            "The noise is that of a run of so many steps at this sample rate; the step that is "
            "timed has a batch of 8. Speed-up: over the first row.",
        ),
    ),
    charts=(
        Chart(
            "step",
            "Time over that of a nonprivate step",
            column("shape"),
            ("times", overhead),
            lambda row: row["config"]["provider"],
            logarithmic=False,
        ),
        Chart(
            "ghost",
            "Opacus' ghost clipping",
            config("tokens"),
            column("median_ms", "ms"),
            lambda row: row["config"]["provider"],
        ),
        Chart(
            "throughput_batch",
            "Private tokens/s by batch",
            config("batch"),
            column("tokens_per_s", "tokens/s"),
            lambda row: AUTO,
        ),
        Chart(
            "throughput_epsilon",
            "Private tokens/s by epsilon",
            config("target_epsilon", "epsilon"),
            column("tokens_per_s", "tokens/s"),
            lambda row: AUTO,
            logarithmic=False,
        ),
    ),
)

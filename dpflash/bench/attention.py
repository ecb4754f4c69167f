"""Attention as a benchmark's subject, and the benchmark of every pattern beside its peers.

Letters: B samples, H heads, T tokens, D head dim, E model dim, R checked query rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash import _validate, patterns
from dpflash.nn import MultiheadAttention

from . import results
from .attention_cases import (
    TOLERANCES,
    Case,
    attend_rows,
    band_error,
    check,
    document_borders,
    reference,
    score_bias,
    whole_error,
)
from .document import CORRECT, FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config
from .named_variants import variant_named
from .peers import FORWARD_ONLY, build_run
from .suite import Comparison, Measurement, Request, Row, Subject, Suite, needs, of_section
from .timing import Step, exponent
from .work import Work, attention_flops, count_work

DIRECTIONS = ("forward", "forward+backward")
# q, k, v and o; then do, q, k, v, o and the gradients of q, k and v.
_FORWARD_TENSORS, _BACKWARD_TENSORS = 4, 8


def attention_subject(
    *,
    variant: str,
    direction: str,
    tokens: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
    device: str,
    seed: int,
) -> Subject:
    """One of `named_variants.VARIANTS`.

    Args:
        variant: its name.
        direction: one of DIRECTIONS.
        tokens: T.
        batch: B.
        heads: H.
        head_dim: D.
        dtype: "float32", "float16" or "bfloat16".
        causal: no query sees a later key.
        device: "cpu" or "cuda".
        seed: of the inputs.

    Raises:
        Unsupported: it cannot run there; the message says what it would need.
    """
    found = variant_named(variant)
    case = Case(found.pattern(tokens, causal), tokens, batch, heads, head_dim, dtype, device)
    if found.operator == "multihead":
        return _module_subject(case, direction, seed)
    return operator_subject(case, found.operator, direction, seed)


def dilated_subject(
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    operator: str = "dpflash",
    direction: str,
    tokens: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
    device: str,
    seed: int,
) -> Subject:
    """LongNet's attention with some segments, see `attention_subject`."""
    pattern = patterns.Dilated(
        segment_lengths=segment_lengths, dilation_rates=dilation_rates, causal=causal
    )
    case = Case(pattern, tokens, batch, heads, head_dim, dtype, device)
    return operator_subject(case, operator, direction, seed)


def operator_subject(case: Case, operator: str, direction: str, seed: int) -> Subject:
    """One of `peers.OPERATORS` on a case."""
    backward = _goes_backward(direction)
    run = build_run(operator, case)
    inputs = case.inputs(seed)
    q, k, v, do = inputs
    is_detached = operator in FORWARD_ONLY

    def forward() -> Tensor:
        with torch.no_grad():
            return run(q, k, v)

    def both() -> object:
        return torch.autograd.grad(run(q, k, v), (q, k, v), do)

    def error() -> float:
        with_grads = backward and not is_detached
        expected = reference(case, *inputs, with_grads=with_grads, seed=seed)
        return max(check(run, inputs, expected).values())

    def work() -> Work:
        tensors = _FORWARD_TENSORS + _BACKWARD_TENSORS * backward
        flops = attention_flops(case.pairs, case.head_dim, forward=True, backward=backward)
        return Work(flops, float(tensors * case.bytes_of_a_tensor))

    return Subject(
        both if backward else forward,
        error,
        TOLERANCES[case.dtype],
        case.batch * case.tokens,
        work,
        case.dtype,
        {
            **_figures(case, len(case.checked_pairs())),
            "gradient": "detached" if is_detached and backward else None,
            "operator": operator,
        },
    )


def _figures(case: Case, checked_pairs: int) -> dict[str, Any]:
    return {
        "pattern_key": case.pattern.key,
        "pairs": case.pairs,
        "density": case.density,
        "checked_rows": len(case.checked_rows()),
        "checked_pairs": checked_pairs,
    }


def _module_subject(case: Case, direction: str, seed: int) -> Subject:
    """A module with its projections; gradients are those of its input and its parameters."""
    backward = _goes_backward(direction)
    width, dtype = case.heads * case.head_dim, getattr(torch, case.dtype)
    generator = torch.Generator(case.device).manual_seed(seed)
    module = MultiheadAttention(
        width, case.heads, pattern=case.pattern, device=case.device, dtype=dtype
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=width**-0.5, generator=generator)
    shape = (case.batch, case.tokens, width)
    x, do = (
        torch.randn(shape, dtype=dtype, device=case.device, generator=generator) for _ in range(2)
    )
    leaves = {"x": x.requires_grad_(), **dict(module.named_parameters())}

    def forward() -> Tensor:
        with torch.no_grad():
            output: Tensor = module(x, x, x)[0]
            return output

    def both() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        module(x, x, x)[0].backward(do)

    def error() -> float:
        return _module_error(case, module, leaves, do, seed, with_grads=backward)

    step: Step = both if backward else forward
    return Subject(
        step,
        error,
        TOLERANCES[case.dtype],
        case.batch * case.tokens,
        lambda: count_work(step),
        case.dtype,
        {**_figures(case, case.batch * case.heads), "operator": "multihead"},
    )


def _module_error(
    case: Case,
    module: MultiheadAttention,
    leaves: dict[str, Tensor],
    do: Tensor,
    seed: int,
    *,
    with_grads: bool,
) -> float:
    """Against float64 at the checked rows of all samples; do is 0 elsewhere."""
    rows = case.checked_rows(seed).to(case.device)
    masked = torch.zeros_like(do)
    masked[:, rows] = do[:, rows]
    exact = {name: x.detach().double().requires_grad_(with_grads) for name, x in leaves.items()}
    with torch.set_grad_enabled(with_grads):
        output = module(leaves["x"], leaves["x"], leaves["x"])[0]
    errors = [whole_error(output.detach())]
    exact_grads = {name: torch.zeros_like(x) for name, x in exact.items()}
    for sample in range(case.batch):
        expected = _module_rows(case, exact, sample, rows)
        errors.append(band_error(output.detach()[sample, rows], expected.detach()))
        if with_grads:
            loss = (expected * masked[sample, rows].double()).sum()
            grads = torch.autograd.grad(loss, list(exact.values()))
            for total, grad in zip(exact_grads.values(), grads, strict=True):
                total += grad
    if with_grads:
        found = torch.autograd.grad(output, list(leaves.values()), masked)
        for ours, theirs in zip(found, exact_grads.values(), strict=True):
            own = zip(ours, theirs, strict=True) if ours.ndim == 3 else [(ours, theirs)]
            errors += [band_error(one, other) for one, other in own]
    return max(errors)


def _module_rows(case: Case, exact: dict[str, Tensor], sample: int, rows: Tensor) -> Tensor:
    """`[R, E]`: the rows of a sample of a module's output, in float64."""
    projected = F.linear(exact["x"][sample], exact["qkv_proj.weight"], exact["qkv_proj.bias"])
    q, k, v = projected.unflatten(1, (3, case.heads, case.head_dim)).permute(1, 2, 0, 3)
    # The batch of one that this sample is.
    bias = score_bias(case, q.unsqueeze(0), k.unsqueeze(0))
    seen = [attend_rows(case, bias, 0, h, rows, q[h], k[h], v[h]) for h in range(case.heads)]
    return F.linear(torch.cat(seen, 1), exact["out_proj.weight"], exact["out_proj.bias"])


def _goes_backward(direction: str) -> bool:
    _validate.one_of(direction=(direction, DIRECTIONS))
    return direction == "forward+backward"


def exponent_row(section: str, curve: str, rows: Sequence[Row], size: str) -> Row:
    """A row of section "exponents": P of ``time = c size^P``, with its 95% interval.

    Args:
        section: whose rows they are.
        curve: which of them, such as a direction.
        rows: of the curve; those without a time do not count.
        size: the value of their config over which time grows.
    """
    measured = [row for row in rows if row["median_ms"] is not None]
    sizes = [row["config"][size] for row in measured]
    columns: dict[str, Any] = {"section": "exponents", "curve": f"{section}, {curve}"}
    columns.update(over=size, sizes=sizes, exponent=None, exponent_ci95=None)
    name = f"exponents/{section}/{curve}"
    if len(set(sizes)) < 3:
        reason = f"three sizes: {len(sizes)} of {len(rows)} were measured"
        return needs(name, {}, reason, **columns)
    power, low, high = exponent(sizes, [row["median_ms"] for row in measured])
    columns.update(exponent=power, exponent_ci95=[low, high])
    return results.row(name, {}, **columns)


def curves(rows: Iterable[Row], section: str) -> dict[str, list[Row]]:
    """The rows of a section by their direction."""
    found: dict[str, list[Row]] = {}
    for row in of_section(rows, section):
        found.setdefault(row["config"]["direction"], []).append(row)
    return found


def of_curve(key: str = "median_ms", **values: object) -> Callable[[Mapping[str, Any]], Any]:
    """A row's figure if its config has these values, else None; for charts."""

    def figure(row: Mapping[str, Any]) -> Any:
        fits = all(row["config"].get(name) == value for name, value in values.items())
        return row.get(key) if fits else None

    return figure


def _shown_exponent(row: Mapping[str, Any]) -> str:
    if row["exponent"] is None:
        return f"needs: {row['needs']}"
    low, high = row["exponent_ci95"]
    return f"{row['exponent']:.2f} [{low:.2f}, {high:.2f}]"


EXPONENTS = Table(
    "exponents",
    "Time grows to the power",
    (
        column("curve"),
        column("over"),
        ("exponent [95%]", _shown_exponent),
        ("sizes", lambda row: ", ".join(str(size) for size in row["sizes"]) or "none"),
    ),
    "1: linear, 2: quadratic. The interval is that of the fit to the logarithms.",
)

# What each pattern is compared with; speed-ups are over the first one.
_PEERS: Mapping[str, Sequence[str]] = {
    "dense": ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn"),
    "sliding_window": ("flash-attn", "flex"),
    "documents": ("flash-attn", "flex"),
    "dilated": ("branch-by-branch", "flex"),
    "block_sparse": ("flex",),
    "hierarchical": ("flex",),
    "adaptive": (),
}
_ON_GPUS = ("sdpa-cudnn", "flex", "flash-attn")
# LongNet's own segments, and a sequence for them.
_MILLION_SEGMENTS = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
_MILLION = {
    "tokens": 2**20,
    "batch": 1,
    "heads": 8,
    "head_dim": 64,
    "dtype": "float16",
    "causal": True,
}


def build_pattern(name: str, causal: bool, tokens: int) -> patterns.Pattern:
    """The pattern of the suite "attention" of that name."""
    if name == "dense":
        return patterns.Dense(causal=causal)
    if name == "sliding_window":
        return patterns.SlidingWindow(window=1024, causal=causal)
    if name == "documents":
        return patterns.Documents(cu_seqlens=document_borders(tokens), causal=causal)
    if name == "block_sparse":
        return patterns.BlockSparse(
            block_size=128, local_blocks=1, global_blocks=1, random_blocks=3, causal=causal
        )
    if name == "hierarchical":
        levels = ((64, 512), (512, 4096), (4096, -1))
        return patterns.Hierarchical(levels=levels, block_size=64, causal=causal)
    if name == "adaptive":
        return patterns.Adaptive(block_size=64, keep=8, causal=causal)
    assert name in ("dilated", "million"), name
    lengths, rates = _MILLION_SEGMENTS if name == "million" else ((2048, 4096, 8192), (1, 2, 4))
    return patterns.Dilated(segment_lengths=lengths, dilation_rates=rates, causal=causal)


def pattern_subject(
    *,
    pattern: str,
    operator: str,
    direction: str,
    tokens: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
    device: str,
    seed: int,
) -> Subject:
    """A pattern of `build_pattern`, see `attention_subject`."""
    made = build_pattern(pattern, causal, tokens)
    case = Case(made, tokens, batch, heads, head_dim, dtype, device)
    return operator_subject(case, operator, direction, seed)


@dataclass(frozen=True)
class _Grid:
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    causal: tuple[bool, ...]
    batch_tokens: int  # B = max(1, this // T)
    width: int  # H = this // D
    has_flex: bool = True


def _grid(request: Request) -> _Grid:
    if request.where.type == "cuda":
        if request.quick:
            # FlexAttention compiles for half a minute in each case.
            return _Grid((2048, 8192), (128,), (True,), 16384, 2048, has_flex=False)
        return _Grid(tuple(2**n for n in range(9, 18)), (64, 128), (False, True), 16384, 2048)
    if request.quick:
        return _Grid((256, 1024), (64,), (True,), 1024, 128)
    return _Grid((1024, 4096, 16384), (64,), (True,), 4096, 256)


def _plan(request: Request) -> Iterator[Comparison]:
    grid, is_cuda = _grid(request), request.where.type == "cuda"
    product = itertools.product(grid.head_dims, _PEERS, grid.causal, grid.lengths, DIRECTIONS)
    for number, (head_dim, pattern, causal, tokens, direction) in enumerate(product):
        peers = [
            peer
            for peer in _PEERS[pattern]
            if (grid.has_flex or peer != "flex")
            # What runs on GPUs alone says so once.
            and (is_cuda or number == 0 or peer not in _ON_GPUS)
        ]
        shape = {
            "tokens": tokens,
            "batch": max(1, grid.batch_tokens // tokens),
            "heads": grid.width // head_dim,
            "head_dim": head_dim,
            "dtype": default_dtype(request),
            "causal": causal,
        }
        yield _comparison(pattern, direction, peers, shape)
    if is_cuda:
        for direction in DIRECTIONS:
            yield _comparison("million", direction, (), _MILLION)


def _comparison(
    pattern: str, direction: str, peers: Sequence[str], shape: Mapping[str, Any]
) -> Comparison:
    reach = "causal" if shape["causal"] else "full"
    place = f"{pattern}/{reach}/D{shape['head_dim']}/T{shape['tokens']}/{direction}"
    measurements = [
        Measurement(
            f"{place}/{operator}",
            pattern_subject,
            {"pattern": pattern, "operator": operator, "direction": direction, **shape},
            {"section": "attention"},
        )
        for operator in ("dpflash", *peers)
    ]
    return Comparison(measurements, f"{place}/{peers[0]}" if peers else None)


def is_small(request: Request) -> bool:
    """Whether sizes are to be small: what a GPU looks at quickly are fewer trials."""
    return request.quick and request.where.type == "cpu"


def default_dtype(request: Request) -> str:
    """float16 on GPUs, as in the reports; float32 on the CPU, whose products of it are slow."""
    return "float16" if request.where.type == "cuda" else "float32"


SHAPE = (
    config("tokens", "T"),
    config("batch", "B"),
    config("heads", "H"),
    config("head_dim", "D"),
    config("dtype"),
)

SUITE = Suite(
    name="attention",
    title="Attention: every pattern, beside SDPA, FlexAttention and flash-attn",
    about=(
        "Each row's output and gradients are compared with the definition in float64 before "
        "anything is timed: at every query row of a short sequence, at 64 of a long one, one "
        "drawn from each of as many equal parts (do is 0 at the others, so that the gradients of "
        "all keys are exact); in every sample and head of a small problem, and of a large one in "
        "so many (sample, head) that each sample and each head is among them. All else has to be "
        "finite. Dilated "
        "attention counts a key once for each branch, in FlexAttention too. GFLOP/s count the "
        "pairs that the pattern has, 4 D each forward and 10 D backward; bytes are those of q, k, "
        "v, o and gradients. A speed-up is over the first peer of the pattern."
    ),
    plan=_plan,
    tables=(
        Table(
            "attention",
            "Patterns",
            (
                config("pattern"),
                config("causal"),
                config("direction"),
                *SHAPE,
                config("operator"),
                *FIGURES,
                SPEEDUP,
                *ROOFS,
                column("density"),
                column("checked_rows", "checked rows"),
                column("checked_pairs", "of B H"),
                *CORRECT,
            ),
        ),
    ),
    charts=[
        Chart(
            "attention",
            f"Causal, {direction}",
            config("tokens", "T"),
            ("ms", of_curve(direction=direction, causal=True)),
            lambda row: f"{row['config']['pattern']} {row['config']['operator']}",
        )
        for direction in DIRECTIONS
    ],
)

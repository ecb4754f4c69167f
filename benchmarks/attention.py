"""Attention as a benchmark's subject, and the benchmark of every pattern beside its peers.

Letters: B samples, H heads, T tokens, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpflash import _validate, patterns
from dpflash.nn import MultiheadAttention

from .attention_cases import TOLERANCES, Case, check, document_borders, reference
from .attention_module import module_subject
from .document import CORRECT, FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config, fitted_row
from .named_variants import variant_named
from .peers import FORWARD_ONLY, PEERS, build_run
from .suite import Comparison, Measurement, Request, Row, Subject, Suite, worst
from .work import Work, attention_flops

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
        module = MultiheadAttention(
            heads * head_dim,
            heads,
            pattern=case.pattern,
            device=device,
            dtype=getattr(torch, dtype),
        )
        return module_subject(case, module, backward=_goes_backward(direction), seed=seed)
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
        return worst(check(run, inputs, expected).values())

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
            **case.figures(len(case.checked_pairs())),
            "gradient": "detached" if is_detached and backward else None,
            "operator": operator,
        },
    )


def _goes_backward(direction: str) -> bool:
    _validate.one_of(direction=(direction, DIRECTIONS))
    return direction == "forward+backward"


def exponent_row(section: str, curve: str, rows: Sequence[Row], size: str) -> Row:
    """A row of section "exponents": how the time of a curve of a section grows with a size."""
    return fitted_row(
        f"exponents/{section}/{curve}",
        rows,
        size,
        section="exponents",
        curve=f"{section}, {curve}",
    )


def of_curve(key: str = "median_ms", **values: object) -> Callable[[Mapping[str, Any]], Any]:
    """A row's figure if its config has these values, else None; for charts."""

    def figure(row: Mapping[str, Any]) -> Any:
        fits = all(row["config"].get(name) == value for name, value in values.items())
        return row.get(key) if fits else None

    return figure


# What each pattern is compared with; speed-ups are over the first one.
_BESIDE: Mapping[str, Sequence[str]] = {
    "dense": ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn"),
    "sliding_window": ("flash-attn", "flex"),
    "documents": ("flash-attn", "flex"),
    "dilated": ("branch-by-branch", "flex"),
    "block_sparse": ("flex",),
    "hierarchical": ("flex",),
    "adaptive": (),
}
_ON_GPUS = ("sdpa-cudnn", "flex", "flash-attn")
# Of the patterns, see `build_pattern`.
_SHORT, _SHORTER = 4096, 4
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
    """The pattern of the suite "attention" of that name.

    In a short sequence its windows, segments, documents and blocks are a quarter as long, since
    those of a long one would leave nothing out.
    """
    part = _SHORTER if tokens < _SHORT else 1
    if name == "dense":
        return patterns.Dense(causal=causal)
    if name == "sliding_window":
        return patterns.SlidingWindow(window=1024 // part, causal=causal)
    if name == "documents":
        borders = document_borders(tokens, shortest=128 // part, longest=4096 // part)
        return patterns.Documents(cu_seqlens=borders, causal=causal)
    if name == "block_sparse":
        return patterns.BlockSparse(
            block_size=128 // part, local_blocks=1, global_blocks=1, random_blocks=3, causal=causal
        )
    if name == "hierarchical":
        levels = ((64 // part, 512 // part), (512 // part, 4096 // part), (4096 // part, -1))
        return patterns.Hierarchical(levels=levels, block_size=64 // part, causal=causal)
    if name == "adaptive":
        return patterns.Adaptive(block_size=64 // part, keep=8, causal=causal)
    assert name in ("dilated", "million"), name
    lengths, rates = _MILLION_SEGMENTS if name == "million" else ((2048, 4096, 8192), (1, 2, 4))
    return patterns.Dilated(
        segment_lengths=[length // part for length in lengths], dilation_rates=rates, causal=causal
    )


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
        return _Grid(tuple(2**n for n in range(10, 18)), (64, 128), (False, True), 16384, 2048)
    if request.quick:
        return _Grid((1024, 2048), (64,), (True,), 1024, 128)
    return _Grid((1024, 4096, 16384), (64,), (True,), 4096, 256)


def _plan(request: Request) -> Iterator[Comparison]:
    grid, is_cuda = _grid(request), request.where.type == "cuda"
    product = itertools.product(grid.head_dims, _BESIDE, grid.causal, grid.lengths, DIRECTIONS)
    for number, (head_dim, pattern, causal, tokens, direction) in enumerate(product):
        peers = [
            peer
            for peer in _BESIDE[pattern]
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
            {"section": "attention", **({"peer": True} if operator in PEERS else {})},
        )
        for operator in ("dpflash", *peers)
    ]
    return Comparison(measurements, f"{place}/{peers[0]}" if peers else None)


def is_small(request: Request) -> bool:
    """Whether sizes are to be small: what a GPU looks at quickly are fewer trials."""
    return request.quick and request.where.type == "cpu"


def default_dtype(request: Request) -> str:
    """float16 on GPUs; float32 on the CPU, whose products of it are slow."""
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
        "Time and memory of attention over the number of tokens T, for each pattern of "
        "`dpflash.patterns` (which query sees which keys), beside what others compute the same "
        "with: torch's scaled_dot_product_attention (SDPA), FlexAttention, flash-attn, and for "
        "dilated attention LongNet's formula with one flash attention for each branch. *density* "
        "is the share of all T x T pairs that a pattern has; below 4096 tokens its windows, "
        "segments, documents and blocks are a quarter as long, so that it leaves something out "
        "there too. GFLOP/s count the pairs of the pattern, 4 D each forward and 10 D backward; "
        "bytes are those of q, k, v, o and gradients. A speed-up is over the first peer of the "
        "same pattern; peak MiB are what a call adds to its inputs. Dilated attention counts a "
        "key once for each branch, in FlexAttention too.\n\n"
        "Each row's output and gradients are compared with the definition in float64 before "
        "anything is timed: at every query row of a short sequence, at 64 of a long one, one "
        "drawn from each of as many equal parts (do is 0 at the others, so that the gradients of "
        "all keys are exact); in every sample and head of a small problem, and of a large one in "
        "so many (sample, head) that each sample and each head is among them. All else has to be "
        "finite."
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

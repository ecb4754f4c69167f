"""Subjects that measure attention, and the suite "attention": every pattern beside its peers.

Letters: B samples, H heads, T tokens, D head dim, E = H D model dim, R checked query rows.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash import _validate, patterns
from dpflash.nn import MultiheadAttention
from dpflash.patterns import BlockSparse, Dense, Dilated

from .attention_cases import (
    TOLERANCES,
    Case,
    attend_rows,
    band_error,
    check,
    document_borders,
    not_finite,
    reference,
    score_bias,
)
from .document import CORRECT, FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config
from .peers import FORWARD_ONLY, PEERS, build_run
from .suite import Comparison, Measurement, Request, Subject, Suite, Unsupported, worst
from .timing import Step
from .work import Work, attention_flops, count_work

DIRECTIONS = ("forward", "forward+backward")
# q, k, v and o; then do, q, k, v, o and the gradients of q, k and v.
_FORWARD_TENSORS, _BACKWARD_TENSORS = 4, 8
_SPARSE_BLOCK = 128


def operator_subject(case: Case, operator: str, direction: str, seed: int) -> Subject:
    """One of `peers.OPERATORS`, with inputs drawn from the seed."""
    backward = goes_backward(direction)
    run, inputs = build_run(operator, case), case.inputs(seed)
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

    figures = {
        **case.figures(len(case.checked_pairs())),
        "gradient": "detached" if is_detached and backward else None,
        "operator": operator,
    }
    step: Step = both if backward else forward
    tokens = case.batch * case.tokens
    return Subject(step, error, TOLERANCES[case.dtype], tokens, work, case.dtype, figures)


def module_subject(case: Case, direction: str, seed: int) -> Subject:
    """`dpflash.nn.MultiheadAttention` with its projections and the gradients of its parameters."""
    width, dtype = case.heads * case.head_dim, getattr(torch, case.dtype)
    module = MultiheadAttention(
        width, case.heads, pattern=case.pattern, device=case.device, dtype=dtype
    )
    generator = torch.Generator(case.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=width**-0.5, generator=generator)
    shape = (case.batch, case.tokens, width)
    x, do = (
        torch.randn(shape, dtype=dtype, device=case.device, generator=generator) for _ in range(2)
    )
    leaves = {"x": x.requires_grad_(), **dict(module.named_parameters())}
    backward = goes_backward(direction)

    def forward() -> Tensor:
        with torch.no_grad():
            output: Tensor = module(x, x, x)[0]
            return output

    def both() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        module(x, x, x)[0].backward(do)

    def error() -> float:
        rows = case.checked_rows(seed).to(case.device)
        masked = torch.zeros_like(do)
        masked[:, rows] = do[:, rows]
        exact = {name: x.detach().double().requires_grad_(backward) for name, x in leaves.items()}
        with torch.set_grad_enabled(backward):
            output = module(x, x, x)[0]
        errors = [not_finite(output.detach())]
        exact_grads = [torch.zeros_like(x) for x in exact.values()]
        for sample in range(case.batch):
            expected = _module_rows(case, exact, sample, rows)
            errors.append(band_error(output.detach()[sample, rows], expected.detach()))
            if backward:
                loss = (expected * masked[sample, rows].double()).sum()
                grads = torch.autograd.grad(loss, list(exact.values()))
                for total, grad in zip(exact_grads, grads, strict=True):
                    total += grad
        if backward:
            found = torch.autograd.grad(output, list(leaves.values()), masked)
            for ours, theirs in zip(found, exact_grads, strict=True):
                by_sample = zip(ours, theirs, strict=True) if ours.ndim == 3 else [(ours, theirs)]
                errors += [band_error(one, other) for one, other in by_sample]
        return worst(errors)

    step: Step = both if backward else forward
    figures = {**case.figures(case.batch * case.heads), "operator": "multihead"}
    tokens = case.batch * case.tokens
    return Subject(
        step,
        error,
        TOLERANCES[case.dtype],
        tokens,
        lambda: count_work(step),
        case.dtype,
        figures,
    )


def _module_rows(case: Case, exact: Mapping[str, Tensor], sample: int, rows: Tensor) -> Tensor:
    """`[R, E]`: these rows of the module's output for one sample, in float64."""
    projected = F.linear(exact["x"][sample], exact["qkv_proj.weight"], exact["qkv_proj.bias"])
    q, k, v = projected.unflatten(1, (3, case.heads, case.head_dim)).permute(1, 2, 0, 3)
    # This sample is a batch of one.
    bias = score_bias(case, q.unsqueeze(0), k.unsqueeze(0))
    seen = [attend_rows(case, bias, 0, h, rows, q[h], k[h], v[h]) for h in range(case.heads)]
    return F.linear(torch.cat(seen, 1), exact["out_proj.weight"], exact["out_proj.bias"])


def goes_backward(direction: str) -> bool:
    """Whether a direction, one of DIRECTIONS, has a backward."""
    _validate.one_of(direction=(direction, DIRECTIONS))
    return direction == "forward+backward"


def dilated_subject(
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    direction: str,
    causal: bool,
    seed: int,
    **shape: Any,
) -> Subject:
    """LongNet's attention; `shape` is the rest of a `Case`."""
    pattern = Dilated(
        segment_lengths=segment_lengths, dilation_rates=dilation_rates, causal=causal
    )
    return operator_subject(Case(pattern, **shape), "dpflash", direction, seed)


def pattern_subject(
    *, pattern: str, operator: str, direction: str, causal: bool, seed: int, **shape: Any
) -> Subject:
    """A pattern of `build_pattern`; `shape` is the rest of a `Case`."""
    case = Case(build_pattern(pattern, causal, shape["tokens"]), **shape)
    return operator_subject(case, operator, direction, seed)


def build_pattern(name: str, causal: bool, tokens: int) -> patterns.Pattern:
    """A pattern by its name in the suite "attention".

    Below 4,096 tokens its windows, segments, documents and blocks are a quarter as long; those of
    a long sequence would leave nothing out.
    """
    part = 4 if tokens < 4096 else 1
    if name == "dense":
        return Dense(causal=causal)
    if name == "sliding_window":
        return patterns.SlidingWindow(window=1024 // part, causal=causal)
    if name == "documents":
        borders = document_borders(tokens, shortest=128 // part, longest=4096 // part)
        return patterns.Documents(cu_seqlens=borders, causal=causal)
    if name == "block_sparse":
        return BlockSparse(
            block_size=128 // part, local_blocks=1, global_blocks=1, random_blocks=3, causal=causal
        )
    if name == "hierarchical":
        levels = ((64 // part, 512 // part), (512 // part, 4096 // part), (4096 // part, -1))
        return patterns.Hierarchical(levels=levels, block_size=64 // part, causal=causal)
    if name == "adaptive":
        return patterns.Adaptive(block_size=64 // part, keep=8, causal=causal)
    if name == "million":
        return longnet(causal)
    assert name == "dilated", name
    lengths = [length // part for length in (2048, 4096, 8192)]
    return Dilated(segment_lengths=lengths, dilation_rates=(1, 2, 4), causal=causal)


def longnet(causal: bool) -> Dilated:
    """Dilated attention with LongNet's own segments, made for a million tokens."""
    lengths, rates = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)
    return Dilated(segment_lengths=lengths, dilation_rates=rates, causal=causal)


@functools.lru_cache(maxsize=256)
def sparse_pattern(
    tokens: int, causal: bool, percent: int, drawn: bool, block: int = _SPARSE_BLOCK
) -> BlockSparse:
    """The densest block pattern that leaves out at least `percent` of dense attention's pairs.

    It has random blocks and the diagonal if `drawn`, else a window and one global block.

    Raises:
        Unsupported: T is too short for a single block beside the diagonal.
    """
    allowed = Dense(causal=causal).edges(tokens) * (100 - percent) // 100
    fitting = bisect.bisect_right(
        range(-(-tokens // block)),
        allowed,
        key=lambda width: _most_pairs(tokens, causal, drawn, block, width),
    )
    if fitting >= 2:
        return _blocks(causal, drawn, block, fitting - 1)
    enough = next(
        longer
        for longer in itertools.count(-(-tokens // block) * block + block, block)
        if 100 * _most_pairs(longer, causal, drawn, block, 1)
        <= (100 - percent) * Dense(causal=causal).edges(longer)
    )
    beside = "a random block" if drawn else "a block to each side and a global one"
    raise Unsupported(
        f"a longer sequence, from T = {enough:,} on: at T = {tokens:,} nothing leaves out "
        f"{percent}% of the pairs and sees {beside} beside the own block of {block} tokens"
    )


def _blocks(causal: bool, drawn: bool, block: int, width: int) -> BlockSparse:
    if drawn:
        return BlockSparse(block_size=block, local_blocks=0, random_blocks=width, causal=causal)
    return BlockSparse(block_size=block, local_blocks=width, global_blocks=1, causal=causal)


def _most_pairs(tokens: int, causal: bool, drawn: bool, block: int, width: int) -> int:
    """Pairs of one head; random blocks differ from head to head, and the most possible count."""
    if not drawn:
        return _blocks(causal, drawn, block, width).edges(tokens)
    own = _blocks(causal, drawn, block, 0).edges(tokens)
    count = -(-tokens // block)
    return own + block**2 * sum(min(width, i if causal else count) for i in range(count))


def is_small(request: Request) -> bool:
    """Whether sizes are small: in a quick run on a CPU. A quick run on a GPU has fewer trials."""
    return request.quick and request.where.type == "cpu"


def default_dtype(request: Request) -> str:
    """float16 on a GPU; float32 on a CPU, which multiplies float16 slowly."""
    return "float16" if request.where.type == "cuda" else "float32"


def of_curve(key: str = "median_ms", **values: object) -> Callable[[Mapping[str, Any]], Any]:
    """For charts: a row's column if its config has these values, else None."""

    def figure(row: Mapping[str, Any]) -> Any:
        fits = all(row["config"].get(name) == value for name, value in values.items())
        return row.get(key) if fits else None

    return figure


# The peers of each pattern; speed-ups are over the first one.
_PEERS_OF: Mapping[str, Sequence[str]] = {
    "dense": ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn"),
    "sliding_window": ("flash-attn", "flex"),
    "documents": ("flash-attn", "flex"),
    "dilated": ("branch-by-branch", "flex"),
    "block_sparse": ("flex",),
    "hierarchical": ("flex",),
    "adaptive": (),
}
_ON_GPUS = ("sdpa-cudnn", "flex", "flash-attn")
_MILLION = {"tokens": 2**20, "batch": 1, "heads": 8, "head_dim": 64, "dtype": "float16"}


def _plan(request: Request) -> Iterator[Comparison]:
    is_cuda, quick = request.where.type == "cuda", request.quick
    # B = max(1, batch_tokens // T) and H = width // D.
    if is_cuda:
        batch_tokens, width = 16384, 2048
        lengths = (2048, 8192) if quick else tuple(2**n for n in range(10, 18))
        head_dims, reaches = ((128,), (True,)) if quick else ((64, 128), (False, True))
    else:
        batch_tokens, width = (1024, 128) if quick else (4096, 256)
        lengths = (1024, 2048) if quick else (1024, 4096, 16384)
        head_dims, reaches = (64,), (True,)
    product = itertools.product(head_dims, _PEERS_OF, reaches, lengths, DIRECTIONS)
    for number, (head_dim, pattern, causal, tokens, direction) in enumerate(product):
        peers = [
            peer
            for peer in _PEERS_OF[pattern]
            # FlexAttention compiles for half a minute in each case.
            if not (peer == "flex" and quick and is_cuda)
            # On a CPU, only the first comparison says that a peer needs a GPU.
            and (is_cuda or number == 0 or peer not in _ON_GPUS)
        ]
        shape = {
            "tokens": tokens,
            "batch": max(1, batch_tokens // tokens),
            "heads": width // head_dim,
            "head_dim": head_dim,
            "dtype": default_dtype(request),
            "causal": causal,
        }
        yield _comparison(pattern, direction, peers, shape)
    if is_cuda:
        for direction in DIRECTIONS:
            yield _comparison("million", direction, (), {**_MILLION, "causal": True})


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
        "Time and memory of every pattern of `dpflash.patterns` over the number of tokens T, "
        "beside peers that compute the same: torch's scaled_dot_product_attention (SDPA), "
        "FlexAttention, flash-attn, and for dilated attention LongNet's formula with one flash "
        "attention for each branch. *density* is the part of all T x T pairs that a pattern has. "
        "Below 4096 tokens windows, segments, documents and blocks are a quarter as long. GFLOP/s "
        "count the pairs of the pattern, 4 D each forward and 10 D backward; bytes are those of "
        "q, k, v, o and gradients. Speed-ups are over the first peer of the same pattern; peak "
        "MiB are what a call adds to its inputs.\n\n"
        "Each row's output and gradients are compared with the definition in float64 before "
        "anything is timed: in every query row of a short sequence, in 64 drawn rows of a long "
        "one (do is 0 in the others, so that the gradients of all keys are exact); in every "
        "sample and head of a small problem, and in each sample and each head at least once of a "
        "large one. Everything else has to be finite."
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

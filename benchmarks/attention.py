"""Calls of attention to measure, and the suite "attention": all patterns and other libraries.

Letters: B samples, H heads, T tokens, D head dim, E = H D model dim, R checked query rows.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpflash import _validate, patterns
from dpflash.patterns import BlockSparse, Dense, Dilated

from .attention_cases import TOLERANCES, Case, check, document_borders
from .document import FIGURES, ROOFS, SPEEDUP, chart, columns, page
from .peers import PEERS, build_run
from .suite import Comparison, Request, Subject, Suite, Unsupported, compared, worst
from .timing import Step
from .work import Work, attention_flops

DIRECTIONS = ("forward", "forward+backward")
# Tensors read or written: q, k, v, o by a forward, also do, dq, dk and dv by a backward.
_FORWARD_TENSORS, _BACKWARD_TENSORS = 4, 8
_SPARSE_BLOCK = 128
# The segment lengths of LongNet's paper, which were chosen for a million tokens.
_LENGTHS = (2048, 4096, 8192, 16384, 32768)
LONGNET = partial(Dilated, segment_lengths=_LENGTHS, dilation_rates=(1, 2, 4, 6, 12))


def operator_subject(case: Case, operator: str, direction: str, seed: int) -> Subject:
    """Return a `Subject` that calls an attention of `peers.OPERATORS` on random inputs."""
    backward = goes_backward(direction)
    run, inputs = build_run(operator, case), case.inputs(seed, with_do=backward)
    q, k, v = inputs[:3]

    def forward() -> Tensor:
        with torch.no_grad():
            return run(q, k, v)

    def both() -> object:
        return torch.autograd.grad(run(q, k, v), (q, k, v), inputs[3])

    def error() -> float:
        return worst(check(case, run, inputs, with_grads=backward, seed=seed).values())

    def work() -> Work:
        tensors = _FORWARD_TENSORS + _BACKWARD_TENSORS * backward
        flops = attention_flops(case.pairs, case.head_dim, forward=True, backward=backward)
        return Work(flops, float(tensors * case.bytes_of_a_tensor))

    figures = {
        "operator": operator,
        "pattern_key": case.pattern.key,
        "pairs": case.pairs,
        "density": case.pairs / (case.batch * case.heads * case.tokens**2),
        "checked_rows": len(case.checked_rows()),
    }
    step: Step = both if backward else forward
    tolerance, tokens = TOLERANCES[case.dtype], case.batch * case.tokens
    return Subject(step, error, tolerance, tokens, work, case.dtype, figures)


def goes_backward(direction: str) -> bool:
    """Whether `direction`, one of DIRECTIONS, includes a backward."""
    _validate.one_of(direction=(direction, DIRECTIONS))
    return direction == "forward+backward"


def dilated_subject(
    *, segment_lengths: Sequence[int], dilation_rates: Sequence[int], causal: bool, **given: Any
) -> Subject:
    """Return the subject that calls LongNet's attention with these segments and rates."""
    pattern = Dilated(
        segment_lengths=segment_lengths, dilation_rates=dilation_rates, causal=causal
    )
    return case_subject(pattern, "dpflash", **given)


def pattern_subject(*, pattern: str, operator: str, causal: bool, **given: Any) -> Subject:
    """Return the subject that calls an operator with a pattern of `build_pattern`."""
    return case_subject(build_pattern(pattern, causal, given["tokens"]), operator, **given)


def case_subject(
    pattern: patterns.Pattern, operator: str, *, direction: str, seed: int, **shape: Any
) -> Subject:
    """Return a `Subject` that calls an operator; `shape` has the other fields of `Case`."""
    return operator_subject(Case(pattern, **shape), operator, direction, seed)


def build_pattern(name: str, causal: bool, tokens: int) -> patterns.Pattern:
    """Return a pattern by its name in the suite "attention".

    Below 4,096 tokens, windows, segments, documents and blocks are a quarter as long. Otherwise
    a pattern could include all pairs.
    """
    if name == "documents":
        part = 4 if tokens < 4096 else 1
        borders = document_borders(tokens, shortest=128 // part, longest=4096 // part)
        return patterns.Documents(cu_seqlens=borders, causal=causal)
    return patterns.from_text(name, causal=causal, tokens=tokens)


@functools.lru_cache(maxsize=256)
def sparse_pattern(
    tokens: int, causal: bool, percent: int, drawn: bool, block: int = _SPARSE_BLOCK
) -> BlockSparse:
    """Return the densest block pattern that omits at least `percent`% of the (query, key) pairs.

    If `drawn`, the pattern has random blocks and the diagonal, else a window and a global block.
    """

    def blocks(width: int) -> BlockSparse:
        near, drawn_blocks = (0, width) if drawn else (width, 0)
        return BlockSparse(
            block_size=block,
            local_blocks=near,
            global_blocks=int(not drawn),
            random_blocks=drawn_blocks,
            causal=causal,
        )

    def fits(tokens: int, width: int) -> bool:
        pairs, count = blocks(0 if drawn else width).edges(tokens), -(-tokens // block)
        if drawn:
            # Heads differ in the number of distinct random blocks: count the largest number.
            pairs += block**2 * sum(min(width, i if causal else count) for i in range(count))
        return 100 * pairs <= Dense(causal=causal).edges(tokens) * (100 - percent)

    count = -(-tokens // block)
    width = bisect.bisect_left(range(count), True, key=lambda width: not fits(tokens, width)) - 1
    if width >= 1:
        return blocks(width)
    raise Unsupported(
        f"a longer sequence: at T = {tokens:,}, only patterns that omit less than {percent}% of "
        f"the pairs have a block of {block} tokens beside their diagonal"
    )


def is_small(request: Request) -> bool:
    """Whether a run has small sizes, as quick runs on a CPU do. Quick runs on a GPU do not."""
    return request.quick and request.where.type == "cpu"


def shape(
    request: Request, direction: str, *size: int, head_dim: int = 64, causal: bool = False
) -> dict[str, Any]:
    """Return the config of a measurement, except its pattern; `size` is (T, B, H).

    The dtype is float16 on a GPU, and float32 on a CPU, which multiplies float16 slowly.
    """
    tokens, batch, heads = size
    return {
        "direction": direction,
        "tokens": tokens,
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": "float16" if request.where.type == "cuda" else "float32",
        "causal": causal,
    }


# The peers of each pattern; speed-ups are over the first peer.
_PEERS_OF: Mapping[str, Sequence[str]] = {
    "dense": ("sdpa-flash", "sdpa-cudnn", "flex"),
    "sliding_window": ("flex",),
    "documents": ("flex",),
    "dilated": ("flex",),
    "block_sparse": ("flex",),
    "hierarchical": ("flex",),
    "adaptive": (),
}
_ON_GPUS = ("sdpa-cudnn", "flex")


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
    sizes = [(tokens, max(1, batch_tokens // tokens)) for tokens in lengths]
    shapes = [*itertools.product(head_dims, _PEERS_OF, reaches, sizes)]
    if not is_cuda:  # short sequences with one sample and head, as in a small model
        shapes += [(64, "dense", True, (tokens, 1)) for tokens in (1, 16, 128)]
    for (head_dim, pattern, causal, (tokens, batch)), direction in itertools.product(
        shapes, DIRECTIONS
    ):
        peers = [
            peer
            for peer in _PEERS_OF[pattern]
            # FlexAttention takes half a minute to compile each case on a GPU.
            if not (peer == "flex" and quick and is_cuda) and (is_cuda or peer not in _ON_GPUS)
        ]
        size = tokens, batch, width // head_dim if tokens >= min(lengths) else 1
        given = shape(request, direction, *size, head_dim=head_dim, causal=causal)
        reach = "causal" if causal else "full"
        place = f"{pattern}/{reach}/D{head_dim}/T{tokens}/{direction}"
        operators, baseline = ("dpflash", *peers), peers[0] if peers else None
        own = (operators, {"pattern": pattern, **given}, "attention", baseline)
        yield compared(place, pattern_subject, "operator", *own, peers=PEERS)


SHAPE = columns("tokens: T | batch: B | heads: H | head_dim: D | dtype")
_COLUMNS = columns(
    "pattern | causal | direction",
    SHAPE,
    "operator",
    FIGURES,
    [SPEEDUP],
    ROOFS,
    "density | checked_rows: checked rows | correct",
)
SUITE = Suite(
    name="attention",
    **page("attention", {"attention": _COLUMNS}),
    plan=_plan,
    charts=[
        chart(
            "attention",
            f"Causal, {direction}",
            "tokens: T",
            "median_ms: ms",
            "pattern operator",
            only={"direction": direction, "causal": True},
        )
        for direction in DIRECTIONS
    ],
)

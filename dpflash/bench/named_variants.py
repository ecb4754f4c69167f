"""The attention variants that the reports name, and what is run for each. T tokens."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpflash.patterns import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Hierarchical,
    Pattern,
)

from .suite import Unsupported

# Of LongNet as the report has it, and of its block-sparse attention.
_LENGTHS, _RATES = (2048, 4096, 8192), (1, 2, 4)
_WINDOW, _BLOCK = 256, 64
_LOCAL_BLOCKS = _WINDOW // _BLOCK // 2
_LEVELS = ((64, 256), (256, 1024), (1024, -1))
_KEPT = 10  # one of so many blocks
_SPARSE_BLOCK = 128
_ONE_WORKER = "on one worker that operator, on more see `dpflash bench scaling`"


@dataclass(frozen=True)
class Variant:
    """A name of the reports, and what is run for it.

    Attributes:
        name: in tables and on the command line.
        about: what the report's class does, and what is run instead.
        pattern: of T and whether it is causal; may raise `Unsupported`.
        operator: one of `peers.OPERATORS`, or "multihead" for a module with its projections.
        same_as: another variant that is the same operator on one worker, and is measured for both.
    """

    name: str
    about: str
    pattern: Callable[[int, bool], Pattern]
    operator: str = "dpflash"
    same_as: str | None = None


def _dense(tokens: int, causal: bool) -> Pattern:
    return Dense(causal=causal)


def _dilated(tokens: int, causal: bool) -> Pattern:
    return Dilated(segment_lengths=_LENGTHS, dilation_rates=_RATES, causal=causal)


def _grouped(tokens: int, causal: bool) -> Pattern:
    return Dilated(segment_lengths=_LENGTHS, dilation_rates=_RATES, causal=causal, heads="grouped")


def _local(tokens: int, causal: bool) -> Pattern:
    return BlockSparse(block_size=_BLOCK, local_blocks=_LOCAL_BLOCKS, causal=causal)


def _local_global(tokens: int, causal: bool) -> Pattern:
    return BlockSparse(
        block_size=_BLOCK, local_blocks=_LOCAL_BLOCKS, global_blocks=1, causal=causal
    )


def _hierarchical(tokens: int, causal: bool) -> Pattern:
    return Hierarchical(levels=_LEVELS, block_size=_BLOCK, causal=causal)


def _adaptive(tokens: int, causal: bool) -> Pattern:
    keep = max(1, -(-tokens // _BLOCK) // _KEPT)
    return Adaptive(block_size=_BLOCK, keep=keep, causal=causal)


@functools.lru_cache(maxsize=256)
def sparse_pattern(tokens: int, causal: bool, percent: int, drawn: bool) -> Pattern:
    """The densest pattern of blocks that leaves out so much of dense attention.

    Args:
        tokens: T.
        causal: no query sees a later key.
        percent: of dense attention's pairs (causal or not, as `causal` says) that are left out
            at least.
        drawn: random blocks, and each block itself; else a window and one global block.

    Raises:
        Unsupported: T has too few blocks of 128 tokens for that.
    """
    blocks = -(-tokens // _SPARSE_BLOCK)
    allowed = Dense(causal=causal).edges(tokens) * (100 - percent) // 100

    def pattern(width: int) -> BlockSparse:
        if drawn:
            return BlockSparse(
                block_size=_SPARSE_BLOCK, local_blocks=0, random_blocks=width, causal=causal
            )
        return BlockSparse(
            block_size=_SPARSE_BLOCK, local_blocks=width, global_blocks=1, causal=causal
        )

    def pairs(width: int) -> int:
        if not drawn:
            return pattern(width).edges(tokens)
        # Drawn blocks differ from head to head; so many are seen at most.
        own = pattern(0).edges(tokens)
        seen = sum(min(width, block if causal else blocks) for block in range(blocks))
        return own + seen * _SPARSE_BLOCK**2

    fitting = bisect.bisect_right(range(blocks), allowed, key=pairs)
    if fitting == 0:
        raise Unsupported(f"a longer sequence: {blocks} blocks cannot leave out {percent}%")
    return pattern(fitting - 1)


def _sparse(percent: int, *, drawn: bool) -> Variant:
    what = "each block itself and random blocks" if drawn else "a window and a global block"
    return Variant(
        f"Sparse{'Random' * drawn}{percent}",
        "the report masks all scores and leaves out no work. Here: "
        f"{what} of {_SPARSE_BLOCK} tokens, of which {percent}% of the pairs of dense attention "
        "or just above are neither seen nor computed",
        lambda tokens, causal: sparse_pattern(tokens, causal, percent, drawn),
    )


_ALL = (
    Variant(
        "SDPA",
        "torch's own dense attention, its flash backend pinned",
        _dense,
        operator="sdpa-flash",
    ),
    Variant("Dense", "dense attention by dpflash", _dense),
    Variant(
        "DilatedAttention",
        "the report's class shares heads out over segments, divides by their number, and refuses "
        "T that the longest does not divide. Here: LongNet's operator, all segments in every "
        "head, [2048, 4096, 8192] / [1, 2, 4], any T",
        _dilated,
    ),
    Variant(
        "BranchByBranch",
        "of no report: LongNet's formula in plain torch, one flash attention for each branch, "
        "mixed by their sums, with its true gradient; what DilatedAttention is compared with",
        _dilated,
        operator="branch-by-branch",
    ),
    Variant(
        "BranchByBranchDetached",
        "the same formula as torchscale has it: no gradient flows through the weights of the "
        "branches, so its gradient is another function's, and only its output is checked",
        _dilated,
        operator="branch-by-branch-detached",
    ),
    Variant(
        "GroupedDilatedAttention",
        "what the report's class means by sharing heads out: a head has one segment length, "
        "and nothing is divided",
        _grouped,
    ),
    Variant(
        "ImprovedDilatedAttention",
        "the report's class attends over heads instead of tokens. Made right it is "
        "DilatedAttention, which runs as one fused operator anyway",
        _dilated,
        same_as="DilatedAttention",
    ),
    Variant(
        "MultiheadDilatedAttention",
        "dpflash.nn.MultiheadAttention with DilatedAttention's pattern, projections included",
        _dilated,
        operator="multihead",
    ),
    Variant(
        "RingDilatedAttention",
        "the report's class gathers all keys and values on every worker, without gradients. "
        f"Here: ring_attention with DilatedAttention's pattern; {_ONE_WORKER}",
        _dilated,
        operator="ring",
        same_as="DilatedAttention",
    ),
    Variant(
        "RingDilatedAttentionV2",
        "the report's class is four independent pieces of the sequence on one GPU. Made right it "
        "is RingDilatedAttention",
        _dilated,
        operator="ring",
        same_as="DilatedAttention",
    ),
    Variant(
        "HybridRingDilated",
        "the report's class receives into the buffer that it sends. Made right it is "
        "RingDilatedAttention",
        _dilated,
        operator="ring",
        same_as="DilatedAttention",
    ),
    Variant(
        "BlockSparse",
        "the report's classes add up a softmax for each pair of blocks. Here: one softmax over "
        "the union of a window of 256 tokens and a global block, blocks of 64",
        _local_global,
    ),
    Variant(
        "BlockSparseOptimized",
        "the report's local_window: a window of 256 tokens in blocks of 64, batched; here in one "
        "softmax",
        _local,
    ),
    Variant(
        "BlockSparseRing",
        "the report's class sends nothing and is the same window. Here: ring_attention with "
        f"BlockSparseOptimized's pattern; {_ONE_WORKER}",
        _local,
        operator="ring",
        same_as="BlockSparseOptimized",
    ),
    Variant(
        "BlockSparseHierarchical",
        "levels of (stride, window) (64, 256), (256, 1024), (1024, all) in blocks of 64, in one "
        "softmax; causal too, which the report's class refuses",
        _hierarchical,
    ),
    Variant(
        "BlockSparseAdaptive",
        "the report's class chooses for the whole batch by a network that gets no gradient. Here: "
        "each sample and head chooses its own tenth of the blocks by scores of their means, with "
        "a gradient",
        _adaptive,
    ),
    Variant(
        "Ring",
        "the report's figures are not of code that ran. Here: ring_attention, dense; "
        f"{_ONE_WORKER}",
        _dense,
        operator="ring",
        same_as="Dense",
    ),
    *(_sparse(percent, drawn=drawn) for drawn in (False, True) for percent in (50, 75, 90)),
)

VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in _ALL}


def variant_named(name: str) -> Variant:
    """One of VARIANTS.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in VARIANTS:
        raise ValueError(f"variant={name!r}: expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]

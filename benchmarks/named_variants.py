"""The attention variants that published tables name, and what is run for each. T tokens."""

from __future__ import annotations

import bisect
import functools
import itertools
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

# Of LongNet as those tables have it, and of their block-sparse attention.
_LENGTHS, _RATES = (2048, 4096, 8192), (1, 2, 4)
_WINDOW, _BLOCK = 256, 64
_LOCAL_BLOCKS = _WINDOW // _BLOCK // 2
_LEVELS = ((64, 256), (256, 1024), (1024, -1))
_KEPT = 10  # one of so many blocks
_SPARSE_BLOCK = 128
_THEIRS = "dilated-attention-pytorch's class"
_ONE_WORKER = "on one worker that operator, on more see `dpflash bench scaling`"


@dataclass(frozen=True)
class Variant:
    """A name of published tables, and what is run for it.

    Attributes:
        name: in tables and on the command line.
        about: what the class of that name does elsewhere, and what is run here instead.
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
def sparse_pattern(
    tokens: int, causal: bool, percent: int, drawn: bool, block: int = _SPARSE_BLOCK
) -> Pattern:
    """The densest pattern of blocks that leaves out so much of dense attention.

    Args:
        tokens: T.
        causal: no query sees a later key.
        percent: of dense attention's pairs (causal or not, as `causal` says) that are left out
            at least.
        drawn: random blocks, and each block itself; else a window and one global block.
        block: tokens in a block.

    Raises:
        Unsupported: T has too few blocks for a block beside the own one, drawn or in the window.
    """
    fitting = bisect.bisect_right(
        range(-(-tokens // block)),
        Dense(causal=causal).edges(tokens) * (100 - percent) // 100,
        key=lambda width: _most_pairs(tokens, causal, drawn, block, width),
    )
    if fitting < 2:
        raise Unsupported(_too_short(tokens, causal, percent, drawn, block))
    return _blocks(causal, drawn, block, fitting - 1)


def _blocks(causal: bool, drawn: bool, block: int, width: int) -> BlockSparse:
    if drawn:
        return BlockSparse(block_size=block, local_blocks=0, random_blocks=width, causal=causal)
    return BlockSparse(block_size=block, local_blocks=width, global_blocks=1, causal=causal)


def _most_pairs(tokens: int, causal: bool, drawn: bool, block: int, width: int) -> int:
    """Pairs of a head, of drawn blocks as many as there may be: they differ from head to head."""
    if not drawn:
        return _blocks(causal, drawn, block, width).edges(tokens)
    own = _blocks(causal, drawn, block, 0).edges(tokens)
    count = -(-tokens // block)
    return own + block**2 * sum(min(width, i if causal else count) for i in range(count))


def _too_short(tokens: int, causal: bool, percent: int, drawn: bool, block: int) -> str:
    """From which T on there are blocks enough."""
    enough = next(
        longer
        for longer in itertools.count(-(-tokens // block) * block + block, block)
        if 100 * _most_pairs(longer, causal, drawn, block, 1)
        <= (100 - percent) * Dense(causal=causal).edges(longer)
    )
    beside = "a random block" if drawn else "a block to each side and a global one"
    return (
        f"a longer sequence, from T = {enough:,} on: at T = {tokens:,} nothing leaves out "
        f"{percent}% of the pairs and sees {beside} beside the own block of {block} tokens"
    )


def _sparse(percent: int, *, drawn: bool) -> Variant:
    what = "each block itself and random blocks" if drawn else "a window and a global block"
    return Variant(
        f"Sparse{'Random' * drawn}{percent}",
        "torchbridge's sparse attention computes all scores and masks them, which leaves out no "
        f"work. Here: {what}, blocks of {_SPARSE_BLOCK} tokens; at least {percent}% of the pairs "
        "of dense attention are neither seen nor computed",
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
        f"{_THEIRS} shares heads out over segments, divides by their number, and refuses T that "
        "the longest does not divide. Here: LongNet's operator, all segments in every head, of "
        "2048, 4096 and 8192 tokens at rates 1, 2 and 4, any T",
        _dilated,
    ),
    Variant(
        "BranchByBranch",
        "not in their tables: LongNet's formula in plain torch, one flash attention for each "
        "branch, mixed by their sums, with its true gradient; what DilatedAttention is compared "
        "with",
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
        f"what {_THEIRS} means by sharing heads out: a head has one segment length, and nothing "
        "is divided",
        _grouped,
    ),
    Variant(
        "ImprovedDilatedAttention",
        f"{_THEIRS} attends over heads instead of tokens. Made right it is DilatedAttention, "
        "which runs as one fused operator anyway",
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
        f"{_THEIRS} gathers all keys and values on every worker, without gradients. Here: "
        f"ring_attention with DilatedAttention's pattern; {_ONE_WORKER}",
        _dilated,
        operator="ring",
        same_as="DilatedAttention",
    ),
    Variant(
        "RingDilatedAttentionV2",
        f"{_THEIRS} is four independent pieces of the sequence on one GPU. Made right it is "
        "RingDilatedAttention",
        _dilated,
        operator="ring",
        same_as="DilatedAttention",
    ),
    Variant(
        "HybridRingDilated",
        "ring-attention and dilated attention together, which in dilated-attention-pytorch "
        "receives into the buffer that it sends. Made right it is RingDilatedAttention",
        _dilated,
        operator="ring",
        same_as="DilatedAttention",
    ),
    Variant(
        "BlockSparse",
        f"{_THEIRS} adds up a softmax for each pair of blocks. Here: one softmax over the union "
        "of a window of 256 tokens and a global block, blocks of 64",
        _local_global,
    ),
    Variant(
        "BlockSparseOptimized",
        "dilated-attention-pytorch's local_window, a window of 256 tokens in blocks of 64; here "
        "in one softmax",
        _local,
    ),
    Variant(
        "BlockSparseRing",
        f"{_THEIRS} sends nothing and is the same window. Here: ring_attention with "
        f"BlockSparseOptimized's pattern; {_ONE_WORKER}",
        _local,
        operator="ring",
        same_as="BlockSparseOptimized",
    ),
    Variant(
        "BlockSparseHierarchical",
        "levels of (stride, window) (64, 256), (256, 1024), (1024, all) in blocks of 64, in one "
        f"softmax; causal too, which {_THEIRS} refuses",
        _hierarchical,
    ),
    Variant(
        "BlockSparseAdaptive",
        f"{_THEIRS} chooses for the whole batch by a network that gets no gradient. Here: each "
        "sample and head chooses its own tenth of the blocks by scores of their means, with a "
        "gradient",
        _adaptive,
    ),
    Variant(
        "Ring",
        "torchbridge publishes figures of it, but no code that makes them. Here: "
        f"ring_attention, dense; {_ONE_WORKER}",
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

"""Attention problems, their definition in float64, and the check that every result must pass.

The definition does not use the library's tile graphs. Letters: B samples, H heads, T tokens, D
head dim, R checked query rows, n blocks in a sequence, K blocks that a block of queries attends.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.patterns import (
    Adaptive,
    BlockSparse,
    Dense,
    Dilated,
    Documents,
    Hierarchical,
    Pattern,
    SlidingWindow,
)

from .suite import Unsupported

# The largest allowed relative error in each of BANDS groups of consecutive rows.
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
BANDS = 8
# Up to CHECKED_TOKENS tokens, all query rows are checked; in longer sequences, CHECKED_ROWS rows.
CHECKED_TOKENS, CHECKED_ROWS = 1024, 64

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
# Function of (head, query, key): how often the key counts in the query's softmax, elementwise.
Multiplicity = Callable[[Any, Any, Any], Tensor]
# Function of (sample, head, rows, q, k): the term [R, T] added to a head's scores.
Bias = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One attention problem, which all implementations under comparison solve."""

    pattern: Pattern
    tokens: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    device: str

    @functools.cached_property
    def pairs(self) -> int:
        """The number of pairs (query, key) of the pattern, over all samples and heads."""
        return self.batch * self.pattern.edges(self.tokens, self.heads)

    @property
    def bytes_of_a_tensor(self) -> int:
        """The size in bytes of q, and of every other tensor with q's shape."""
        size = getattr(torch, self.dtype).itemsize
        return self.batch * self.heads * self.tokens * self.head_dim * int(size)

    def inputs(self, seed: int, *, with_do: bool = True) -> list[Tensor]:
        """Return q, k and v, which require gradients, and do; all contiguous `[B, H, T, D]`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.batch, self.heads, self.tokens, self.head_dim)
        given: Any = {"dtype": getattr(torch, self.dtype), "device": self.device}
        leaves = [
            torch.randn(shape, generator=generator, requires_grad=True, **given) for _ in range(3)
        ]
        return [*leaves, *([torch.randn(shape, generator=generator, **given)] * with_do)]

    def checked_rows(self, seed: int = 0) -> Tensor:
        """Return the checked query rows, `[R]`: all rows, or a random row of each of R parts."""
        if self.tokens <= CHECKED_TOKENS:
            return torch.arange(self.tokens)
        borders = [self.tokens * part // CHECKED_ROWS for part in range(CHECKED_ROWS + 1)]
        generator = random.Random(seed)
        return torch.tensor([generator.randrange(a, b) for a, b in itertools.pairwise(borders)])


def document_borders(
    tokens: int, seed: int = 0, *, shortest: int = 128, longest: int = 4096
) -> tuple[int, ...]:
    """Return borders of documents of log-uniform lengths; the last document ends at `tokens`."""
    generator, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        length = round(math.exp(generator.uniform(math.log(shortest), math.log(longest))))
        borders.append(min(borders[-1] + length, tokens))
    return tuple(borders)


def multiplicity(case: Case) -> tuple[Multiplicity, bool]:
    """Return how often each key counts for a query, and whether this differs between heads.

    FlexAttention's masks use the result too. `Adaptive`, which depends on q and k, is refused.
    """
    pattern, per_head = case.pattern, False
    seen: Multiplicity = _all_pairs
    if isinstance(pattern, SlidingWindow):
        seen = _window(pattern)
    elif isinstance(pattern, Documents):
        seen = _documents(pattern, case)
    elif isinstance(pattern, Hierarchical):
        seen = _hierarchical(pattern)
    elif isinstance(pattern, BlockSparse):
        seen = _block_sparse(pattern, case)
        per_head = pattern.random_blocks > 0 or pattern.block_lists is not None
    elif isinstance(pattern, Dilated):
        seen = _dilated(pattern, case)
        per_head = max(pattern.dilation_rates) > 1 or pattern.heads == "grouped"
    elif not isinstance(pattern, Dense):
        raise Unsupported(f"{type(pattern).__name__} has no fixed mask: it chooses from q and k")
    if not pattern.causal:
        return seen, per_head
    if isinstance(pattern, Dilated):
        return (lambda h, i, j: seen(h, i, j) * (j <= i)), per_head
    return (lambda h, i, j: seen(h, i, j) & (j <= i)), per_head


def _all_pairs(h: Any, i: Any, j: Any) -> Tensor:
    return (i >= 0) & (j >= 0)


def _window(pattern: SlidingWindow) -> Multiplicity:
    left, right = pattern.reach
    return lambda h, i, j: (i - j <= left) & (j - i <= right)


def _documents(pattern: Documents, case: Case) -> Multiplicity:
    lengths = torch.tensor(pattern.cu_seqlens).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths).to(case.device)
    return lambda h, i, j: document[i] == document[j]


def _hierarchical(pattern: Hierarchical) -> Multiplicity:
    size = pattern.block_size

    def seen(h: Any, i: Any, j: Any) -> Tensor:
        row, col = i // size, j // size
        found = row == col
        for stride, window in pattern.levels:
            near = (row - col).abs() <= max(1, window // size) // 2
            found = found | ((row % max(1, stride // size) == 0) & (near | (window == -1)))
        return found

    return seen


def _block_sparse(pattern: BlockSparse, case: Case) -> Multiplicity:
    size, blocks = pattern.block_size, dataclasses.replace(pattern, block_size=1)
    table = blocks.mask(-(-case.tokens // size), case.heads).bool().to(case.device)
    return lambda h, i, j: table[h, i // size, j // size]


def _dilated(pattern: Dilated, case: Case) -> Multiplicity:
    branches = list(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
    groups = torch.arange(case.heads).tensor_split(len(branches))
    own = torch.cat([torch.full_like(group, n) for n, group in enumerate(groups)]).to(case.device)

    def seen(h: Any, i: Any, j: Any) -> Tensor:
        count: Any = 0
        for branch, (length, r) in enumerate(branches):
            w = min(length, case.tokens)
            offset = h % r if pattern.offset == "head" else h // -(-case.heads // r)
            live = ((i % w) % r == offset) & ((j % w) % r == offset) & (i // w == j // w)
            if pattern.heads == "grouped":
                live = live & (own[h] == branch)
            count = count + live.to(torch.int32)
        return count.clamp(max=1) if pattern.overlap == "set" else count

    return seen


def attend_rows(
    case: Case, bias: Bias, sample: int, head: int, rows: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return the attention output of the query rows, `[R, D]`, from a head's q, k, v `[T, D]`."""
    scores = case.head_dim**-0.5 * (q[rows] @ k.T) + bias(sample, head, rows, q, k)
    # A fully masked row has the output 0; its softmax would be NaN.
    masked = (scores == -math.inf).all(1, keepdim=True)
    return (scores.masked_fill(masked, 0.0).softmax(1) @ v) * ~masked


def score_bias(case: Case, q: Tensor, k: Tensor) -> Bias:
    """Return the bias of the pattern in scores: the log of how often each key counts."""
    if isinstance(case.pattern, Adaptive):
        return _adaptive_bias(case, case.pattern, q, k)
    seen, _ = multiplicity(case)
    keys = torch.arange(case.tokens, device=case.device)

    def bias(sample: int, head: int, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen(head, rows[:, None], keys[None, :]).double().log()

    return bias


def _adaptive_bias(case: Case, pattern: Adaptive, q: Tensor, k: Tensor) -> Bias:
    """Return the bias for `Adaptive`: the log of the gate (weight) of each chosen key block."""
    size, n = pattern.block_size, -(-case.tokens // pattern.block_size)
    chosen = pattern.choose(q.detach(), k.detach(), case.head_dim**-0.5)[0].long()  # [B, H, n, K]
    keys = torch.arange(case.tokens, device=case.device)

    def bias(sample: int, head: int, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
        blocks = chosen[sample, head]
        q_means, k_means = (torch.stack([b.mean(0) for b in x.split(size)]) for x in (q, k))
        if pattern.causal:
            q_means = F.pad(q_means, (0, 0, 1, 0))[:-1]
        scores = case.head_dim**-0.5 * (q_means.unsqueeze(1) * k_means[blocks.clamp(min=0)]).sum(2)
        gates = torch.cat((torch.zeros_like(scores[:, :1]), F.logsigmoid(scores[:, 1:])), dim=1)
        nowhere = q.new_full((n, n + 1), -math.inf)
        table = nowhere.scatter(1, blocks.masked_fill(blocks < 0, n), gates)
        unseen = (keys[None, :] > rows[:, None]) & pattern.causal
        return table[rows // size][:, keys // size].masked_fill(unseen, -math.inf)

    return bias


def check(
    case: Case, run: Run, inputs: Sequence[Tensor], *, with_grads: bool, seed: int = 0
) -> dict[str, float]:
    """Return the relative errors of o and, with gradients, of dq, dk and dv.

    o is compared with the definition at rows drawn from the seed. The gradient of o is 0 in all
    other rows, so the drawn rows determine dq, dk and dv. Non-finite entries give infinite errors.
    """
    q, k, v = inputs[:3]
    rows = case.checked_rows(seed).to(case.device)
    with torch.set_grad_enabled(with_grads):
        o = run(q, k, v)
    found, masked = {"o": o.detach()}, torch.zeros_like(o)
    if with_grads:
        masked[:, :, rows] = inputs[3][:, :, rows]
        grads = torch.autograd.grad(o, (q, k, v), masked)
        found.update(zip(("dq", "dk", "dv"), grads, strict=True))
    errors = {name: not_finite(x) for name, x in found.items()}
    found["o"] = found["o"][:, :, rows]
    bias = score_bias(case, q, k)
    for sample, head in itertools.product(range(case.batch), range(case.heads)):
        leaves = [x.detach()[sample, head].double().requires_grad_(with_grads) for x in (q, k, v)]
        expected = attend_rows(case, bias, sample, head, rows, *leaves)
        exact = [expected.detach()]
        if with_grads:
            exact += torch.autograd.grad(expected, leaves, masked[sample, head, rows].double())
        for name, value in zip(found, exact, strict=True):
            error = band_error(found[name][sample, head], value, exact[-1])
            errors[name] = max(errors[name], error)
    return errors


def not_finite(x: Tensor) -> float:
    """Return 0 if every entry is finite, else infinity."""
    return 0.0 if bool(x.isfinite().all()) else math.inf


def band_error(x: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest ``|x - expected| / |expected|`` over BANDS groups of consecutive rows.

    In long sequences late rows are small, so an error over all rows would hide them. The divisor
    of a group is at least a hundredth of the root mean square of |expected| over the groups. If
    `expected` is 0 up to rounding (for example dq with a single key), the divisor is |scale|.
    """
    floor = 1e-2 * expected.norm() / math.sqrt(BANDS)
    if scale is not None and expected.norm() < 1e-12 * scale.norm():
        floor = scale.norm()
    worst = 0.0
    for ours, theirs in zip(x.double().chunk(BANDS), expected.chunk(BANDS), strict=True):
        error = ((ours - theirs).norm() / theirs.norm().maximum(floor)).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst

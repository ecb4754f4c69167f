"""The cases of the attention benchmark: patterns, providers, and the check that each row passes.

Letters: B samples, H heads, T tokens, D head dim, R checked query rows, n blocks, K kept blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dpflash
from dpflash import patterns

PATTERNS = (
    "dense",
    "sliding_window",
    "documents",
    "dilated",
    "block_sparse",
    "hierarchical",
    "adaptive",
)
PROVIDERS = ("dpflash", "sdpa-flash", "sdpa-cudnn", "flex", "flash-attn")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Largest relative error that a row may have, in the worst of BANDS bands of rows.
TOLERANCES = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2}
BANDS = 8
# Up to this T every row is checked, beyond it this many.
CHECKED_TOKENS, CHECKED_ROWS = 2048, 64
MILLION = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Multiplicity = Callable[[Any, Any, Any], Tensor]


class Unsupported(Exception):
    """A provider cannot run a case; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """One problem: everything that the providers of a comparison share."""

    pattern: str
    causal: bool
    tokens: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    device: str

    @functools.cached_property
    def definition(self) -> patterns.Pattern:
        """The pattern as the library has it."""
        return build_pattern(self.pattern, self.causal, self.tokens)

    @functools.cached_property
    def edges(self) -> int:
        """Pairs (query, key) that see each other, over all samples and heads."""
        return self.batch * self.definition.edges(self.tokens, self.heads)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def flops(self, direction: str) -> float:
        """On real edges only: 4 D each in the forward, 2.5 times as many in the backward."""
        return {"forward": 4, "backward": 10, "both": 14}[direction] * self.head_dim * self.edges

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (which ask for gradients) and do, `[B, H, T, D]`, contiguous."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.batch, self.heads, self.tokens, self.head_dim)
        made = [
            torch.randn(
                shape, dtype=DTYPES[self.dtype], device=self.device, generator=generator
            ).requires_grad_(position < 3)
            for position in range(4)
        ]
        return made[0], made[1], made[2], made[3]

    def checked_rows(self) -> Tensor:
        """`[R]`: all query rows of a short sequence, a random subset of a long one."""
        if self.tokens <= CHECKED_TOKENS:
            return torch.arange(self.tokens)
        drawn = random.Random(0).sample(range(self.tokens - 1), CHECKED_ROWS - 1)
        return torch.tensor([*sorted(drawn), self.tokens - 1])


def build_pattern(name: str, causal: bool, tokens: int) -> patterns.Pattern:
    """The benchmark's pattern of that name."""
    if name == "dense":
        return patterns.Dense(causal=causal)
    if name == "sliding_window":
        return patterns.SlidingWindow(window=1024, causal=causal)
    if name == "documents":
        return patterns.Documents(cu_seqlens=document_borders(tokens), causal=causal)
    if name == "block_sparse":
        rules = {"local_blocks": 1, "global_blocks": 1, "random_blocks": 3}
        return patterns.BlockSparse(block_size=128, **rules, causal=causal)
    if name == "hierarchical":
        levels = ((64, 512), (512, 4096), (4096, -1))
        return patterns.Hierarchical(levels=levels, block_size=64, causal=causal)
    if name == "adaptive":
        return patterns.Adaptive(block_size=64, keep=8, causal=causal)
    lengths, rates = MILLION if name == "million" else ((2048, 4096, 8192), (1, 2, 4))
    return patterns.Dilated(segment_lengths=lengths, dilation_rates=rates, causal=causal)


def document_borders(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Borders of documents whose lengths are log-uniform from 128 to 4096, the last one cut."""
    generator, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        length = round(math.exp(generator.uniform(math.log(128), math.log(4096))))
        borders.append(min(borders[-1] + length, tokens))
    return tuple(borders)


def multiplicity(case: Case) -> tuple[Multiplicity, bool]:
    """How often key j counts for query i in head h, elementwise, and whether heads differ.

    Written from the definitions, so that it checks the library's tile graphs and gives
    FlexAttention its masks. Not for Adaptive, which chooses from q and k.
    """
    pattern, tokens = case.definition, case.tokens
    per_head = False
    if isinstance(pattern, patterns.Dense):

        def seen(h: Any, i: Any, j: Any) -> Tensor:
            return (i >= 0) & (j >= 0)

    elif isinstance(pattern, patterns.SlidingWindow):
        window = pattern.window

        def seen(h: Any, i: Any, j: Any) -> Tensor:
            return (i - j <= window) & (j - i <= window)

    elif isinstance(pattern, patterns.Documents):
        lengths = torch.tensor(pattern.cu_seqlens).diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths).to(case.device)

        def seen(h: Any, i: Any, j: Any) -> Tensor:
            return document[i] == document[j]

    elif isinstance(pattern, patterns.Dilated):
        per_head = max(pattern.dilation_rates) > 1
        branches = [
            (min(w, tokens), r)
            for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
        ]

        def seen(h: Any, i: Any, j: Any) -> Tensor:
            count: Any = 0
            for w, r in branches:
                live = ((i % w) % r == h % r) & ((j % w) % r == h % r)
                count = count + (live & (i // w == j // w)).to(torch.int32)
            return count

    else:
        table, size = _block_table(case)
        per_head = table.shape[0] > 1

        def seen(h: Any, i: Any, j: Any) -> Tensor:
            return table[h if per_head else 0, i // size, j // size]

    if not case.causal:
        return seen, per_head
    if isinstance(pattern, patterns.Dilated):
        return (lambda h, i, j: seen(h, i, j) * (j <= i)), per_head
    return (lambda h, i, j: seen(h, i, j) & (j <= i)), per_head


def _block_table(case: Case) -> tuple[Tensor, int]:
    """`[H or 1, n, n]`, bool: which blocks see each other, and the size of a block.

    A pattern of blocks sees blocks as the same pattern with blocks of one token sees tokens.
    """
    pattern = case.definition
    if isinstance(pattern, patterns.Hierarchical):
        size = pattern.block_size
        levels = tuple((max(1, s // size), max(w // size, -1)) for s, w in pattern.levels)
        small: patterns.Pattern = dataclasses.replace(pattern, levels=levels, block_size=1)
        heads = 1
    elif isinstance(pattern, patterns.BlockSparse):
        size = pattern.block_size
        small = dataclasses.replace(pattern, block_size=1)
        heads = case.heads if pattern.random_blocks else 1
    else:
        raise Unsupported(f"{case.pattern} has no fixed mask: it chooses from q and k")
    return small.mask(-(-case.tokens // size), heads).bool().to(case.device), size


@dataclass(frozen=True)
class Reference:
    """The definition in float64 at the checked rows, one sample of each head.

    Gradients are those of ``sum(o do)`` over the checked rows alone: with do = 0 elsewhere they
    are exact for every query and key, whatever T.
    """

    rows: Tensor  # [R]
    do: Tensor  # [B, H, T, D], 0 outside of rows
    expected: dict[str, list[Tensor]]  # of each head: o [R, D]; dq, dk, dv [T, D]


def reference(
    case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor, with_grads: bool
) -> Reference:
    """Computes what each provider's result is compared with."""
    rows = case.checked_rows().to(case.device)
    masked = torch.zeros_like(do)
    masked[:, :, rows] = do[:, :, rows]
    bias = _adaptive_bias(case, q, k) if case.pattern == "adaptive" else _bias(case)
    expected: dict[str, list[Tensor]] = {"o": [], "dq": [], "dk": [], "dv": []}
    for head in range(case.heads):
        sample = head % case.batch
        leaves = [x.detach()[sample, head].double().requires_grad_(with_grads) for x in (q, k, v)]
        scores = case.scale * (leaves[0][rows] @ leaves[1].T) + bias(head, rows, *leaves[:2])
        o = scores.softmax(1) @ leaves[2]
        expected["o"].append(o.detach())
        if with_grads:
            grads = torch.autograd.grad((o * masked[sample, head, rows].double()).sum(), leaves)
            for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
                expected[name].append(grad)
    return Reference(rows, masked, expected)


def _bias(case: Case) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    seen, _ = multiplicity(case)
    keys = torch.arange(case.tokens, device=case.device)

    def bias(head: int, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen(head, rows[:, None], keys[None, :]).double().log()

    return bias


def _adaptive_bias(
    case: Case, q: Tensor, k: Tensor
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The log of the gates, as a function of q and k; the blocks as the library chooses them."""
    pattern = case.definition
    assert isinstance(pattern, patterns.Adaptive)
    size, n = pattern.block_size, case.tokens // pattern.block_size
    assert n * size == case.tokens, "whole blocks only"
    chosen = pattern.choose(q.detach(), k.detach(), case.scale)[0].long()  # [B, H, n, K]
    keys = torch.arange(case.tokens, device=case.device)

    def bias(head: int, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
        blocks = chosen[head % case.batch, head]
        q_means, k_means = (x.unflatten(0, (n, size)).mean(1) for x in (q, k))
        if case.causal:
            q_means = F.pad(q_means, (0, 0, 1, 0))[:-1]
        scores = case.scale * (q_means.unsqueeze(1) * k_means[blocks.clamp(min=0)]).sum(2)
        gates = torch.cat((torch.zeros_like(scores[:, :1]), F.logsigmoid(scores[:, 1:])), dim=1)
        nowhere = q.new_full((n, n + 1), -math.inf)
        table = nowhere.scatter(1, blocks.masked_fill(blocks < 0, n), gates)
        unseen = (keys[None, :] > rows[:, None]) & case.causal
        return table[rows // size][:, keys // size].masked_fill(unseen, -math.inf)

    return bias


def check(case: Case, run: Run, inputs: tuple[Tensor, ...], ref: Reference) -> dict[str, float]:
    """The relative error of o and, where the reference has them, dq, dk and dv."""
    q, k, v = inputs[:3]
    found: dict[str, Tensor] = {}
    if ref.expected["dq"]:
        o = run(q, k, v)
        grads = torch.autograd.grad(o, (q, k, v), ref.do)
        found = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    else:
        with torch.no_grad():
            o = run(q, k, v)
    found["o"] = o.detach()[:, :, ref.rows]
    errors: dict[str, float] = {}
    for name in ("o", "dq", "dk", "dv"):
        pairs = [
            band_error(found[name][head % case.batch, head], expected)
            for head, expected in enumerate(ref.expected[name])
        ]
        if pairs:
            errors[name] = max(pairs)
    return errors


def band_error(x: Tensor, expected: Tensor) -> float:
    """``|x - expected| / |expected|`` in the worst of BANDS bands of rows.

    By bands, because the late rows of a long sequence are small and would vanish beside the early
    ones. A band counts as at least a hundredth of the mean one.
    """
    floor = 1e-2 * expected.norm() / math.sqrt(BANDS)
    worst = 0.0
    for ours, theirs in zip(x.double().chunk(BANDS), expected.chunk(BANDS), strict=True):
        error = ((ours - theirs).norm() / theirs.norm().maximum(floor)).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def build(provider: str, case: Case) -> Run:
    """A provider's attention for a case, ready to be called.

    Raises:
        Unsupported: it has none; the message says why.
    """
    if provider == "dpflash":
        pattern = case.definition
        return lambda q, k, v: dpflash.attention(q, k, v, pattern=pattern)
    if provider == "flex":
        if case.device == "cpu":
            raise Unsupported("flex_attention has no backward on the CPU")
        return flex(case)
    if provider == "flash-attn":
        return _flash_attn(case)
    return _sdpa(provider.removeprefix("sdpa-"), case)


def _sdpa(name: str, case: Case) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.device == "cpu" and name == "cudnn":
        raise Unsupported("cuDNN needs a CUDA device")
    if case.pattern != "dense":
        raise Unsupported("takes dense or causal attention only; a mask would be T x T")
    if case.device != "cpu" and case.dtype == "fp32":
        raise Unsupported("this backend takes fp16 and bf16 only on CUDA")
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    return run


def flex(case: Case, compiled: bool = True) -> Run:
    """FlexAttention with the same multiplicities; what is not compiled is for tests only."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen, per_head = multiplicity(case)
    score_mod = block_mask = None
    if case.pattern in ("dilated", "million"):

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + torch.log(seen(h, i, j).to(torch.float32))

    # Every case compiles anew; without this, dynamo would give up after eight of them.
    torch._dynamo.reset()
    make, attend = create_block_mask, flex_attention
    if compiled:
        # The block mask too, because the eager one holds T x T entries for each head.
        make, attend = (torch.compile(function, dynamic=False) for function in (make, attend))
    if case.pattern != "dense" or case.causal:
        block_mask = make(
            lambda b, h, i, j: seen(h, i, j) > 0,
            None,
            case.heads if per_head else None,
            case.tokens,
            case.tokens,
            device=case.device,
        )
    # Backward alone is timed on a graph that is kept.
    torch._functorch.config.donated_buffer = False
    return lambda q, k, v: attend(q, k, v, score_mod=score_mod, block_mask=block_mask)


def _flash_attn(case: Case) -> Run:
    if case.device == "cpu":
        raise Unsupported("flash-attn needs a CUDA device")
    if case.dtype == "fp32":
        raise Unsupported("flash-attn takes fp16 and bf16 only")
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise Unsupported(f"flash-attn is not importable: {error}") from error
    pattern = case.definition
    if isinstance(pattern, patterns.Documents):
        if case.batch > 1:
            raise Unsupported("packs one sample here; choose T of at least --batch-tokens")
        lengths = torch.tensor(pattern.cu_seqlens)
        borders = lengths.to(case.device, torch.int32)
        longest = int(lengths.diff().max())

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            o = flash_attn_varlen_func(
                *packed, borders, borders, longest, longest, causal=case.causal
            )
            return o.transpose(0, 1).unsqueeze(0)

        return run
    if not isinstance(pattern, patterns.Dense | patterns.SlidingWindow):
        raise Unsupported("has dense attention, windows and packed documents only")
    reach = pattern.window if isinstance(pattern, patterns.SlidingWindow) else -1
    window = (reach, 0 if case.causal and reach >= 0 else reach)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_last = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(*heads_last, causal=case.causal, window_size=window).transpose(1, 2)

    return run

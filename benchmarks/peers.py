"""Attention baselines: dpflash's operators, torch's, flash-attn and LongNet's formula.

Letters: B samples, H heads, T tokens, D head dim, r dilation rate, n segments, m live tokens of a
segment.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dpflash
from dpflash.patterns import Dense, Dilated, Documents, SlidingWindow

from .attention_cases import Case, Run, multiplicity
from .suite import Unsupported

OPERATORS = (
    "dpflash",
    "sdpa-flash",
    "sdpa-cudnn",
    "flex",
    "flash-attn",
    "branch-by-branch",
)
# Other projects' code: a wrong result of it is a finding, not a failure of dpflash.
PEERS = ("sdpa-flash", "sdpa-cudnn", "flex", "flash-attn")


_NEEDS_CUDA = {
    "sdpa-cudnn": "a CUDA device: cuDNN has no attention on the CPU",
    "flex": "a GPU: FlexAttention has no backward on the CPU",
    "flash-attn": "a CUDA device: flash-attn has no attention on the CPU",
}


def build_run(operator: str, case: Case) -> Run:
    """Attention by one of OPERATORS, as a function of q, k and v.

    Raises:
        Unsupported: the operator cannot compute this case here.
    """
    if case.device == "cpu" and operator in _NEEDS_CUDA:
        raise Unsupported(_NEEDS_CUDA[operator])
    if operator == "dpflash":
        return lambda q, k, v: dpflash.attention(q, k, v, pattern=case.pattern)
    if operator == "flex":
        return flex(case)
    if operator == "flash-attn":
        return _flash_attn(case)
    if operator == "branch-by-branch":
        branches = _branches(case)
        return lambda q, k, v: _BranchByBranch.apply(q, k, v, branches, case.pattern.causal)
    if operator.startswith("sdpa-"):
        return _sdpa(operator, case)
    raise ValueError(f"operator={operator!r}: expected one of {', '.join(OPERATORS)}")


def _sdpa(operator: str, case: Case) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not isinstance(case.pattern, Dense):
        raise Unsupported("another pattern: SDPA takes dense or causal attention only")
    if case.device != "cpu" and case.dtype == "float32":
        raise Unsupported("fp16 or bf16: this backend takes no fp32 on CUDA")
    is_flash = operator == "sdpa-flash"
    backend = SDPBackend.FLASH_ATTENTION if is_flash else SDPBackend.CUDNN_ATTENTION

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.pattern.causal)

    return run


def flex(case: Case, *, compiled: bool = True) -> Run:
    """FlexAttention with the same multiplicities; only tests pass compiled=False."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen, per_head = multiplicity(case)
    score_mod = block_mask = None
    if isinstance(case.pattern, Dilated):

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + torch.log(seen(h, i, j).to(torch.float32))

    # Every case compiles again, and dynamo gives up after eight compilations.
    torch._dynamo.reset()
    make: Any = create_block_mask
    attend: Any = flex_attention
    if compiled:
        # The block mask too: built eagerly it holds T x T entries for each head.
        make, attend = (torch.compile(function, dynamic=False) for function in (make, attend))
    if not isinstance(case.pattern, Dense) or case.pattern.causal:
        block_mask = make(
            lambda b, h, i, j: seen(h, i, j) > 0,
            None,
            case.heads if per_head else None,
            case.tokens,
            case.tokens,
            device=case.device,
        )
    # A backward that is timed alone runs on a retained graph.
    torch._functorch.config.donated_buffer = False
    return lambda q, k, v: attend(q, k, v, score_mod=score_mod, block_mask=block_mask)


def _flash_attn(case: Case) -> Run:
    if case.dtype == "float32":
        raise Unsupported("fp16 or bf16: flash-attn takes no fp32")
    try:
        flash_attn: Any = importlib.import_module("flash_attn")
    except ImportError as error:
        raise Unsupported(f"flash-attn, which is not importable: {error}") from error
    pattern, causal = case.pattern, case.pattern.causal
    if isinstance(pattern, Documents):
        if case.batch > 1:
            raise Unsupported("B = 1: one packed sample is measured here")
        lengths = torch.tensor(pattern.cu_seqlens)
        borders = lengths.to(case.device, torch.int32)
        longest = int(lengths.diff().max())

        def run_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            o: Tensor = flash_attn.flash_attn_varlen_func(
                *packed, borders, borders, longest, longest, causal=causal
            )
            return o.transpose(0, 1).unsqueeze(0)

        return run_packed
    if not isinstance(pattern, Dense | SlidingWindow):
        raise Unsupported("another pattern: flash-attn has dense, windows and documents")
    reach = pattern.reach[0] if isinstance(pattern, SlidingWindow) else -1
    window = (reach, 0 if causal and reach >= 0 else reach)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_last = (x.transpose(1, 2) for x in (q, k, v))
        o: Tensor = flash_attn.flash_attn_func(*heads_last, causal=causal, window_size=window)
        return o.transpose(1, 2)

    return run


class _Piece(NamedTuple):
    """Consecutive segments of equal length: a branch's whole segments, or its short last one."""

    begin: int
    segments: int  # n
    length: int  # divisible by rate
    rate: int

    def classes(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Heads h with equal h mod r, and a view of their live tokens, `[B, ., n, m, .]`."""
        end = self.begin + self.segments * self.length
        sizes = (self.segments, self.length // self.rate, self.rate)
        parts = x[:, :, self.begin : end].unflatten(2, sizes)
        for offset in range(min(self.rate, x.shape[1])):
            heads = slice(offset, None, self.rate)
            yield heads, parts[:, heads, :, :, offset]

    def gather(self, x: Tensor) -> Tensor:
        """`[B n, H, m, D]`: the live tokens of x `[B, H, T, D]`; head h's are those at h mod r."""
        batch, heads, _, width = x.shape
        if self.rate == 1:
            (_, view), *_ = self.classes(x)
            return view.transpose(1, 2).flatten(0, 1)
        live = x.new_empty(batch, self.segments, heads, self.length // self.rate, width)
        for own, view in self.classes(x):
            live[:, :, own] = view.transpose(1, 2)
        return live.flatten(0, 1)

    def scatter(self, into: Tensor, live: Tensor, *, add: bool) -> None:
        """Writes the result of `gather` back to its place, or adds it there."""
        values = live.unflatten(0, (into.shape[0], self.segments)).transpose(1, 2)
        for own, view in self.classes(into):
            if add:
                view += values[:, own]
            else:
                view.copy_(values[:, own])


_Branches = tuple[tuple[_Piece, ...], ...]


def _branches(case: Case) -> _Branches:
    """The pieces of each branch in LongNet's formula."""
    pattern, tokens = case.pattern, case.tokens
    if not isinstance(pattern, Dilated):
        raise Unsupported("a dilated pattern: LongNet's formula has no other")
    if (pattern.overlap, pattern.offset, pattern.heads) != ("multiset", "head", "all"):
        raise Unsupported("LongNet's own rules: every branch counts, in every head, at h mod r")
    branches = []
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        width = min(length, tokens)
        whole, rest = divmod(tokens, width)
        if width % rate or rest % rate:
            raise Unsupported(
                f"segments whose lengths {width} and {rest} rate {rate} divides, for their live "
                "tokens to be as many in every head"
            )
        pieces = [_Piece(0, whole, width, rate)]
        if rest:
            pieces.append(_Piece(tokens - rest, 1, rest, rate))
        branches.append(tuple(pieces))
    return tuple(branches)


def _attended(piece: _Piece, *inputs: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, `[B n, H, m, .]`, of the live tokens of q, k and v."""
    q, k, v = map(piece.gather, inputs)
    o, lse, *_ = _aten("", q)(q, k, v, 0.0, causal)
    return o, lse.unsqueeze(3)


def _aten(direction: str, x: Tensor) -> Callable[..., Any]:
    """Torch's flash attention on the device of x, or its "_backward"."""
    name = "_scaled_dot_product_flash_attention" + "_for_cpu" * (x.device.type == "cpu")
    found: Callable[..., Any] = getattr(torch.ops.aten, name + direction)
    return found


class _BranchByBranch(torch.autograd.Function):
    """LongNet's formula with its true gradient: one flash backward for each branch.

    Each backward gets the log-sum-exp and the output of all branches together, so it returns the
    branch's part of the whole gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, branches: _Branches, causal: bool
    ) -> Tensor:
        lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32)
        found = []
        for piece in _all(branches):
            found.append(_attended(piece, q, k, v, causal=causal))
            piece.scatter(lse, torch.logaddexp(piece.gather(lse), found[-1][1]), add=False)
        o = torch.zeros_like(q, dtype=torch.float32)
        for piece, (live, own) in zip(_all(branches), found, strict=True):
            piece.scatter(o, live * torch.exp(own - piece.gather(lse)), add=True)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.branches, ctx.causal = branches, causal
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for piece in _all(ctx.branches):
            own = [piece.gather(x) for x in (do, q, k, v, o)]
            parts = _flash_backward(own, piece.gather(lse).squeeze(3), ctx.causal)
            for grad, part in zip(grads, parts, strict=True):
                piece.scatter(grad, part, add=True)
        return *(grad.to(q.dtype) for grad in grads), None, None


def _all(branches: _Branches) -> list[_Piece]:
    return [piece for pieces in branches for piece in pieces]


def _flash_backward(inputs: Sequence[Tensor], lse: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """dq, dk and dv from do, q, k, v and o."""
    backward = _aten("_backward", lse)
    if lse.device.type == "cpu":
        return tuple(backward(*inputs, lse, 0.0, causal))
    # The random state of dropout, which is off.
    none = torch.zeros(2, dtype=torch.int64, device=lse.device)
    sizes = (None, None, inputs[1].shape[2], inputs[2].shape[2])
    return tuple(backward(*inputs, lse.contiguous(), *sizes, 0.0, causal, none, none))

"""Calls attention by dpflash and by its peers: torch's SDPA and FlexAttention."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import dpflash
from dpflash.patterns import Dense, Dilated

from .attention_cases import Case, Run, multiplicity
from .suite import Unsupported

OPERATORS = ("dpflash", "sdpa-flash", "sdpa-cudnn", "flex")
# Other projects' code. A peer's wrong result is reported, but is no failure of dpflash.
PEERS = OPERATORS[1:]
_NEEDS_CUDA = {
    "sdpa-cudnn": "a CUDA device: cuDNN has no attention on the CPU",
    "flex": "a GPU: FlexAttention has no backward on the CPU",
}


def build_run(operator: str, case: Case) -> Run:
    """Return attention by one of OPERATORS as a function of (q, k, v), or raise Unsupported."""
    if case.device == "cpu" and operator in _NEEDS_CUDA:
        raise Unsupported(_NEEDS_CUDA[operator])
    if operator == "dpflash":
        return lambda q, k, v: dpflash.attention(q, k, v, pattern=case.pattern)
    if operator == "flex":
        return flex(case)
    if operator.startswith("sdpa-"):
        return _sdpa(operator, case)
    raise ValueError(f"operator={operator!r}: expected one of {', '.join(OPERATORS)}")


def _sdpa(operator: str, case: Case) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not isinstance(case.pattern, Dense):
        raise Unsupported("another pattern: SDPA takes dense or causal attention only")
    if case.device != "cpu" and case.dtype == "float32":
        raise Unsupported("fp16 or bf16: this backend takes no fp32 on CUDA")
    if case.device == "cpu":  # without the context, which takes time, torch chooses flash
        return functools.partial(F.scaled_dot_product_attention, is_causal=case.pattern.causal)
    is_flash = operator == "sdpa-flash"
    backend = SDPBackend.FLASH_ATTENTION if is_flash else SDPBackend.CUDNN_ATTENTION

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.pattern.causal)

    return run


def flex(case: Case, *, compiled: bool = True) -> Run:
    """Return FlexAttention with the case's `multiplicity`; only tests pass compiled=False."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen, per_head = multiplicity(case)
    score_mod = block_mask = None
    if isinstance(case.pattern, Dilated):

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + torch.log(seen(h, i, j).to(torch.float32))

    # Every case is compiled again, and dynamo falls back to eager after eight compilations.
    torch._dynamo.reset()
    make: Any = create_block_mask
    attend: Any = flex_attention
    if compiled:
        # The block mask is compiled too: in eager mode it allocates T x T entries for each head.
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
    # A backward that is timed alone runs several times on a retained graph.
    torch._functorch.config.donated_buffer = False
    return lambda q, k, v: attend(q, k, v, score_mod=score_mod, block_mask=block_mask)

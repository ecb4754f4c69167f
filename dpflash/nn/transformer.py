"""The pre-norm transformer block. Letters: B samples, T tokens, E model dim."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .. import _validate
from ..attn.functional import require_pattern
from ..distributed.agreement import Context
from ..patterns import Pattern
from .attention import MultiheadAttention, require_dropout


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        embed_dim: E.
        num_heads: query heads; divides E.
        mlp_ratio: the hidden width of the MLP is ``mlp_ratio * E``, which must be an integer.
        dropout: dropout probability of the residual branches and, in dense attention without
            attention_sinks and alibi, of the attention weights.
        causal: whether token t sees the tokens 0..t only.
        norm: "layer_norm" or "rms_norm".
        bias: whether projections and layer norms have biases.
        pattern: one of `dpflash.patterns`, with the same `causal`; None means dense attention.
        num_kv_heads: number of key/value heads, a divisor of num_heads; None means num_heads.
        rotary: whether attention uses rotary position embeddings.
        attention_sinks: learn one attention sink per head, see `MultiheadAttention`.
        alibi: learn one slope per head, see `MultiheadAttention`.

    Raises:
        ValueError: for a value outside of the ranges above.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        causal: bool = True,
        norm: Literal["layer_norm", "rms_norm"] = "layer_norm",
        bias: bool = True,
        pattern: Pattern | None = None,
        num_kv_heads: int | None = None,
        rotary: bool = False,
        attention_sinks: bool = False,
        alibi: bool = False,
    ) -> None:
        super().__init__()
        _validate.positive_int(embed_dim=embed_dim)
        _validate.positive(mlp_ratio=mlp_ratio)
        _validate.finite(mlp_ratio=mlp_ratio)
        require_dropout(dropout)
        hidden_dim = round(mlp_ratio * embed_dim)
        if hidden_dim < 1 or hidden_dim != mlp_ratio * embed_dim:
            raise ValueError(
                f"mlp_ratio={mlp_ratio}: {mlp_ratio} * {embed_dim} is not an integer; "
                f"pass a multiple of 1/{embed_dim}"
            )
        if pattern is not None and require_pattern(pattern).causal != causal:
            raise ValueError(
                f"pattern={pattern!r} with causal={causal}: expected both to agree; build the "
                f"pattern with causal={causal}"
            )
        self.causal = causal
        self.attention_norm = make_norm(norm, embed_dim, bias)
        self.attention = MultiheadAttention(
            embed_dim,
            num_heads,
            dropout=0.0 if pattern is not None or attention_sinks or alibi else dropout,
            bias=bias,
            num_kv_heads=num_kv_heads,
            pattern=pattern,
            rotary=rotary,
            attention_sinks=attention_sinks,
            alibi=alibi,
        )
        self.mlp_norm = make_norm(norm, embed_dim, bias)
        self.mlp_up = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.mlp_down = nn.Linear(hidden_dim, embed_dim, bias=bias)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Apply the block to a batch.

        Args:
            x: `[B, T, E]`.
            key_padding_mask: `[B, T]`, True if a token is not attended to.
            cu_seqlens: borders of documents that are packed into x, see `MultiheadAttention`.
            context: see `MultiheadAttention`.

        Returns:
            `[B, T, E]`.
        """
        attended, _ = self.attention(
            self.attention_norm(x),
            key_padding_mask=key_padding_mask,
            is_causal=self.causal,
            cu_seqlens=cu_seqlens,
            context=context,
        )
        x = x + self.residual_dropout(attended)
        hidden = F.gelu(self.mlp_up(self.mlp_norm(x)), approximate="tanh")
        return x + self.residual_dropout(self.mlp_down(hidden))


def make_norm(norm: Literal["layer_norm", "rms_norm"], embed_dim: int, bias: bool) -> nn.Module:
    """Return a `torch.nn.LayerNorm` or a `torch.nn.RMSNorm`, which has no bias."""
    _validate.one_of(norm=(norm, ("layer_norm", "rms_norm")))
    if norm == "layer_norm":
        return nn.LayerNorm(embed_dim, bias=bias)
    return nn.RMSNorm(embed_dim)

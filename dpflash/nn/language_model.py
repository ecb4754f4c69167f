"""A decoder-only language model for long contexts. Letters: B samples, T tokens, V vocabulary."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from .. import _validate, losses
from ..distributed import ContextParallel
from ..distributed.agreement import Context
from ..distributed.context import weights_of
from ..packing import PackedBatch, Units
from ..patterns import Pattern
from ..refusal import PrivateRefusal
from .attention import require_dropout
from .linear_cross_entropy import LinearCrossEntropy
from .transformer import TransformerBlock, make_norm

_INIT_STD = 0.02


class LongContextLM(nn.Module):
    """Decoder-only language model: token embedding, causal blocks, a final norm and a head.

    Weights are initialized as in GPT-2, from a normal distribution of std 0.02. For projections
    that write into the residual stream, the std is divided by ``sqrt(2 * num_layers)``.

    Args:
        vocab_size: V.
        embed_dim: model dim.
        num_layers: number of blocks.
        num_heads: number of query heads, a divisor of embed_dim.
        max_seq_len: the largest T that the model accepts.
        tie_embeddings: whether the head shares the token embedding's weight.
        mlp_ratio: hidden width of an MLP divided by embed_dim.
        dropout: dropout probability, see `TransformerBlock`.
        norm: "layer_norm" or "rms_norm".
        bias: whether projections and layer norms have biases; the head has no bias.
        pattern: a causal pattern of `dpflash.patterns`; None means dense attention.
        num_kv_heads: number of key/value heads, a divisor of num_heads; None means num_heads.
        activation_checkpointing: recompute each block's activations in the backward instead of
            saving them.
        positions: "rotary", which has no parameters; "learned", one embedding for each of
            max_seq_len positions; or "alibi", one slope for each head of each block.
        attention_sinks: learn one attention sink per head, the score of an extra key with value 0.
        context_parallel: a DeviceMesh with a dimension "context", or a
            `dpflash.distributed.ContextParallel`. The model then receives this rank's part of the
            tokens and targets, as `dpflash.distributed.shard_sequence` divides them.
        chunked_loss: whether the head is a `LinearCrossEntropy`, so that a call with targets never
            holds all logits. It has the parameters of a `torch.nn.Linear`.

    Attributes:
        architecture: the arguments that determine what the model computes, as plain values
            (for the pattern its key). ``state_dict()`` stores them in its metadata.

    Raises:
        ValueError: an argument is outside of the ranges above, or is not supported together with
            context_parallel, see `dpflash.distributed.context_parallel`.

    Guarantees:
        If weights were saved with their metadata (as `torch.save` does), `load_state_dict` refuses
        weights of a model with another number of heads, even if names and shapes are equal.
    """

    takes_context_parallel = True

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        *,
        max_seq_len: int,
        tie_embeddings: bool = True,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        norm: Literal["layer_norm", "rms_norm"] = "layer_norm",
        bias: bool = True,
        pattern: Pattern | None = None,
        num_kv_heads: int | None = None,
        activation_checkpointing: bool = False,
        positions: Literal["rotary", "learned", "alibi"] = "rotary",
        attention_sinks: bool = False,
        chunked_loss: bool = False,
        context_parallel: DeviceMesh | ContextParallel | None = None,
    ) -> None:
        super().__init__()
        _validate.positive_int(
            vocab_size=vocab_size,
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            max_seq_len=max_seq_len,
        )
        _validate.one_of(positions=(positions, ("rotary", "learned", "alibi")))
        require_dropout(dropout)
        self.architecture = {
            "vocab_size": vocab_size,
            "embed_dim": embed_dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "max_seq_len": max_seq_len,
            "tie_embeddings": tie_embeddings,
            "mlp_ratio": mlp_ratio,
            "dropout": dropout,
            "norm": norm,
            "bias": bias,
            "pattern": None if pattern is None else pattern.key,
            "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
            "positions": positions,
            "attention_sinks": attention_sinks,
        }
        self.max_seq_len = max_seq_len
        self.activation_checkpointing = activation_checkpointing
        self.token_embedding = nn.Embedding(vocab_size, embed_dim)
        self.position_embedding = (
            nn.Embedding(max_seq_len, embed_dim) if positions == "learned" else None
        )
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                norm=norm,
                bias=bias,
                pattern=pattern,
                num_kv_heads=num_kv_heads,
                rotary=positions == "rotary",
                alibi=positions == "alibi",
                attention_sinks=attention_sinks,
            )
            for _ in range(num_layers)
        )
        self.final_norm = make_norm(norm, embed_dim, bias)
        head = LinearCrossEntropy if chunked_loss else nn.Linear
        self.lm_head = head(embed_dim, vocab_size, bias=False)
        if tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.reset_parameters()
        self._looked = False
        self.context_parallel: ContextParallel | None = None
        if context_parallel is not None:
            if not isinstance(context_parallel, ContextParallel):
                context_parallel = ContextParallel.of(context_parallel)
            context_parallel.apply(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata[prefix[:-1]]["architecture"] = dict(self.architecture)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *lists: Any,
    ) -> None:
        error_msgs, saved = lists[-1], local_metadata.get("architecture", {})
        for name in ("num_heads", "num_kv_heads"):
            own = self.architecture[name]
            if saved.get(name, own) != own:
                error_msgs.append(
                    f"{name}={own}: the weights belong to a model with {name}={saved[name]}; "
                    "build the model with this value, or use dpflash.load"
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *lists)

    def reset_parameters(self) -> None:
        """Initialize all weights at random, and all biases with 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        residual_std = _INIT_STD / math.sqrt(2 * len(self.blocks))
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            nn.init.normal_(block.attention.out_proj.weight, std=residual_std)
            nn.init.normal_(block.mlp_down.weight, std=residual_std)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        packed: PackedBatch | None = None,
    ) -> Tensor:
        """Return the logits of the next token at each position or, with targets, the losses.

        Args:
            tokens: `[B, T]`, int64, values 0..V-1, T at most max_seq_len; with context_parallel
                this rank's tokens.
            targets: `[B, T]`, int64, the next token at each position; -100 is ignored.
            packed: the batch of `dpflash.packing` from which the tokens come. Each document is
                then a sample: attention stays within the document, and positions count from the
                document's first token. With context_parallel, this rank's part of the batch.

        Returns:
            `[B, T, V]`, logits; the logits at t depend on tokens 0..t of the same sample alone.
            With targets `[B]`, or one loss per document of `packed`: the cross-entropy of each
            sample, see `losses.cross_entropy`. With context_parallel each loss is this rank's
            part; the loss is the sum over the ranks.

        Raises:
            ValueError: another shape or dtype, or a T above max_seq_len.
        """
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)} and dtype {tokens.dtype}: expected "
                "[batch, tokens] of torch.int64; use tokens.unsqueeze(0) for one sequence and "
                "tokens.long() for other integers"
            )
        length, positions = tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
        cu_seqlens = None if packed is None else tuple(packed.cu_seqlens.tolist())
        units = None if packed is None else packed.units
        context = None
        if self.context_parallel is not None:
            context = self._agree(tokens, targets, cu_seqlens, units)
            length, positions = context.length, context.positions(tokens.device)
            if not self._looked and tokens.shape[0]:
                self._looked = True
                self.context_parallel.warn_of_copies(context, tokens)
        if packed is not None:
            if tuple(tokens.shape) != packed.units.shape:
                raise ValueError(
                    f"packed has shape {packed.units.shape}, but tokens have shape "
                    f"{tuple(tokens.shape)}: pass packed.input_ids as tokens"
                )
            length = packed.longest
        if length > self.max_seq_len:
            shared = " of all ranks together (cut them by model.context_parallel.shard)"
            together = shared * (self.context_parallel is not None)
            raise PrivateRefusal(
                f"tokens have more positions{together} than max_seq_len={self.max_seq_len}; "
                "shorten the sequences, or build the model with a greater max_seq_len",
                length=length,
            ) from None
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            # [1, T], not [T]: dimension 0 of every layer's input is the batch.
            position_ids = positions.unsqueeze(0) if packed is None else packed.position_ids
            if torch.compiler.is_compiling():
                # A compiled private layer reads the batch size from dimension 0.
                position_ids = position_ids.expand_as(tokens)
            x = x + self.position_embedding(position_ids)
        x = self.embedding_dropout(x)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(
                    block, x, cu_seqlens=cu_seqlens, context=context, use_reentrant=False
                )
            else:
                x = block(x, cu_seqlens=cu_seqlens, context=context)
        x = self.final_norm(x)
        if targets is None:
            return self.lm_head(x)
        if isinstance(self.lm_head, LinearCrossEntropy):
            sample_losses = self.lm_head(x, targets, units)
        elif packed is None:
            sample_losses = losses.cross_entropy(self.lm_head(x), targets)
        else:
            sample_losses = losses.cross_entropy(
                self.lm_head(x),
                targets,
                sample_index=packed.sample_index,
                num_samples=packed.max_documents,
            )
        if self.context_parallel is None:
            return sample_losses
        return sample_losses * weights_of(targets, self.context_parallel.group, -100, units)

    def _agree(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        cu_seqlens: tuple[int, ...] | None,
        units: Units | None,
    ) -> Context:
        """Return the Context of this forward, on which ranks agree once for blocks and losses."""
        assert self.context_parallel is not None
        rows, per_rank = tokens.shape
        return self.context_parallel.agree(
            per_rank,
            rows=1 if cu_seqlens is None else rows,
            samples=rows if units is None else units.size,
            cu_seqlens=cu_seqlens,
            targets=targets is not None,
            training=self.training,
            dtype=self.token_embedding.weight.dtype,
            autocast=torch.is_autocast_enabled(tokens.device.type),
            patterns=[None if p is None else p.key for p in map(_pattern_of, self.blocks)],
        )


def _pattern_of(block: nn.Module) -> Pattern | None:
    assert isinstance(block, TransformerBlock)
    return block.attention.pattern

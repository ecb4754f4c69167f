"""Models, batches and losses of the private training steps that are measured.

Letters: B samples, T tokens, E model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpflash import losses
from dpflash.nn import LongContextLM, MultiheadAttention

from .suite import Unsupported

VOCABULARY = 256


@dataclass(frozen=True)
class Task:
    """A model, its batch and its loss."""

    build: Callable[[], nn.Module]  # makes the model, each time with the same weights
    x: Tensor  # inputs of one batch, `[B, ...]`
    y: Tensor  # targets of the batch
    loss: Callable[[Tensor, Tensor], Tensor]  # function of (output, y): losses `[B]`
    # Function of (model, x, y): the output. Opacus calls the model with x only.
    forward: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda model, x, y: model(x)
    dtype: str = "float32"  # or "bfloat16", for autocast

    @property
    def batch(self) -> int:
        """The number of samples B."""
        return len(self.x)

    def losses(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Run the forward, and return one loss per sample, `[B]`."""
        with self.precision():
            output = self.forward(model, x, y)
        return self.loss(output, y)

    def precision(self) -> torch.autocast:
        """Return the autocast context of a forward."""
        enabled = self.dtype == "bfloat16"
        return torch.autocast(self.x.device.type, torch.bfloat16, enabled=enabled)


def make_task(*, model: str, heads: int, head_dim: int, layers: int = 1, **given: Any) -> Task:
    """Return a task: "lm" or "llama-lora" on random bytes, or "attention" on random vectors.

    `given` are the other arguments of `bytes_task`. "attention" is a single attention layer.
    """
    if model == "llama-lora":
        return bytes_task(lambda: adapted_llama(heads * head_dim, heads, layers), **given)
    if model == "lm":
        shape = (VOCABULARY, heads * head_dim, layers, heads)
        # Opacus' ghost clipping refuses tied weights.
        free = {"max_seq_len": given["tokens"], "tie_embeddings": False}
        return bytes_task(lambda: LongContextLM(*shape, **free), **given)
    assert model == "attention", model
    if layers != 1:
        raise ValueError(f"layers={layers}: model='attention' has one layer; pass model='lm'")
    return _attention_task(heads, heads * head_dim, **given)


def adapted_llama(width: int, heads: int, layers: int) -> nn.Module:
    """Return a Llama over bytes with LoRA of rank 16 on all linear layers; it returns logits."""
    try:
        import peft
        import transformers
    except ImportError:
        raise Unsupported("PEFT and transformers: pip install peft transformers") from None
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=-(-8 * width // 96) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    # With LoRA's usual initial weights, half of which are zero, half of the gradients are zero.
    lora = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    return _Logits(peft.get_peft_model(transformers.LlamaForCausalLM(config), lora))


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x, use_cache=False).logits
        return logits


def bytes_task(
    make: Callable[[], nn.Module],
    *,
    batch: int,
    tokens: int,
    device: str,
    seed: int,
    dtype: str = "float32",
    vocab: int = VOCABULARY,
) -> Task:
    """Return a task on random bytes `[batch, tokens]`; the model of `make` returns logits."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, vocab, (2, batch, tokens), generator=generator).to(device)
    return Task(_built(make, device, seed), x, y, losses.cross_entropy, dtype=dtype)


def _attention_task(
    heads: int,
    width: int,
    *,
    batch: int,
    tokens: int,
    device: str,
    seed: int,
    dtype: str = "float32",
) -> Task:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, tokens, width, generator=generator).to(device) for _ in range(2))
    build = _built(lambda: _Attention(width, heads), device, seed)
    return Task(build, x, y, lambda o, y: (o.float() - y).square().sum(2).mean(1), dtype=dtype)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = MultiheadAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, is_causal=True)[0]
        return output


def _built(make: Callable[[], nn.Module], device: str, seed: int) -> Callable[[], nn.Module]:
    """Return a function that makes a model with this seed and restores torch's generator."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make().to(device)

    return build

"""What each rank runs for test_pretrained_models.py; one process is the same rank alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from meshes import mesh_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed import context_parallel, loss_weights

VOCAB, TOKENS, SAMPLES, BATCH = 40, 23, 12, 4
TINY = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 32, "initializer_range": 0.2, "intermediate_size": 24},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}
GROUPED = {**TINY, "num_key_value_heads": 2, "head_dim": 4}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
CONFIGS = {
    "gpt2": ("GPT2", {**TINY, **NO_DROPOUT, "n_inner": 24}),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 5}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED),
}


def build(kind: str, lora: bool = False, **changes: Any) -> Any:
    """A tiny model with attention of transformers, or with adapters that change its output."""
    name, options = CONFIGS[kind]
    config = getattr(transformers, f"{name}Config")(**{**options, **changes})
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config)
    if lora:
        adapters = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, adapters)
    return model.train()


def texts(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, VOCAB, (samples, TOKENS + 1), generator=generator)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def _mistake(parallel: Any, mistake: str | None) -> Any:
    """What cuts inputs, of the other sharding where that is the mistake."""
    if mistake == "sharding":
        others = {"contiguous": "zigzag", "zigzag": "contiguous"}
        return type(parallel)(parallel.group, "ring", others[parallel.sharding]).shard
    return parallel.shard


def matches(
    group: object,
    *,
    kind: str,
    mode: str = "ring",
    sharding: str = "contiguous",
    lora: bool = False,
    checkpointing: bool = False,
    given: str | None = None,
) -> dict[str, float]:
    """Greatest differences of logits and of summed gradients from those of one process.

    given: "mask" passes right padding, "positions" two packed documents in each row.
    """
    alone, together = build(kind, lora), build(kind, lora)
    context_parallel(together, mesh_of(2), mode=mode, sharding=sharding)
    if checkpointing:
        together.gradient_checkpointing_enable({"use_reentrant": False})
    parallel = together.context_parallel
    x, y = texts(3)
    kept, whole, own = torch.ones_like(x, dtype=torch.bool), {}, {}
    if given == "mask":
        kept[1, 15:] = False
        whole = {"attention_mask": kept.long()}
        y[~kept] = -100
    elif given == "positions":
        whole = {"position_ids": torch.arange(TOKENS).expand(3, -1).clone()}
        for row, border in enumerate((9, 14, TOKENS)):
            whole["position_ids"][row, border:] -= border
        assert dpflash.integrations.transformers.register() == "dpflash"
        alone.set_attn_implementation("dpflash")
    own = {name: parallel.shard(value) for name, value in whole.items()}
    logits = alone(x, **whole).logits
    part = together(parallel.shard(x), **own).logits
    losses = dpflash.losses.cross_entropy(logits, y)
    own_y = parallel.shard(y)
    own_losses = dpflash.losses.cross_entropy(part, own_y) * loss_weights(own_y, mesh_of(2))
    errors = {"logits": _error(parallel.unshard(part)[kept], logits[kept])}
    losses.sum().backward()
    own_losses.sum().backward()
    errors["gradients"] = 0.0
    for p, q in zip(alone.parameters(), together.parameters(), strict=True):
        if p.requires_grad:
            dist.all_reduce(q.grad)
            errors["gradients"] = max(errors["gradients"], _error(q.grad, p.grad))
    return errors


def _error(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


def _train(
    model: nn.Module, mesh: Any, *, steps: int, sigma: float, scale: float, **options: Any
) -> Tensor:
    """The trained parameters after some private steps."""
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=1.0),
        data_loader=DataLoader(TensorDataset(*texts()), BATCH),
        noise_multiplier=sigma,
        max_grad_norm=0.5,
        **options,
    )
    while optimizer.releases < steps:
        for x, y in loader:
            if mesh is not None:
                x, y = map(private.context_parallel.shard, (x, y))
            losses = dpflash.losses.cross_entropy(private(x).logits, y)
            if mesh is not None:
                losses = losses * loss_weights(y, mesh)
            engine.backward(losses * scale)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.releases == steps:
                break
    return torch.cat([p.detach().flatten() for p in trained])


def private_matches(
    group: object,
    *,
    kind: str,
    sharding: str,
    lora: bool = False,
    checkpointing: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Differences of private training from that of one process, and of its noise."""
    errors: dict[str, Any] = {}
    for name, sigma, scale in (("clipped", 0.0, 1.0), ("noise", 0.5, 0.0), ("private", 0.5, 1.0)):
        results = []
        for mesh in (None, mesh_of(2)):
            model = build(kind, lora)
            if mesh is not None:
                context_parallel(model, mesh, sharding=sharding)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="several ranks.*without mesh")
                run = {"steps": 2, "sigma": sigma, "scale": scale, **options}
                results.append(_train(model, mesh, **run))
        alone, together = results
        errors[name] = _error(alone, together)
        if name == "noise":
            errors["noise is equal"] = torch.equal(alone, together)
    return errors

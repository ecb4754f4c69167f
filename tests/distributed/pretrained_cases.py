"""What each rank runs for test_pretrained_models.py; one process is the same rank alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import torch.distributed as dist
import transformers
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from train_cases import Connected

import dpflash
from dpflash.distributed import context_parallel, loss_weights
from dpflash.integrations.transformers import register
from dpflash.train.config import Parallelism, TrainingConfig
from dpflash.train.run import TrainingRun

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
        alone.set_attn_implementation(register())
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
    """The greatest difference, over the greatest value where that is above 1."""
    return float((x - y).abs().max() / y.abs().max().clamp(min=1))


def _train(model: nn.Module, mesh: Any, *, scale: float, steps: int = 1, **options: Any) -> Tensor:
    """The trained parameters after some private steps, on losses times `scale`."""
    engine = dpflash.PrivacyEngine(seed=3, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=1.0),
        data_loader=DataLoader(TensorDataset(*texts()), BATCH),
        **{"noise_multiplier": 0.5, "max_grad_norm": 0.5, **options},
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
    wholes = (p.full_tensor() if isinstance(p, DTensor) else p for p in trained)
    return torch.cat([p.detach().flatten() for p in wholes])


def private_matches(
    group: object,
    *,
    kind: str,
    sharding: str = "contiguous",
    lora: bool = False,
    checkpointing: bool = False,
    wrapper: str = "plain",
    scale: float = 1.0,
    **options: Any,
) -> float:
    """Greatest difference of privately trained parameters from those of one process."""
    results = []
    for mesh in (None, mesh_of(2)):
        model = build(kind, lora)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if mesh is not None:
            context_parallel(model, mesh, sharding=sharding)
            if wrapper == "fsdp":
                over = mesh["data", "context"]._flatten("all")
                for layer in model.model.layers:
                    fully_shard(layer, mesh=over)
                fully_shard(model, mesh=over)
        results.append(_train(model, mesh, scale=scale, **options))
    return _error(*results)


def refusals(group: object) -> dict[str, str]:
    """What is refused, and how it is said."""
    mesh, said, first = mesh_of(2), {}, dist.get_rank() == 0

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = "nothing"
        except (ValueError, dpflash.PrivateRefusal) as error:
            said[name] = str(error)

    def over(model: Any) -> Any:
        return context_parallel(model, mesh)

    bert = transformers.BertConfig(**TINY)
    llama = transformers.LlamaConfig(**GROUPED)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    attempt("encoder", lambda: over(transformers.BertModel(bert)))
    attempt("classifier", lambda: over(transformers.LlamaForSequenceClassification(llama)))
    attempt("rotary", lambda: over(build("llama", rope_parameters=rope)))
    two_sided = build("llama")
    two_sided.model.layers[1].self_attn.is_causal = False
    attempt("two-sided", lambda: over(two_sided))
    own = type("Own", (transformers.LlamaForCausalLM,), {})
    own._can_set_attn_implementation = classmethod(lambda cls: False)
    attempt("attention of its own", lambda: over(own(llama)))
    attempt("cross attention", lambda: over(build("gpt2", add_cross_attention=True)))
    model, short = over(build("llama")), over(build("gpt2", max_position_embeddings=7))
    attempt("twice", lambda: over(model))
    x, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    attempt("labels", lambda: model(x, labels=x))
    attempt("labels of one rank", lambda: model(x, labels=x if first else None))
    attempt("generation", lambda: model.generate(x, max_new_tokens=1))
    attempt("embedded", lambda: model(inputs_embeds=torch.zeros(2, 4, 16)))
    attempt("by position", lambda: model(x, mask))
    attempt("mask of one rank", lambda: model(x, attention_mask=mask if first else None))
    # The first tokens are padding on the first rank.
    left = mask * (torch.arange(4) > 1) if first else mask
    attempt("padding on the left", lambda: model(x, attention_mask=left))
    attempt("another mask", lambda: model(x, attention_mask=mask[:, None, None]))
    attempt("borders", lambda: model(x, cu_seq_lens_q=torch.tensor([0, 4])))
    attempt("odd positions", lambda: model(x, position_ids=torch.tensor([[0, 2, 4, 5]])))
    attempt("too long", lambda: short(x))
    attempt("too far", lambda: short(x[:, :2], position_ids=torch.arange(6, 8)[None]))
    attempt("dropout", lambda: over(build("llama", attention_dropout=0.1))(x))
    attempt("a shared config", lambda: transformers.LlamaForCausalLM(model.config)(x))
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    attempt("prompts", lambda: over(peft.get_peft_model(build("llama"), prompts))(x))
    attempt("samples", lambda: model(x[: 1 + dist.get_rank()]))
    return said


def trained(
    group: object, *, folder: str, parallel: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """`dpflash train --model` on two ranks, and on this one alone."""
    rank = dist.get_rank()
    model, notes = Path(folder, "model"), Path(folder, "notes.jsonl")
    if rank == 0:
        _write_model(model)
        records = ({"text": f"note {i}: the fever is {36 + i % 5}"} for i in range(40))
        notes.write_text("".join(json.dumps(record) + "\n" for record in records))
    dist.barrier()
    config = TrainingConfig(
        **{"data": str(notes), "unit": "record", "model": str(model), "seq_len": 24},
        **{"physical_batch_size": 4, "batch_size": 4, "steps": 1, "delta": 1e-3, "seed": 5},
        **{"accountant": "rdp", "learning_rate": 0.01, "baseline": False, **changes},
    )
    launch = Connected(Parallelism(**parallel))
    jobs = [
        TrainingRun.start(config, Path(folder, f"alone-{rank}")),
        TrainingRun.start(config, Path(folder, "together"), launch),
    ]
    reports = [job.run() for job in jobs]
    alone, together = (dict(job.model.named_parameters()) for job in jobs)
    keys = [k for k in reports[0] if k.startswith("bits_per_token") or k == "epsilon"]
    return {
        "parameters": max(_error(p, together[name]) for name, p in alone.items()),
        "reports": [[report[key] for key in keys] for report in reports],
    }


def _write_model(folder: Path) -> None:
    """A tiny Llama with a tokenizer of single bytes."""
    level = tokenizers.pre_tokenizers.ByteLevel
    words = ["<s>", "</s>", *sorted(level.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    build("llama", vocab_size=len(words), num_hidden_layers=1).save_pretrained(folder)

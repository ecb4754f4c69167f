"""What tests of trainers share: tiny models, their words, and arguments of a quiet run."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

TINY = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"intermediate_size": 24, "max_position_embeddings": 16}


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, **changes))


def gpt2(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **changes))


def mixture():
    transformers = pytest.importorskip("transformers")
    config = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))


def lora(build, *targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM")
    return peft.get_peft_model(build(), config)


def tokenizer():
    """Of the words w3 to w22."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 23)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def quiet(tmp_path, **changes):
    """Arguments of a trainer that writes little."""
    return {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        **changes,
    }


def quiet_trl(tmp_path, **changes):
    return quiet(tmp_path, **{"bf16": False, "gradient_checkpointing": False, **changes})


def largest_difference(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


def points():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (32,), generator=generator))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

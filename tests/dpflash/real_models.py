"""Tiny models of transformers' architectures, and a loop over single samples."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import nn

import dpflash

BATCH, TOKENS, VOCABULARY = 4, 7, 50

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
NO_DROPOUT = dict.fromkeys(
    (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "attention_dropout",
        "activation_dropout",
        "dropout",
        "embd_pdrop",
        "resid_pdrop",
        "attn_pdrop",
        "hidden_dropout",
        "classifier_dropout",
        "dropout_rate",
        "layerdrop",
        "encoder_layerdrop",
        "decoder_layerdrop",
    ),
    0.0,
)
IMAGE = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    **{k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
SEQUENCES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "init_std": 0.2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


class RealModel(NamedTuple):
    """A tiny model and how it is trained.

    Attributes:
        build: makes the model, in float64, with eager attention or the one that is named.
        batch: makes the tensors `[B, ...]` of a batch.
        losses: losses `[B]` of (model, *batch).
        rounding: relative error of a sum that is not clipped.
    """

    build: Callable[..., nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    losses: Callable[..., torch.Tensor]
    rounding: float = 1e-10


def _built(name, head, config, config_name=None):
    def build(attention="eager"):
        torch.manual_seed(0)
        made = getattr(transformers, f"{config_name or name}Config")(**config)
        made._attn_implementation, made._experts_implementation = attention, "eager"
        model = getattr(transformers, f"{name}{head}")(made).double().train()
        # Norms start at 1 and biases at 0, where mistakes do not show.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    return build


def _generator():
    return torch.Generator().manual_seed(1)


def _tokens():
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS + 1), generator=_generator())
    return ids[:, :-1], ids[:, 1:]


def _images():
    generator = _generator()
    images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 2, (BATCH,), generator=generator)


def _token_losses(model, ids, targets):
    options = {} if model.config.is_encoder_decoder else {"use_cache": False}
    if not hasattr(model.config, "use_cache"):
        options = {}
    return dpflash.losses.cross_entropy(model(ids, **options).logits, targets)


def _decoded_losses(model, ids, targets):
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(1), use_cache=False).logits
    return dpflash.losses.cross_entropy(logits, targets)


def _class_losses(model, images, targets):
    return nn.functional.cross_entropy(model(images).logits, targets, reduction="none")


def _decoder(name, **config):
    return RealModel(_built(name, "ForCausalLM", {**NO_DROPOUT, **config}), _tokens, _token_losses)


def _masked(name, **config):
    config = {**SIZES, **NO_DROPOUT, **config}
    return RealModel(_built(name, "ForMaskedLM", config), _tokens, _token_losses)


def _translator(name, **config):
    config = {**NO_DROPOUT, **config}
    return RealModel(_built(name, "ForConditionalGeneration", config), _tokens, _decoded_losses)


def _classifier(name, **config):
    config = {**IMAGE, **NO_DROPOUT, **config}
    return RealModel(_built(name, "ForImageClassification", config), _images, _class_losses)


def _mels():
    generator = _generator()
    mels = torch.randn(BATCH, 8, 16, generator=generator, dtype=torch.float64)
    return mels, *_tokens()


def _speech_losses(model, mels, ids, targets):
    logits = model(input_features=mels, decoder_input_ids=ids, use_cache=False).logits
    return dpflash.losses.cross_entropy(logits, targets)


def _waves():
    generator = _generator()
    waves = torch.randn(BATCH, 200, generator=generator, dtype=torch.float64)
    return waves, torch.randint(0, 2, (BATCH,), generator=generator)


def _pairs():
    return _images()[0], _tokens()[0]


def _pair_losses(model, images, ids):
    return model(pixel_values=images, input_ids=ids).logits_per_image.diagonal()


_DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {**SIZES, "state_size": 4, "conv_kernel": 3, "expand": 2, "time_step_rank": 2}

MODELS = {
    "GPT2": RealModel(
        _built("GPT2", "LMHeadModel", {**NO_DROPOUT, **SIZES}), _tokens, _token_losses
    ),
    "Llama": _decoder("Llama", **GROUPED),
    "Qwen2": _decoder("Qwen2", **GROUPED),
    "Qwen3": _decoder("Qwen3", **GROUPED),
    "Mistral": _decoder("Mistral", **GROUPED, sliding_window=4),
    "Gemma": _decoder("Gemma", **GROUPED),
    "Gemma2": _decoder("Gemma2", **GROUPED, sliding_window=4),
    "Gemma3": RealModel(
        _built(
            "Gemma3", "ForCausalLM", {**NO_DROPOUT, **GROUPED, "sliding_window": 4}, "Gemma3Text"
        ),
        _tokens,
        _token_losses,
    ),
    "Phi3": _decoder("Phi3", **GROUPED),
    "GPT-NeoX": _decoder("GPTNeoX", **SIZES),
    "GPT-J": _decoder(
        "GPTJ",
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        rotary_dim=4,
        initializer_range=0.2,
    ),
    "Falcon": _decoder("Falcon", **SIZES),
    "OPT": _decoder(
        "OPT",
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        ffn_dim=24,
        word_embed_proj_dim=16,
        init_std=0.2,
    ),
    "BLOOM": _decoder(
        "Bloom", vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.2
    ),
    "StarCoder2": _decoder("Starcoder2", **SIZES, num_key_value_heads=1),
    "Mixtral": _decoder("Mixtral", **GROUPED, **_EXPERTS),
    "Qwen3-MoE": _decoder(
        "Qwen3Moe", **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "GPT-OSS": _decoder("GptOss", **GROUPED, **_EXPERTS, sliding_window=4),
    # Their routers compute in float32, whatever the model's dtype.
    "DeepSeek-V2": _decoder("DeepseekV2", **_DEEPSEEK)._replace(rounding=1.2e-7),
    "DeepSeek-V3": _decoder("DeepseekV3", **_DEEPSEEK)._replace(rounding=1.2e-7),
    "Mamba": _decoder("Mamba", **_MAMBA),
    "Mamba2": _decoder("Mamba2", **_MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    "Jamba": _decoder(
        "Jamba",
        **SIZES,
        num_key_value_heads=1,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
    ),
    "BERT": _masked("Bert"),
    "RoBERTa": _masked("Roberta"),
    "ALBERT": _masked("Albert", embedding_size=8),
    "DistilBERT": _masked("DistilBert", dim=16, hidden_dim=24, n_layers=2, n_heads=2),
    "ELECTRA": _masked("Electra", embedding_size=16),
    "DeBERTa-v2": _masked(
        "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4
    ),
    "BigBird": _masked("BigBird", attention_type="original_full"),
    "Longformer": _masked("Longformer", attention_window=[4, 4]),
    "XLM-R": _masked("XLMRoberta"),
    "ModernBERT": _masked("ModernBert", local_attention=4, global_attn_every_n_layers=2),
    "T5": _translator(
        "T5",
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        decoder_start_token_id=0,
    ),
    "BART": _translator("Bart", **SEQUENCES),
    "mBART": _translator("MBart", **SEQUENCES),
    "Pegasus": _translator("Pegasus", **SEQUENCES),
    "Whisper": RealModel(
        _built(
            "Whisper",
            "ForConditionalGeneration",
            {
                **SEQUENCES,
                **NO_DROPOUT,
                "num_mel_bins": 8,
                "max_source_positions": 8,
                "max_target_positions": 32,
            },
        ),
        _mels,
        _speech_losses,
    ),
    "ViT": _classifier("ViT"),
    "DINOv2": _classifier("Dinov2", mlp_ratio=2),
    "CLIP vision": _classifier(
        "CLIP", vision_config={**IMAGE, **NO_DROPOUT}, text_config={**SIZES, **NO_DROPOUT}
    ),
    "CLIP": RealModel(
        _built(
            "CLIP",
            "Model",
            {
                "vision_config": {**IMAGE, **NO_DROPOUT},
                "text_config": {**SIZES, **NO_DROPOUT},
                "projection_dim": 8,
            },
        ),
        _pairs,
        _pair_losses,
    ),
    "Swin": RealModel(
        _built(
            "Swin",
            "ForImageClassification",
            {
                **NO_DROPOUT,
                "image_size": 8,
                "patch_size": 2,
                "embed_dim": 8,
                "depths": [2, 1],
                "num_heads": [2, 2],
                "window_size": 2,
                "drop_path_rate": 0.0,
            },
        ),
        _images,
        _class_losses,
    ),
    "BEiT": _classifier("Beit", use_relative_position_bias=True, drop_path_rate=0.0),
    "DeiT": _classifier("DeiT"),
    "Wav2Vec2": RealModel(
        _built(
            "Wav2Vec2",
            "ForSequenceClassification",
            {
                **SIZES,
                **NO_DROPOUT,
                "conv_dim": [8, 8],
                "conv_stride": [5, 4],
                "conv_kernel": [5, 4],
                "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2,
                "feat_proj_dropout": 0.0,
                "final_dropout": 0.0,
                "apply_spec_augment": False,
                "classifier_proj_size": 8,
            },
        ),
        _waves,
        _class_losses,
    ),
}

# What the models whose refusal is wanted, or whose layers have no rule yet, say.
REFUSED = {
    "DeBERTa-v2": "pos_key_proj",
    "CLIP": "for a contrastive loss, have no per-sample gradients",
}


def sample_gradients(model, data, losses):
    """Gradients of each sample by itself, by the parameters' names."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    for i in range(len(data[0])):
        loss = losses(model, *[t[i : i + 1] for t in data]).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        found.append(dict(zip(parameters, grads, strict=True)))
    return found


def norm(grads, names):
    """L2 norm of the named gradients together."""
    return math.sqrt(sum(float(grads[n].square().sum()) for n in names))


def clipped_sum(gradients, groups):
    """The sum of gradients that are clipped in groups, as `engine.groups()` gives them."""
    totals = {n: torch.zeros_like(g) for n, g in gradients[0].items()}
    for grads in gradients:
        for group in groups:
            length = norm(grads, group.parameters)
            factor = 1.0 if length <= group.bound else group.bound / length
            for n in group.parameters:
                totals[n] += factor * grads[n]
    return totals

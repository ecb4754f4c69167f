"""Models of transformers give on this library's attention what they give on transformers' own."""

import copy
import gc
import sys

import pytest
import torch
from torch import nn

import dpflash
from dpflash.integrations import transformers as huggingface

transformers = pytest.importorskip("transformers")

NAME = "dpflash"
TOKENS = 11
# Relative to the largest entry, in fp32. Measured: 6e-7 for logits, 5e-7 for gradients.
CLOSE = 1e-5

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # Wide, so that attention is far from uniform and a wrong key is seen in every digit.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def bert(**more):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM, transformers.BertConfig(**{**SIZES, **off, **more})


def gpt2(**more):
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(**{**SIZES, **off, **more})


def llama(**more):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**GROUPED, **more})


def mistral(**more):
    config = transformers.MistralConfig(**{**GROUPED, "sliding_window": 4, **more})
    return transformers.MistralForCausalLM, config


def narrow(**more):
    """A window that is shorter than the packed documents."""
    return mistral(sliding_window=2, **more)


def qwen(**more):
    config = transformers.Qwen3Config(**{**GROUPED, "head_dim": 8, **more})
    return transformers.Qwen3ForCausalLM, config


def gpt_oss(**more):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 4}
    config = transformers.GptOssConfig(**{**GROUPED, **experts, **rope, **more})
    return transformers.GptOssForCausalLM, config


def modernbert(**more):
    own = {"local_attention": 6, "global_attn_every_n_layers": 2, "attention_dropout": 0.0}
    config = transformers.ModernBertConfig(**{**SIZES, **own, **more})
    return transformers.ModernBertForMaskedLM, config


def gemma2(**more):
    own = {"head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    config = transformers.Gemma2Config(**{**GROUPED, "sliding_window": 4, **own, **more})
    return transformers.Gemma2ForCausalLM, config


# Values of 20 numbers beside keys of 12.
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def deepseek_v2(**more):
    config = transformers.DeepseekV2Config(**{**SIZES, "num_key_value_heads": 4, **LATENT, **more})
    return transformers.DeepseekV2ForCausalLM, config


def deepseek_v3(**more):
    config = transformers.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4, **LATENT, **more})
    return transformers.DeepseekV3ForCausalLM, config


BUILDERS = [
    bert,
    gpt2,
    llama,
    mistral,
    qwen,
    gpt_oss,
    modernbert,
    gemma2,
    deepseek_v2,
    deepseek_v3,
]
DECODERS = [gpt2, llama, mistral, gpt_oss, gemma2, deepseek_v3]


def model_of(build, attention=NAME, **more):
    model_class, config = build(**more)
    torch.manual_seed(0)
    return model_class._from_config(copy.deepcopy(config), attn_implementation=attention)


def tokens(batch=3, length=TOKENS):
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side):
    if side == "none":
        return None
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    if side != "all_kept":
        mask[1, 7:] = mask[2, 3:] = 0
    return mask.flip(1) if side == "left" else mask


@pytest.fixture(autouse=True)
def registered():
    assert huggingface.register() == NAME


@pytest.fixture
def distances():
    """distances(build, mask, ...): of logits and of gradients from those of eager attention."""

    def of(build, mask=None, ids=None, reference="eager", **inputs):
        ids = tokens() if ids is None else ids
        kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
        found = []
        for attention in (reference, NAME):
            model = model_of(build, attention).train()
            logits = model(ids, attention_mask=mask, **inputs).logits
            logits[kept].log_softmax(-1)[:, 3].mean().backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append((logits[kept].detach(), gradients))
        (expected, expected_gradients), (logits, gradients) = found
        assert gradients.keys() == expected_gradients.keys() and len(gradients) > 10
        assert all(g.isfinite().all() for g in gradients.values())
        largest = max(float(g.abs().max()) for g in expected_gradients.values())
        difference = max(
            float((gradients[n] - g).abs().max()) for n, g in expected_gradients.items()
        )
        return float((logits - expected).abs().max() / expected.abs().max()), difference / largest

    return of


@pytest.mark.parametrize("side", ["none", "right", "left", "all_kept"])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_logits_and_gradients_are_those_of_eager_attention(build, side, distances):
    assert max(distances(build, padding(side))) <= CLOSE


@pytest.mark.parametrize("window", [1, 2, TOKENS - 1, TOKENS, TOKENS + 1])
def test_a_window_is_as_wide_as_in_transformers(window, distances):
    assert max(distances(lambda: mistral(sliding_window=window), padding("left"))) <= CLOSE


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_decoder_may_attend_to_both_sides(side, distances):
    assert max(distances(llama, padding(side), is_causal=False)) <= CLOSE


def test_the_scale_of_the_scores_is_the_layers_own(distances):
    assert max(distances(lambda: gpt2(scale_attn_by_inverse_layer_idx=True))) <= CLOSE


@pytest.mark.parametrize("length", [1, 5, TOKENS])
def test_cross_attention_sees_all_of_the_other_sequence(length):
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(3, length, 32, generator=generator)
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, : length // 2] = 0
    logits = [
        model_of(gpt2, attention, add_cross_attention=True)(
            tokens(), encoder_hidden_states=states, encoder_attention_mask=mask
        ).logits
        for attention in ("eager", NAME)
    ]
    torch.testing.assert_close(logits[1], logits[0], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("build", DECODERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_generation_gives_the_tokens_of_eager_attention(build, side, cache):
    eager, ours = model_of(build, "eager").eval(), model_of(build).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "attention_mask": padding(side)}
    options |= {"cache_implementation": cache}
    expected, found = (model.generate(tokens(), **options) for model in (eager, ours))
    assert torch.equal(found.sequences, expected.sequences)
    for logits, reference in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, reference, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("build", [bert, llama, gpt_oss], ids=lambda build: build.__name__)
@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_is_nan_where_a_whole_sample_is_padding(build, side):
    mask = padding(side)
    mask[0] = 0
    model = model_of(build)
    logits = model(tokens(), attention_mask=mask).logits
    assert logits.isfinite().all()
    logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


LENGTHS = [4, 3, 4]
PACKED = torch.cat([torch.arange(n) for n in LENGTHS])[None]
BORDERS = torch.tensor([0, 4, 7, 11], dtype=torch.int32)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("build", [gpt2, llama, mistral, narrow], ids=lambda build: build.__name__)
def test_packed_documents_give_what_each_gives_alone(build, use_cache):
    model, row = model_of(build), tokens(1)
    alone = torch.cat([model(part).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    given = {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS, "max_length_q": 4}
    for more in ({}, given | {"max_length_k": 4}):
        logits = model(row, position_ids=PACKED, use_cache=use_cache, **more).logits
        torch.testing.assert_close(logits, alone, rtol=CLOSE, atol=CLOSE)
    logits = model(row, position_ids=PACKED, attention_mask=torch.ones_like(row)).logits
    torch.testing.assert_close(logits, alone, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("build", [gpt2, llama, mistral, narrow], ids=lambda build: build.__name__)
def test_documents_packed_into_several_rows_give_what_each_gives_alone(build, use_cache):
    model, rows = model_of(build), tokens(3)
    lengths = [LENGTHS, [1, 9, 1], [TOKENS]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in of_row]) for of_row in lengths])
    alone = [
        torch.cat([model(part[None]).logits[0] for part in row.split(of_row)])
        for row, of_row in zip(rows, lengths, strict=True)
    ]
    logits = model(rows, position_ids=positions, use_cache=use_cache).logits
    torch.testing.assert_close(logits, torch.stack(alone), rtol=CLOSE, atol=CLOSE)


def call(**inputs):
    return lambda model: model(tokens(), **inputs)


def row(**inputs):
    return lambda model: model(tokens(1), **inputs)


def holes(model):
    mask = padding("all_kept")
    mask[1, 4] = 0
    model(tokens(), attention_mask=mask)


def overlay(model):
    def second_half(batch, head, query, key):
        return key > 5

    transformers.masking_utils.create_causal_mask(
        model.config,
        torch.zeros(3, TOKENS, 32),
        None,
        None,
        and_mask_function=second_half,
    )


def blocks(model):
    transformers.masking_utils.create_causal_mask(
        model.config,
        torch.zeros(3, TOKENS, 32),
        None,
        None,
        block_sequence_ids=torch.zeros(3, TOKENS, dtype=torch.long),
    )


def chunks(model):
    model.config.attention_chunk_size = 4
    transformers.masking_utils.create_chunked_causal_mask(
        model.config, torch.zeros(3, TOKENS, 32), None, None
    )


T5_WITH_DROPOUT = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
FOUR_DIMENSIONS = torch.ones(3, 1, TOKENS, TOKENS).tril().bool()
REFUSED = {
    "dropout_llama": (lambda: llama(attention_dropout=0.1), call(), "dropout=0.1"),
    "dropout_gpt2": (lambda: gpt2(attn_pdrop=0.2), call(), "set attn_pdrop of the"),
    "dropout_bert": (
        lambda: bert(attention_probs_dropout_prob=0.3),
        call(),
        "set attention_probs_dropout_prob of the",
    ),
    "dropout_t5": (
        lambda: (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(**T5_WITH_DROPOUT),
        ),
        lambda model: model(tokens(), decoder_input_ids=tokens()),
        "set dropout_rate of the",
    ),
    "head_mask": (llama, call(head_mask=torch.ones(2, 4)), "head_mask with"),
    "output_attentions": (llama, call(output_attentions=True), "output_attentions=True"),
    "unknown": (llama, call(temperature=2.0), "temperature with"),
    "four_dimensions": (
        llama,
        call(attention_mask=FOUR_DIMENSIONS),
        "attention_mask of another shape",
    ),
    "holes": (llama, holes, "key_padding_mask has a hole"),
    "overlay": (llama, overlay, "mask_function="),
    "blocks": (llama, blocks, "mask_function=or_masks"),
    "chunks": (llama, chunks, "chunked"),
    "skipping_positions": (
        llama,
        row(position_ids=torch.arange(TOKENS)[None] * 2, use_cache=False),
        "position_ids with .* consecutive",
    ),
    "skipping_positions_cache": (
        llama,
        row(position_ids=torch.arange(TOKENS)[None] * 2, use_cache=True),
        "position_ids with .* consecutive",
    ),
    "half_of_the_borders": (llama, row(cu_seq_lens_q=BORDERS), "cu_seq_lens_k=None"),
    "borders_of_a_batch": (
        llama,
        call(cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS),
        "expected one row",
    ),
    "other_borders": (
        llama,
        row(cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS[[0, 1, 3]]),
        "position_ids give other documents",
    ),
    "borders_beside_positions": (
        llama,
        row(
            cu_seq_lens_q=BORDERS[[0, 1, 3]],
            cu_seq_lens_k=BORDERS[[0, 1, 3]],
            position_ids=PACKED,
            use_cache=False,
        ),
        "position_ids give other documents",
    ),
    "borders_beside_padding": (
        llama,
        row(cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS, attention_mask=padding("right")[1:2]),
        "cu_seq_lens_q beside attention_mask",
    ),
    "seq_idx": (llama, row(seq_idx=torch.zeros(1, TOKENS, dtype=torch.int32)), "seq_idx"),
}


@pytest.mark.parametrize(("build", "run", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_it_cannot_do_is_refused_by_name(build, run, message):
    with pytest.raises((ValueError, dpflash.PrivateRefusal), match=message):
        run(model_of(build).train())


def t5(attention):
    config = transformers.T5Config(
        vocab_size=50,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        initializer_factor=2.0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration._from_config(
        config, attn_implementation=attention
    )
    return model.double()  # its scores are not scaled: fp32 rounds them to 1e-5


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_a_bias_on_the_scores_and_its_table_are_those_of_eager_attention(side):
    found = []
    for attention in ("eager", NAME):
        model = t5(attention)
        logits = model(tokens(), attention_mask=padding(side), decoder_input_ids=tokens()).logits
        logits.log_softmax(-1)[..., 3].mean().backward()
        found.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (expected, gradients), (logits, own) = found
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    tables = [name for name in own if "relative_attention_bias" in name]
    assert len(tables) == 2 and all(own[name].abs().max() > 1e-6 for name in tables)
    torch.testing.assert_close(own, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cache", [None, "static"])
def test_decoding_with_a_bias_on_the_scores_gives_the_tokens_of_eager_attention(cache):
    named = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    mask = padding("left")
    expected, found = (
        t5(x).generate(tokens(), attention_mask=mask, **named) for x in ("eager", NAME)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("build", DECODERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("sizes", [(4, 3, 4), (1, 2, 8)])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(build, sizes):
    model = model_of(build).eval()
    whole = model_of(build, "eager").eval()(tokens()).logits
    past, found = None, []
    for chunk in tokens().split(sizes, dim=1):
        result = model(chunk, past_key_values=past, use_cache=True)
        past = result.past_key_values
        found.append(result.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    "model_class", ["FalconForCausalLM", "BigBirdForMaskedLM", "LongformerForMaskedLM"]
)
@pytest.mark.parametrize("name", [NAME, huggingface.NEUTRAL_NAME])
def test_models_with_their_own_attention_are_refused_when_made(model_class, name):
    made = getattr(transformers, model_class)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = made.config_class(vocab_size=50, **sizes)
    with pytest.raises(ValueError, match=f"{model_class}.*attn_implementation=.eager"):
        made._from_config(config, attn_implementation=name)
    made._from_config(config, attn_implementation="eager")


def test_a_model_without_attention_can_be_made():
    config = transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)
    transformers.MambaForCausalLM._from_config(config, attn_implementation=NAME)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers>=5.15"):
        huggingface.register()


def test_registering_twice_changes_nothing():
    found = [
        (transformers.AttentionInterface()[name], transformers.AttentionMaskInterface()[name])
        for name in (huggingface.register(), huggingface.register())
    ]
    assert found[0] == found[1] == (huggingface._attention, huggingface._mask)


class Importing:
    """Garbage which leads to an import whenever some is looked for."""

    number = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Importing.number += 1
        sys.modules[f"imported_{Importing.number}"] = sys
        if Importing.number < 10_000:
            Importing()


def test_a_finalizer_may_import_a_module_while_it_registers(monkeypatch):
    asked = huggingface.register() and transformers.utils.generic.is_flash_attention_requested
    name = "is_flash_attention_requested"
    monkeypatch.setattr(transformers.utils.generic, name, asked.__wrapped__)
    before = gc.get_threshold()
    Importing()
    gc.set_threshold(1)
    try:
        huggingface._is_not_flash_attention()
    finally:
        gc.set_threshold(*before)
        last, Importing.number = Importing.number, 10_000
        for number in range(1, last + 1):
            sys.modules.pop(f"imported_{number}")
    assert last > 0
    assert transformers.modeling_utils.is_flash_attention_requested is not asked


@pytest.mark.parametrize("build", [gpt2, llama, gpt_oss], ids=lambda build: build.__name__)
def test_autocast_and_checkpointing_change_nothing_but_the_rounding(build):
    mask = padding("left")
    model = model_of(build).train()
    expected = model(tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()]
    model.gradient_checkpointing_enable()
    found = model(tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    found.square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()]
    found.square().mean().backward()
    assert (found - expected).square().mean() <= 0.05**2 * expected.square().mean()


def test_a_model_can_change_to_it_and_back():
    model = model_of(llama, "eager")
    expected = model(tokens()).logits
    model.set_attn_implementation(huggingface.register())
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=CLOSE, atol=CLOSE)
    model.set_attn_implementation("eager")
    assert torch.equal(model(tokens()).logits, expected)


@pytest.mark.parametrize(("side", "backend"), [("none", "eager"), ("left", "aot_eager")])
def test_a_compiled_model_is_one_graph_and_agrees(side, backend):
    mask = padding(side)
    kept = torch.ones(3, TOKENS).bool() if mask is None else mask.bool()
    model = model_of(mistral, num_hidden_layers=1)
    expected = model(tokens(), attention_mask=mask, use_cache=False).logits[kept]
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    logits = compiled(tokens(), attention_mask=mask, use_cache=False).logits[kept]
    torch.testing.assert_close(logits, expected, rtol=CLOSE, atol=CLOSE)
    logits.square().mean().backward()


def test_a_compiled_model_refuses_packed_documents_instead_of_mixing_them():
    compiled = torch.compile(model_of(llama, num_hidden_layers=1), backend="eager")
    with pytest.raises(RuntimeError, match="packed position_ids"):
        compiled(tokens(1), position_ids=PACKED, use_cache=False)


@pytest.mark.parametrize("mode", ["instantiate", "book_keeping", "ghost"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda build: build.__name__)
def test_private_training_sums_the_clipped_gradients_of_sdpa(
    build, side, mode, private, sums, distance, oracle
):
    mask, ids = padding(side), tokens()

    def loss(model, ids, mask):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        kept = (mask[:, 1:] * mask[:, :-1]).bool()
        return dpflash.losses.cross_entropy(logits, ids[:, 1:].masked_fill(~kept, -100))

    norms = sorted(oracle(model_of(build, "sdpa"), loss, ids, mask).norms())
    found = []
    for attention in ("sdpa", NAME):
        engine, model, _, _ = private(
            model_of(build, attention),
            max_grad_norm=(norms[0] + norms[1]) / 2,
            grad_sample_mode=mode,
        )
        engine.backward(loss(model, ids, mask))
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) <= 2e-6


def _masked_lm(name, **more):
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **off, **more})
    return getattr(transformers, f"{name}ForMaskedLM"), config


MASKED = {
    "BERT": bert,
    "RoBERTa": lambda: _masked_lm("Roberta"),
    "ALBERT": lambda: _masked_lm("Albert", embedding_size=16),
    "DeBERTa": lambda: _masked_lm("DebertaV2"),
    "BigBird": lambda: _masked_lm("BigBird", attention_type="original_full"),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_head_whose_bias_is_its_decoders_trains_as_a_loop_over_samples(
    name, clipping, oracle, private, sums, distance
):
    model = model_of(MASKED[name], "eager").train()
    data, keys = (tokens(4), tokens(4).flip(0)), list(model.state_dict())

    def loss(model, x, y):
        return dpflash.losses.cross_entropy(model(x).logits, y)

    expected = oracle(model, loss, *data).clipped_sum(0.5, clipping)
    engine, model, *_ = private(
        model, *data, one_part=True, clipping=clipping, max_grad_norm=0.5, exact=False
    )
    engine.backward(loss(model, *data))
    found = sums(engine, model)
    assert list(model.state_dict()) == keys
    assert distance({n: found[n] for n in expected}, expected) <= 1e-5


class _Head(nn.Module):
    """BERT's: the decoder's bias hangs on the head too, which may use it by itself."""

    def __init__(self, uses_it):
        super().__init__()
        self.decoder = nn.Linear(4, 4)
        self.bias, self.uses_it = self.decoder.bias, uses_it

    def forward(self, x):
        return self.decoder(x) + (self.bias if self.uses_it else 0.0)


def test_a_bias_that_its_head_uses_beside_the_decoder_is_refused(private):
    for uses_it in (False, True):
        engine, model, optimizer, _ = private(_Head(uses_it), torch.randn(4, 4), one_part=True)
        losses = model(torch.randn(4, 4)).square().mean(1)
        if uses_it:
            with pytest.raises(RuntimeError, match="'bias' got a gradient past"):
                engine.backward(losses)
        else:
            engine.backward(losses)
            optimizer.step()

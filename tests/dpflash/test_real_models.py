"""Architectures of transformers train privately as a loop over single samples, or are refused."""

import copy
import functools
import json
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
import models_table  # noqa: E402
import real_models  # noqa: E402
from real_models import BATCH, MODELS, REFUSED  # noqa: E402

import dpflash  # noqa: E402

TRAINED = [name for name in MODELS if name not in REFUSED]
MEASURED = json.loads(models_table.RESULTS.read_text())["models"]
TRAINED_OR_ADAPTED = [
    pytest.param(name, adapted, id=f"{name}-{column}")
    for name in MODELS
    for adapted, column in ((False, "flat"), (True, "LoRA"))
    if "refusal" not in MEASURED[name][column]
]
# The module that check names first where training refuses.
FOUND = {
    "DeBERTa-v2": "deberta.encoder.layer.0.attention.self.pos_key_proj",
    "CLIP": "(the model itself)",
}


def _options(clipping, bound):
    mode = {"clipping": "flat", "grad_sample_mode": "ghost"}
    chosen = mode if clipping == "ghost" else {"clipping": clipping}
    return {**chosen, "one_part": True, "exact": False, "max_grad_norm": bound}


CLIPPINGS = ["flat", "ghost", "per_layer"]


@pytest.mark.parametrize("column", models_table.COLUMNS)
@pytest.mark.parametrize("name", MODELS)
def test_a_private_step_is_what_the_page_says(name, column):
    committed = MEASURED[name][column]
    if "refusal" in committed:
        assert "refusal" in models_table.cell_of(MODELS[name], column)
        return
    unclipped, clipped = models_table.errors_of(MODELS[name], column)
    # Eager attention's softmax is float32, and clipping factors are rounded down to it.
    assert unclipped <= (5e-7 if column == "dpflash" else MODELS[name].rounding)
    assert clipped <= 5e-7


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("name", TRAINED)
def test_one_sample_moves_the_sum_by_at_most_the_bound(name, clipping, private, sums, distance):
    data, bound, found = MODELS[name].batch(), 1e-2, []
    for size in (BATCH, BATCH - 1):
        part = [t[:size] for t in data]
        engine, model, *_ = private(MODELS[name].build(), *part, **_options(clipping, bound))
        engine.backward(MODELS[name].losses(model, *part))
        found.append(sums(engine, model))
    moved = distance(*found, absolute=True)
    assert sum(group.bound**2 for group in engine.groups()) <= bound**2
    assert moved <= bound * (1 + 1e-9)
    assert moved >= bound * (0.999 if clipping in ("flat", "ghost") else 0.3)


@pytest.mark.parametrize(("name", "adapted"), TRAINED_OR_ADAPTED)
def test_on_public_data_a_private_model_is_the_plain_one(name, adapted, private):
    """Also after a private forward, whose backward is still to come."""
    real = MODELS[name]
    data = real.batch()
    model = models_table.adapted(real.build()) if adapted else real.build()
    plain = copy.deepcopy(model)
    engine, model, *_ = private(model, *data, one_part=True, exact=False)
    # None of the loader's rows.
    public = [t.flip(-1) if t.ndim > 1 else t for t in data]
    real.losses(plain, *public).mean().backward()
    losses = real.losses(model, *data)
    with engine.public_data():
        real.losses(model, *public).mean().backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected)
    engine.backward(losses)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_by_sample_is_refused(name, private):
    data = MODELS[name].batch()
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[name]):
        engine, model, *_ = private(MODELS[name].build(), *data, one_part=True)
        engine.backward(MODELS[name].losses(model, *data))


def _errors(name, dtype=torch.float64, reduction=None):
    """The modules in which check finds an error."""
    real = MODELS[name]
    batch = [t.to(dtype) if t.is_floating_point() else t for t in real.batch()]

    def loss(model, data):
        losses = real.losses(model, *data)
        return losses if reduction is None else losses.mean()

    engine = dpflash.PrivacyEngine()
    report = engine.check(real.build().to(dtype), batch, loss, loss_reduction=reduction)
    return [problem.where for problem in report.problems if problem.severity == "error"]


# Their layers do not see the batch first, or they change what they are given.
@pytest.mark.parametrize("name", ["T5", "BART", "Swin", "Wav2Vec2", *REFUSED])
def test_check_takes_from_layers_what_training_takes(name):
    assert _errors(name)[:1] == ([FOUND[name]] if name in REFUSED else [])


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_check_finds_an_error_in_what_does_not_train_and_in_nothing_else(name, dtype, reduction):
    assert _errors(name, dtype, reduction)[:1] == ([FOUND[name]] if name in REFUSED else [])


def test_the_page_is_that_of_the_committed_results_and_has_all_models():
    results = json.loads(models_table.RESULTS.read_text())
    assert models_table.PAGE.read_text() == models_table.page(results)
    assert list(results["models"]) == list(MODELS)
    cells = [cell for of_model in results["models"].values() for cell in of_model.values()]
    assert all(
        ("ok" in of["check"]) == ("error" in of["flat"]) for of in results["models"].values()
    )
    assert all(cell.get("error", 0.0) <= 5e-7 for cell in cells)
    trained = [name for name, cells in results["models"].items() if "error" in cells["flat"]]
    assert trained == [name for name, cells in results["models"].items() if "ok" in cells["check"]]
    assert set(trained) == set(TRAINED) and len(trained) >= 40


def _as_many_tokens_as_samples():
    ids, targets = real_models._tokens()
    return ids[:, :BATCH], targets[:, :BATCH]


def _losses_with_global_attention(model, ids, targets):
    is_global = torch.zeros_like(ids)
    is_global[:, 0] = 1
    logits = model(ids, global_attention_mask=is_global).logits
    return dpflash.losses.cross_entropy(logits, targets)


def test_positions_of_one_sample_are_looked_at_below_a_module_with_parameters_of_its_own():
    # With one sample, positions that all samples share look like those of the samples.
    real = MODELS["GPT-OSS"]._replace(batch=lambda: [t[:1] for t in real_models._tokens()])
    assert max(models_table.errors_of(real, "dpflash")) <= 5e-7


@pytest.mark.parametrize("column", ["flat", "LoRA"])
def test_longformers_layers_take_the_second_dimension_for_the_batch(column):
    real = MODELS["Longformer"]._replace(losses=_losses_with_global_attention)
    for batch in (real.batch, _as_many_tokens_as_samples):
        assert max(models_table.errors_of(real._replace(batch=batch), column)) <= 5e-7


def test_adapters_of_leds_encoder_train_as_a_loop_over_samples():
    sizes = {k: v for k, v in real_models.SEQUENCES.items() if k != "max_position_embeddings"}
    longest = {f"max_{side}_position_embeddings": 32 for side in ("encoder", "decoder")}
    led = real_models._translator("LED", **sizes, **longest, attention_window=4)
    assert max(models_table.errors_of(led, "LoRA")) <= 5e-7


@pytest.mark.parametrize("name", ["T5", "Swin"])
def test_a_learned_bias_in_torchs_own_attention_has_its_gradient(name):
    real = MODELS[name]
    with_sdpa = real._replace(build=lambda attention=None: real.build("sdpa"))
    assert max(models_table.errors_of(with_sdpa, "flat")) <= 5e-7


def _losses_with_a_cache(model, ids, targets):
    outputs = model(input_ids=ids, labels=targets.clamp(min=0), use_cache=True)
    return dpflash.losses.cross_entropy(outputs.logits, targets)


# Modules with parameters of their own, or with shared positions, get the cache.
@pytest.mark.parametrize(
    ("name", "column"), [("T5", "flat"), ("T5", "dpflash"), ("GPT-OSS", "flat")]
)
def test_an_empty_cache_makes_no_difference(name, column):
    real = MODELS[name]._replace(losses=_losses_with_a_cache)
    assert max(models_table.errors_of(real, column)) <= 5e-7


def test_a_cache_that_an_earlier_call_would_have_filled_is_refused(private):
    (ids, targets), cache = MODELS["GPT-OSS"].batch(), transformers.DynamicCache()
    _, model, *_ = private(MODELS["GPT-OSS"].build(), ids, targets, verify_first_batch=False)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="self_attn.*pass use_cache=False in the call"):
        model(input_ids=ids, past_key_values=cache)


def test_adapters_of_shared_positions_are_refused_by_name_and_others_train(monkeypatch):
    real = MODELS["DeBERTa-v2"]
    with pytest.raises(
        RuntimeError, match=r"self\.pos_key_proj\.lora_A.*out of LoRA's target_mod"
    ):
        models_table.errors_of(real, "LoRA")
    targets = ["query_proj", "key_proj", "value_proj", "dense"]
    some = functools.partial(models_table.adapted, target_modules=targets)
    monkeypatch.setattr(models_table, "adapted", some)
    assert max(models_table.errors_of(real, "LoRA")) <= 5e-7


def test_contrastive_logits_of_adapters_are_refused_for_what_they_are():
    refusal = models_table.cell_of(MODELS["CLIP"], "LoRA")["refusal"]
    assert "[B, B]" in refusal and "contrastive loss" in refusal
    assert "negatives from the sample's own entry" in refusal
    assert "no per-sample gradients" in refusal and "verify_first_batch" not in refusal

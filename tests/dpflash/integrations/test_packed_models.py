"""Models of transformers train on packed documents as a loop over documents alone does."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import dpflash
from dpflash.packing import PackTo, pack

transformers = pytest.importorskip("transformers")

from dpflash.integrations import transformers as huggingface  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from real_models import MODELS, VOCABULARY, clipped_sum, norm  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# In five rows of 8 tokens the document of 9 is cut; in one row of 40 there is padding behind all.
LENGTHS = (5, 1, 7, 3, 9, 4)
TOKENS, ROWS, DOCUMENTS = 40, (1, 5), 8
# Eager attention's softmax is float32, and so are Gemma's norms.
ROUNDING = {"eager": 5e-7, "sdpa": 1e-10, "dpflash": 1e-10}
FAMILIES = ["GPT2", "Llama", "Qwen3", "Gemma3", "Mistral", "Mixtral", "Qwen3-MoE"]
ATTENTIONS = ["eager", "sdpa", "dpflash"]


@pytest.fixture(autouse=True)
def registered():
    huggingface.register()


def documents():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def packed(rows=1, documents_of=documents):
    return pack(documents_of(), tokens=TOKENS, max_documents=DOCUMENTS, rows=rows)


def losses_of(model, batch, **options):
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        **{"use_cache": False, **options},
    ).logits
    return dpflash.losses.causal_lm(
        logits,
        batch.labels,
        sample_index=batch.sample_index,
        num_samples=batch.max_documents,
    )


def gradients_alone(model, rows=1):
    """The gradients of each document by itself, cut where a row ends."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    for document in documents():
        total, count = 0.0, 0
        for part in document.split(TOKENS // rows):
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum")
            count += len(part) - 1
        loss = total / max(count, 1)
        grads = torch.autograd.grad(
            loss, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        found.append(dict(zip(parameters, grads, strict=True)))
    return found


@pytest.fixture
def attached():
    """attached(model, rows, ...) -> (engine, model, loader) that draws documents, noiseless."""

    def make(model, rows=1, *, batch_size=4, align=1, **options):
        engine = dpflash.PrivacyEngine(accountant="rdp", seed=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        model, _, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(trained, lr=0.1),
            data_loader=DataLoader(
                documents(),
                batch_size=batch_size,
                collate_fn=PackTo(tokens=TOKENS, max_documents=DOCUMENTS, rows=rows, align=align),
            ),
            **{
                "noise_multiplier": 0.0,
                "max_grad_norm": 1e6,
                "exact": False,
                "foreign_batches": True,
                **options,
            },
        )
        return engine, model, loader

    return make


def adapted(kind):
    """Llama with trained adapters; what they begin as would hide mistakes."""
    peft = pytest.importorskip("peft")
    layers = ["q_proj", "down_proj"]
    config = {
        "lora": peft.LoraConfig(r=2, target_modules=layers),
        "dora": peft.LoraConfig(r=2, target_modules=layers, use_dora=True),
        "ia3": peft.IA3Config(target_modules=layers, feedforward_modules=["down_proj"]),
        "tokens": peft.TrainableTokensConfig(token_indices=[3, 7, 20]),
    }[kind]
    model = MODELS["Llama"].build("sdpa")
    torch.manual_seed(1)
    made = peft.get_peft_model(model, config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def private_sum(attached, sums, model, rows, **options):
    """The clipped sum of one packed batch, by parameter name; and the clipping groups."""
    engine, model, _ = attached(model, rows, **options)
    batch = packed(rows)
    engine.prepare(batch)
    engine.backward(losses_of(model, batch))
    return sums(engine, model), engine.groups()


def error(found, expected):
    size = norm(expected, expected)
    return norm({n: found[n].double() - g for n, g in expected.items()}, expected) / size


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_sum_is_that_of_a_loop_over_documents(name, attention, rows, attached, sums):
    expected = gradients_alone(MODELS[name].build("sdpa"), rows)
    model = MODELS[name].build(attention)
    found, _ = private_sum(attached, sums, model, rows)
    total = {n: sum(grads[n] for grads in expected) for n in expected[0]}
    assert error(found, total) <= (5e-7 if name == "Gemma3" else ROUNDING[attention])


CLIPPINGS = {
    "ghost": {"clipping": "flat", "grad_sample_mode": "ghost"},
    "instantiate": {"clipping": "flat", "grad_sample_mode": "instantiate"},
    "per_layer": {"clipping": "per_layer"},
}


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "GPT2"])
def test_clipped_sums_of_documents_are_those_of_a_loop(name, clipping, attached, sums):
    alone = gradients_alone(MODELS[name].build("sdpa"), 5)
    bound = sorted(norm(grads, grads) for grads in alone)[3] / 2
    model = MODELS[name].build("sdpa")
    options = {**CLIPPINGS[clipping], "max_grad_norm": bound}
    found, groups = private_sum(attached, sums, model, 5, **options)
    # Clipping factors are rounded down to float32.
    assert error(found, clipped_sum(alone, groups)) <= 5e-7


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Gemma3"])
def test_one_packed_document_moves_the_sum_by_at_most_the_bound(name, attached, sums):
    found, bound = [], 1e-2
    for count in (len(LENGTHS), len(LENGTHS) - 1):
        engine, model, _ = attached(MODELS[name].build("sdpa"), 5, max_grad_norm=bound)
        batch = packed(5, lambda n=count: documents()[:n])
        engine.prepare(batch)
        engine.backward(losses_of(model, batch))
        found.append(sums(engine, model))
    moved = norm({n: found[0][n] - found[1][n] for n in found[0]}, found[0])
    assert 0.999 * bound <= moved <= bound * (1 + 1e-9)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "tokens"])
def test_adapters_on_packed_documents_are_those_of_a_loop(kind, rows, attached, sums):
    alone = gradients_alone(adapted(kind), rows)
    found, _ = private_sum(attached, sums, adapted(kind), rows)
    total = {n: sum(grads[n] for grads in alone) for n in alone[0]}
    assert len(total) and error(found, total) <= 1e-10


def test_clipped_adapters_of_documents_are_those_of_a_loop(attached, sums):
    alone = gradients_alone(adapted("dora"), 5)
    bound = sorted(norm(grads, grads) for grads in alone)[3] / 2
    options = {"clipping": "per_layer", "max_grad_norm": bound}
    found, groups = private_sum(attached, sums, adapted("dora"), 5, **options)
    assert error(found, clipped_sum(alone, groups)) <= 5e-7


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_first_batches_prove_a_model_that_keeps_documents_apart(attention, attached):
    engine, model, loader = attached(MODELS["Llama"].build(attention), 5, batch_size=6)
    for _ in range(6):
        for batch in loader:
            engine.backward(losses_of(model, batch))
            engine._run.optimizers[0].step()
    assert engine.verified is True


MIXING = {
    # With a cache, transformers does not look for documents.
    "cache": {"use_cache": True},
    "mask": {"attention_mask": torch.ones(1, TOKENS, dtype=torch.int64)},
}


@pytest.mark.parametrize("how", MIXING)
def test_a_forward_that_mixes_documents_is_refused_in_the_first_batch(how, attached):
    engine, model, _ = attached(MODELS["Llama"].build("sdpa"))
    batch = packed()
    engine.prepare(batch)
    with pytest.raises(RuntimeError, match="so nothing was released"):
        engine.backward(losses_of(model, batch, **MIXING[how]))


def test_positions_that_do_not_restart_are_refused_in_the_first_batch(attached):
    engine, model, _ = attached(MODELS["Llama"].build("sdpa"))
    batch = packed()
    engine.prepare(batch)
    with pytest.raises(RuntimeError, match="so nothing was released"):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        engine.backward(
            dpflash.losses.causal_lm(
                logits,
                batch.labels,
                sample_index=batch.sample_index,
                num_samples=batch.max_documents,
            )
        )


@pytest.mark.parametrize("name", ["GPT-OSS", "Mamba"])
def test_a_layer_without_a_rule_for_documents_is_refused_by_name(name, attached):
    engine, model, _ = attached(MODELS[name].build())
    batch = packed()
    engine.prepare(batch)
    with pytest.raises(ValueError, match="in a batch of packed documents"):
        losses_of(model, batch)


def test_virtual_tokens_beside_packed_documents_are_refused_by_name(attached):
    peft = pytest.importorskip("peft")
    # As many as a row has tokens, so that shapes do not tell.
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=8, num_transformer_submodules=1
    )
    engine, model, _ = attached(peft.get_peft_model(MODELS["Llama"].build("sdpa"), config), 5)
    batch = packed(5)
    engine.prepare(batch)
    with pytest.raises(ValueError, match="in a batch of packed documents: its rule computes"):
        model(input_ids=batch.input_ids, use_cache=False)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_batch_without_documents_adds_nothing(name, attached, sums):
    engine, model, _ = attached(MODELS[name].build("sdpa"))
    batch = packed(1, list)
    engine.prepare(batch)
    engine.backward(losses_of(model, batch))
    assert all(not bool(total.any()) for total in sums(engine, model).values())

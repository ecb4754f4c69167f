"""Models of transformers train on packed documents as a loop over documents alone does."""

import math
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
                collate_fn=PackTo(
                    tokens=TOKENS, max_documents=DOCUMENTS, rows=rows, align=align
                ),
            ),
            **{"noise_multiplier": 0.0, "max_grad_norm": 1e6, "exact": False, **options},
        )
        return engine, model, loader

    return make


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


@pytest.mark.cases(9)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_sum_is_that_of_a_loop_over_documents(name, attention, rows, attached, sums):
    expected = gradients_alone(MODELS[name].build("sdpa"), rows)
    model = MODELS[name].build(attention)
    found, _ = private_sum(attached, sums, model, rows)
    total = {n: sum(grads[n] for grads in expected) for n in expected[0]}
    assert error(found, total) <= (5e-7 if name == "Gemma3" else ROUNDING[attention])

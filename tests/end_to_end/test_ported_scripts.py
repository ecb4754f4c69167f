"""Training scripts of Opacus' users, tiny and written anew, changed as docs/opacus.md says.

Of each run epsilon is that of dp_accounting, and the first release that of a loop over samples.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.sampling import PadTo

dp_accounting = pytest.importorskip("dp_accounting")
opacus = pytest.importorskip("opacus")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

DELTA, BOUND, SIGMA, ENTRIES, BATCH = 1e-3, 0.5, 1.2, 48, 12
VOCABULARY, TOKENS = 20, 6


def images():
    return TensorDataset(torch.randn(ENTRIES, 1, 8, 8), torch.randint(0, 4, (ENTRIES,)))


def texts():
    tokens = torch.randint(1, VOCABULARY, (ENTRIES, TOKENS))
    return TensorDataset(tokens, torch.randint(0, 3, (ENTRIES,)))


def ragged():
    lengths = torch.randint(2, TOKENS + 1, (ENTRIES,)).tolist()
    return [(torch.randint(1, VOCABULARY, (n,)), i % 3) for i, n in enumerate(lengths)]


def notes():
    tokens = torch.randint(1, VOCABULARY, (ENTRIES, TOKENS))
    return [{"input_ids": row, "labels": row} for row in tokens]


def convolutions():
    """The MNIST example."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)),
    )


class Residual(nn.Module):
    """The CIFAR-10 example: a network with BatchNorm, which becomes GroupNorm."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.block, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        return self.head((x + self.block(x)).mean((2, 3)))


def residual():
    with pytest.warns(UserWarning, match="GroupNorm"):
        return dpflash.PrivacyEngine.get_compatible_module(Residual())


class Sentences(nn.Module):
    """The IMDB example: the mean of embeddings, here over the real tokens alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, tokens):
        real = (tokens != 0)[..., None]
        return self.layers((self.embedding(tokens) * real).sum(1) / real.sum(1).clamp(min=1))


def bert():
    """The text classification tutorial: the last layers of an encoder are trained."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.BertConfig(
        **{**sizes, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    model = transformers.BertForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layer.1" in name or "pooler" in name or "classifier" in name
    return model


def llama():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    )


def lora():
    """The LoRA notebook."""
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # else the gradients of lora_A are zero at first
    return model


def regression():
    """The hospital example of federated learning: a table of numbers."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def table():
    return TensorDataset(torch.randn(ENTRIES, 5), torch.randn(ENTRIES, 1))


def of_classes(model, batch):
    outputs = model(batch[0])
    return dpflash.losses.cross_entropy(getattr(outputs, "logits", outputs), batch[1])


def of_numbers(model, batch):
    return dpflash.losses.mse(model(batch[0]), batch[1])


def of_tokens(model, batch):
    return dpflash.losses.causal_lm(model(input_ids=batch["input_ids"]).logits, batch["labels"])


Epoch = Callable[..., None]


def loop(engine, model, optimizer, loader, losses):
    for batch in loader:
        engine.backward(losses(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def declared(engine, model, optimizer, loader, losses):
    """`criterion(model(x), y)` stays a mean, and `loss.backward()` stays."""
    for batch in loader:
        losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def managed(engine, model, optimizer, loader, losses):
    """With Opacus' BatchMemoryManager."""
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
    ) as small:
        loop(engine, model, optimizer, small, losses)


def scheduled(engine, model, optimizer, loader, losses):
    """The learning rate follows releases, not microbatches."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before, rate = optimizer.releases, optimizer.param_groups[0]["lr"]
    for batch in loader:
        engine.backward(losses(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if loader.is_last:
            schedule.step()
    made = optimizer.releases - before
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate * 0.5**made)


@dataclass(frozen=True)
class Script:
    """One script: what it trains, on what, how; and what it passes to make_private."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    losses: Callable[[nn.Module, Any], torch.Tensor] = of_classes
    epoch: Epoch = loop
    collate: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    rounds: bool = False


SCRIPTS = {
    "mnist": Script(convolutions, images),
    "mnist-mean": Script(convolutions, images, epoch=declared, options={"loss_reduction": "mean"}),
    "cifar10-memory-manager": Script(residual, images, epoch=managed),
    "imdb": Script(Sentences, ragged, collate=PadTo(TOKENS)),
    "bert": Script(bert, texts, options={"physical_batch_size": 4}),
    "lora": Script(lora, notes, of_tokens),
    "ghost": Script(Sentences, texts, options={"grad_sample_mode": "ghost"}),
    "schedules": Script(convolutions, images, epoch=scheduled),
    "nvflare-one-engine": Script(regression, table, of_numbers, rounds=True),
    "per-layer": Script(regression, table, of_numbers, options={"clipping": "per_layer"}),
}


def collate_for(script):
    return script.collate or (lambda rows: torch.utils.data.default_collate(rows))


def prepared(script, *, noise, ledger=None):
    torch.manual_seed(0)
    model, data = script.model(), script.data()
    plain = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = dpflash.PrivacyEngine(seed=3, accountant="pld", ledger=ledger)
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=1.0),
        data_loader=DataLoader(data, batch_size=BATCH, collate_fn=collate_for(script)),
        noise_multiplier=noise,
        max_grad_norm=BOUND,
        **script.options,
    )
    return plain, engine, *parts


def dp_epsilon(releases, noise=SIGMA):
    """Epsilon of so many releases by Google's accountant."""
    event = dp_accounting.PoissonSampledDpEvent(
        BATCH / ENTRIES, dp_accounting.GaussianDpEvent(noise)
    )
    accountant = dp_accounting.pld.PLDAccountant()
    return float(accountant.compose(event, releases).get_epsilon(DELTA))


def rows_of(batch, rows):
    if isinstance(batch, dict):
        return [{name: value[i : i + 1] for name, value in batch.items()} for i in rows]
    return [[value[i : i + 1] for value in batch] for i in rows]


def loop_over_samples(script, plain, batches):
    """The clipped sum of the first draw, sample by sample, over the expected batch size."""
    trained = [p for p in plain.parameters() if p.requires_grad]
    layers = [list(m.parameters(recurse=False)) for m in plain.modules()]
    groups = [[p for p in own if p.requires_grad] for own in layers]
    groups = [g for g in groups if g] if "clipping" in script.options else [trained]
    bound = BOUND / math.sqrt(len(groups))
    total = {p: torch.zeros_like(p) for p in trained}
    for batch in batches:
        losses = script.losses(plain, batch)
        found = torch.autograd.grad(losses[0], trained, allow_unused=True)
        pairs = zip(trained, found, strict=True)
        grads = {p: torch.zeros_like(p) if g is None else g for p, g in pairs}
        for group in groups:
            norm = torch.stack([grads[p].norm() for p in group]).norm()
            for p in group:
                total[p] += grads[p] * min(1.0, float(bound / norm))
    return [total[p] / BATCH for p in trained]


@pytest.mark.cases(0)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_ported_script_spends_dp_accountings_epsilon_and_releases_a_loops_gradient(name):
    script = SCRIPTS[name]
    _, engine, model, optimizer, loader = prepared(script, noise=SIGMA)
    for _ in range(2):
        if script.rounds:  # the server's mean of all clients
            model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
        script.epoch(engine, model, optimizer, loader, script.losses)
    assert optimizer.releases == 2 * ENTRIES // BATCH
    assert engine.get_epsilon(DELTA) == pytest.approx(dp_epsilon(optimizer.releases), rel=0.02)

    plain, engine, model, optimizer, loader = prepared(script, noise=0.0)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    batches: list[Any] = []

    class FirstDraw(Exception):
        pass

    def noted(made, batch):
        if optimizer.releases:
            raise FirstDraw
        if script.epoch is managed:
            batches.extend(rows_of(batch, list(range(len(batch[0])))))
        else:
            batches.extend(rows_of(batch, loader.is_real.nonzero().flatten().tolist()))
        return script.losses(made, batch)

    with pytest.raises(FirstDraw):
        script.epoch(engine, model, optimizer, loader, noted)
    expected = loop_over_samples(script, plain, batches)
    after = [p.detach() for p in model.parameters() if p.requires_grad]
    assert any(float(e.norm()) > 1e-3 for e in expected)
    for old, new, wanted in zip(before, after, expected, strict=True):
        torch.testing.assert_close(old - new, wanted, rtol=1e-3, atol=2e-6)

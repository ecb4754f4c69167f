"""What the privacy tests share: a float64 loop over single samples, and building private runs."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.kernels import grads as dispatch
from dpflash.kernels import reference
from dpflash.sampling import plan
from dpflash.step import PrivateStep, noise
from dpflash.step import sums as step_sums

_release = PrivateStep.release


def _release_and_keep_sums(step, **options):
    sums = step.sums._sums
    _release(step, **options)
    step.sums._sums = sums  # until its step, for tests to compare


PrivateStep.release = _release_and_keep_sums


class Oracle:
    """Per-sample gradients by autograd in float64, sample by sample, and their clipped sums."""

    def __init__(self, model, loss, *batch):
        self.model = copy.deepcopy(model).double()
        self.names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.grads = []
        for i in range(batch[0].shape[0]):
            single = [
                t[i : i + 1].double() if t.is_floating_point() else t[i : i + 1] for t in batch
            ]
            found = torch.autograd.grad(
                loss(self.model, *single).sum(), parameters, allow_unused=True
            )
            self.grads.append(
                {
                    n: torch.zeros_like(p) if g is None else g
                    for n, p, g in zip(self.names, parameters, found, strict=True)
                }
            )

    def norms(self, names=None):
        names = self.names if names is None else names
        return [
            math.sqrt(sum(float(grads[n].square().sum()) for n in names)) for grads in self.grads
        ]

    def layers(self):
        """Names of the parameters of each module, modules that share one merged."""
        groups = []
        by_id = {id(p): n for n, p in self.model.named_parameters() if p.requires_grad}
        for module in self.model.modules():
            own = {by_id[id(p)] for p in module.parameters(recurse=False) if id(p) in by_id}
            if own:
                merged = [g for g in groups if g & own]
                groups = [g for g in groups if not g & own]
                groups.append(own.union(*merged))
        return groups

    def clipped_sum(self, bound, clipping="flat"):
        groups = [set(self.names)] if clipping == "flat" else self.layers()
        share = bound / math.sqrt(len(groups))
        totals = {n: torch.zeros_like(g) for n, g in self.grads[0].items()}
        for group in groups:
            for grads, norm in zip(self.grads, self.norms(group), strict=True):
                factor = 1.0 if norm <= share else share / norm
                for name in group:
                    totals[name] += factor * grads[name]
        return totals


@pytest.fixture
def oracle():
    return Oracle


@pytest.fixture
def private():
    """private(model, *data, ...) -> (engine, model, optimizer, loader), by default noiseless.

    Batches of the test's own are taken too, except with unit_of.

    With one_part=True each draw is one physical batch, of as many rows as there are data.
    """

    def make(
        model,
        *data,
        batch_size=4,
        lr=0.1,
        kind=torch.optim.SGD,
        seed=0,
        ledger=None,
        accountant="rdp",
        workers=0,
        collate=None,
        one_part=False,
        **kwargs,
    ):
        data = data or (torch.zeros(16, 1),)
        engine = dpflash.PrivacyEngine(accountant=accountant, seed=seed, ledger=ledger)
        loader = DataLoader(
            TensorDataset(*data), batch_size=batch_size, num_workers=workers, collate_fn=collate
        )
        options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0}
        options |= {"foreign_batches": "unit_of" not in kwargs, **kwargs}
        if one_part:  # each draw is one physical batch
            sizes = ("physical_batch_size", "max_batch_size", "max_dataset_size")
            options |= dict.fromkeys(sizes, len(data[0]))
        optimizer = kind(model.parameters(), lr=lr)
        return engine, *engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, **options
        )

    return make


@pytest.fixture
def one_batch_a_draw(monkeypatch):
    """So many slots that each draw is one physical batch, without a physical_batch_size."""

    def slots(num_samples, sample_rate, *, ranks=1, at_most=None, cap=None):
        return at_most or -(-num_samples // ranks)

    monkeypatch.setattr(plan, "slots_of_draws", slots)


@pytest.fixture
def sums():
    """sums(engine, model): the clipped sums before noise, by parameter name, as they are kept."""

    def of(engine, model):
        held = engine._step.sums
        return {
            n: held[p].detach().clone() if p in held else torch.zeros_like(p)
            for n, p in model.named_parameters()
            if p.requires_grad
        }

    return of


@pytest.fixture
def distance():
    """distance(a, b): ||a - b|| / ||b|| over all parameters together, in float64."""

    def of(found, expected, *, absolute=False):
        assert found.keys() == expected.keys()
        difference = sum(
            float((found[n].double() - expected[n].double()).square().sum()) for n in expected
        )
        scale = sum(float(expected[n].double().square().sum()) for n in expected)
        return math.sqrt(difference) / (1.0 if absolute else math.sqrt(scale))

    return of


class TinyLM(nn.Module):
    """Embedding, norm, a linear layer over tokens, tied head."""

    def __init__(self, rows=11, width=6, tied=True, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=bias)
        self.head = nn.Linear(width, rows, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + torch.tanh(self.mix(self.norm(hidden))))


@pytest.fixture
def tiny_lm():
    return TinyLM


@pytest.fixture
def next_token_loss():
    """Cross-entropy of each sequence's next tokens."""

    def loss(model, tokens):
        logits = model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        return dpflash.losses.cross_entropy(logits, tokens[:, 1:])

    return loss


@pytest.fixture
def kernels_of_a_gpu(monkeypatch):
    """Gradients and noise are Triton's, interpreted; called with True, they decide no rounding."""
    launch = pytest.importorskip("dpflash.kernels.grad_launch")
    noise_triton = pytest.importorskip("dpflash.kernels.noise_triton")
    if torch.cuda.is_available():
        pytest.skip("patches what the interpreter reads")

    def add_noise_(outs, streams):
        noise_triton.add_noise_(outs, streams)
        return outs

    monkeypatch.setattr(noise_triton, "GROUPS", 8)
    monkeypatch.setattr(noise_triton, "SETTLE_BLOCK", 128)
    monkeypatch.setattr(launch, "REDUCE_BLOCK", 64)
    monkeypatch.setattr(launch, "WIDTH_BLOCK", 16)

    def backend(*tensors, any_dtype=False):
        double = any(t.dtype == torch.float64 for t in tensors)
        return reference if double and not any_dtype else launch

    monkeypatch.setattr(dispatch, "_backend", backend)
    for module in (step_sums, noise):
        monkeypatch.setattr(module, "add_noise_", add_noise_)

    def undecided():
        one = pytest.importorskip("triton.language").constexpr(1.0)
        monkeypatch.setattr(noise_triton, "_RELATIVE_ERROR", one)
        monkeypatch.setattr(noise_triton, "expected_capacity", lambda elements, scale: elements)

    return undecided

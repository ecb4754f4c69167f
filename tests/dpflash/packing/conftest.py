"""What the tests of packed batches share: documents, private runs, and a loop over documents."""

import contextlib
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import dpflash
from dpflash.packing import PackTo

VOCAB = 23


class Documents(list):
    """Documents of random tokens, a list that a DataLoader takes as its dataset."""

    def __init__(self, lengths, seed=0):
        generator = torch.Generator().manual_seed(seed)
        super().__init__(torch.randint(VOCAB, (n,), generator=generator) for n in lengths)


@pytest.fixture
def documents():
    """documents(lengths, seed=0)."""
    return Documents


def language_model(**options):
    """A small LongContextLM, the same in every call."""
    torch.manual_seed(1)
    given = {"num_kv_heads": 2, "max_seq_len": 256, **options}
    return dpflash.nn.LongContextLM(VOCAB, 16, 2, 4, **given)


@pytest.fixture(name="language_model")
def _language_model():
    return language_model


def of_batch(model, batch):
    """Losses of a packed batch: of a language model, or of one with `logits(tokens, ...)`."""
    if isinstance(model, dpflash.nn.LongContextLM):
        return model(batch.input_ids, batch.targets, batch)
    return model(batch)


def of_document(model, document, width, reduction="mean"):
    """The loss of one document by itself, unpacked: windows of `width` tokens, a row each."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for window in document.split(width) if len(document) > width else [document]:
        if len(window) > 1:
            logits = model.alone(window[None]) if hasattr(model, "alone") else model(window[None])
            losses = F.cross_entropy(logits[0, :-1].double(), window[1:], reduction="sum")
            total, count = total + losses, count + len(window) - 1
    return total / max(1, count) if reduction == "mean" else total


def gradients(model, documents, width, reduction="mean"):
    """The gradients of each document by itself, in the parameters' order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for document in documents:
        loss = of_document(model, document, width, reduction)
        grads = [None] * len(parameters)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append(
            [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(parameters, grads, strict=True)
            ]
        )
    return found


def clipped(engine, grads, bound, function="hard"):
    """The sum of documents' gradients, clipped in the groups of the engine."""
    of = {id(p): i for i, p in enumerate(engine._step.sums.trained)}
    sums = [torch.zeros_like(g) for g in grads[0]]
    for own in grads:
        for group in engine._run.backward.groups:
            members = [of[id(p)] for p in group.parameters]
            # The matrices of these models are no larger than a tile.
            norm = math.sqrt(sum(float(own[i].double().square().sum()) for i in members))
            share = bound * group.share
            if function == "automatic":
                factor = share / (norm + 0.01)
            else:
                factor = 1.0 if norm <= share else share / norm
            for i in members:
                sums[i] += factor * own[i]
    return sums


class Run:
    """A private model on a loader that draws every document of a dataset.

    Attributes:
        microbatches: of the last call of `sums`.
    """

    def __init__(self, model, documents, *, losses=of_batch, seed=0, mesh=None, **options):
        packing = {"tokens": 64, "max_documents": 5, "rows": 1, "align": 1}
        packing = {name: options.pop(name, value) for name, value in packing.items()}
        self.losses, self.autocast = losses, options.pop("autocast", contextlib.nullcontext)
        self.engine = dpflash.PrivacyEngine(seed=seed, mesh=mesh)
        loader = DataLoader(documents, batch_size=len(documents), collate_fn=PackTo(**packing))
        given = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "exact": False, **options}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=loader,
            **given,
        )

    def sums(self):
        """The clipped sum of each trained parameter over one draw."""
        self.microbatches = 0
        for batch in self.loader:
            self.microbatches += 1
            with self.autocast():
                losses = self.losses(self.model, batch)
            self.engine.backward(losses)
            if self.loader.is_last:
                break
        step = self.engine._step
        sums = [step.sums[p].detach().clone() for p in step.sums.trained]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sums


@pytest.fixture(name="run")
def _run():
    return Run


@pytest.fixture(name="gradients")
def _gradients():
    return gradients


@pytest.fixture(name="clipped")
def _clipped():
    return clipped


@pytest.fixture
def error():
    """error(found, expected): ||found - expected|| / ||expected||, the worst parameter's."""

    def of(found, expected):
        return max(
            float((f.double() - e.double()).norm() / e.double().norm().clamp(min=1e-300))
            for f, e in zip(found, expected, strict=True)
        )

    return of

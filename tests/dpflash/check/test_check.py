"""`engine.check` finds layers and losses that couple samples, and accepts those that do not."""

import copy
import math
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dpflash
import dpflash.check.run
from dpflash.attn import boundary
from dpflash.check import CheckReport, Problem
from dpflash.packing import pack
from dpflash.patterns import Adaptive

B = 5
CLASSES = 3
WIDTH = 8
VOCABULARY = 50


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def vectors(batch=B):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (batch,), generator=generator)


def documents(length=12, batch=B):
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def per_sample(model, batch):
    return dpflash.losses.cross_entropy(model(batch[0]), batch[1])


def check(model, batch, loss_fn=per_sample, **options):
    return dpflash.PrivacyEngine().check(model, batch, loss_fn, **options)


def found(report, kind):
    return [problem.where for problem in report.problems if problem.kind == kind]


def around(*layers):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))


def language_model(**more):
    sizes = {"embed_dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 64}
    return dpflash.nn.LongContextLM(VOCABULARY, **{**sizes, **more})


class PerTensorQuantizer(nn.Module):
    def forward(self, x):
        scale = x.detach().abs().max() / 7
        return x + ((x / scale).round() * scale - x).detach()


class PerSampleQuantizer(nn.Module):
    def forward(self, x):
        scale = x.detach().abs().amax(tuple(range(1, x.ndim)), keepdim=True) / 7
        return x + ((x / scale).round() * scale - x).detach()


class BackwardScale(nn.Module):
    """Couples in the backward alone: the forward is the identity."""

    class _Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.saved_tensors[0].abs().mean()

    def forward(self, x):
        return self._Scaled.apply(x)


class SparseAttention(nn.Module):
    """Each query keeps its best keys, by scores of its own sample or of the batch's mean."""

    def __init__(self, of_the_batch):
        super().__init__()
        self.of_the_batch = of_the_batch
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        ranked = scores.mean(0, keepdim=True).expand_as(scores) if self.of_the_batch else scores
        kept = torch.full_like(scores, -1e9).scatter(-1, ranked.topk(3, -1).indices, 0.0)
        return self.head((scores + kept).softmax(-1) @ v)


class RunningMean(nn.Module):
    """Subtracts what earlier batches left behind."""

    def __init__(self, buffer=True):
        super().__init__()
        self.mean = 0.0
        if buffer:
            del self.mean
            self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        out = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return out


class TimeFirst(nn.Module):
    """A recurrence over the first dimension, written by hand."""

    def __init__(self):
        super().__init__()
        self.reads = nn.Linear(WIDTH, WIDTH)
        self.remembers = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        steps = self.reads(x.transpose(0, 1))
        state = torch.zeros_like(steps[0])
        for step in steps:
            state = torch.tanh(step + self.remembers(state))
        return self.head(state)


class RelativeBias(nn.Module):
    """Attention with one learned bias for each distance, as T5 has it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(20, 1)
        self.reads = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        places = torch.arange(x.shape[1])
        bias = self.bias((places[:, None] - places).abs()).squeeze(-1)
        x = self.reads(x)
        return self.head(((x @ x.transpose(1, 2) + bias).softmax(-1) @ x).mean(1))


class Functional(nn.Module):
    """Uses a weight outside of its own module, besides or instead of the module."""

    def __init__(self, also_called):
        super().__init__()
        self.also_called = also_called
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.twice(x) if self.also_called else x
        return self.head(torch.tanh(F.linear(x, self.twice.weight)))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Released(nn.Module):
    """The identity, or attention, behind a boundary that clips every sample."""

    def __init__(self, noise_multiplier=1.0, attends=False):
        super().__init__()
        self.named = {"max_grad_norm": 1e-3, "noise_multiplier": noise_multiplier}
        self.attends = attends

    def forward(self, x):
        if not self.attends:
            return dpflash.private_boundary(x, **self.named)
        x = x.unflatten(-1, (2, -1)).unsqueeze(2)
        o = dpflash.attention(x, x, x, boundary=dpflash.Boundary(**self.named))
        return o.squeeze(2).flatten(1)


class Sequences(nn.Module):
    """A layer over [B, T, E] between two others, and a mean over T."""

    def __init__(self, layer):
        super().__init__()
        self.reads = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        out = self.layer(self.reads(x))
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class LearnedPositions(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Embedding(20, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        positions = positions[None, :] if self.shared else positions
        return self.head(self.tokens(tokens) + self.pos(positions))


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


def divided_by_the_batchs_tokens(model, batch):
    x, y = batch
    each = F.cross_entropy(model(x).movedim(-1, 1), y, reduction="none", ignore_index=-100)
    return each.flatten(1).sum(1) * len(y) / (y != -100).sum()


def mean_of_samples(model, batch):
    return per_sample(model, batch).mean()


def sum_of_samples(model, batch):
    return per_sample(model, batch).sum()


def mean_of_tokens(model, batch, ignore_index=-100):
    logits = model(batch[0]).movedim(-1, 1)
    return F.cross_entropy(logits, batch[1], ignore_index=ignore_index)


def mean_for_everyone(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]).expand(len(batch[0]))


class Coupled(nn.Module):
    def forward(self, x):
        return x + 1e-7 * x.roll(1, 0)


class Before(nn.Module):
    def forward(self, x):
        return torch.cat([x[:1], x[1:] + 0.1 * x[:-1]])


class FirstMean(TimeFirst):
    def forward(self, x):
        # Of one sample, the head gets [1, E] after [T, 1, E].
        return self.head(self.reads(x.transpose(0, 1) * 2).mean(0))


class NormFirst(TimeFirst):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(B + 2)

    def forward(self, x):
        return super().forward(self.norm(x))


class Unpacked(nn.Module):
    """Unpacks to the longest sample of the batch; a sample ends with its last nonzero number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(1, CLASSES, batch_first=True)

    def forward(self, x):
        x = x[:, :B]
        lengths = (x != 0).int().argmax(1).cpu() + 1
        packed = pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False)
        return (pad_packed_sequence(self.layer(packed)[0], True)[0] * x[..., None]).sum(1)


class NoWayBack(BackwardScale):
    class _Scaled(BackwardScale._Scaled):
        @staticmethod
        def backward(ctx, dy):
            raise RuntimeError("no way back")


class Writing(nn.Module):
    """Writes something of each batch, or of the first one, into what state_dict() has."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how, self.seen = nn.Linear(WIDTH, CLASSES), how, None
        self.register_parameter("scale", None)

    def get_extra_state(self):
        return self.seen if self.how == "extra state" else None

    def forward(self, x):
        first, mean = self.seen is None, x.detach().mean(0)
        self.seen = mean if self.how == "extra state" else 0
        if self.how == "revived":
            with torch.no_grad():
                self.layer.weight[0] = mean
        elif first and self.how == "initialized":
            self.layer.weight.data[0] = mean
        elif first and self.how == "made":
            self.scale = nn.Parameter(1 / (1 + mean.square()))
        elif self.how == "late buffer":
            self.register_buffer("last", mean)
        return self.layer(x)


def sequences(length=B):
    return torch.randn(B, length, WIDTH), vectors()[1]


def ignored(places, mark=-100):
    """Documents in which some targets are `mark`."""
    x, y = (t.clone() for t in documents())
    y[places] = mark
    return x, y


def divided_by_the_batchs_mask(model, batch):
    each = F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], reduction="none")
    return (each * batch[2]).sum(1) * B / batch[2].sum()


def divided_by_tokens_of_another_mark(model, batch):
    each = F.cross_entropy(
        model(batch[0]).movedim(-1, 1), batch[1], reduction="none", ignore_index=-7
    )
    return each.sum(1) * len(each) / (batch[1] != -7).sum()


def mean_or_sum_by_size(model, batch):
    losses = per_sample(model, batch)
    return losses.mean() if len(losses) in (1, B) else losses.sum()


def with_penalty(model, batch):
    return mean_of_samples(model, batch) + 0.1 * model[0].weight.square().sum()


def of_a_part(model, batch):
    return per_sample(model.used, batch)


def partly_unused():
    return nn.ModuleDict({"used": around(nn.ReLU()), "unused": nn.Linear(2, 2)})


def under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return per_sample(model, batch)


def weighted_error(model, batch):
    return batch["weight"] * (model(batch["x"])[:, 0] - batch["y"]).square()


def partly_frozen():
    model = around(nn.ReLU())
    model[0].requires_grad_(False)
    return model


def wide(batch=B):
    return vectors(batch)[0].to(torch.bfloat16), vectors(batch)[1]


# What must be caught


def case(model, kind, where, *words, batch=vectors, loss=per_sample, declared=None, no=()):
    """A model or the layers around which it is, and the problems that it has; none of `no`."""
    return model, kind, where, words, batch, loss, declared, no


def outside(words, outputs):
    """Losses that train something outside of the model."""
    words = (f"{words} outside of the private model", "before make_private")

    def loss(model, batch):
        return dpflash.losses.cross_entropy(outputs(model, batch[0]), batch[1])

    return case([nn.ReLU()], "outside_use", ["loss_fn"], *words, loss=loss)


def writing(how, name):
    return case(lambda: Writing(how), "state", [name], "state_dict() releases", "optimizer alone")


HEAD, PROMPT = nn.Parameter(torch.eye(CLASSES)), nn.Parameter(torch.zeros(WIDTH))
TEMPERATURE = torch.ones((), requires_grad=True)
NORM = nn.BatchNorm1d(WIDTH)
WHOLE = "(the model itself)"
MEAN = {"loss": mean_of_samples, "declared": "mean"}
OF_TOKENS = {"loss": mean_of_tokens, "declared": "mean"}
AMAX, OURS = "amax over all dimensions but the first", "dpflash.losses"
UNUSED = ["unused.weight, unused.bias"]
OTHER = around(nn.ReLU())
TALL = {"batch": lambda: sequences(B + 2)}
LOSS = ("loss", ["loss_fn"])
CAUGHT = {
    "buffers beside an unsupported layer": case([NORM, RunningMean()], "state", ["2.mean"]),
    "all unsupported layers": case([NORM, nn.ReLU(), NORM], "unsupported", ["1", "3"]),
    "nothing but one": case(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH)), "unsupported", ["0"]),
    "tokens of the batch": case(
        language_model, "coupling", ["loss_fn"], "targets of the others are ignored",
        "dpflash.losses.cross_entropy", batch=documents, loss=divided_by_the_batchs_tokens),
    "tokens of another mark": case(
        language_model, "coupling", ["loss_fn"], loss=divided_by_tokens_of_another_mark,
        batch=lambda: ignored((slice(None), slice(9, None)), -7)),
    "one mean for all": case([nn.ReLU()], "coupling", ["loss_fn"], loss=mean_for_everyone),
    # Its states have the samples in dimension 1.
    "one mean for all beside a GRU": case(
        lambda: Sequences(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)), "coupling", ["loss_fn"],
        batch=sequences, loss=mean_for_everyone),
    "another order": case(
        [nn.ReLU()], "coupling", ["loss_fn"], "in the order of the batch",
        loss=lambda m, b: per_sample(m, b).roll(1)),
    "tokens of the mask": case(
        language_model, "coupling", ["loss_fn"], "masks of the others are shortened",
        batch=lambda: (*documents(), torch.ones(B, 12)), loss=divided_by_the_batchs_mask),
    "a scale of the tensor": case([PerTensorQuantizer()], "coupling", ["1"], AMAX),
    "of two samples": case([PerTensorQuantizer()], "coupling", ["1"], batch=lambda: vectors(2)),
    "beside a boundary": case([Released(), PerTensorQuantizer()], "coupling", ["2"]),
    "a pattern of the mean": case(
        lambda: SparseAttention(of_the_batch=True), "coupling", [WHOLE], batch=documents),
    "a small share": case([Coupled()], "coupling", ["1"]),
    "a statistic in a buffer": case([RunningMean()], "state", ["1.mean"]),
    "a statistic elsewhere": case([RunningMean(buffer=False)], "state", [WHOLE]),
    "time first, T = B": case(TimeFirst, "first_dimension", ["reads"], batch=sequences),
    "time first": case(TimeFirst, "first_dimension", ["reads"], **TALL),
    "before others": case(FirstMean, "first_dimension", ["reads"], no=["unsupported"], **TALL),
    "beside an unsupported layer": case(NormFirst, "first_dimension", ["reads"], **TALL),
    "a bias of positions, T = B": case(
        RelativeBias, "first_dimension", ["bias"], batch=sequences, no=["coupling"]),
    "a weight used twice": case(lambda: Functional(True), "outside_use", ["twice.weight"]),
    "a weight used elsewhere": case(lambda: Functional(False), "outside_use", ["twice.weight"]),
    "a head outside": outside("a parameter of shape (3, 3)", lambda m, x: m(x) @ HEAD),
    "a prompt outside": outside("a parameter of shape (8,)", lambda m, x: m(x + PROMPT)),
    "a temperature outside": outside("a tensor", lambda m, x: m(x) / TEMPERATURE),
    "codes that are revived": writing("revived", "layer.weight"),
    "weights from the first batch": writing("initialized", "layer.weight"),
    "a parameter made of it": writing("made", "scale"),
    "a late buffer": writing("late buffer", "last"),
    "an extra state": writing("extra state", "_extra_state"),
    "no gradient": case(partly_unused, "no_gradient", UNUSED, loss=of_a_part),
    "a scalar": case(
        [nn.ReLU()], *LOSS, "a scalar, which does not separate samples", "dpflash.losses",
        "loss_reduction='mean'", loss=mean_of_samples),
    "a column": case([nn.ReLU()], *LOSS, OURS, loss=lambda m, b: per_sample(m, b)[:, None]),
    "detached": case([nn.ReLU()], *LOSS, OURS, loss=lambda m, b: per_sample(m, b).detach()),
    "nan": case([nn.ReLU()], *LOSS, OURS, loss=lambda m, b: per_sample(m, b) * math.nan),
    "a float": case([nn.ReLU()], *LOSS, OURS, loss=lambda m, b: per_sample(m, b).sum().item()),
    "losses where a mean is declared": case(
        [nn.ReLU()], *LOSS, "shape (5,); expected a scalar, as loss_reduction='mean' declares",
        "losses.mean()", declared="mean"),
    "of another model": case(
        [nn.ReLU()], "run", ["loss_fn"], "does not call the model",
        loss=lambda m, b: per_sample(OTHER, b)),
    "a loss that raises": case(
        [nn.ReLU()], "run", ["loss_fn"], "targets have dtype",
        batch=lambda: (vectors()[0], vectors()[1].float())),
    "a batch of a short sample that raises": case(
        Unpacked, "run", ["loss_fn"], "batch of copies of one sample raised RuntimeError",
        "needs total_length=", batch=lambda: (torch.eye(B, WIDTH).flip(0), vectors()[1])),
    "a backward that raises": case([NoWayBack()], "run", ["loss_fn"], "no way back"),
    # All samples have equally many tokens, so only targets that are ignored can tell.
    "a mean of tokens": case(
        language_model, "reduction", ["loss_fn"], "targets of the others are ignored",
        "cross_entropy(logits, targets).mean()", "valid tokens", batch=documents, **OF_TOKENS),
    "a mean that a sample alone has not": case(
        language_model, "reduction", ["loss_fn"], "becomes NaN or infinite when",
        batch=lambda: ignored(2), **OF_TOKENS),
    "a reduction by the size": case(
        [nn.ReLU()], "reduction", ["loss_fn"], loss=mean_or_sum_by_size, declared="mean"),
    "a scalar through the sample before": case(
        [Before()], "coupling", ["1"], no=["reduction"], **MEAN),
    "a mean in 16 bit": case(
        lambda: around(nn.Tanh()).to(torch.bfloat16), "reduction", ["0.weight"], batch=wide,
        **MEAN),
    "a scale through a scalar": case(
        [PerTensorQuantizer()], "coupling", ["1"], AMAX, no=["reduction"], **MEAN),
    "a penalty": case(
        [nn.ReLU()], "outside_use", ["0.weight"], loss=with_penalty, declared="mean"),
    "no gradient through a scalar": case(
        partly_unused, "no_gradient", UNUSED, loss=lambda m, b: of_a_part(m, b).mean(),
        declared="mean"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUGHT)
def test_what_breaks_the_guarantee_is_found_by_its_place_with_the_way_out(name):
    model, kind, where, words, batch, loss, declared, no = CAUGHT[name]
    model = around(*map(copy.deepcopy, model)) if isinstance(model, list) else model()
    report = check(model, batch(), loss, loss_reduction=declared)
    assert found(report, kind) == where
    assert report.ok == (kind == "no_gradient")
    problem = next(problem for problem in report.problems if problem.kind == kind)
    assert all(word in problem.message + problem.remedy for word in words)
    assert not [problem for problem in report.problems if problem.kind in no]


# The last net, under what the shapes of the inputs tell.
@pytest.mark.parametrize("options", [{}, {"loss_reduction": "mean"}], ids=["losses", "scalar"])
def test_a_private_norm_that_is_no_samples_norm_is_found(options, monkeypatch):
    monkeypatch.setattr(dpflash.check.run, "check_first_dimensions", lambda *_: None)
    loss = mean_of_samples if options else per_sample
    report = check(TimeFirst(), sequences(), loss, **options)
    assert found(report, "first_dimension") == [WHOLE]
    assert not options or "the loss of sample 0 alone" in report.problems[0].message


@pytest.mark.parametrize("options", [{}, {"loss_reduction": "mean"}], ids=["losses", "scalar"])
def test_batch_norm_is_found_as_a_layer_and_as_coupling_and_is_to_be_replaced(options):
    loss = mean_of_samples if options else per_sample
    report = check(around(nn.BatchNorm1d(WIDTH)), vectors(), loss, **options)
    assert found(report, "unsupported") == ["1"] and found(report, "coupling") == ["1"]
    assert found(report, "batch_size") == ["loss_fn"] and not found(report, "state")
    assert "nn.GroupNorm" in str(report) and "freeze it: .eval()" in str(report)
    assert any("takes no sample alone" in entry for entry in report.not_checked) == bool(options)


def test_coupling_that_makes_a_loss_no_number_is_said_in_words():
    def losses(model, batch):
        logits = model(batch[0])
        return dpflash.losses.cross_entropy(logits / logits.std(0), batch[1])

    report = dpflash.PrivacyEngine().check(nn.Linear(WIDTH, CLASSES), vectors(), losses)
    assert "becomes NaN or infinite when" in str(report).replace("\n    ", " ")


@pytest.mark.parametrize("options", [{}, {"loss_reduction": "mean"}], ids=["losses", "scalar"])
def test_coupling_in_the_backward_alone_is_found(options):
    loss = mean_of_samples if options else per_sample
    report = check(around(BackwardScale()), vectors(), loss, **options)
    assert found(report, "reduction" if options else "coupling")
    assert "0.weight, 0.bias" in report.problems[0].message
    assert "2.weight" not in report.problems[0].message


@pytest.mark.parametrize("length", [B, B + 2], ids=["T-equals-B", "T-differs"])
def test_positions_without_a_batch_are_found_with_a_remedy_that_mends_them(length):
    report = check(LearnedPositions(shared=False), documents(length))
    assert found(report, "first_dimension") == ["pos"]
    remedy = report.problems[0].remedy
    assert "indices.expand(B, -1)" in remedy and "(indices[:, None]).squeeze(1)" in remedy
    assert "transpose" not in remedy
    # Training takes them, unless it cannot tell them from one index for each sample.
    assert report.ok == (length != B)
    assert check(LearnedPositions(shared=True), documents(length)).problems == []


def test_every_layer_that_refuses_its_input_is_found_not_only_the_first():
    class Positions(LearnedPositions):
        def __init__(self):
            super().__init__(shared=False)
            self.again = nn.Embedding(20, WIDTH)

        def forward(self, tokens):
            positions = torch.arange(tokens.shape[1])
            return self.head(self.tokens(tokens) + self.pos(positions) + self.again(positions))

    report = check(Positions(), documents(B))
    assert found(report, "first_dimension") == ["pos", "again"]
    assert all("(B = 5)" in problem.message for problem in report.problems[:2])


@pytest.mark.parametrize("time_first", [False, True])
def test_a_layer_over_flattened_tokens_is_found_where_the_time_is_first(time_first):
    class Flattened(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens):
            x = self.embedding(tokens)
            x = x.transpose(0, 1) if time_first else x
            y = self.head(torch.relu(self.inner(x.flatten(0, 1)))).unflatten(0, x.shape[:2])
            return y.transpose(0, 1) if time_first else y

    expected = ["inner", "head"] if time_first else []
    assert found(check(Flattened(), documents()), "first_dimension") == expected


def test_parameters_without_a_gradient_are_one_problem_that_keeps_every_name():
    model = around(nn.ReLU())
    model.unused = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    report = check(model, vectors(), lambda m, b: per_sample(m[:3], b))
    (names,) = found(report, "no_gradient")
    assert names.split(", ") == [f"unused.{n}.{p}" for n in range(5) for p in ("weight", "bias")]
    assert "unused.0.weight, unused.0.bias, unused.1.weight and 7 more" in str(report)
    assert "unused.4.bias" not in str(report) and "these 10 trainable" in str(report)


def test_a_model_that_cannot_take_an_empty_batch_has_no_problem():
    """Training has no empty batch: an empty logical batch has padding rows."""
    model = around(nn.ReLU())

    def loss(m, batch):
        assert len(batch[0]) > 0
        return per_sample(m, batch)

    report = check(model, vectors(), loss)
    assert report.ok and not report.problems


def test_randomness_is_a_warning_and_does_not_hide_coupling():
    assert check(around(Noisy()), vectors()).ok
    report = check(around(Noisy(), PerTensorQuantizer()), vectors())
    assert found(report, "random") and found(report, "coupling") == ["2"]


def test_dropout_that_cannot_be_taken_out_is_a_warning_with_the_way_to_switch_it_off():
    batch = torch.randn(B, 4, WIDTH), vectors()[1]
    lstm = Sequences(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True))
    (problem,) = check(lstm, batch).problems
    assert problem.kind == "random" and "dropout=0.0 or model.eval()" in problem.remedy
    assert not found(check(lstm.eval(), batch), "random")


def test_a_boundary_that_clips_a_mean_over_samples_is_an_error_with_a_way_out():
    # Rows of a mean's gradient shrink with the batch, and what clipping takes with them.
    model = around(Released())
    report = check(model, vectors(), mean_of_samples, loss_reduction="mean")
    assert found(report, "reduction") == ["loss_fn"]
    assert "a boundary in the model clips" in report.problems[0].remedy
    assert check(model, vectors(), sum_of_samples, loss_reduction="sum").problems == []


# What a declared reduction must be


@pytest.mark.parametrize("padded", [True, False], ids=["unequal-lengths", "equal-lengths"])
def test_a_mean_over_tokens_by_an_unknown_mark_is_found_or_said_to_be_beyond_the_test(padded):
    tokens, targets = (t.clamp(min=1) for t in documents())
    if padded:
        targets[0, 7:] = 0

    def loss(model, batch):
        return mean_of_tokens(model, batch, ignore_index=0)

    report = check(language_model(), (tokens, targets), loss, loss_reduction="mean")
    assert found(report, "reduction") == (["loss_fn"] if padded else [])
    assert any("unequal lengths" in entry for entry in report.not_checked)


@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_reduction_declared_for_the_other_is_found_and_the_right_one_named(declared):
    actual, mend = {"mean": ("sum", "divide"), "sum": ("mean", "multiply")}[declared]
    loss = {"mean": mean_of_samples, "sum": sum_of_samples}[actual]
    report = check(around(nn.ReLU()), vectors(), loss, loss_reduction=declared)
    assert [problem.kind for problem in report.problems] == ["reduction"]
    assert f"is the {actual} of its samples' own losses" in report.problems[0].message
    assert f"declare loss_reduction='{actual}'" in report.problems[0].remedy
    assert mend in report.problems[0].remedy


def value_of(wrong, right):
    return right + 1e-4 * (wrong - right).detach()


def gradient_of(wrong, right):
    return right + 1e-4 * (wrong - wrong.detach() - right + right.detach())


HALVES = {
    "value-alone": (value_of, "its gradient by 0.0e+00"),
    "gradient-alone": (gradient_of, "changes by 0.0e+00"),
}


@pytest.mark.parametrize(("slightly", "equal"), HALVES.values(), ids=HALVES.keys())
def test_a_scalar_is_compared_in_its_value_and_in_its_gradient(slightly, equal):
    def loss(model, batch):
        return slightly(mean_of_tokens(model, batch), mean_of_samples(model, batch))

    report = check(language_model(), documents(), loss, loss_reduction="mean")
    assert found(report, "reduction") == ["loss_fn"]
    assert equal in report.problems[0].message


def test_randomness_hides_no_coupling_in_a_scalar_but_which_reduction_it_is():
    quiet = check(around(Noisy()), vectors(), mean_of_samples, loss_reduction="sum")
    assert quiet.ok and found(quiet, "random")
    assert any("whether the scalar is a mean or a sum" in entry for entry in quiet.not_checked)
    coupled = around(Noisy(), PerTensorQuantizer())
    report = check(coupled, vectors(), mean_of_samples, loss_reduction="mean")
    assert found(report, "coupling") == ["2"]

    def loss(model, batch):
        return mean_of_tokens(nn.Sequential(model, Noisy()), batch)

    report = check(language_model(), documents(), loss, loss_reduction="mean")
    assert found(report, "reduction") == ["loss_fn"]


REDUCED = {
    "mean": (mean_of_samples, "mean"),
    "sum": (sum_of_samples, "sum"),
    "sum-over-tokens": (lambda m, b: per_sample(m, b).mul(b[1].shape[1]).sum(), "sum"),
    "part-of-a-mean": (lambda m, b: mean_of_samples(m, b) / 4, "mean"),
}


@pytest.mark.parametrize(("loss", "declared"), REDUCED.values(), ids=REDUCED.keys())
def test_a_reduction_over_samples_has_no_problem(loss, declared):
    report = check(language_model(), documents(), loss, loss_reduction=declared)
    assert report.problems == []
    assert any("targets of the others" in entry for entry in report.checked)
    assert any("private backward" in entry for entry in report.checked)
    assert not any("unequal lengths" in entry for entry in report.not_checked)


def test_a_reduction_of_another_name_is_refused():
    with pytest.raises(ValueError, match="loss_reduction='none'"):
        check(around(nn.ReLU()), vectors(), loss_reduction="none")


# What must pass

CLEAN = {
    "a scale of each sample": (lambda: around(PerSampleQuantizer()), vectors, per_sample),
    "a pattern of each sample": (lambda: SparseAttention(False), documents, per_sample),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
        ),
        lambda: (torch.randn(4, 3, 6, 6), torch.randint(0, CLASSES, (4,))), per_sample,
    ),
    "frozen parameters": (partly_frozen, vectors, per_sample),
    "float32": (language_model, documents, per_sample),
    "16 bit": (lambda: language_model().to(torch.bfloat16), documents, per_sample),
    "autocast": (language_model, documents, under_autocast),
    "a dict": (
        lambda: around(nn.Tanh()),
        lambda: {"x": vectors()[0], "y": torch.randn(B), "weight": torch.ones(B)},
        weighted_error,
    ),
    "two samples": (lambda: around(nn.ReLU()), lambda: vectors(2), per_sample),
    "a mean of one target each": (lambda: around(nn.ReLU()), vectors, mean_of_tokens),
    "a mean of two targets": (lambda: around(nn.ReLU()), lambda: vectors(2), mean_of_tokens),
}  # fmt: skip


@pytest.mark.parametrize(("build", "batch", "loss"), CLEAN.values(), ids=CLEAN)
def test_what_keeps_the_guarantee_has_no_problem(build, batch, loss):
    options = {"loss_reduction": "mean"} if loss is mean_of_tokens else {}
    report = check(build(), batch(), loss, **options)
    assert report.ok and {problem.kind for problem in report.problems} <= {"random"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pattern": Adaptive(block_size=16, keep=2, causal=True)},
        {"dropout": 0.2, "positions": "learned", "tie_embeddings": False},
        {"activation_checkpointing": True, "norm": "rms_norm", "num_kv_heads": 1},
    ],
    ids=["dense-tied", "adaptive", "dropout-learned", "checkpointing"],
)
def test_a_long_context_lm_has_no_problem(options):
    report = check(language_model(**options), documents(length=40))
    assert report.problems == []
    assert any("private backward" in entry for entry in report.checked)


def test_dropout_is_no_coupling_and_is_said_to_be_off():
    report = check(around(nn.Dropout(0.5), FunctionalDropout()), vectors())
    assert report.problems == []
    assert any("dropout" in entry for entry in report.not_checked)
    only_functional = check(around(FunctionalDropout()), vectors())
    assert any("dropout" in entry for entry in only_functional.not_checked)


def test_dropout_inside_of_torchs_attention_is_switched_off():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True)
    report = check(Sequences(layer), (torch.randn(B, 4, WIDTH), vectors()[1]))
    assert report.ok and not report.problems
    assert any("it is alone" in entry for entry in report.checked)
    assert any("dropout" in entry for entry in report.not_checked)
    attention = Sequences(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True))
    attention.layer.self_attn.dropout = 0.5  # nowhere else
    report = check(attention, (torch.randn(B, 4, WIDTH), vectors()[1]))
    assert not found(report, "random")
    assert any("dropout" in entry for entry in report.not_checked)


@pytest.mark.parametrize("attends", [False, True], ids=["private-boundary", "attention"])
def test_noise_of_a_boundary_is_no_coupling_and_is_said_to_be_off(attends):
    report = check(around(Released(attends=attends)), vectors())
    assert report.problems == []
    assert any("noise of boundaries" in entry for entry in report.not_checked)
    assert any("private backward" in entry for entry in report.checked)
    quiet = check(around(Released(noise_multiplier=0.0, attends=attends)), vectors())
    assert not any("noise of boundaries" in entry for entry in quiet.not_checked)


def test_a_batch_norm_in_eval_mode_is_named_unless_it_is_frozen():
    model = around(nn.BatchNorm1d(WIDTH).eval())
    assert found(check(model, vectors()), "unsupported") == ["1"]
    model[1].requires_grad_(False)
    assert check(model, vectors()).problems == []


def test_class_weights_of_a_loss_are_compared_in_float64():
    weights = torch.arange(1.0, 1.0 + CLASSES)

    def weighted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="none")

    report = check(around(), vectors(), weighted)
    assert report.ok and not any("float64" in entry for entry in report.not_checked)


def test_state_in_float32_that_a_loss_writes_in_place_is_found_in_float64():
    state = torch.zeros(CLASSES)

    def shifted(model, batch):
        logits = model(batch[0])
        losses = F.cross_entropy(logits + state, batch[1], reduction="none")
        torch.mean(logits.detach(), 0, out=state)
        return losses

    assert not check(around(), vectors(), shifted).ok


def test_a_check_without_a_batch_says_how_it_is_called():
    with pytest.raises(TypeError, match=r"engine\.check\(model, batch, loss_fn, .*'loss_fn'"):
        dpflash.PrivacyEngine().check(around(), per_sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_refuses_float64_is_checked_as_it_is(dtype):
    class Narrow(nn.Module):
        def forward(self, x):
            assert x.dtype != torch.float64
            return x

    model = around(Narrow(), nn.Tanh()).to(dtype)
    batch = vectors()[0].to(dtype), vectors()[1]
    report = check(model, batch)
    assert report.ok and any("float64" in entry for entry in report.not_checked)
    assert check(model, batch, sum_of_samples, loss_reduction="sum").ok
    assert check(model, batch, mean_of_samples, loss_reduction="mean").ok == (dtype.itemsize == 4)
    assert found(check(model, batch, mean_of_samples, loss_reduction="sum"), "reduction")
    coupled = around(Narrow(), PerTensorQuantizer()).to(dtype)
    assert found(check(coupled, batch), "coupling") == ["2"]


def test_a_single_tensor_is_a_batch():
    report = check(language_model(), documents()[0], lambda m, b: per_sample(m, (b, b)))
    assert report.problems == []
    assert any("unequal lengths" in entry for entry in report.not_checked)


HUGGING_FACE = {
    "gpt2": lambda t: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "llama": lambda t: t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    ),
}


@pytest.mark.parametrize("build", HUGGING_FACE.values(), ids=HUGGING_FACE.keys())
def test_a_hugging_face_model_has_no_error_until_its_own_loss_is_taken(build):
    model = build(pytest.importorskip("transformers")).train()
    tokens = torch.randint(0, VOCABULARY, (4, 9))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    def own(m, b):
        return m(**b).loss.expand(len(b["labels"]))

    def ours(m, b):
        logits = m(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits
        return dpflash.losses.cross_entropy(logits[:, :-1], b["labels"][:, 1:].contiguous())

    report = check(model, batch, ours)
    assert not report.problems
    assert any("masks of the others" in entry for entry in report.checked)
    assert found(check(model, batch, own), "coupling") == ["loss_fn"]

    def ours_reduced(m, b):
        return ours(m, b).mean()

    report = check(model, batch, ours_reduced, loss_reduction="mean")
    assert report.ok
    report = check(model, batch, lambda m, b: m(**b).loss, loss_reduction="mean")
    assert found(report, "reduction") == ["loss_fn"]


def test_a_private_model_is_checked_by_its_plain_layers_and_stays_private():
    data = torch.utils.data.TensorDataset(*vectors(16))
    model = around(nn.ReLU())
    engine = dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        foreign_batches=True,
    )
    assert engine.check(model, vectors(), per_sample).problems == []
    engine.backward(per_sample(model, vectors()))
    optimizer.step()


# What must stay as it was


def test_a_check_changes_nothing():
    model = around(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), RunningMean())
    model[2].eval()
    per_sample(model, vectors()).sum().backward()
    batch = vectors()
    state = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    grads = [p.grad.clone() for p in model.parameters()]
    inputs = [t.clone() for t in batch]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    check(model, batch)
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad) and parameter.dtype == torch.float32
    assert all(
        torch.equal(a, b) and not a.requires_grad for a, b in zip(batch, inputs, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def leaves(x):
    """What leaves through a boundary of noise where nothing else does."""
    (grad,) = torch.autograd.grad((Released()(x) * 0).sum(), x)
    return grad


def test_a_boundarys_noise_is_back_after_a_check_however_it_ended():
    x = torch.zeros(B, WIDTH, requires_grad=True)
    during, kept = [], []

    def loss(model, batch):
        during.append(leaves(x))
        kept.append((Released()(x) * 0).sum())
        return per_sample(model, batch)

    def fails(model, batch):
        raise KeyboardInterrupt

    check(around(Released()), vectors(), loss)
    assert during and not any(grad.any() for grad in during)
    assert leaves(x).all()
    # Crossed in the check, run after it.
    assert torch.autograd.grad(kept[0], x)[0].all()
    with pytest.raises(KeyboardInterrupt):
        check(around(Released()), vectors(), fails)
    assert leaves(x).all()


def test_a_check_leaves_the_noise_of_boundaries_in_other_threads():
    x = torch.zeros(B, WIDTH, requires_grad=True)
    elsewhere = []

    def loss(model, batch):
        thread = threading.Thread(target=lambda: elsewhere.append(leaves(x)))
        thread.start()
        thread.join()
        return per_sample(model, batch)

    check(around(nn.ReLU()), vectors(), loss)
    assert elsewhere and all(grad.all() for grad in elsewhere)


def test_a_boundarys_noise_is_decided_in_its_forward_whatever_thread_runs_the_backward():
    x = torch.zeros(B, WIDTH, requires_grad=True)
    found = []
    with boundary.without_noise():
        end = (Released()(x) * 0).sum()
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(end, x)))
        thread.start()
        thread.join()
    assert not found[0].any()


def test_only_the_check_can_switch_a_boundarys_noise_off():
    package = Path(dpflash.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "without_noise" in path.read_text(encoding="utf-8")
    }
    assert users == {"attn/boundary.py", "check/run.py"}
    assert not hasattr(dpflash, "without_noise")
    assert "without noise are not private" in boundary.without_noise.__doc__


def test_a_loss_that_changes_its_batch_in_place_changes_no_comparison():
    batch = vectors()

    def loss(model, b):
        b[0].mul_(2)
        return per_sample(model, b)

    assert check(around(nn.ReLU()), batch, loss).problems == []
    assert torch.equal(batch[0], vectors()[0])


BATCHES = {
    "one-sample": (vectors(1), "holds 1 sample"),
    "empty": (vectors(0), "holds 0 sample"),
    "no-tensor": ([1, 2], "holds no tensor"),
    "packed": ([pack([[1], [2]], tokens=4, max_documents=2)], "PackedBatch.*one a row"),
    "unequal": ((torch.zeros(3, 2), torch.zeros(2)), "the batch as the first dimension of each"),
}


@pytest.mark.parametrize(("batch", "message"), BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_that_cannot_be_compared_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        check(around(nn.ReLU()), batch)


@pytest.mark.parametrize("arguments", [(None, 1), (nn.Linear(1, 1), None)], ids=["model", "loss"])
def test_what_is_no_model_or_no_function_is_refused(arguments):
    model, loss = arguments
    with pytest.raises(ValueError, match="expected a"):
        check(model, vectors(), loss)


def test_a_mean_over_class_weights_is_refused_with_of_criterion_which_passes():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0]))
    model = around(nn.ReLU())
    report = check(model, vectors(), lambda m, b: criterion(m(b[0]), b[1]), loss_reduction="mean")
    assert found(report, "reduction") and "class weights" in str(report)
    each = dpflash.losses.of_criterion
    report = check(model, vectors(), lambda m, b: each(criterion, m(b[0]), b[1]))
    assert report.ok and "such as class weights" in " ".join(report.not_checked)
    with pytest.raises(ValueError, match="loss_fn=CrossEntropyLoss: .*of_criterion"):
        check(model, vectors(), criterion)


def test_a_report_says_that_the_data_set_and_its_collate_fn_were_not_tried():
    report = check(around(nn.ReLU()), vectors(2))
    left = str(report).partition("not checked")[2]
    assert "collate_fn" in left and "padding to the longest sample" in left


def test_a_report_reads_errors_first_and_never_claims_a_proof():
    warning = Problem("random", "loss_fn", "m", "r", "warning")
    error = Problem("coupling", "blocks.0", "m", "r")
    assert CheckReport([warning], [], []).ok and not CheckReport([warning, error], [], []).ok
    clean = str(check(around(nn.ReLU()), vectors()))
    assert clean.startswith("no problem found") and clean.endswith("not a proof.")
    text = str(check(around(nn.BatchNorm1d(WIDTH)), vectors()))
    assert text.startswith("error") and "not checked" in text

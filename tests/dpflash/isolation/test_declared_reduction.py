"""A scalar loss that is not the declared reduction is refused on the first batches."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.isolation.declared_reduction import refuse_scalars, refuse_weights

V, T = 11, 6
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(V, (24, T), generator=GENERATOR)
LENGTHS = torch.randint(2, T + 1, (24,), generator=GENERATOR)
LABELS = IDS.masked_fill(torch.arange(T) >= LENGTHS[:, None], -100)
EQUAL = IDS.masked_fill(torch.arange(T) >= 4, -100)


class Head(nn.Module):
    """Tokens to logits; with labels it returns a scalar too, as models of Hugging Face do."""

    def __init__(self, loss=None, dropout=0.0):
        super().__init__()
        self.embedding, self.out = nn.Embedding(V, 8), nn.Linear(8, V)
        self.dropout, self.loss = nn.Dropout(dropout), loss

    def forward(self, ids, labels=None):
        logits = self.out(self.dropout(self.embedding(ids)))
        return logits if labels is None else (self.loss(logits, labels), logits)


def token_mean(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def per_class_first(logits, labels):
    return nn.CrossEntropyLoss()(logits.transpose(1, 2), labels)


def weighted_mean(logits, labels):
    weight = torch.linspace(0.5, 2, V)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight)


def quarter(logits, labels):
    return token_mean(logits, labels) / 4


def mean_with_zeros(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean()


def shifted_mean(logits, labels):
    return mean_with_zeros(logits[:, :-1], labels[:, 1:])


def weighted_samples(logits, labels):
    weight = labels.double().var(1)
    return (dpflash.losses.cross_entropy(logits, labels) * weight).mean()


def sample_mean(logits, labels):
    return dpflash.losses.cross_entropy(logits, labels).mean()


def sample_sum(logits, labels):
    return dpflash.losses.cross_entropy(logits, labels).sum()


def mean_of_sums(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)


def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def made(build, *, labels=LABELS, declared="mean", **options):
    """(engine, model, optimizer, loader) of a private model that `build` returns."""
    torch.manual_seed(0)
    engine, model = dpflash.PrivacyEngine(seed=0), build()
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(IDS, labels), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction=declared,
        **options,
    )


def train(loss, declared, *, inside, labels=LABELS, dropout=0.0, **options):
    options |= {"labels": labels, "declared": declared}
    engine, model, optimizer, loader = made(lambda: Head(loss, dropout), **options)
    for x, y in loader:
        (model(x, y)[0] if inside else loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("loss", [token_mean, per_class_first, weighted_mean, quarter])
def test_a_mean_over_tokens_is_refused_before_anything_is_released(loss, declared, inside):
    words = "not the .* of losses of single" if inside else "mean over all valid tokens"
    if loss is quarter and not inside:
        words = "or over their class weights, times a factor"
    with pytest.raises(RuntimeError, match=f"loss_reduction='{declared}', but.*{words}"):
        train(loss, declared, inside=inside)


class Attributes(dict):
    def __init__(self, *arguments, **entries):
        super().__init__(*arguments, **entries)
        self.__dict__ = self


class Form(Head):
    """Returns its logits, or a mean over tokens, in one of several forms."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, ids, labels):
        logits = super().forward(ids)
        return self.form(logits, labels)


# What the model returns, and the loss of it.
FORMS = {
    "attributes": (lambda z, y: Attributes(loss=token_mean(z, y)), lambda out, y: out.loss),
    "one number": (lambda z, y: token_mean(z, y)[None], lambda out, y: out.sum()),
    "[1, 1]": (lambda z, y: token_mean(z, y)[None, None], lambda out, y: out.sum()),
    "flattened": (lambda z, y: z.flatten(0, 1), lambda z, y: F.cross_entropy(z, y.flatten())),
    "beside a scalar": (
        lambda z, y: (z, 0 * z.mean()),
        lambda out, y: token_mean(out[0], y) + out[1],
    ),
    "log-probabilities": (
        lambda z, y: z.log_softmax(2),
        lambda out, y: F.nll_loss(out.flatten(0, 1), y.flatten()),
    ),
}


@pytest.mark.parametrize(("form", "loss"), FORMS.values(), ids=list(FORMS))
def test_a_mean_over_tokens_is_refused_in_other_forms_too(form, loss):
    engine, model, _, loader = made(lambda: Form(form))
    with pytest.raises(RuntimeError, match="loss_reduction='mean', but the scalar"):
        for x, y in loader:
            loss(model(x, y), y).backward()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("loss", "declared", "labels"),
    [
        (sample_mean, "mean", LABELS),
        (sample_sum, "sum", LABELS),
        (mean_of_sums, "mean", LABELS),
        (mean_with_zeros, "mean", LABELS),
        (shifted_mean, "mean", LABELS),
        (weighted_samples, "mean", LABELS),
        (token_mean, "mean", EQUAL),
    ],
)
def test_reductions_over_samples_train(loss, declared, labels, dropout, inside):
    engine = train(loss, declared, labels=labels, dropout=dropout, inside=inside)
    assert engine.get_epsilon(1e-5) < 100


def test_a_mean_over_tokens_inside_of_the_model_is_refused_without_trials_too():
    _, model, _, _ = made(lambda: Head(token_mean), foreign_batches=True)
    with pytest.raises(RuntimeError, match="exchanging samples of two batches"):
        model(IDS[:12], LABELS[:12])[0].backward()


def test_a_mean_over_tokens_inside_of_the_model_is_refused_under_dropout_too():
    with pytest.raises(RuntimeError, match="as other samples of the batch were replaced"):
        train(token_mean, "mean", inside=True, dropout=0.5)


@pytest.mark.parametrize(
    ("loss", "declared", "other"), [(sample_mean, "sum", "mean"), (sample_sum, "mean", "sum")]
)
def test_the_other_reduction_is_refused_by_its_name(loss, declared, other):
    with pytest.raises(RuntimeError, match=f"Declare loss_reduction='{other}'"):
        train(loss, declared, inside=False)


def test_what_is_refused_released_nothing_and_charged_nothing():
    engine, model, optimizer, loader = made(lambda: Head(token_mean))
    with pytest.raises(RuntimeError):
        for x, y in loader:
            model(x, y)[0].backward()
    assert not engine._step.sums and all(p.grad is None for p in model.parameters())
    assert engine.get_epsilon(1e-5) == 0


def test_a_scalar_that_is_not_used_is_not_refused():
    engine, model, optimizer, loader = made(lambda: Head(token_mean))
    for x, y in chain(loader, loader):
        sample_mean(model(x, y)[1], y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.verified is True


def test_the_test_can_be_left_out():
    engine = train(token_mean, "mean", inside=False, verify_first_batch=False)
    assert engine.verified is False


def test_losses_of_another_form_are_refused_too():
    with pytest.raises(RuntimeError, match="as other samples of the batch were replaced"):
        train(smoothed, "mean", inside=False)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_weights_are_found_also_where_the_model_is_sure(scale):
    logits = (torch.randn(4, T, V, generator=GENERATOR) * scale).requires_grad_()
    labels = logits.argmax(2).masked_fill(LABELS[:4] == -100, -100)
    labels[0, 1:] = -100
    for loss, refused in ((token_mean, True), (sample_mean, False)):
        (grad,) = torch.autograd.grad(loss(logits, labels), logits)
        assert (refuse_weights([logits], [grad], len(logits), "mean") is not None) is refused


def test_a_mean_over_class_weights_is_found_behind_a_factor_too():
    logits = torch.randn(12, V, generator=GENERATOR).requires_grad_()
    labels, weight = torch.arange(12) % 4, torch.tensor([1.0, 2.0, 3.0, 4.0] + [1.0] * (V - 4))
    losses = F.cross_entropy(logits, labels, reduction="none")
    of_classes = F.cross_entropy(logits, labels, weight=weight) / 4
    for loss, refused in ((of_classes, True), ((losses * torch.rand(12)).mean(), False)):
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert (refuse_weights([logits], [grad], 12, "mean") is not None) is refused


@pytest.mark.parametrize(("labelled", "reduction"), [(1, "sum"), (2, "sum"), (2, "mean")])
def test_a_sum_of_which_one_sample_has_a_label_is_no_mean(labelled, reduction):
    logits = torch.randn(8, V, generator=GENERATOR).requires_grad_()
    labels = torch.arange(8).masked_fill(torch.arange(8) >= labelled, -100)
    loss = F.cross_entropy(logits, labels, reduction=reduction)
    (grad,) = torch.autograd.grad(loss, logits)
    found = refuse_weights([logits], [grad], 8, "sum")
    assert (found is not None) is (reduction == "mean")


def test_scalars_that_are_no_numbers_or_of_other_counts_show_nothing():
    one = [torch.tensor(1.0)]
    assert refuse_scalars([one, one, one, []], "mean") is None
    assert refuse_scalars([one, [torch.tensor(torch.inf)], one, one], "mean") is None
    assert "loss_reduction='sum'" in refuse_scalars([one, one, one, [torch.tensor(2.0)]], "sum")


def test_the_loss_of_a_hugging_face_model_is_refused():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=V, num_hidden_layers=1, **small)
    model = transformers.LlamaForCausalLM(config)
    model, _, loader = dpflash.PrivacyEngine(seed=0).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(IDS, LABELS), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="mean",
    )
    with pytest.raises(RuntimeError, match="default of Hugging Face"):
        for x, y in loader:
            model(input_ids=x, labels=y).loss.backward()

"""A loss that depends on the tokens of another document is refused, wherever it is computed."""

import contextlib
import types
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import dpflash
from dpflash.isolation.documents import with_changed_documents
from dpflash.packing import PackTo, pack

LENGTHS = [5, 3, 12, 17, 9]
OF_TOKENS = ("input_ids", "labels", "position_ids", "sample_index")
IGNORED = -100


def token_losses(model, batch, targets):
    logits = model(batch.input_ids, packed=batch).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="none")


def by_document(tokens, batch):
    sums = tokens.new_zeros(batch.max_documents + 1)
    return sums.index_add(0, batch.sample_index.flatten() % len(sums), tokens)[:-1]


def shifted(batch):
    return batch.input_ids.roll(-1, 1)


def shifted_over_rows(batch):
    return batch.input_ids.flatten().roll(-1).view_as(batch.input_ids)


def shifted_but_for_padding(batch):
    targets = batch.input_ids.new_full(batch.input_ids.shape, IGNORED)
    targets[:, :-1] = batch.input_ids[:, 1:]
    return targets.masked_fill(batch.sample_index < 0, IGNORED)


def of_loop(targets):
    return lambda model, batch: by_document(token_losses(model, batch, targets(batch)), batch)


def of_head(targets):
    return lambda model, batch: model(batch.input_ids, targets(batch), batch)


def of_function(targets):
    def losses(model, batch):
        return dpflash.losses.cross_entropy(
            model(batch.input_ids, packed=batch),
            targets(batch),
            sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )

    return losses


def mean_over_tokens_of_the_batch(model, batch):
    tokens = token_losses(model, batch, batch.targets)
    return by_document(tokens, batch) / (batch.targets != IGNORED).sum()


WRONG = {
    "loop": of_loop(shifted),
    "loop-over-rows": of_loop(shifted_over_rows),
    "head": of_head(shifted),
    "function": of_function(shifted_but_for_padding),
    "batch-mean": mean_over_tokens_of_the_batch,
}


def hugging_face_shift(model, batch):
    """Labels of first tokens are ignored already, so a plain shift of labels is right."""
    return of_loop(lambda b: F.pad(b.labels, (0, 1), value=IGNORED)[:, 1:])(model, batch)


def masked(model, batch):
    """Masked-language modelling: tokens of any place, drawn in the loop, predict themselves."""
    hidden = torch.rand(batch.input_ids.shape) < 0.3
    logits = model(batch.input_ids.masked_fill(hidden, 0), packed=batch)
    return dpflash.losses.cross_entropy(
        logits,
        batch.input_ids.masked_fill(~hidden, IGNORED),
        sample_index=batch.sample_index,
        num_samples=batch.max_documents,
    )


def divided(number):
    def losses(own, batch):
        tokens = token_losses(own.model, batch, batch.targets)
        return by_document(tokens, batch) / number(own, batch)

    return losses


NUMBERS = {
    "tokens": lambda own, batch: (batch.sample_index >= 0).sum(),
    "labels": lambda own, batch: (batch.labels != IGNORED).sum(),
    "documents": lambda own, batch: batch.sample_index.max() + 1,
    "real-documents": lambda own, batch: own.loader.is_real.sum(),
    "longest": lambda own, batch: batch.longest,
    "longest-by-borders": lambda own, batch: batch.cu_seqlens.diff().max(),
}


RIGHT = {
    "targets": of_head(lambda batch: batch.targets),
    "labels": hugging_face_shift,
    "masked": masked,
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("alike", [False, True], ids=["", "first-tokens-alike"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_loss_of_another_documents_tokens_is_refused(
    wrong, alike, rows, run, documents, language_model
):
    docs = documents(LENGTHS)
    for document in docs if alike else ():
        document[0] = 1
    own = run(language_model(), docs, rows=rows, losses=WRONG[wrong])
    for _ in range(2):  # A loop that catches the error meets it again.
        with pytest.raises(RuntimeError, match="a document .* nothing was released"):
            own.sums()
    assert own.optimizer.releases == 0


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS * 2, [5, 4]], ids=["five", "ten", "two"])
def test_a_loss_divided_by_a_number_of_the_batch_is_refused_in_the_first_draws(
    lengths, number, run, documents, language_model
):
    docs = [{"input_ids": d, "labels": d.clone()} for d in documents(lengths)]
    for document in docs:
        document["labels"][:-1] = IGNORED  # So each has one label.
    loss = divided(NUMBERS[number])
    own = run(language_model(), docs, losses=lambda model, batch: loss(own, batch))
    with pytest.raises(RuntimeError, match="the loss of a document .* nothing was released"):
        for _ in range(4):
            own.sums()


@pytest.mark.parametrize("number", range(6))
def test_a_trial_keeps_half_of_the_documents_and_adds_no_label(number, documents):
    docs = [document + 1 for document in documents(LENGTHS)]
    for document in docs:
        document[0], document[-1] = 1, 2 + len(document)
    batch = pack(docs, tokens=64, max_documents=8)
    trial, kept = with_changed_documents(batch, number)
    assert 2 <= int(kept.sum()) <= 3
    found = set()
    for unit, (start, end) in enumerate(batch.units.spans[: len(docs)]):
        own = {n: (batch[n][:, start:end], trial[n][:, start:end]) for n in OF_TOKENS}
        same = {n: torch.equal(*tensors) for n, tensors in own.items()}
        if kept[unit]:
            assert all(same.values()) and trial.units.spans[unit] == (start, end)
        elif trial.units.spans[unit] == (0, 0):
            assert (trial.sample_index[:, start:end] == -1).all()
            assert (trial.labels[:, start:end] == IGNORED).all()
            found.add("left out")
        else:
            assert same["sample_index"] and same["position_ids"]
            assert trial.input_ids[0, start] != 1 and trial.labels[0, start] == IGNORED
            found.add("changed")
    assert found == {"left out", "changed"}
    packing = PackTo(tokens=64, max_documents=8)
    left = [
        packing.read(document) if start < end else []
        for document, (start, end) in zip(docs, trial.units.spans, strict=False)
    ]
    assert torch.equal(trial.cu_seqlens, packing.packed(left, LENGTHS).cu_seqlens)


class Bordered(torch.nn.Module):
    """Attends between borders; its positions are numbers, or shares of the longest document."""

    def __init__(self, *, shares):
        super().__init__()
        self.table, self.inputs = torch.nn.Embedding(23, 8), torch.nn.Linear(8, 24)
        self.head, self.shares = torch.nn.Linear(8, 23), shares

    def forward(self, batch):
        borders = batch.cu_seqlens
        positions = batch.position_ids / (borders.diff().max() if self.shares else 8)
        x = self.inputs(self.table(batch.input_ids) + positions[..., None])
        pieces = [
            F.scaled_dot_product_attention(*x[:, start:end].chunk(3, -1), is_causal=True)
            for start, end in pairwise(borders.tolist())
            if start < end
        ]
        return dpflash.losses.causal_lm(
            self.head(torch.cat(pieces, 1)),
            batch.labels,
            sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )


@pytest.mark.parametrize("shares", [False, True])
def test_a_model_may_attend_by_the_borders_but_not_measure_the_longest_document(
    shares, run, documents
):
    own = run(Bordered(shares=shares), documents(LENGTHS), losses=lambda model, b: model(b))
    message = "'inputs' changed for a document .* nothing was released"
    with pytest.raises(RuntimeError, match=message) if shares else contextlib.nullcontext():
        for _ in range(6):
            own.sums()


def test_a_document_that_makes_others_not_finite_is_refused(run, documents, language_model):
    def losses(model, batch):
        own = of_head(lambda b: b.targets)(model, batch)
        return own + 0 * (batch.input_ids.sum() - total).abs().float().log()

    docs = documents(LENGTHS)
    total = sum(int(document.sum()) for document in docs)
    own = run(language_model(), docs, losses=losses, tokens=64)
    with pytest.raises(RuntimeError, match="the loss of a document .* nothing was released"):
        own.sums()


def test_a_loss_is_tried_where_the_longest_document_fills_a_microbatch(
    run, documents, language_model
):
    own = run(language_model(), documents([64, *LENGTHS]), losses=WRONG["loop"])
    with pytest.raises(RuntimeError, match="the loss of a document .* nothing was released"):
        own.sums()


def test_a_collate_function_that_adds_to_packed_batches_is_refused(documents, language_model):
    """Its entries stay as they are in a trial, such as targets that predict the next document."""

    class Rolled(PackTo):
        def __call__(self, given):
            batch = super().__call__(given)
            batch["targets"] = shifted_over_rows(batch)
            return batch

    model = language_model()
    with pytest.raises(ValueError, match="collate_fn=Rolled, a subclass of PackTo"):
        dpflash.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                documents(LENGTHS), batch_size=2, collate_fn=Rolled(tokens=64, max_documents=5)
            ),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_chunked_head_takes_trials_that_leave_documents_out(run, documents, language_model):
    own = run(language_model(chunked_loss=True), documents(LENGTHS))
    for _ in range(2):
        own.sums()
    assert own.engine._run.trial.has_compared


@pytest.mark.parametrize("where", ["loop", "model"])
def test_what_is_kept_of_a_full_document_is_refused(where, run, documents, language_model):
    """Each microbatch has one document."""
    of_loop = types.SimpleNamespace()

    def losses(model, batch):
        own = of_head(lambda b: b.targets)(model, batch)
        holder = model if where == "model" else of_loop
        found = own * (1 + getattr(holder, "held", 0))
        holder.held = own.detach().sum()
        return found

    own = run(language_model(), documents([30] * 12), losses=losses, tokens=32)
    with pytest.raises(dpflash.PrivateRefusal, match="the loss of a "):
        for _ in range(4):
            own.sums()


def test_no_microbatch_passes_behind_one_that_was_refused(run, documents, language_model):
    own = run(language_model(), documents(LENGTHS * 4), losses=WRONG["loop"])
    passed, real = 0, 0
    for _ in range(6):
        with contextlib.suppress(dpflash.PrivateRefusal):
            for batch in own.loader:
                real += bool(own.loader.is_real.any())
                with contextlib.suppress(RuntimeError):
                    own.engine.backward(own.losses(own.model, batch))
                    passed += bool(own.loader.is_real.any())
                own.optimizer.step()
                own.optimizer.zero_grad()
    assert real > 4 and not passed


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("right", RIGHT)
def test_losses_of_each_document_by_itself_pass_and_sums_are_those_without_trials(
    right, dropout, run, documents, language_model
):
    sums = []
    for verifies in (True, False):
        model = language_model()
        model.embedding_dropout.p = dropout
        own = run(model, documents(LENGTHS), losses=RIGHT[right], verify_first_batch=verifies)
        torch.manual_seed(3)
        sums.append(own.sums())
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_a_loop_that_leaves_trials_out_is_refused(run, documents, language_model):
    own = run(language_model(), documents(LENGTHS * 2))
    with pytest.raises(dpflash.PrivateRefusal, match="for each microbatch, trials too"):
        for batch in own.loader:
            if own.loader.is_real.any():
                own.engine.backward(own.losses(own.model, batch))


@pytest.mark.parametrize("strength", [1.0, 1e-6])
def test_a_gradient_that_other_documents_scale_is_refused(
    strength, run, documents, language_model
):
    def losses(model, batch):
        own = of_head(lambda b: b.targets)(model, batch)
        held = own.detach()
        return held + (own - held) * (1 + strength * held.mean())  # equal losses

    own = run(language_model(), documents(LENGTHS), losses=losses)
    with pytest.raises(dpflash.PrivateRefusal, match="the gradient of layer .* changed"):
        own.sums()

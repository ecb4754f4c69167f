"""A loss that depends on the tokens of another document is refused, wherever it is computed."""

import pytest
import torch
import torch.nn.functional as F

import dpflash

LENGTHS = [5, 3, 12, 17, 9]
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


RIGHT = {
    "targets": of_head(lambda batch: batch.targets),
    "labels": hugging_face_shift,
    "masked": masked,
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("alike", [False, True], ids=["", "first-tokens-alike"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.cases(3)
def test_a_loss_of_another_documents_tokens_is_refused(
    wrong, alike, rows, run, documents, language_model
):
    docs = documents(LENGTHS)
    for document in docs if alike else ():
        document[0] = 1
    own = run(language_model(), docs, rows=rows, losses=WRONG[wrong])
    for _ in range(2):  # A loop that catches the error meets it again.
        with pytest.raises(RuntimeError, match="the loss of document .* nothing was released"):
            own.sums()
    assert own.optimizer.releases == 0


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.cases(3)
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


def test_a_loop_that_leaves_trials_out_is_not_verified(run, documents, language_model):
    own = run(language_model(), documents(LENGTHS * 2))
    for skips in (True, False):
        for _ in range(2):
            for batch in own.loader:
                if skips and not own.loader.is_real.any():
                    continue
                own.engine.backward(own.losses(own.model, batch))
                own.optimizer.step()
                own.optimizer.zero_grad()
        assert own.engine.verified == ("pending" if skips else True)

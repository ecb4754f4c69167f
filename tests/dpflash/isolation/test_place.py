"""A loss that changes with the padding of its batch is refused, and masked padding is not."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import dpflash
from dpflash.grad_rules.recurrent_cells import CELLS
from dpflash.isolation.comparison import changed_losses
from dpflash.isolation.place import LESS_PADDING, OTHER_ORDER, Place, PlaceTrial
from dpflash.isolation.place_gradients import PlaceGradients

VOCAB, LONGEST = 20, 24


def _documents():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, LONGEST, (120,), generator=generator).tolist()
    return [
        (torch.randint(1, VOCAB, (length,), generator=generator), torch.tensor(length % 2))
        for length in lengths
    ]


def _padded(entries, left=False):
    tokens, labels = zip(*entries, strict=True)
    side = "left" if left else "right"
    ids = pad_sequence(list(tokens), batch_first=True, padding_side=side)
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.stack(labels)}


def _on_the_left(entries):
    return _padded(entries, left=True)


def _without_mask(entries):
    padded = _padded(entries)
    return {name: padded[name] for name in ("ids", "labels")}


class Text(nn.Module):
    """Means of embeddings, whose layers see each token."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding, self.hidden = nn.Embedding(VOCAB, 8), nn.Linear(8, 8)
        self.head, self.dropout = nn.Linear(8, 2), nn.Dropout(0.2)
        if kind == "packed":
            self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=True)
            self.head = nn.Linear(16, 2)
        self.register_buffer("positions", torch.randn(LONGEST, 8))

    def forward(self, ids, mask=None):
        mask = ids > 0 if mask is None else mask
        h = self.embedding(ids)
        if "positions" in self.kind:
            h = h + self.positions[: ids.shape[1]]
        if self.kind == "noise":
            h = h + torch.randn_like(h)
        if self.kind == "packed":
            pack = nn.utils.rnn.pack_padded_sequence
            packed = pack(h, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(self.rnn(packed)[0], True, total_length=ids.shape[1])
        else:
            h = torch.tanh(self.hidden(self.dropout(h)))
        if "all" in self.kind:
            return self.head(h.mean(1))
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def _made(kind, collate, seed=2, **options):
    torch.manual_seed(1)
    model, engine = Text(kind), dpflash.PrivacyEngine(seed=seed)
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=collate),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options},
    )
    return engine, *private


def _train(kind, collate, losses_of=None, draws=False, reads_first=False, cuts=False, **options):
    engine, model, optimizer, loader = _made(kind, collate, **options)
    with torch.no_grad():
        for _ in loader if reads_first else ():
            pass
    for batch in loader:
        if cuts:
            longest = int(batch["mask"].sum(1).max())
            batch |= {name: batch[name][:, :longest] for name in ("ids", "mask")}
        if draws:
            torch.rand(batch["ids"].shape)
        logits = model(batch["ids"], batch.get("mask"))
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        engine.backward(losses if losses_of is None else losses_of(losses, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert loader.releases == len(loader)
    return engine, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        *(("all", _padded), ("all", _on_the_left), ("all", _without_mask)),
        ("positions", _on_the_left),
    ],
)
def test_a_loss_that_changes_with_padding_is_refused(kind, collate):
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train(kind, collate)


def _train_by_mean(kind, collate, backward, dropout=0.2, **options):
    torch.manual_seed(1)
    model, engine = Text(kind), dpflash.PrivacyEngine(seed=2)
    model.dropout.p = dropout
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=collate),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "loss_reduction": "mean", **options},
    )
    for batch in loader:
        logits = model(batch["ids"], batch.get("mask"))
        backward(engine, F.cross_entropy(logits.mul_(1.0), batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    assert loader.releases == len(loader)
    return engine, [p.detach() for p in model.parameters()]


BACKWARDS = {
    "of the loop": lambda engine, loss: loss.backward(),
    "of the engine": lambda engine, loss: engine.backward(loss),
}


@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=list(BACKWARDS))
@pytest.mark.parametrize("kind", ["all", "positions"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_declared_mean_that_changes_with_padding_is_refused(kind, backward, dropout):
    collate = _on_the_left if kind == "positions" else _padded
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train_by_mean(kind, collate, backward, dropout)


@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=list(BACKWARDS))
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_declared_mean_of_masked_padding_trains_with_the_same_bits_as_without_trials(
    backward, dropout
):
    engine, tried = _train_by_mean("mask", _padded, backward, dropout)
    assert "Gradients with less padding were compared" in engine.trials
    _, plain = _train_by_mean("mask", _padded, backward, dropout, verify_first_batch=False)
    assert all(map(torch.equal, tried, plain))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("declared", [None, "mean"])
def test_a_head_of_zeros_whose_losses_no_padding_changes_is_refused_before_a_release(
    declared, dropout
):
    torch.manual_seed(1)
    model, engine = Text("all"), dpflash.PrivacyEngine(seed=2)
    model.dropout.p = dropout
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=_padded),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction=declared,
    )
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        for batch in loader:
            losses = F.cross_entropy(model(batch["ids"]), batch["labels"], reduction="none")
            engine.backward(losses if declared is None else losses.mean())
            optimizer.step()
            optimizer.zero_grad()
    assert loader.releases == 0


class Checkpointed(Text):
    """Text whose layers run again in the backward, with dropout between two of them."""

    def forward(self, ids, mask=None):
        def block(h):
            return self.hidden(self.dropout(torch.tanh(self.hidden(self.dropout(h)))))

        h = torch.utils.checkpoint.checkpoint(block, self.embedding(ids), use_reentrant=False)
        if self.kind == "all":
            return self.head(h.mean(1))
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize("declared", [None, *BACKWARDS])
@pytest.mark.parametrize("kind", ["all", "mask"])
def test_dropout_in_layers_that_run_again_is_left_out_of_the_comparison(kind, declared):
    torch.manual_seed(1)
    model, engine = Checkpointed(kind), dpflash.PrivacyEngine(seed=2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=_padded),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction=declared and "mean",
    )

    def train():
        for batch in loader:
            logits = model(batch["ids"], batch["mask"])
            losses = F.cross_entropy(logits, batch["labels"], reduction="none")
            if declared is None:
                engine.backward(losses)
            else:
                BACKWARDS[declared](engine, losses.mean())
            optimizer.step()
            optimizer.zero_grad()

    if kind == "mask":
        train()
        assert all(module.training for module in model.modules())
        assert "with less padding were compared" in engine.trials
    else:
        with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
            train()


class OnFrozen(nn.Module):
    """A trained head in float32 on a frozen body that computes in bfloat16."""

    def __init__(self, autocasts):
        super().__init__()
        dtype = torch.float32 if autocasts else torch.bfloat16
        self.autocasts, self.head = autocasts, nn.Linear(16, 2)
        self.embedding = nn.Embedding(VOCAB, 16, dtype=dtype).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, dtype=dtype)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.body.requires_grad_(False)

    def forward(self, ids, mask):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocasts):
            h = self.body(self.embedding(ids), src_key_padding_mask=mask == 0).float()
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_frozen_body_in_16_bit_may_round_by_the_padding(autocasts):
    torch.manual_seed(0)
    model, engine = OnFrozen(autocasts), dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=40, collate_fn=_padded),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for batch in loader:
        logits = model(batch["ids"], batch["mask"])
        engine.backward(F.cross_entropy(logits, batch["labels"], reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.verified is True


class Returned(nn.Module):
    """Text whose forward returns its mean loss, alone or with other outputs."""

    def __init__(self, kind, returned):
        super().__init__()
        self.text, self.returned = Text(kind), returned

    def forward(self, ids, mask, labels):
        logits = self.text(ids, mask)
        loss = F.cross_entropy(logits, labels)
        others = {
            "loss": (),
            "hidden": (self.text.embedding(ids).transpose(0, 1),),
            "scores": (self.text.embedding(ids).sum(2), mask),
        }
        return (loss, *others[self.returned])


def _train_returned(kind, returned, backward="of the engine", **options):
    torch.manual_seed(1)
    model, engine = Returned(kind, returned), dpflash.PrivacyEngine(seed=2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=_padded),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="mean",
        **options,
    )
    for batch in loader:
        BACKWARDS[backward](engine, model(**batch)[0])
        optimizer.step()
        optimizer.zero_grad()
    return engine, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("returned", ["loss", "hidden", "scores"])
def test_a_mean_loss_that_the_model_returns_is_refused_if_it_changes_with_padding(
    returned, backward, clipping
):
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train_returned("all", returned, backward, clipping=clipping)


@pytest.mark.parametrize("returned", ["loss", "hidden", "scores"])
def test_a_mean_loss_that_the_model_returns_may_stand_beside_padded_outputs(returned):
    engine, tried = _train_returned("mask", returned)
    assert "Gradients with less padding were compared" in engine.trials
    _, plain = _train_returned("mask", returned, verify_first_batch=False)
    assert all(map(torch.equal, tried, plain))


@pytest.mark.parametrize("kind", ["mask", "all"])
def test_a_declared_mean_whose_loop_asks_for_gradients_between_outputs(kind):
    """Saliency of features, and a batch that asks for gradients."""

    seen = []

    class Kept(Text):
        def forward(self, ids, mask=None):
            logits = super().forward(ids, mask)
            seen.append(logits)
            return logits * 1.0

    torch.manual_seed(1)
    model, engine = Kept(kind), dpflash.PrivacyEngine(seed=2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=_padded),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="mean",
    )

    def train():
        for batch in loader:
            mask = batch["mask"].float().requires_grad_()
            loss = F.cross_entropy(model(batch["ids"], mask), batch["labels"])
            assert torch.autograd.grad(loss, seen[-1], retain_graph=True)[0].isfinite().all()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    if kind == "mask":
        train()
        assert "Gradients with less padding were compared" in engine.trials
    else:
        with pytest.raises(dpflash.PrivateRefusal, match="padded less"):
            train()


class Seen:
    """A gate of one group."""

    index = 0
    by_sample = staticmethod(lambda x: (x, None))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_products_of_gradients_are_those_of_a_matrix_whatever_the_padding(
    samples, tokens, padding, is_index
):
    torch.manual_seed(samples * 100 + tokens)
    dy = torch.randn(samples, tokens, 5, dtype=torch.float64)
    x = torch.randn(samples, tokens, 3, dtype=torch.float64)
    first = torch.randint(0, 9, (samples, tokens)) if is_index else x
    found = []
    for left in (0, padding):
        seen = PlaceGradients(7)
        widths = (0, 0) * (first.ndim - 2) + (left, 0)
        seen.use(Seen(), 2, (F.pad(dy, (0, 0, left, 0)), F.pad(first, widths)))
        found.append(seen)
    torch.testing.assert_close(found[0].values[0], found[1].values[0])
    torch.testing.assert_close(found[0].squares[0], found[1].squares[0])
    if not is_index:
        of = PlaceGradients(7)._of_tokens
        draws = [of(torch.eye(n), 1, (0, 2, i))[0] for i, n in ((0, 5), (1, 3))]
        gradients = torch.einsum("bto,bti->boi", dy, x)
        expected = torch.einsum("boi,ok,ik->bk", gradients, *(d.double() for d in draws))
        torch.testing.assert_close(found[0].values[0], expected, rtol=1e-5, atol=1e-5)


def test_gradients_that_turn_are_seen():
    """Norms stay, and by chance a product with one vector would for some samples."""
    one, other = PlaceGradients(1), PlaceGradients(1)
    x = torch.randn(1000, 60, generator=torch.Generator().manual_seed(0)).double()
    for found, rows in ((one, x), (other, x.roll(1, 1))):
        found.dense((0, 0), "", rows)
    torch.testing.assert_close(one.squares[0], other.squares[0])
    change = (x - x.roll(1, 1)).norm(dim=1)
    every, least = torch.ones(1000, dtype=torch.bool), float(change.min()) / 3
    assert changed_losses(
        one.values[0], other.values[0], every, rounding=1e-30, sizes=change, least=least
    ).all()


def test_a_sample_that_is_left_out_lets_no_other_loss_change():
    before, now = torch.tensor([1.0, 1.0, 1e12]), torch.tensor([1.0, 1.001, 3.0])
    kept = torch.tensor([True, True, False])
    assert changed_losses(before, now, kept, rounding=1e-4).tolist() == [False, True, False]


def test_a_small_loss_alone_may_differ_by_the_rounding_of_the_usual_ones():
    before, now = torch.tensor([1e-4, 0.5, 2.0]), torch.tensor([1.1e-4, 0.7, 1.0])
    kept = torch.tensor([True, False, False])
    assert not changed_losses(before, now, kept, rounding=1e-4).any()
    assert changed_losses(before, now + 1e-4, kept, rounding=1e-4).any()


def test_what_the_loop_sets_where_is_last_and_trials_that_it_leaves_are_as_without_padding():
    torch.manual_seed(1)
    model, engine = Text("mask"), dpflash.PrivacyEngine(seed=2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_documents(), batch_size=20, collate_fn=_padded),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for batch in loader:
        if loader.releases == 3:
            break
        scale = vars(model).get("scale", 1.0)
        logits = scale * model(batch["ids"], batch["mask"])
        engine.backward(F.cross_entropy(logits, batch["labels"], reduction="none"))
        optimizer.step()
        if loader.is_last:
            model.scale = 1.0 + loader.releases
    before = model.head.weight.detach().clone()
    with engine.public_data():
        model(torch.ones(4, 5, dtype=torch.long)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


def test_a_scalar_loss_that_nobody_declared_is_named_with_padding_too():
    with pytest.raises(RuntimeError, match="loss.backward.. was called on a private model"):
        _train("mask", _padded, lambda losses, batch: losses.mean().backward())


@pytest.mark.parametrize("each", [1, 2, 8])
def test_two_samples_are_enough(each):
    users = {"unit_of": [i // each for i in range(120)], "examples_per_unit": each}
    options = {"physical_batch_size": 2 * each, **(users if each > 1 else {})}
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train("all", _padded, **options)


def _with_a_counter(entries):
    batch = _padded(entries)
    _with_a_counter.batches = getattr(_with_a_counter, "batches", 0) + 1
    return {**batch, "number": torch.tensor(_with_a_counter.batches)}


def _with_gaps(entries):
    return {**_padded(entries), "weights": torch.full((len(entries), 2), torch.nan)}


def _of_two_lengths(entries):
    """Short where the others are long: together all are as long."""
    batch = _padded(entries)
    others = pad_sequence([x.new_ones(2 * (LONGEST - len(x))) for x, _ in entries], True)
    return {**batch, "others": others}


@pytest.mark.parametrize("collate", [_with_a_counter, _with_gaps, _of_two_lengths])
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_loss_that_changes_with_padding_is_refused_whatever_else_a_batch_has(
    collate, reads_first
):
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train("all", collate, reads_first=reads_first)


def _of_one_length(entries):
    batch = _padded(entries)
    return {n: F.pad(x, (0, LONGEST - x.shape[1])) if x.ndim > 1 else x for n, x in batch.items()}


def test_rows_of_one_length_that_a_loop_cuts_to_the_longest_are_padded_less():
    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train("all", _of_one_length, cuts=True, sampling="fixed_size")


@pytest.mark.parametrize("own", [None, torch.Generator()])
def test_of_random_entries_no_shorter_batch_is_made(own):
    def masked(entries):
        batch = _padded(entries)
        hidden = torch.rand(batch["ids"].shape, generator=own) < 0.2
        return {**batch, "ids": batch["ids"].masked_fill(hidden, 1)}

    assert _train("masked", masked)[0].verified is True


def test_a_loss_that_the_loop_takes_over_padding_is_refused():
    def over_all(losses, batch):
        return losses / batch["mask"].shape[1]

    with pytest.raises(dpflash.PrivateRefusal, match="padded less, so nothing was released"):
        _train("masked", _padded, over_all)


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        *(("masked", _padded), ("masked", _on_the_left), ("positions", _padded)),
        *(("packed", _padded), ("noise", _padded), ("masked", _without_mask)),
        ("all", dpflash.sampling.PadTo(LONGEST)),
    ],
)
def test_masked_padding_trains_with_the_same_bits_as_without_trials(kind, collate):
    if kind == "all":  # a public length
        fields = collate
        collate = lambda entries: fields(  # noqa: E731
            [{"ids": x, "mask": (x > 0).long(), "labels": y} for x, y in entries]
        )
    engine, tried = _train(kind, collate)
    _, untried = _train(kind, collate, verify_first_batch=False)
    assert engine.verified is True
    assert bool(engine._run.place_trial.compared) is (kind != "noise")
    assert all(map(torch.equal, tried, untried))


def test_the_longest_sequence_so_far_may_round_the_gradients_of_a_declared_mean(monkeypatch):
    forward, backward = CELLS["GRU"]

    def by_length(steps):
        return backward(steps._replace(dh=steps.dh * (1 + 1e-6 * len(steps.dh))))

    monkeypatch.setitem(CELLS, "GRU", (forward, by_length))
    # In the first draw of this seed the trial of a microbatch is shorter than the microbatch.
    options = {"loss_reduction": "mean", "physical_batch_size": 2, "seed": 27}
    _, model, optimizer, loader = _made("packed", _padded, **options)
    for batch in loader:
        F.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"]).backward()
        if loader.is_last:
            break
    optimizer.step()
    assert loader.releases == 1


def test_random_numbers_by_the_length_leave_the_masks_of_training_as_they_are():
    """The runs with less padding draw other numbers in the loop before the forward."""

    _, tried = _train("masked", _padded, draws=True)
    _, untried = _train("masked", _padded, draws=True, verify_first_batch=False)
    assert all(map(torch.equal, tried, untried))


def test_an_error_in_the_loop_leaves_dropout_on():
    def fails(losses, batch):
        raise KeyError("loop")

    # Its traceback keeps the loader's iterator alive.
    with pytest.raises(KeyError) as held:
        _train("masked", _padded, fails)
    assert held.tb is not None and not F.dropout(torch.ones(100), 0.5).all()


def test_random_numbers_of_the_loop_leave_the_comparison_out():
    def noisy(losses, batch):
        return losses * (1 + torch.rand(batch["ids"].shape).sum(1))

    assert _train("masked", _padded, noisy)[0].verified is True


def _without_mask_of_one_length(entries):
    return {name: x for name, x in _of_one_length(entries).items() if name != "mask"}


def _first_come(losses, rows):
    """A capacity of one sample of a class, which the first rows use up."""
    labels = rows["labels"]
    before = torch.stack([(labels[:row] == label).sum() for row, label in enumerate(labels)])
    return losses * (before < 1)


def _by_row(losses, rows):
    return losses * torch.linspace(1, 2, len(losses))


def _of_new_generator(losses, rows):
    generator = torch.Generator().manual_seed(3)
    return losses * (1 + torch.rand(len(losses), generator=generator))


@pytest.fixture
def only_places(monkeypatch):
    """Leave out the trial in which samples are replaced."""
    monkeypatch.setattr("dpflash.isolation.trial.Trial.begin", lambda *_, **__: None)


_USERS = {"unit_of": [i // 3 for i in range(120)], "examples_per_unit": 3}


@pytest.mark.usefixtures("only_places")
@pytest.mark.parametrize(
    "options", [{}, {"physical_batch_size": 8}, {"sampling": "shuffled"}, _USERS]
)
@pytest.mark.cases(4)
def test_a_loss_that_changes_with_the_order_of_other_samples_is_refused(options):
    with pytest.raises(dpflash.PrivateRefusal, match="exchanged their rows, so nothing was"):
        _train("masked", _without_mask_of_one_length, _first_come, **options)


@pytest.mark.parametrize(
    ("by_row", "options"),
    [(_by_row, {}), (_by_row, _USERS), (_of_new_generator, {}), (None, {}), (None, _USERS)],
)
@pytest.mark.cases(2)
def test_samples_that_exchange_rows_train_with_the_same_bits_as_without_trials(by_row, options):
    """A loss may depend on the number of its row, which is secret and random."""
    engine, tried = _train("masked", _of_one_length, by_row, **options)
    _, untried = _train("masked", _of_one_length, by_row, verify_first_batch=False, **options)
    assert all(map(torch.equal, tried, untried))
    assert OTHER_ORDER in engine._run.place_trial.compared


@pytest.mark.usefixtures("only_places")
def test_a_loss_that_changes_with_the_order_of_other_pairs_is_refused():
    collate = dpflash.packing.Pairs(
        lambda entries: {"x": torch.cat([torch.stack(entries)[:, k] for k in (0, 1)])}
    )
    model, engine = nn.Linear(3, 1), dpflash.PrivacyEngine(seed=2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(list(torch.randn(40, 2, 3)), batch_size=8, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=8,
        sampling="fixed_size",
    )
    with pytest.raises(dpflash.PrivateRefusal, match="exchanged their rows, so nothing was"):
        for batch in loader:
            losses = model(dpflash.packing.Pairs.rows(batch)["x"]).square().view(-1, 2).mean(1)
            engine.backward(losses + losses.detach().cumsum(0))
            optimizer.step()


def test_ranks_run_one_place_of_a_draw_by_turns():
    trial = PlaceTrial(None, has_ranks=True, devices=(), numbers={})
    places = [Place(kind.how, torch.ones(2).bool(), kind) for kind in (LESS_PADDING, OTHER_ORDER)]
    first = []
    for _ in range(4):
        assert trial.is_due(begins_draw=True, is_tried=True)
        first.append(next(iter(trial.runs("batch", places))))
        assert not list(trial.runs("batch", places))
    assert first == 2 * [LESS_PADDING.how, OTHER_ORDER.how]


@pytest.mark.parametrize(
    ("declared", "dtype", "change", "is_refused"),
    [
        *(("sum", torch.float32, 0.5e-4, False), ("sum", torch.float32, 2e-4, True)),
        *(("sum", torch.bfloat16, 0.05, False), ("sum", torch.bfloat16, 0.1, True)),
        *((None, torch.float32, 2e-4, True), (None, torch.bfloat16, 0.1, False)),
    ],
)
def test_gradients_of_ten_samples_change_together_by_a_thousandth_at_most(
    declared, dtype, change, is_refused
):
    trial = PlaceTrial(
        None, has_ranks=False, devices=(), declared=declared, numbers={"max_grad_norm": 1e-9}
    )
    before, now = PlaceGradients(1), PlaceGradients(1)
    trial.gradients = now
    trial.forward({dtype}, is_random=False)
    trial._places = [Place(None, torch.ones(10, dtype=torch.bool), LESS_PADDING)]
    for found, factor in ((before, 1.0 + change), (now, 1.0)):
        found.parts = {(0, 0, True)}
        found.values, found.squares = {0: torch.ones(10, 16) * factor}, {0: torch.ones(10)}
    trial._runs = [before]
    if trial.gradients is now:
        trial._compare_gradients(now, 0)
    assert (trial.refused is not None) is is_refused

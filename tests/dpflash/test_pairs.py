"""A pair of rows is one privacy unit: DataLoader(collate_fn=dpflash.packing.Pairs(...))."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dpflash
from dpflash.packing import Pairs

HUGE = 1e6
BETA = 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        """Log-probability of each row."""
        logits = self.head(self.norm(self.embedding(tokens)).cumsum(1))
        return -F.cross_entropy(logits.transpose(1, 2), tokens.flip(1), reduction="none").sum(1)


def net():
    torch.manual_seed(1)
    return Net().double()


def entries(count=10):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, (2, 6), generator=generator) for _ in range(count)]


def collate(pairs):
    """The first row of each pair before all second ones, and a number of each pair."""
    chosen, rejected = torch.stack(pairs).unbind(1)
    return {"tokens": torch.cat([chosen, rejected]), "margin": torch.stack(pairs)[:, 0, 0] / 10.0}


OF_PAIRS = Pairs(collate)


def private(dataset, *, model=None, engine=None, collate_fn=OF_PAIRS, batch_size=4, **options):
    model, engine = model or net(), engine or dpflash.PrivacyEngine(seed=5)
    given = {"noise_multiplier": 0.0, "max_grad_norm": HUGE, **options}
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn),
        **given,
    )


def losses_of(model, batch):
    """One for each pair."""
    chosen, rejected = model(Pairs.rows(batch)["tokens"]).view(-1, 2).unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected) - batch["margin"])


def released(run, losses=losses_of, draws=2):
    """The sum of each draw, and the pairs that were in it."""
    engine, model, optimizer, loader = run
    found, drawn = [], []
    for batch in loader:
        engine.backward(losses(model, batch))
        drawn += [x for x, real in zip(batch["tokens"], loader.is_real, strict=True) if real]
        if loader.is_last:
            optimizer.step()
            grads = [p.grad.flatten() * loader.expected_batch_size for p in model.parameters()]
            found.append((torch.cat(grads), drawn))
            optimizer.zero_grad()
            drawn = []
            if len(found) == draws:
                break
    return found


def gradient(pair, losses=losses_of):
    model = net()
    loss = losses(model, OF_PAIRS([pair])).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def clipped(gradient, bound):
    return gradient * min(1.0, bound / float(gradient.norm()))


@pytest.mark.parametrize("mode", ["instantiate", "book_keeping", "ghost"])
def test_the_sum_is_over_pairs_of_their_clipped_gradients(mode):
    bound = float(gradient(entries()[0]).norm())  # about half of the pairs are clipped
    run = private(
        entries(), max_grad_norm=bound, grad_sample_mode=mode, physical_batch_size=3, exact=False
    )
    norms = []
    for total, drawn in released(run):
        own = [gradient(pair) for pair in drawn]
        norms += [float(g.norm()) for g in own]
        expected = sum(clipped(g, bound) for g in own)
        assert float((total - expected).norm()) <= 1e-6 * bound
    assert min(norms) < bound < max(norms)


def test_one_pair_more_moves_the_sum_by_at_most_the_bound_and_rows_by_themselves_by_more():
    bound, pairs = 0.1, entries(4)
    (with_it, _), *_ = released(private(pairs, max_grad_norm=bound), draws=1)
    (without, _), *_ = released(private(pairs[:3], max_grad_norm=bound), draws=1)
    moved = float((with_it - without).norm())
    assert 0.99 * bound < moved <= bound * (1 + 1e-6)
    # The same rows as samples, each clipped by itself.
    of_rows = [
        gradient(pairs[3], lambda model, batch, row=row: losses_of_rows(model, batch, row))
        for row in range(2)
    ]
    assert float(sum(clipped(g, bound) for g in of_rows).norm()) > 1.1 * bound


def losses_of_rows(model, batch, row):
    """The pair's loss as a function of one row alone; the other one counts as given."""
    scores = list(model(Pairs.rows(batch)["tokens"]).view(-1, 2).unbind(1))
    scores[1 - row] = scores[1 - row].detach()
    return -F.logsigmoid(BETA * (scores[0] - scores[1]) - batch["margin"])


def test_a_loss_for_each_row_is_the_mean_of_the_pair():
    def by_row(model, batch):
        return losses_of(model, batch).repeat_interleave(2)

    (by_pairs, _), (by_rows, _) = (
        released(private(entries()), f, 1)[0] for f in (losses_of, by_row)
    )
    assert torch.equal(by_pairs, by_rows)
    engine, model, _, loader = private(entries())
    with pytest.raises(
        dpflash.PrivateRefusal, match="another number of entries.* or one for each pair"
    ):
        engine.backward(losses_of(model, next(iter(loader)))[:-1])


def test_rows_of_a_pair_apart_from_each_other_are_refused():
    engine, model, _, loader = private(entries())
    with pytest.raises(RuntimeError, match="another order"):
        for batch in loader:
            engine.backward(model(batch["tokens"].transpose(0, 1).flatten(0, 1)))


def test_losses_that_compare_pairs_are_refused():
    engine, model, _, loader = private(entries(64), batch_size=8)

    def sorted_losses(batch):  # as those of AOT
        chosen, rejected = model(Pairs.rows(batch)["tokens"]).view(-1, 2).unbind(1)
        return -F.logsigmoid(chosen.sort().values - rejected.sort().values)

    with pytest.raises(RuntimeError, match="loss of a sample changed as "):
        for batch in loader:
            engine.backward(sorted_losses(batch))


def test_pairs_with_equal_rows_are_in_order():
    """Padding repeats a pair; its first row may be that of other pairs too."""
    shared = entries(1)[0][0]
    pairs = [torch.stack([shared, other[1]]) for other in entries(48)]
    run = private(pairs, batch_size=24)
    assert run[-1].slots > 4
    assert len(released(run)) == 2


def test_ledger_public_facts_and_checkpoint_name_the_pair(tmp_path):
    engine = dpflash.PrivacyEngine(seed=5, ledger=tmp_path / "ledger")
    run = private(entries(), engine=engine, noise_multiplier=1.0)
    released(run)
    assert engine.privacy_unit == engine.public.unit.split(" of ")[0].removeprefix("one ")
    lines = [json.loads(x) for x in (tmp_path / "ledger").read_text().splitlines()]
    assert {line["unit"] for line in lines} == {"preference pair"} == {engine.privacy_unit}
    assert run[-1].plan.scheme["unit"] == engine.public.unit
    again = dpflash.PrivacyEngine(ledger=tmp_path / "ledger")
    with pytest.raises(ValueError, match="'sample' here, and a 'preference pair'"):
        private(entries(), engine=again, collate_fn=None, noise_multiplier=1.0)


def test_batches_of_other_loaders_are_refused():
    engine, model, optimizer, loader = private(entries(), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="the rows of a pair .* are clipped each by itself"):
        next(iter(DataLoader(entries(), batch_sampler=loader.batch_sampler)))
    with pytest.raises(RuntimeError, match="the batch is not of the private loader"):
        engine.backward(model(torch.stack(entries(2)).flatten(0, 1)))
    assert engine.get_epsilon(1e-5) == 0
    with pytest.raises(ValueError, match="foreign_batches=True with unit_of or Pairs"):
        private(entries(), foreign_batches=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "shuffled"}, "sampling='shuffled' .* with collate_fn=Pairs"),
        ({"loss_reduction": "mean"}, "loss_reduction='mean' with collate_fn=Pairs"),
        ({"unit_of": list(range(10)), "examples_per_unit": 1}, "unit_sampling='example'"),
    ],
    ids=["shuffled", "scalar", "users"],
)
def test_options_that_do_not_go_with_pairs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        private(entries(), **options)


def test_pairs_of_users_are_counted():
    run = private(
        entries(), unit_of=[0, 0, *range(1, 9)], examples_per_unit=1, unit_sampling="example",
        noise_multiplier=1.0,
    )  # fmt: skip
    found = released(run)
    second = entries()[1]
    assert not any(torch.equal(pair, second) for _, drawn in found for pair in drawn)
    assert run[0].privacy_unit == "user"


def test_a_public_length_is_that_of_rows():
    run = private(entries(), public_length=6)
    released(run, draws=1)
    assert "public, 6 as declared" in str(run[0].public)
    with pytest.raises(dpflash.PrivateRefusal, match="public_length=7"):
        released(private(entries(), public_length=7), draws=1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda pairs: torch.stack(pairs), "returned a Tensor"),
        (lambda pairs: {"x": torch.stack(pairs)[:, 0]}, r"of 3 pairs is shape \(3, 6\)"),
        (lambda pairs: {"x": [1] * 6}, "of 3 pairs is a list"),
    ],
    ids=["tensor", "rows", "list"],
)
def test_batches_that_are_no_pairs_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        Pairs(made)(entries(3))


def test_a_collate_function_of_pairs_without_pairs_is_refused():
    with pytest.raises(
        dpflash.PrivateRefusal, match="no field of the batch has one row for each entry"
    ):
        private(entries(), collate_fn=lambda pairs: {"tokens": collate(pairs)["tokens"]})

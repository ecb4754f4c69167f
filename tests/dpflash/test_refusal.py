"""Private refusals: no text holds what was found, and the ledger says that a run ended by one."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from dpflash import PrivateRefusal
from dpflash.privacy.ledger import LOST, REFUSED, Ledger

DATA = torch.arange(24.0).view(8, 3)


def one_epoch(made, change=lambda x: x, reduce=lambda losses: losses):
    engine, model, optimizer, loader = made
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(reduce(model(change(x)).square().mean(1)))
        optimizer.step()


@pytest.fixture
def run(private, tmp_path):
    """run(data, ...) -> (engine, model, optimizer, loader), with a ledger."""

    def made(data=DATA, **options):
        options = {"noise_multiplier": 1.0, "foreign_batches": False, **options}
        return private(
            nn.Linear(3, 2), data, batch_size=8, seed=1, ledger=tmp_path / "ledger", **options
        )

    return made


def refused_by_loader(made):
    lengths = made[3].lengths
    held, lengths._seen = lengths._seen, {}  # as if an earlier batch had other shapes
    try:
        one_epoch(made)
    finally:
        lengths._seen = held


REFUSALS = {
    "loader": refused_by_loader,
    "forward": lambda made: one_epoch(made, lambda x: x.flip(0)),
    "backward": lambda made: one_epoch(made, reduce=lambda x: x[1:]),
}


@pytest.mark.parametrize("where", REFUSALS)
def test_a_run_that_a_private_refusal_ends_says_so_once_and_goes_on(where, run, tmp_path):
    path, saved = tmp_path / "ledger", tmp_path / "run.pt"
    made = run(public_length=3)
    engine = made[0]
    one_epoch(made)
    engine.save_checkpoint(saved)
    before = engine.get_epsilon(1e-5)
    for _ in range(2):
        with pytest.raises(PrivateRefusal):
            REFUSALS[where](made)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    notes = [line for line in lines if line.get("note") == REFUSED]
    assert len(notes) == 1 and notes[0]["event"] is None
    assert engine.get_epsilon(1e-5) == before
    one_epoch(made)
    spent = engine.get_epsilon(1e-5)
    assert spent > before
    kinds = [line.note for line in Ledger(path).lines]
    assert kinds.count(REFUSED) == 1 and kinds[-1] is None
    # The checkpoint is from before the refusal; the ledger counts what came after it.
    resumed, *_ = run(public_length=3)
    resumed.load_checkpoint(saved)
    assert resumed.get_epsilon(1e-5) == spent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.conv, self.rnn = nn.Conv1d(4, 2, 1), nn.LSTM(4, 2, batch_first=True)

    def forward(self, x, use):
        odd, hidden = x[:, 0] > 100, self.body(x)
        return (use(self, hidden, odd) if odd.any() else self.head(hidden)).square().sum(1)


def of_rows(layer, rows):
    """The outputs of a layer that gets some rows, at their places among zeros."""

    def use(net, hidden, odd):
        some = rows(odd)
        return hidden.new_zeros(len(odd), 2).index_put((some,), layer(net, hidden[some])[:, :2])

    return use


def plain(net, hidden, odd):
    return net.head(hidden)


def thawed(net, losses):
    frozen = net.frozen.requires_grad_()
    frozen.grad = torch.ones_like(frozen)


# What the forward, the losses and the loop do in a batch that has an odd row.
OF_ROWS = {
    "filtered": (of_rows(lambda net, h: net.head(h), lambda odd: ~odd),),
    "filtered before a mean": (of_rows(lambda net, h: net.head(h), lambda odd: ~odd),),
    "filtered at a norm": (of_rows(lambda net, h: net.norm(h), lambda odd: ~odd),),
    "filtered at a layer without a rule": (
        of_rows(lambda net, h: net.conv(h[..., None])[..., 0], lambda odd: ~odd),
    ),
    "one row": (of_rows(lambda net, h: net.head(h), lambda odd: odd.nonzero()[:1, 0]),),
    "no batch": (lambda net, hidden, odd: net.head(hidden[0]) + net.head(hidden),),
    "no steps": (lambda net, hidden, odd: net.rnn(hidden)[0],),
    "more losses": (plain, lambda net, losses: torch.cat([losses, losses])),
    "no gradient": (plain, lambda net, losses: torch.zeros(len(losses))),
    "no layer": (plain, lambda net, losses: torch.zeros(len(losses)).requires_grad_()),
    "no tensor": (plain, lambda net, losses: 0.0),
    "a scalar": (plain, lambda net, losses: losses.sum()),
    "a penalty": (plain, lambda net, losses: losses + net.head.weight.norm()),
    "a frozen layer": (plain, lambda net, losses: losses, thawed),
}


@pytest.mark.parametrize("kind", OF_ROWS)
def test_an_error_that_some_row_causes_is_private(kind, private, tmp_path):
    """The neighbor without the row trains; the text is the same for one such row and for two."""
    use, reduce, then = (*OF_ROWS[kind], *[lambda net, losses: losses] * 2)[:3]
    reduction, texts = "mean" if "mean" in kind else None, []
    for count in (0, 1, 2):
        data = DATA.clone()
        data[2 : 2 + count, 0] = 1000
        net = Net()
        net.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        engine, net, optimizer, loader = private(
            net,
            data,
            batch_size=8,
            seed=1,
            ledger=tmp_path / str(count),
            noise_multiplier=1.0,
            verify_first_batch=False,
            loss_reduction=reduction,
        )
        try:
            for (x,) in loader:
                losses, odd = net(x, use), (x[:, 0] > 100).any()
                losses = reduce(net, losses) if odd else losses
                losses.mean().backward() if reduction else engine.backward(losses)
                if odd:
                    then(net, losses)
                optimizer.step()
                optimizer.zero_grad()
        except PrivateRefusal as error:
            texts.append(str(error))
            assert error.__cause__ is None and error.__suppress_context__
        notes = [line.note for line in Ledger(tmp_path / str(count)).lines]
        assert notes.count(REFUSED) == len(texts[-1:]) == min(count, 1)
    assert len(texts) == 2 and len(set(texts)) == 1


@pytest.mark.parametrize("note", [REFUSED, LOST])
def test_budget_counts_private_refusals(note, tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.note(note, run="a", accountant="rdp", unit="sample")
    command = [sys.executable, "-m", "dpflash", "budget", str(path), "--delta", "1e-5", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert report["private_refusals"] == 1 and report["steps"] == 0 and report["runs"] == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refusal_in_a_worker_is_one_in_the_training_process_without_values(workers, run):
    def mixing(entries):
        rows = torch.stack([row for (row,) in entries])
        return (rows - rows.mean(0),)

    data = torch.full((8, 3), 0.7731) * torch.arange(1, 9)[:, None]
    with pytest.raises(PrivateRefusal, match="mixes the entries") as caught:
        one_epoch(run(data, collate=mixing, workers=workers))
    assert "0.77" not in str(caught.value) and "tensor(" not in str(caught.value)


def test_details_are_never_in_the_text_of_a_copy():
    error = PrivateRefusal("a batch has other lengths", lengths=[12345])
    for other in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert other.details == {"lengths": [12345]}
        assert "12345" not in f"{other} {other!r} {other.args}"

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
from dpflash.privacy.ledger import REFUSED, Ledger

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


def test_budget_counts_private_refusals(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.note(REFUSED, run="a", accountant="rdp", unit="sample")
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

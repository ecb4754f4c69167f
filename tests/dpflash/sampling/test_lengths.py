"""Lengths of samples: padded to a public one, or said not to be public."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from dpflash import PrivacyEngine, PrivateRefusal
from dpflash.sampling import PadTo
from dpflash.sampling.lengths import Lengths


class Documents(Dataset):
    """Texts of lengths 1 to 9 in steps of `step`, and their targets but for the first ones."""

    def __init__(self, step=1, unlabelled=0):
        self.lengths = [1 + i * step % 9 for i in range(40)]
        self.unlabelled = unlabelled

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        tokens = 1 + torch.arange(index, index + length) % 7
        labels = {"labels": tokens.flip(0)} if index >= self.unlabelled else {}
        return {"tokens": tokens, **labels, "index": index}


def longest(samples):
    return {
        name: pad_sequence([s[name] for s in samples], batch_first=True)
        for name in ("tokens", "labels")
    }


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 64), nn.Linear(64, 64)

    def forward(self, tokens):
        return self.head(self.embedding(tokens)).square().mean(2)


def made(collate, data=None, **options):
    torch.manual_seed(0)
    model = Model()
    engine = PrivacyEngine(accountant="rdp", seed=0)
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data or Documents(), batch_size=5, collate_fn=collate),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        grad_sample_mode="instantiate",
        verify_first_batch=False,
        **options,
    )


def norms_of(engine, model, optimizer, loader, passes=3):
    """The norms that each document had in all of its draws."""
    found = {}
    for _ in range(passes):
        for batch in loader:
            tokens = batch["tokens"]
            engine.backward((model(tokens) * (tokens > 0)).sum(1))
            norms = engine.diagnostics()["per_sample_norms"].tolist()
            for row, norm in zip(tokens[loader.is_real], norms, strict=True):
                found.setdefault(tuple(row[row > 0].tolist()), set()).add(norm)
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_a_sample_that_is_padded_to_a_public_length_has_the_same_bits_in_every_draw():
    run = made(PadTo(9, 0))
    assert all(len(norms) == 1 for norms in norms_of(*run).values())
    assert "lengths: public, 9 as declared" in str(run[0].plan())


def test_a_collate_function_that_pads_to_the_longest_keeps_working_and_is_told():
    run = made(longest)
    assert "yielded no batch" in str(run[0].public)
    norms_of(*run, passes=1)
    text = str(run[0].plan())
    assert "the bound holds up to the rounding of other lengths" in text
    assert "not public" in run[0].public.as_dict()["lengths"]


def test_windows_of_one_length_are_told_to_be_of_one_length():
    engine, *rest = made(lambda samples: {"tokens": torch.ones(len(samples), 6).long()})
    norms_of(engine, *rest, passes=1)
    assert engine.public.lengths == "the same in all batches so far"


def test_other_shapes_than_the_declared_ones_are_refused_by_name():
    run = made(longest, public_length=9)
    with pytest.raises(
        PrivateRefusal, match=r"batch\['tokens'\] had other shapes.*PadTo\(9\)|no tensor"
    ):
        norms_of(*run)
    run = made(PadTo(9, 0), public_length=12)
    with pytest.raises(PrivateRefusal, match=r"public_length=12: no tensor .* 1; pass") as refusal:
        norms_of(*run)
    assert refusal.value.details == {"lengths": [9, 9]}
    with pytest.raises(ValueError, match="public_length=0"):
        made(longest, public_length=0)


def test_a_later_batch_of_other_shapes_is_refused_by_its_place():
    lengths = Lengths(9)
    lengths.observe({"tokens": torch.zeros(2, 9), "labels": torch.zeros(2, 9)}, 2)
    with pytest.raises(PrivateRefusal, match=r"batch\['labels'\] had other shapes in two batches"):
        lengths.observe({"tokens": torch.zeros(4, 9), "labels": torch.zeros(4, 8)}, 4)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensors", "arrays"])
@pytest.mark.parametrize(("first", "then"), [((2, 5), (4, 7)), ((5,), (7,))], ids=["rows", "one"])
def test_a_length_that_differs_is_seen_in_arrays_and_in_tensors_of_one_sample(make, first, then):
    lengths = Lengths()
    lengths.observe({"x": torch.zeros(2, 9), "ragged": [make(first)]}, 2)
    assert "the same" in str(lengths)
    lengths.observe({"x": torch.zeros(4, 9), "ragged": [make(then)]}, 4)
    assert "not public" in str(lengths)


Pair = namedtuple("Pair", "tokens label")


def test_samples_are_padded_and_cut_to_one_length():
    pad = PadTo(4, {"labels": -100})
    batch = pad([Documents()[1], Documents()[6]])
    assert batch["tokens"].tolist() == [[2, 3, 0, 0], [7, 1, 2, 3]]
    assert batch["labels"].tolist() == [[3, 2, -100, -100], [6, 5, 4, 3]]
    assert batch["index"].tolist() == [1, 6]
    tokens, label = pad([(torch.ones(2, 3), 5), (torch.ones(6, 3), 7)])
    assert tokens.shape == (2, 4, 3) and tokens[0].sum() == 6 and label.tolist() == [5, 7]
    pair = PadTo(3, {0: 9})([Pair([1.5], torch.tensor(2))])
    assert type(pair) is Pair and pair.tokens.tolist() == [[1.5, 9, 9]]
    assert PadTo(3, -1)([torch.ones(1), torch.ones(2)]).tolist() == [[1, -1, -1], [1, 1, -1]]
    with pytest.raises(ValueError, match="length=0"):
        PadTo(0)


@pytest.mark.parametrize(("unlabelled", "name"), [(0, "label"), (40, "labels")])
def test_a_padding_for_a_field_that_entries_lack_is_refused_before_the_first_draw(
    unlabelled, name
):
    with pytest.raises(
        PrivateRefusal, match=f"PadTo.*'{name}': .*: the entries have no such field"
    ):
        made(PadTo(9, {"tokens": 0, name: -100}), Documents(unlabelled=unlabelled))


def test_targets_of_tokens_are_not_padded_with_a_class():
    pairs = [(torch.arange(1, n), torch.arange(1, n)) for n in range(3, 9)] * 4
    for data, name in ((Documents(), "'labels'"), (pairs, "1")):
        with pytest.raises(PrivateRefusal, match=rf"the targets in field {name}.*-100"):
            made(PadTo(9), data)
    for given in (0, {1: 0}):
        made(PadTo(9, given), pairs)
    scores = [(x, y.float(), y.bool(), len(y)) for x, y in pairs]
    made(PadTo(9), scores)


def test_an_entry_that_lacks_the_named_field_adds_nothing_and_raises_nothing():
    run = made(PadTo(9, {"labels": -100}), Documents(unlabelled=1))
    found = norms_of(*run)
    assert len(found) > 30 and tuple(Documents()[0]["tokens"].tolist()) not in found

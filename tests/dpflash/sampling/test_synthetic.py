"""Made-up samples are like the entries of a dataset, and hold none of their values."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dpflash.packing import PackTo
from dpflash.sampling import synthetic
from dpflash.sampling.synthetic import Ranges
from dpflash.verification.nested import tensors_of

RANGES = Ranges(tokens=50, labels=3, padding=7)


def _entry(rng, length):
    return {
        "input_ids": rng.integers(60, 90, length).tolist(),
        "attention_mask": [1] * length,
        "pixel_values": torch.from_numpy(rng.standard_normal((2, 3))).float(),
        "weight": float(rng.random()),
        "text": "private",
        "labels": 8,
    }


def _padded(entries):
    longest = max(len(entry["input_ids"]) for entry in entries)
    rows = {
        name: torch.tensor([e[name] + [0] * (longest - len(e[name])) for e in entries])
        for name in ("input_ids", "attention_mask")
    }
    others = {name: torch.tensor([e[name] for e in entries]) for name in ("weight", "labels")}
    texts = torch.tensor([len(entry["text"].split()) for entry in entries])
    pixels = torch.stack([entry["pixel_values"] for entry in entries])
    return {**rows, **others, "texts": texts, "pixel_values": pixels}


def _batches(seed, lengths, change=dict, **more):
    rng = np.random.default_rng(seed)
    entries = [change(_entry(rng, length)) for length in lengths]
    loader = DataLoader(entries, collate_fn=more.pop("collate_fn", _padded))
    return synthetic.batches(loader, RANGES, **{"at_most": 4, **more})


@pytest.mark.parametrize("lengths", [(9, 5, 12), (12, 12, 12)], ids=["several", "one"])
def test_no_value_is_of_an_entry(lengths):
    *alone, batch, _ = made = _batches(0, lengths)
    again = _batches(1, lengths)
    assert len(made) == 4 and len(alone[1]["input_ids"]) == 1
    for (_, one), (_, two) in zip(tensors_of(made), tensors_of(again), strict=True):
        assert torch.equal(one, two)
    longest = 12 if len({*lengths}) == 1 else 16
    own = batch["attention_mask"].sum(1)
    assert own.tolist() == [longest, longest - 7, longest, longest - 2]
    assert int(batch["input_ids"].max()) < 50
    assert batch["labels"].tolist() == [0, 1, 2, 0]
    padding = batch["attention_mask"] == 0
    assert {*batch["input_ids"][padding].tolist()} == {7 if longest == 12 else 0}
    assert batch["pixel_values"].shape == (4, 2, 3) and batch["weight"].unique().numel() == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: {**entry, "age": 3},
        lambda entry: {**entry, "image": object()},
        lambda entry: list(entry.values()),
        lambda entry: {**entry, "input_ids": [entry["input_ids"]]},
    ],
    ids=["integer", "object", "list", "nested"],
)
def test_of_unknown_entries_nothing_is_made(change):
    assert _batches(0, (9, 5, 12), change) == []


def test_large_samples_are_no_more_than_a_batch_has():
    def large(entry):
        return {**entry, "pixel_values": torch.zeros(300)}

    assert len(_batches(0, (9, 5), large, at_most=3)[-1]["labels"]) == 3
    assert _batches(0, (9, 5), large, at_most=1) == []


def test_documents_are_packed_without_a_look_at_entries():
    *alone, batch, _ = _batches(0, (0,), collate_fn=PackTo(tokens=4096, max_documents=9))
    assert batch.input_ids.shape == (1, 64) and len(alone) == 2
    assert [end - start for start, end in batch.units.spans] == [16, 9, 16, 14]

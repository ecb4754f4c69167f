"""A bad entry adds nothing and says nothing: training is as if its row were padding."""

import collections
import contextlib
import functools
import json
import math
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

import dpflash
from dpflash import PrivateRefusal
from dpflash.kernels import native
from dpflash.packing import PackTo
from dpflash.sampling import PadTo
from dpflash.sampling.entries import BadShare, FittingCollate, ReadableEntries, Unreadable
from dpflash.verification.nested import tensors_of

BAD, ENTRIES = 5, 24


def raising(x, y):
    raise KeyError(f"no record of {y}")


def undecodable(x, y):
    return torch.tensor([*b"\xff\xfe".decode()]), y


ROWS = {
    "raises": raising,
    "undecodable": undecodable,
    "none": lambda x, y: None,
    "a field is none": lambda x, y: (x, None),
    "short": lambda x, y: (x[:3], y),
    "long": lambda x, y: (torch.cat([x, x]), y),
    "another dimension": lambda x, y: (x[None], y),
    "inputs of another dtype": lambda x, y: (x.double(), y),
    "a label of another dtype": lambda x, y: (x, y.double()),
    "a label that is text": lambda x, y: (x, "4"),
    "a field less": lambda x, y: (x,),
    "another structure": lambda x, y: {"x": x, "y": y},
    "a label that cannot be copied": lambda x, y: (x, threading.Lock()),
    "a label out of range": lambda x, y: (x, torch.tensor(7)),
    "a negative label": lambda x, y: (x, torch.tensor(-1)),
    "nan": lambda x, y: (x * math.nan, y),
    "inf": lambda x, y: (x + math.inf, y),
}


class Entries(Dataset):
    def __init__(self, change):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ENTRIES, 4, generator=generator)
        self.y = torch.randint(2, (ENTRIES,), generator=generator)
        self.change = change

    def __len__(self):
        return ENTRIES

    def __getitem__(self, index):
        entry = self.x[index], self.y[index]
        return self.change(*entry) if index == BAD and self.change else entry


def emptied(batch):
    return default_collate([entry for entry in batch if entry is not None])


def popping(batch):
    """Takes its entries apart, and pads to the longest."""
    labels = [entry.pop("y") for entry in batch]
    x = torch.nn.utils.rnn.pad_sequence([entry["x"] for entry in batch], batch_first=True)
    return {"x": x, "y": torch.stack(labels)}


def scaling(batch):
    """Standardizes its entries in place."""
    for x, _ in batch:
        x.sub_(1).div_(3)
    return default_collate(batch)


def taking(batch):
    """Takes parts of its entries apart."""
    labels = [entry["target"].pop("y") for entry in batch]
    x = default_collate([entry["x"].append(1.0) or entry["x"] for entry in batch])
    return {"x": torch.stack(x[:4], 1).float(), "y": torch.stack(labels)}


class Nested(Entries):
    def __getitem__(self, index):
        entry = super().__getitem__(index)
        if not isinstance(entry, tuple) or len(entry) < 2:
            return entry
        return {"x": entry[0].flatten().tolist(), "target": {"y": entry[1]}}


class Reversed(Entries):
    """Arrays; the one that changes has negative strides."""

    def __getitem__(self, index):
        x, y = self.x[index].numpy().copy(), self.y[index]
        return (x[::-1] if index == BAD and self.change else x), y


class Named(Entries):
    """Entries of several lengths, as dicts."""

    def __getitem__(self, index):
        entry = super().__getitem__(index)
        if not isinstance(entry, tuple):
            return entry
        x, y = entry
        return {"x": x[: 2 + index % 3] if index != BAD else x, "y": y}


def losses_of(model, batch):
    x, y = batch if isinstance(batch, list | tuple) else (batch["x"], batch["y"])
    x = torch.nn.functional.pad(x, (0, 4 - x.shape[1]))
    return dpflash.losses.cross_entropy(model(x), y)


def train(
    dataset, *, make=lambda: torch.nn.Linear(4, 2), losses_of=losses_of, keywords=(), **loader
):
    """(sums before the noise of each release, the engine)."""
    torch.manual_seed(0)
    engine = dpflash.PrivacyEngine(seed=3)
    model = make()
    model, optimizer, data = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(dataset, batch_size=8, **loader), noise_multiplier=0.0,
        max_grad_norm=0.5, **dict(keywords),
    )  # fmt: skip
    released = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for batch in data:
                engine.backward(losses_of(model, batch))
                optimizer.step()
                if data.is_last:
                    released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                optimizer.zero_grad()
    return released, engine


@pytest.fixture(autouse=True)
def _quiet():
    native.library()  # It says when it compiles.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "noise_multiplier=0")
        yield


def assert_adds_nothing(dataset, capsys, **arguments):
    """As an entry of NaN does, whose gradient is zero."""
    expected, _ = train(type(dataset)(ROWS["nan"]), **arguments)
    found, engine = train(dataset, **arguments)
    counts = engine.diagnostics()
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert capsys.readouterr() == ("", "")
    assert counts["bad_entries"] + counts["nonfinite_samples"] > 0


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_entry_is_like_a_padding_row(kind, capsys):
    assert_adds_nothing(Entries(ROWS[kind]), capsys)


@pytest.mark.parametrize("kind", ["raises", "none", "a field less", "another structure"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"collate_fn": PadTo(4), "keywords": {"physical_batch_size": 1}},
        {"collate_fn": emptied},
        {"keywords": {"sampling": "fixed_size"}},
    ],
    ids=["one row a microbatch", "drops none", "fixed size"],
)
def test_a_bad_entry_is_like_a_padding_row_however_batches_are_made(kind, arguments, capsys):
    assert_adds_nothing(Entries(ROWS[kind]), capsys, **arguments)


@pytest.mark.parametrize("kind", ["raises", "a label that is text", "another dimension"])
def test_entries_of_other_lengths_fit_where_the_function_pads_them(kind, capsys):
    assert_adds_nothing(Named(ROWS[kind]), capsys, collate_fn=popping)


@pytest.mark.parametrize("kind", ["a label that is text", "another dimension", "a field less"])
def test_a_function_that_changes_its_entries_gets_each_of_them_once(kind, capsys):
    assert_adds_nothing(Entries(ROWS[kind]), capsys, collate_fn=scaling)
    if kind != "another dimension":
        assert_adds_nothing(Nested(ROWS[kind]), capsys, collate_fn=taking)


class Computed(Entries):
    """Entries that other tensors were computed into."""

    def __init__(self, change):
        super().__init__(None)
        self.x = self.x.requires_grad_() * 2


@pytest.mark.parametrize("kind", [Reversed, Computed])
def test_an_array_with_negative_strides_or_a_tensor_with_a_graph_fits(kind):
    _, engine = train(kind(raising))
    assert engine.diagnostics()["bad_entries"] == 0


def test_a_bad_entry_of_a_loader_worker_adds_nothing(capsys):
    assert_adds_nothing(Entries(undecodable), capsys, num_workers=1)


def test_a_shuffled_loader_has_no_row_of_a_bad_entry():
    found, engine = train(Entries(ROWS["none"]), keywords={"sampling": "shuffled"})
    assert len(found) == 6 and engine.diagnostics()["bad_entries"] == 2


def test_a_unit_with_a_bad_entry_adds_nothing_in_that_draw():
    units = {"unit_of": [i // 2 for i in range(ENTRIES)], "examples_per_unit": 2}
    _, engine = train(Entries(raising), keywords=units)
    assert engine.diagnostics()["bad_entries"] > 0


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_whether_an_entry_fits_depends_on_no_entry_but_itself_while_the_first_agree(bad):
    """Any two of the first seven entries may be bad."""
    good, short = torch.ones(4), torch.ones(3)
    first = [short] * bad + [good] * (7 - bad)
    for entries in (first, first[::-1]):
        fitting = FittingCollate(default_collate, ReadableEntries(entries))
        others = [short, good.double(), None]
        assert fitting.fit([good, good.bfloat16(), *others]) == [True] * 2 + [False] * 3
        batch, rows, _ = fitting([short, short])
        assert rows == [0, 1] and torch.equal(batch, torch.ones(2, 4))
        # Padded to the others' length it would pass.
        padding = functools.partial(pad_sequence, batch_first=True)
        exact = FittingCollate(padding, ReadableEntries(entries), has_public_length=True)
        assert exact.fit([good, short]) == [True, False]


ONES, TOKENS = torch.ones(4), [1] * 20


def test_batches_that_show_the_form_of_entries_are_not_kept():
    made = []

    def collate(entries):
        batch = default_collate(entries)
        made.append(weakref.ref(batch))
        return batch

    fitting = FittingCollate(collate, ReadableEntries([ONES] * 7))
    assert fitting([ONES] * 3).batch.equal(torch.ones(3, 4))
    assert len(made) > 3 and all(batch() is None for batch in made)


class Example:
    def __init__(self, x, y):
        self.x, self.y = x, y


def of_examples(examples):
    return torch.stack([e.x for e in examples]), torch.tensor([e.y for e in examples])


def of_lines(lines):
    return torch.tensor([json.loads(line)["y"] for line in lines])


def of_table(rows):
    return torch.tensor([row.tolist() for row in rows])


class Linked:
    """A batch that holds itself."""

    def __init__(self, examples):
        self.x, self.y = of_examples(examples)
        self.me = self


# The common entry, the odd one, and whether that counts as a sample.
MINORITIES = {
    "bool": ((ONES, 1), (ONES, True), default_collate, True),
    "integer tensor": ((ONES, 1), (ONES, torch.tensor(1)), default_collate, False),
    "bfloat16": ((ONES, 1), (ONES.bfloat16(), 1), default_collate, True),
    "narrower integers": (ONES.long(), ONES.int(), default_collate, True),
    "another field": ({"x": ONES}, {"x": ONES, "source": 2}, default_collate, False),
    "a list of floats": (TOKENS, [1.0] * 20, torch.tensor, False),
    "nested": ({"x": [[ONES]]}, {"x": [[ONES.double()]]}, default_collate, False),
    "an object's integer": (Example(ONES, 0.5), Example(ONES, 1), of_examples, True),
    "an object's fraction": (Example(ONES, 1), Example(ONES, 0.5), of_examples, False),
    "an object's integers": (Example(ONES, 1), Example(ONES.int(), 1), of_examples, True),
    "an integer in an object": (Example(ONES, 0.5), Example(ONES, 1), Linked, True),
    "a line's integer": ('{"y": 0.5}', '{"y": 1}', of_lines, True),
    "a line's text": (b'{"y": 1}', b'{"y": "n/a"}', of_lines, False),
    "a table's integer": (*(np.array([1, y], object) for y in (0.5, 1)), of_table, True),
}


@pytest.mark.parametrize("kind", MINORITIES)
def test_whether_an_entry_counts_is_the_same_in_every_microbatch(kind):
    common, odd, collate, counts = MINORITIES[kind]
    fitting = FittingCollate(collate, ReadableEntries([common] * 7))
    batches = [[common] * 2, [common, odd, common], [odd, common, odd], [odd] * 2]
    batches.append([common, Unreadable(""), odd])
    found = [fitting(batch) for batch in batches]
    expected = [[], [], [], [], [1]] if counts else [[], [1], [0, 2], [0, 1], [1, 2]]
    assert [[*batch.bad] for batch in found] == expected
    dtypes = {tuple(x.dtype for _, x in tensors_of(batch.batch)) for batch in found}
    assert len(dtypes) == 1


class Together(Entries):
    """Reads several entries as one object."""

    def __getitems__(self, indices):
        return list(map(torch.stack, zip(*map(self.__getitem__, indices), strict=True)))


class TogetherByName(Together):
    def __getitems__(self, indices):
        return dict(zip("xy", super().__getitems__(indices), strict=True))


class AsColumns(Together):
    """Returns a tuple of columns, as of memory-mapped arrays."""

    def __getitems__(self, indices):
        return tuple(super().__getitems__(indices))


@pytest.mark.parametrize("kind", [*list(ROWS)[:8], "nan"])
@pytest.mark.parametrize("dataset", [AsColumns, TogetherByName])
def test_a_bad_entry_of_a_dataset_that_reads_several_as_one_adds_nothing(kind, dataset, capsys):
    assert_adds_nothing(dataset(ROWS[kind]), capsys, collate_fn=lambda batch: batch)


class PaddedTogether(Dataset):
    """Pads the entries that it reads together to the longest, as a tokenizing transform does."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        longest = max(self.lengths[i] for i in indices)
        return [
            F.pad(torch.ones(self.lengths[i]), (0, longest - self.lengths[i])) for i in indices
        ]


@pytest.mark.parametrize("lengths", [[6] * 30 + [9], [6] * 7 + [5, 9, 7, 4] * 6])
def test_entries_that_are_padded_as_they_are_read_fit(lengths):
    dataset = ReadableEntries(PaddedTogether(lengths))
    fitting = FittingCollate(default_collate, dataset)
    for indices in ([0, 1, 2], [3, len(lengths) - 1, 4], [*range(7, 12)], [0, 1]):
        batch = fitting(dataset.__getitems__(indices))
        assert not batch.bad
        assert (batch.batch != 0).sum(1).tolist() == [lengths[i] for i in indices]


def test_what_is_not_of_one_entry_alone_is_refused_without_a_value():
    def halves(entries):
        if len(entries) > 3:
            raise ValueError(f"secret {entries[0]}")
        return default_collate(entries)

    fitting = FittingCollate(halves, ReadableEntries([torch.ones(4)] * 7))
    with pytest.raises(PrivateRefusal, match="halves failed on a batch") as refusal:
        fitting([torch.ones(4)] * 4)
    assert "secret" not in str(refusal.value) and refusal.value.__suppress_context__
    assert "secret" in refusal.value.details["error"]
    held = FittingCollate(list, ReadableEntries([(1, threading.Lock())] * 7))
    with pytest.raises(PrivateRefusal, match="of type lock, which copy.deepcopy") as refusal:
        held([(1, threading.Lock())])
    assert refusal.value.details == {"error": "TypeError(\"cannot pickle '_thread.lock' object\")"}
    # A dataset most of whose entries cannot be read has its own error there.
    unread = FittingCollate(default_collate, ReadableEntries(dict.fromkeys(range(-9, -2))))
    with pytest.raises(PrivateRefusal, match="__getitem__ failed") as refusal:
        unread([Unreadable("KeyError('secret')")] * 7)
    assert refusal.value.details == {"error": "KeyError('secret')"}


class Curriculum(Entries):
    """Entries that all change."""

    has_changed = False

    def __getitem__(self, index):
        entry = self.x[index], self.y[index]
        return self.change(*entry) if self.has_changed else entry


LATER = {
    "longer": lambda x, y: (torch.cat([x, x]), y),
    "another dtype": lambda x, y: (x.double(), y),
    "a field more": lambda x, y: (x, y, x),
    "another structure": lambda x, y: {"x": x, "y": y},
}


@pytest.mark.parametrize("kind", LATER)
def test_where_all_entries_change_they_are_trained_on_in_their_new_form(kind):
    """As by progressive resizing, a curriculum of lengths or a transform that is switched on."""

    def losses_of(model, batch):
        x, y, *_ = batch.values() if isinstance(batch, dict) else batch
        forms.append((type(batch), len(batch), x.dtype, x.shape[1]))
        dataset.has_changed = len(forms) > 5
        return dpflash.losses.cross_entropy(model(x.float()[:, :4]), y)

    forms, dataset = [], Curriculum(LATER[kind])
    _, engine = train(dataset, losses_of=losses_of)
    assert len(set(forms)) == 2 and engine.diagnostics()["bad_entries"] == 0


@pytest.mark.parametrize("unlike", [3, 4, 7])
def test_a_form_that_changes_is_that_of_most_of_the_first_again(unlike):
    entries = [torch.ones(4)] * 7
    fitting = FittingCollate(default_collate, ReadableEntries(entries))
    assert fitting([torch.ones(4)] * 2).bad == ()
    entries[:unlike] = [torch.ones(3)] * unlike
    assert fitting([torch.ones(3)] * 2).bad == ([] if unlike == 7 else [0, 1])


Pair = collections.namedtuple("Pair", ["y", "text"])
INTEGERS = {
    "numbers": (3, 2.5),
    "of numpy": (np.int64(3), np.float32(2.5)),
    "arrays": (np.array([3]), np.array([2.5])),
    "tensors": (torch.tensor(3), torch.tensor(2.5)),
}


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("nest", [lambda y: y, lambda y: {"y": y}, lambda y: [Pair(y, "text")]])
def test_an_integer_among_floats_is_one_of_them(kind, nest):
    """As in targets that JSON holds; its row is the same whichever other entries there are."""
    integer, number = map(nest, INTEGERS[kind])
    fitting = FittingCollate(default_collate, ReadableEntries([number] * 7))
    for entries in ([integer, integer], [integer, number], [number, integer]):
        batch, bad, _ = fitting(entries)
        (x,) = [x for _, x in tensors_of(batch)]
        wanted = [3.0 if entry is integer else 2.5 for entry in entries]
        assert not bad and x.is_floating_point() and x.flatten().tolist() == wanted


@pytest.mark.parametrize("keywords", [{}, {"physical_batch_size": 1}, {"sampling": "shuffled"}])
def test_where_most_entries_are_bad_training_ends(keywords):
    """The first seven show what entries are like, so they must be like most."""
    rows = [(torch.ones(4), 1 if i < 10 else {"label": 1}) for i in range(40)]
    with pytest.raises(PrivateRefusal, match="most of the entries"):
        train(rows, keywords=keywords)
    _, engine = train(rows[:20], keywords=keywords)  # half of them
    assert engine.diagnostics()["bad_entries"] > 0


@pytest.mark.parametrize("per_unit", [1, 3])
def test_no_unit_ends_training_unless_half_of_the_others_are_bad(per_unit):
    generator = torch.Generator().manual_seed(0)
    ended = 0
    for share_of_bad in torch.linspace(0.3, 1, 300):
        share, seen, bad = BadShare(per_unit), 0, 0
        with contextlib.suppress(PrivateRefusal):
            while seen < 64:
                size = int(torch.randint(8, (), generator=generator))
                others = int((torch.rand(size, generator=generator) < share_of_bad).sum())
                seen, bad = seen + size, bad + others
                share.observe(size + per_unit, others + per_unit, is_last=True)
            continue
        ended += 1
        assert 2 * bad > seen
    assert ended > 10


class Documents(Dataset):
    def __init__(self, bad=None):
        self.documents = [torch.arange(1, 4 + i % 5) for i in range(ENTRIES)]
        self.bad = bad

    def __len__(self):
        return ENTRIES

    def __getitem__(self, index):
        if index == BAD and self.bad is not None:
            return self.bad()
        return [] if index == BAD else self.documents[index]


@pytest.mark.parametrize(
    "bad",
    [
        lambda: b"\xff".decode(),
        lambda: None,
        lambda: "text",
        lambda: torch.ones(3),
        lambda: {"input_ids": [1, 2], "labels": [1]},
        lambda: [],
    ],
    ids=["raises", "none", "text", "floats", "labels", "empty"],
)
def test_what_is_no_document_adds_nothing(bad):
    def losses_of(model, batch):
        return dpflash.losses.cross_entropy(
            model(batch.input_ids), batch.targets, sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )  # fmt: skip

    arguments = {"collate_fn": PackTo(tokens=32, max_documents=8), "losses_of": losses_of}
    found, expected = (
        train(dataset, make=lambda: torch.nn.Embedding(16, 16), **arguments)[0]
        for dataset in (Documents(bad), Documents())
    )
    assert len(found) > 5 and all(map(torch.equal, found, expected))

"""Two neighboring datasets leave the same traces: errors, outputs, shapes, schedules, ledger."""

import functools
import itertools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dpflash
from dpflash import PrivacyEngine
from dpflash.packing import PackTo
from dpflash.sampling import LogicalBatches, PadTo

ENTRIES, PUBLIC_SIZE, LENGTH = 24, 25, 9


class Listed(Dataset):
    def __init__(self, entries):
        self.entries = entries

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, index):
        entry = self.entries[index]
        if isinstance(entry, Exception):
            raise entry
        return entry


class Subclass(torch.Tensor):
    pass


class Lying(list):
    def __len__(self):
        return 7


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, as those of Gemma and BART."""

    def forward(self, input):
        return super().forward(input) * 2


class Tables(nn.Module):
    """Looks up tokens, and numbers of the tokens that are not 0, in three tables."""

    def __init__(self, trained):
        super().__init__()
        self.plain, self.scaled = nn.Embedding(7, 4, padding_idx=0), Scaled(7, 4)
        self.places, self.head = nn.Embedding(6, 4), nn.Linear(4, 7)
        for module in (self.plain, self.scaled, self.places):
            module.requires_grad_(trained)

    def forward(self, ids):
        h = self.plain(ids) + self.scaled(ids) + self.places((ids != 0).cumsum(1))
        return self.head(h)


def classes(model, batch):
    return dpflash.losses.cross_entropy(model(batch[0]), batch[1])


def yes_or_no(model, batch):
    return dpflash.losses.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def next_tokens(model, batch):
    return dpflash.losses.causal_lm(model(batch["input_ids"]), batch["labels"])


def next_tokens_of_documents(model, batch):
    return dpflash.losses.cross_entropy(
        model(batch.input_ids),
        batch.targets,
        sample_index=batch.sample_index,
        num_samples=batch.max_documents,
    )


def text(length, change=None):
    ids = torch.arange(length) % 7 if change is None else change
    return {"input_ids": ids, "labels": ids}


ROW = torch.tensor([0.5, -1.0, 2.0])
# Kind: (entry number i, model, loss, collate function, options), and the odd entries.
KINDS = {
    "classes": (
        lambda i: (ROW * (1 + i % 5), i % 3),
        lambda: nn.Linear(3, 3),
        classes,
        None,
        {"grad_sample_mode": "instantiate"},
    ),
    "classes of ghost": (
        lambda i: (ROW * (1 + i % 5), i % 3),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
        classes,
        None,
        {"grad_sample_mode": "ghost", "physical_batch_size": 4},
    ),
    "yes or no": (
        lambda i: (ROW * (1 + i % 5), float(i % 2)),
        lambda: nn.Linear(3, 1),
        yes_or_no,
        None,
        {"clipping": "per_layer"},
    ),
    "tokens": (
        lambda i: text(3 + i % 6),
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)),
        next_tokens,
        PadTo(LENGTH, {"labels": -100}),
        {},
    ),
    "trained tables": (
        lambda i: text(3 + i % 3),
        lambda: Tables(True),
        next_tokens,
        PadTo(LENGTH, {"labels": -100}),
        {"clipping": "per_layer"},
    ),
    "frozen tables": (
        lambda i: text(3 + i % 3),
        lambda: Tables(False),
        next_tokens,
        PadTo(LENGTH, {"labels": -100}),
        {"physical_batch_size": 1},
    ),
    "documents": (
        lambda i: {"input_ids": list(range(2 + i % 5))},
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)),
        next_tokens_of_documents,
        PackTo(tokens=64, max_documents=8),
        {},
    ),
}
SHARED = {"none": None, "raises": KeyError("patient 7"), "text": "patient 7", "one more": ...}
ODD = {
    "classes": {
        "nan": (ROW * torch.nan, 1),
        "infinite": (ROW * torch.inf, 1),
        "huge": (ROW * 1e30, 1),
        "another class": (ROW, 2),
        "target out of range": (ROW, 7),
        "negative target": (ROW, -5),
        "target none": (ROW, None),
        "wide": (torch.ones(4), 1),
        "float64": (ROW.double(), 1),
        "bfloat16": (ROW.bfloat16(), 1),
        "integers": (ROW.long(), 1),
        "complex": (ROW + 1j, 1),
        "sparse": (ROW.to_sparse(), 1),
        "on no device": (ROW.to("meta"), 1),
        "of a subclass": (ROW.as_subclass(Subclass), 1),
        "with a gradient": (ROW.clone().requires_grad_(), 1),
        "an array": (ROW.numpy(), 1),
        "of a false length": (ROW, Lying([1, 2])),
        "lazy": (ROW, lambda: 1),
    },
    "yes or no": {
        "nan": (ROW * torch.nan, 1.0),
        "target nan": (ROW, float("nan")),
        "target of 3": (ROW, 3.0),
        "target of -1": (ROW, -1.0),
        "target an integer": (ROW, 1),
        "empty": (ROW[:0], 1.0),
    },
    "tokens": {
        "long": text(40),
        "of full length": text(LENGTH),
        "empty": text(0),
        "unknown token": text(0, torch.tensor([1, 400, 2])),
        "negative token": text(0, torch.tensor([1, -3, 2])),
        "floats": text(0, torch.tensor([1.0, 2.0])),
        "a field less": {"input_ids": torch.arange(4)},
        "a field more": {**text(4), "name": "patient 7"},
    },
    "documents": {
        "long": {"input_ids": list(range(7)) * 12},
        "empty": {"input_ids": []},
        "one token": {"input_ids": [3]},
        "unknown token": {"input_ids": [1, 400, 2]},
        "floats": {"input_ids": [1.5, 2.5]},
        "labels of another length": {"input_ids": [1, 2, 3], "labels": [1, 2]},
        "texts": {"input_ids": ["a", "b"]},
    },
}
ODD["classes of ghost"] = ODD["classes"]
ODD["trained tables"] = {**ODD["tokens"], "place unknown": text(0, torch.ones(9).long())}
ODD["frozen tables"] = ODD["trained tables"]
PLACES = [0, 11, 17, 20]  # All are drawn.
CASES = [
    case
    for kind in KINDS
    for case in itertools.product([kind], {**SHARED, **ODD[kind]}, PLACES)
    if case[1] != "one more" or case[2] in (0, 20)
]


def traces(kind, change, tmp_path):
    """What a run shows, apart from what is declared private."""
    entry, build, loss, collate, options = KINDS[kind]
    entries = [entry(i) for i in range(ENTRIES)]
    if change is not None:
        odd, place = change
        value = {**SHARED, **ODD[kind]}[odd]
        if value is ...:
            entries.append(entry(place))
        else:
            entries[place] = value
    torch.manual_seed(0)
    model, path = build(), tmp_path / "ledger"
    shown = {"shapes": set(), "rates": [], "error": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine = PrivacyEngine(seed=3, ledger=path)
            model, optimizer, loader = engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(Listed(entries), batch_size=6, collate_fn=collate),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                dataset_size=PUBLIC_SIZE,
                **options,
            )
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for batch in itertools.islice(LogicalBatches(loader), 3):
                for microbatch in batch:
                    engine.backward(loss(model, microbatch))
                    shown["shapes"] |= shapes_of(microbatch)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                shown["rates"].append(optimizer.param_groups[0]["lr"])
            shown["epsilon"] = engine.get_epsilon(1e-5)
        except Exception as error:
            shown["error"] = f"{type(error).__name__}: {error}"
    shown["warnings"] = [f"{w.category.__name__}: {w.message}" for w in caught]
    lines = path.read_text() if path.exists() else ""
    shown["ledger"] = re.sub('"(run|digest)": "[^"]*"', "", lines)
    return shown


def shapes_of(batch):
    parts = batch.values() if isinstance(batch, dict) else batch
    return {(tuple(x.shape), x.dtype) for x in parts if isinstance(x, torch.Tensor)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return functools.cache(lambda kind: traces(kind, None, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize(("kind", "odd", "place"), CASES, ids=lambda x: str(x).replace(" ", "_"))
def test_a_neighboring_dataset_leaves_the_same_traces(kind, odd, place, plain, tmp_path, capfd):
    expected = plain(kind)
    assert expected["error"] is None and len(expected["rates"]) == 3
    capfd.readouterr()
    assert traces(kind, (odd, place), tmp_path) == expected
    assert capfd.readouterr() == ("", "")

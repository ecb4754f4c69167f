"""Batches of any nesting train and are checked; empty draws have a batch that models take."""

import enum
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import dpflash
from dpflash.sampling import LogicalBatches
from dpflash.sampling.loader import _blank

ROWS = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(30)]
Pair = namedtuple("Pair", "x meta")


@dataclass
class Fields:
    x: torch.Tensor
    names: list
    length: int = 3


class Encoding(UserDict):
    """As transformers' BatchEncoding."""


COLLATED = {
    "dict": lambda entries: {"x": torch.stack(entries), "none": None, "n": len(entries)},
    "user dict": lambda entries: Encoding(x=torch.stack(entries), a=np.stack(entries)),
    "dataclass": lambda entries: Fields(torch.stack(entries), [str(e) for e in entries]),
    "named tuple": lambda entries: Pair(torch.stack(entries), (None, "text", 2.5)),
    "nested list": lambda entries: [1, [(torch.stack(entries), "text")]],
    "objects": lambda entries: {"x": torch.stack(entries), "o": [object() for _ in entries]},
}
TAKEN = {
    "dict": lambda batch: batch["x"],
    "user dict": lambda batch: batch["x"],
    "dataclass": lambda batch: batch.x,
    "named tuple": lambda batch: batch.x,
    "nested list": lambda batch: batch[1][0][0],
    "objects": lambda batch: batch["x"],
}


class Taking(nn.Module):
    """A model that gets the batch as it is."""

    def __init__(self, take, mixes=False):
        super().__init__()
        self.take, self.mixes = take, mixes
        self.layer = nn.Linear(3, 2)

    def forward(self, batch):
        x = self.take(batch)
        return self.layer(x - x.mean(0) if self.mixes else x)


def make(kind, mixes=False, noise_multiplier=1.0, **options):
    engine = dpflash.PrivacyEngine(seed=0)
    model = Taking(TAKEN[kind], mixes)
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(ROWS, collate_fn=COLLATED[kind], **{"batch_size": 8, **options}),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("kind", COLLATED)
def test_a_batch_of_any_nesting_trains_and_is_proven(kind):
    engine, model, optimizer, loader = make(kind)
    for _ in range(3):
        for batch in loader:
            engine.backward(model(batch).square().sum(1))
            optimizer.step()
            optimizer.zero_grad()
    assert engine.verified is True


@pytest.mark.parametrize("kind", COLLATED)
def test_a_model_that_mixes_the_rows_of_a_nested_batch_is_refused(kind):
    engine, model, optimizer, loader = make(kind, mixes=True)
    with pytest.raises(RuntimeError, match="'layer' changed for a sample"):
        for batch in loader:
            engine.backward(model(batch).square().sum(1))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_rows_in_another_order_are_seen_in_a_nested_batch(kind):
    engine, model, _, loader = make(kind)
    with pytest.raises(RuntimeError, match="another order"):
        for batch in loader:
            x = TAKEN[kind](batch).flip(0)
            engine.backward(model({"x": x} if kind == "dict" else Fields(x, [])).sum(1))


class Scored(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, a, b):
        return (self.layer(a) - 2 * self.layer(b)).square().sum(1)


ARGUMENTS = {
    "in another order": lambda model, a, b: model(b, a),
    "in both orders": lambda model, a, b: model(a, b) + model(b, a),
    "twice": lambda model, a, b: model(a, a) + model(a, b),
}


@pytest.mark.parametrize("use", ARGUMENTS.values(), ids=ARGUMENTS)
def test_as_many_arguments_as_rows_are_no_samples(use, private):
    engine, model, optimizer, loader = private(
        Scored(), *torch.randn(2, 40, 8), batch_size=6, physical_batch_size=2
    )
    for a, b in loader:
        assert len(a) == 2
        engine.backward(use(model, a, b))
        optimizer.step()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_an_empty_draw_of_opacus_manager_is_noise_alone(kind, workers):
    manager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager
    engine, model, optimizer, loader = make(
        kind, batch_size=1, num_workers=workers, noise_multiplier=0.0
    )
    empty = 0
    drawn = [len(loader._draws.draw(index)) for index in range(30)]
    with manager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
        for batch in batches:
            count = drawn[optimizer.releases]
            assert len(TAKEN[kind](batch)) == max(1, count)
            loss = model(batch).square().sum(1) * 1e6
            engine.backward(loss)
            if count == 0:
                empty += 1
                assert all(not bool(x.any()) for x in engine._step.sums.values())
            else:
                assert any(bool(x.any()) for x in engine._step.sums.values())
            optimizer.step()
            optimizer.zero_grad()
    assert empty > 3 and optimizer.releases == 30
    assert engine.sampler == "poisson"  # all draws are accounted for as drawn


def test_a_second_row_in_place_of_an_empty_draw_is_refused():
    manager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager
    engine, model, optimizer, loader = make("dict", batch_size=1)
    with manager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
        for _ in batches:
            if loader.tracker.emitted[0] == 0:
                with pytest.raises(RuntimeError, match="than are left of the logical batch"):
                    engine.backward(model({"x": torch.ones(2, 3)}).sum(1))
                return
            optimizer.step()
            optimizer.zero_grad()


def nested(entries):
    return {"labels": torch.zeros(len(entries)), "x": torch.nested.nested_tensor(entries)}


def time_first(entries):
    return {"n": len(entries), "x": torch.stack(entries, 1)}


def packed(entries):
    return torch.cat(entries)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (nested, r"collate_fn=nested makes batch\['x'\] a nested tensor.*PadTo"),
        (time_first, r"collate_fn=time_first makes batch\['x'\] of another size"),
        (packed, r"collate_fn=packed makes batch of another size"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_odd_field_is_refused_in_make_private_by_its_name(collate, words):
    model = nn.Linear(3, 2)
    with pytest.raises(dpflash.PrivateRefusal, match=words):
        dpflash.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(ROWS, batch_size=4, collate_fn=collate),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_torchs_own_function_reads_no_entry_for_the_trial():
    class Counted(list):
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    model = nn.Linear(3, 2)
    dpflash.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(Counted(ROWS), batch_size=4, collate_fn=default_collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert Counted.read == 0


@pytest.mark.parametrize("mlm", [False, True])
def test_collators_and_models_of_hugging_face_take_empty_draws(mlm):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    manager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager
    words = {str(i): i for i in range(30)} | {"[PAD]": 30, "[MASK]": 31}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")),
        pad_token="[PAD]",
        mask_token="[MASK]",
    )
    small = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    small["intermediate_size"] = 16
    model = (
        transformers.BertForMaskedLM(transformers.BertConfig(**small))
        if mlm
        else transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    )
    data = [{"input_ids": [*range(1, 3 + i % 4)]} for i in range(10)]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=mlm)
    engine = dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=1, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    empty = sum(not loader._draws.draw(index) for index in range(20))
    with manager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
        for source in (batches, loader):
            for batch in source:
                labels = batch.pop("labels")
                logits = model(**batch).logits
                losses = (
                    dpflash.losses.cross_entropy(logits, labels)
                    if mlm
                    else dpflash.losses.cross_entropy(logits[:, :-1], labels[:, 1:])
                )
                engine.backward(losses)
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.releases == 20 and empty > 2


class Kind(enum.IntEnum):
    FIRST = 1


class Named(str):
    def __new__(cls, first, second):
        return super().__new__(cls, first + second)


@pytest.mark.parametrize(
    ("value", "blank"),
    [(Kind.FIRST, 0), (Named("a", "b"), ""), (True, False), (np.float32(3), 0.0), (2.5, 0.0)],
)
def test_a_blank_value_has_nothing_of_the_data_also_of_classes_of_their_own(value, blank):
    assert _blank(value) == blank and not isinstance(_blank(value), np.ndarray)


def test_a_logical_batch_puts_the_tensors_of_a_dataclass_on_its_device():
    *_, loader = make("dataclass")
    with torch.no_grad():
        logical = next(iter(LogicalBatches(loader)))
        assert all(batch.x.device.type == "meta" for batch in logical.to("meta"))


def test_engine_check_finds_mixing_in_a_dataclass():
    model = Taking(TAKEN["dataclass"], mixes=True)
    batch = COLLATED["dataclass"](ROWS[:6])
    report = dpflash.PrivacyEngine().check(model, batch, lambda m, b: m(b).square().sum(1))
    assert "depends on other samples" in str(report)
    kept = Taking(TAKEN["dataclass"])
    report = dpflash.PrivacyEngine().check(kept, batch, lambda m, b: m(b).square().sum(1))
    assert not report.problems

"""Tensors are found and changed in batches of any nesting, and everything else stays as it is."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dpflash.verification.nested import map_tensors, tensors_of

Pair = namedtuple("Pair", "a b")


@dataclass
class Fields:
    x: torch.Tensor
    meta: object = None


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Mapped(UserDict):
    """As transformers' BatchEncoding."""


class Record(dict):
    """A mapping of its own kind."""


class Listed(list):
    """A list of its own kind."""


X = torch.arange(3.0)
BATCHES = {
    "tensor": (X, ""),
    "dict": ({"x": X, "n": 3}, "['x']"),
    "own mapping": (Record(x=X, s="text"), "['x']"),
    "user dict": (Mapped({"x": X, "none": None}), "['x']"),
    "ordered": (OrderedDict(x=X), "['x']"),
    "named tuple": (Pair({"k": X}, None), ".a['k']"),
    "dataclass": (Fields(X, np.ones(2)), ".x"),
    "frozen": (Frozen(X), ".x"),
    "nested": ([1, (Fields(None, [X]), "text")], "[1][0].meta[0]"),
    "own list": (Listed([0, X]), "[1]"),
}


@pytest.mark.parametrize(("batch", "place"), BATCHES.values(), ids=list(BATCHES))
def test_a_tensor_is_found_by_its_place_and_changed_in_a_container_of_the_same_kind(batch, place):
    ((found, tensor),) = tensors_of(batch)
    assert found == place and tensor is X
    changed = map_tensors(lambda x: x + 1, batch)
    assert type(changed) is type(batch)
    ((found, tensor),) = tensors_of(changed)
    assert found == place and torch.equal(tensor, X + 1)
    ((_, tensor),) = tensors_of(batch)
    assert tensor is X


class Shares(MutableMapping):
    """A mapping whose `copy.copy` holds the same dict."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


def test_a_container_whose_copy_shares_its_contents_is_never_changed():
    batch = Shares({"x": X, "y": X})
    assert map_tensors(lambda x: x + 1, batch) is batch
    assert batch["x"] is X and batch["y"] is X


class WithAttributes(dict):
    def __init__(self, *arguments, **entries):
        super().__init__(*arguments, **entries)
        self.__dict__ = self


@dataclass
class Derived:
    x: torch.Tensor

    def __post_init__(self):
        self.same = self.x


@pytest.mark.parametrize(("batch", "name"), [(WithAttributes(x=X), "x"), (Derived(X), "same")])
def test_attributes_that_hold_a_tensor_change_with_it(batch, name):
    assert torch.equal(getattr(map_tensors(lambda x: x + 1, batch), name), X + 1)
    assert getattr(batch, name) is X


def test_all_else_is_kept():
    array, other = np.ones(2), object()
    batch = {"a": array, "b": [1, 2.0, "s", None, True, other], "c": Fields(None, array)}
    kept = map_tensors(torch.neg, batch)
    assert kept["a"] is array and kept["b"] == batch["b"] and kept["c"] is batch["c"]
    assert list(tensors_of(batch)) == [] and list(tensors_of("text")) == []

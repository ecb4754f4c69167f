"""Entries of data sets are compared by what they hold, not by the objects that hold it."""

from datetime import date

import numpy as np
import pytest
import torch

from dpflash.distributed.validate import _entry_digest

KEY = bytes(32)


class Unknown:
    pass


def digest(entry):
    return _entry_digest(entry, KEY)


def entry(**changes):
    values = {
        "tokens": torch.arange(6).view(2, 3),
        "image": np.ones((2, 2), dtype=np.float32),
        "label": np.int64(3),
        "rest": ("text", b"bytes", [1, 2.5, True, None]),
    }
    return {**values, **changes}


def test_entries_that_share_objects_are_equal_to_those_that_do_not():
    word, x = "".join(["a", "b"]), torch.ones(3)
    shared = [word, word, x, x, (1, 2)]
    apart = ["".join(["a", "b"]), "ab", torch.ones(3), torch.ones(6)[::2], (1, 2)]
    assert shared[0] is shared[1] and apart[0] is not apart[1]
    assert digest(shared) == digest(apart) != ""


def test_the_order_of_a_mapping_does_not_count():
    assert digest(entry()) == digest(dict(reversed(entry().items()))) != ""


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tokens": torch.arange(6).view(3, 2)}, id="shape"),
        pytest.param({"tokens": torch.arange(6).view(2, 3).int()}, id="dtype"),
        pytest.param({"tokens": torch.arange(1, 7).view(2, 3)}, id="values"),
        pytest.param({"image": np.zeros((2, 2), dtype=np.float32)}, id="array"),
        pytest.param({"label": np.int64(4)}, id="label"),
        pytest.param({"rest": ("text", b"bytes", [1, 2.5, True])}, id="missing"),
        pytest.param({"rest": ("text", b"bytes", [1, 2.5, 1, None])}, id="number"),
        pytest.param({"rest": (b"text", "bytes", [1, 2.5, True, None])}, id="bytes"),
        pytest.param({"rest": ("textb", b"ytes", [1, 2.5, True, None])}, id="where-it-ends"),
        pytest.param({"rest": ("text", [b"bytes", 1], 2.5, True, None)}, id="nesting"),
        pytest.param({"more": 1}, id="key"),
    ],
)
def test_entries_with_other_contents_differ(changes):
    assert digest(entry(**changes)) not in ("", digest(entry()))


@pytest.mark.parametrize(
    "value",
    [
        Unknown(),
        date(2026, 1, 1),
        {1, 2},
        np.array([Unknown()], dtype=object),
        torch.ones(2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_known_is_not_compared(value):
    assert digest(value) == digest([1, {"a": value}]) == ""


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.ones(2, dtype=torch.bfloat16),
        np.zeros(0),
        [],
        {},
    ],
    ids=repr,
)
def test_small_and_empty_values_are_compared(value):
    assert digest(value) != ""

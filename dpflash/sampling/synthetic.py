"""Synthetic samples for tests that samples do not depend on each other.

The tests run before private data are read. The samples' values come from a generator with a fixed
seed. From the entries of a dataset only the fields, dtypes and shapes are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..isolation.example import samples_in
from ..packing import PackTo
from ..verification.nested import tensors_of
from .entries import ReadableEntries

SAMPLES = 4
TOKENS = 16  # largest number of tokens of a sample
# A batch of more numbers than this has at most as many samples as a batch of training.
_LARGE = 1024
# For each sample, the number of tokens by which it is shorter than the longest sample. The tests
# replace two samples by the other two, so the two pairs have different numbers of tokens.
_SHORTER = (0, 7, 0, 2)
# Number of first entries whose fields, dtypes and shapes are read.
_FIRST = 7
_TOKEN_IDS = ("input_ids", "decoder_input_ids", "prompt_ids", "chosen_ids", "rejected_ids")
_LABELS = ("labels", "label", "label_ids")
_ZEROS = ("token_type_ids", "special_tokens_mask")
_NO_LABEL = -100


class Ranges(NamedTuple):
    """The ranges of the integers in entries.

    Attributes:
        tokens: the size of the vocabulary; None if unknown.
        labels: the number of classes, or of tokens to predict.
        padding: the token that pads shorter samples.
        positions: the largest number of tokens of a sample.
    """

    tokens: int | None
    labels: int
    padding: int = 0
    positions: int = TOKENS


class _Form(NamedTuple):
    name: str
    kind: type  # class of the value, such as Tensor or list
    dtype: Any  # dtype of a tensor or array, else None
    letter: str  # kind of values: "i" integers, "f" floating-point, "b" bool, "U" string
    ndim: int


def lengths(at_most: int) -> list[int]:
    """Return the lengths of `SAMPLES` samples; the longest has `at_most` tokens."""
    return [max(at_most - shorter, min(at_most, 2)) for shorter in _SHORTER]


def documents(vocabulary: int, at_most: int) -> list[Tensor]:
    """Make `SAMPLES` documents of random tokens, each `[length]`, int64."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths(at_most)]


def packing(at_most: int) -> PackTo:
    """Return a `PackTo` that packs `documents(..., at_most)` into one row."""
    return PackTo(tokens=SAMPLES * at_most, max_documents=SAMPLES)


def batches(loader: DataLoader, ranges: Ranges, *, at_most: int) -> list[Any]:
    """Return four batches: one long sample, one short sample, all samples, all samples again.

    Args:
        loader: the user's loader, whose entries determine the form of the samples, and whose
            collate function collates them.
        ranges: ranges of the samples' integers.
        at_most: number of samples of a batch, if a batch of all samples would be large.

    Returns:
        The four batches. An empty list if entries are not mappings of numbers and strings, if a
        field's name does not tell the range of its integers, or if the collate function fails.
    """
    collate: Any = loader.collate_fn
    entries: Sequence[Any] | None = None
    try:
        if not isinstance(collate, PackTo):
            entries = _alike(_first(loader), ranges)
        elif ranges.tokens is not None:
            entries = documents(ranges.tokens, min(TOKENS, ranges.positions))
            collate = packing(TOKENS)
        if entries is None:
            return []
        if max(x.numel() for _, x in tensors_of(collate([*entries]))) > _LARGE:
            entries = entries[:at_most]
        made = [collate([*own]) for own in (entries[:1], entries[1:2], entries, entries)]
        return made if samples_in(made[-1]) == len(entries) else []
    except Exception:
        return []


def _first(loader: DataLoader) -> list[Any]:
    dataset = ReadableEntries(loader.dataset)
    made: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=[[*range(min(_FIRST, len(dataset)))]],
        collate_fn=list,
        # Read in a worker if there are any: files opened here would be open in later forks.
        num_workers=min(1, loader.num_workers),
    )
    return next(iter(made))


def _alike(entries: Sequence[Any], ranges: Ranges) -> list[dict[str, Any]] | None:
    """Return synthetic entries with the form of most entries; None if a range is unknown."""
    described = [found for entry in entries if (found := _described(entry))]
    if not described:
        return None
    form, _ = Counter(tuple(found) for found in described).most_common(1)[0]
    shapes = [list(found.values()) for found in described if tuple(found) == form]
    values = _Values(ranges, is_padded=any(field.name == "attention_mask" for field in form))
    made: list[dict[str, Any]] = [{} for _ in range(SAMPLES)]
    for field, own in zip(form, zip(*shapes, strict=True), strict=True):
        shape = own[0] if len(set(own)) == 1 else None
        for number, entry in enumerate(made):
            entry[field.name] = value = values.of(field, shape, number)
            if value is None:
                return None
    return made


def _described(entry: Any) -> dict[_Form, tuple[int, ...]]:
    """Return the shape of each field of an entry; {} if a field has an unsupported type."""
    found: dict[_Form, tuple[int, ...]] = {}
    dtype: Any
    for name, value in entry.items() if isinstance(entry, Mapping) else ():
        if isinstance(value, Tensor):
            dtype = value.dtype
            letter = "b" if dtype == torch.bool else "f" if dtype.is_floating_point else "i"
            found[_Form(name, Tensor, dtype, letter, value.ndim)] = tuple(value.shape)
        elif isinstance(value, np.ndarray | list | int | float | str):
            try:
                array = np.asarray(value)
            except ValueError:  # a list with lists of several lengths
                return {}
            letter = array.dtype.kind.replace("u", "i")
            dtype = array.dtype if isinstance(value, np.ndarray) else None
            found[_Form(name, type(value), dtype, letter, array.ndim)] = array.shape
        else:
            return {}
    return found


class _Values:
    """Makes the values of synthetic entries.

    Args:
        ranges: ranges of integers.
        is_padded: whether entries have an attention mask.
    """

    def __init__(self, ranges: Ranges, *, is_padded: bool) -> None:
        self._ranges = ranges
        self._is_padded = is_padded
        self._rng = np.random.default_rng(0)

    def of(self, field: _Form, shape: tuple[int, ...] | None, number: int) -> Any:
        """Return a value for a sample's field; None if the field's range is unknown.

        Args:
            field: the form of the field.
            shape: the shape of the field in all entries; None if shapes differ.
            number: the index of the sample.
        """
        value = self._array(field, shape, number)
        if value is None or isinstance(value, str):
            return value
        if field.kind is Tensor:
            return torch.from_numpy(value).to(field.dtype)
        return value.tolist() if field.dtype is None else value.astype(field.dtype)

    def _array(self, field: _Form, shape: tuple[int, ...] | None, number: int) -> Any:
        if field.letter == "U" and field.ndim == 0:
            return " ".join(map(str, self._rng.integers(100, size=lengths(TOKENS)[number])))
        if field.letter == "i" and field.ndim == 0:
            own = np.array(number % self._ranges.labels)
            return own if field.name in _LABELS else None
        if field.letter in "ib" and field.ndim == 1:
            longest = min(TOKENS, self._ranges.positions, *(shape or ()))
            found = self._sequence(field.name, longest, number, is_fixed=shape is not None)
            return found if found is None or field.letter == "i" else found.astype(bool)
        if field.letter == "f" and shape is not None:
            return np.asarray(self._rng.standard_normal(shape))
        return None

    def _sequence(
        self, name: str, longest: int, number: int, *, is_fixed: bool
    ) -> np.ndarray | None:
        """Return a sample's tokens, labels or mask, padded to `longest` tokens if `is_fixed`."""
        own, padding, tokens = lengths(longest)[number], 0, self._ranges.tokens
        if name in _TOKEN_IDS and tokens is not None:
            values, padding = self._rng.integers(tokens, size=longest), self._ranges.padding
            values[values == padding] = (padding + 1) % tokens
            if is_fixed and not self._is_padded:
                own = longest
        elif name in _LABELS:
            values, padding = self._rng.integers(self._ranges.labels, size=longest), _NO_LABEL
        elif name in _ZEROS:
            values = np.zeros(longest, dtype=np.int64)
        elif "mask" in str(name):
            values = np.ones(longest, dtype=np.int64)
        else:
            return None
        values[own:] = padding
        return values if is_fixed else values[:own]

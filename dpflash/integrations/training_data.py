"""Detects whether two datasets share entries, by the memory in which entries are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

_Places = NDArray[np.int64]


def share_entries(one: Any, two: Any) -> bool:
    """Whether the two datasets have a common entry.

    Entries inside Subset, ConcatDataset, TensorDataset, tensors, arrays, lists of objects and
    tables of the `datasets` library are compared; copies of an entry are not recognized.
    """
    held: dict[int, list[_Places]] = {}
    for storage, places in _stored(one):
        held.setdefault(storage, []).append(places)
    return any(
        bool(np.isin(places, np.concatenate(held[storage])).any())
        for storage, places in _stored(two)
        if storage in held
    )


def _stored(dataset: Any) -> Iterator[tuple[int, _Places]]:
    """Yield (storage, positions of entries in it) for a dataset or a dict of datasets."""
    for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if part is not None:
            size = len(part) if hasattr(part, "__len__") else 1
            yield from _places(part, np.arange(size))


def _places(dataset: Any, chosen: _Places) -> Iterator[tuple[int, _Places]]:
    yield id(dataset), chosen
    table = getattr(dataset, "data", None)
    if isinstance(dataset, Subset):
        yield from _places(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[chosen])
    elif isinstance(dataset, ConcatDataset):
        parts = np.searchsorted(dataset.cumulative_sizes, chosen, side="right")
        for number, part in enumerate(dataset.datasets):
            begin = dataset.cumulative_sizes[number] - len(part)  # type: ignore[arg-type]
            yield from _places(part, chosen[parts == number] - begin)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield from _places(tensor, chosen)
    elif isinstance(dataset, np.ndarray) and dataset.flags.writeable:
        yield from _places(torch.from_numpy(dataset), chosen)
    elif isinstance(dataset, Tensor) and dataset.ndim and dataset.layout == torch.strided:
        step = dataset.stride(0) * dataset.element_size()
        yield hash(dataset.device), dataset.data_ptr() + step * chosen
    elif getattr(type(dataset), "__getitem__", None) in (list.__getitem__, tuple.__getitem__):
        # Two different entries that are equal numbers or strings may be one Python object.
        entries = [dataset[i] for i in chosen]
        kept = [id(x) for x in entries if not isinstance(x, int | float | str | bytes)]
        yield 0, np.asarray(kept, dtype=np.int64)
    elif hasattr(table, "column_names"):
        rows = dataset._indices
        own = chosen if rows is None else rows.column(0).to_numpy()[chosen]
        yield from _columns(table, own)


def _columns(table: Any, rows: _Places) -> Iterator[tuple[int, _Places]]:
    """Yield (buffer address, positions of the rows) for each column of an Arrow table."""
    for name in table.column_names:
        begin = 0
        for chunk in table.column(name).chunks:
            held = rows[(rows >= begin) & (rows < begin + len(chunk))]
            buffer = next((b for b in chunk.buffers() if b is not None), None)
            if buffer is not None:
                yield buffer.address, held - begin + chunk.offset
            begin += len(chunk)

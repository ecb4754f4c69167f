"""Runs a module on each packed document separately, with one copy of its parameters for each.

Letters: U documents, R rows, T tokens of a row, N = R T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..packing import Units


def by_document(
    call: Callable[[dict[str, Tensor], Any], Any],
    parameters: Mapping[str, Tensor],
    inputs: Any,
    units: Units,
    name: str,
) -> Any:
    """Run a module on each document's part of its inputs, and join the outputs.

    A document of several rows needs a call for each row, since its rows do not see each other.
    Padding also runs through the module, but parameters get no gradient from it.

    Args:
        call: (parameters by name, inputs) -> outputs; these parameters replace the module's own.
        parameters: parameters of each document, `[U, ...]`.
        inputs: nested tensors `[R, T, ...]` or `[N, ...]`; `call` gets a document's part of each,
            `[1, n, ...]` or `[n, ...]`.
        units: the documents.
        name: name of the module, for messages.

    Raises:
        ValueError: an output has no entry for each token.
    """
    pieces = units.pieces()
    counts = [count for _, count in pieces]
    leaves, spec = tree_flatten(inputs)
    parts = [
        _parts(leaf, counts, units) if isinstance(leaf, Tensor) else [leaf] * len(pieces)
        for leaf in leaves
    ]
    of_documents = {n: p.unbind(0) for n, p in parameters.items()}
    found = []
    for number, (unit, _) in enumerate(pieces):
        own = {} if unit == units.size else {n: ps[unit] for n, ps in of_documents.items()}
        found.append(call(own, tree_unflatten([column[number] for column in parts], spec)))
    outputs, spec = tree_flatten(found[0])
    columns = zip(*(tree_flatten(one)[0] for one in found), strict=True)
    joined = [
        _joined(column, counts, units, name) if isinstance(first, Tensor) else first
        for first, column in zip(outputs, columns, strict=True)
    ]
    result = tree_unflatten(joined, spec)
    if all(unit == units.size for unit, _ in pieces):
        # There is no gradient, but the clipping gate must take part in the exchange between ranks.
        nothing = sum(p[:0].sum() for p in parameters.values())
        result = tree_map_only(
            Tensor, lambda t: t + nothing if t.is_floating_point() else t, result
        )
    return result


def _parts(x: Tensor, counts: list[int], units: Units) -> Sequence[Tensor]:
    has_rows = tuple(x.shape[:2]) == units.shape
    flat = x.flatten(0, 1) if has_rows else x
    each = len(flat) // units.positions
    parts = flat.split([each * count for count in counts])
    return [part.unsqueeze(0) for part in parts] if has_rows else parts


def _joined(parts: Sequence[Tensor], counts: list[int], units: Units, name: str) -> Tensor:
    if all(tuple(t.shape[:2]) == (1, n) for t, n in zip(parts, counts, strict=True)):
        return torch.cat([t[0] for t in parts]).unflatten(0, units.shape)
    if all(tuple(t.shape[:1]) == (n,) for t, n in zip(parts, counts, strict=True)):
        return torch.cat(list(parts))
    raise ValueError(
        f"module '{name}' returned a tensor without one entry for each token of a document, so "
        "outputs of packed documents cannot be joined; freeze it with requires_grad_(False), or "
        "train with one document per row"
    )

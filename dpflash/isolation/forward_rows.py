"""ForwardRows: records the inputs of the private layers and the model's outputs in a forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..packing import Units
from ..verification.digests import greatest, row_summaries
from ..verification.nested import tensors_of

OUTPUT = "the model's output"


class ForwardRows:
    """Records the inputs of the private layers and the model's outputs in a forward, in order.

    Args:
        compares: whether to compare a module's sample-by-sample run with a run of the whole batch.
        only_dtypes: whether only dtypes are recorded.
        units: the samples if they are not single rows, else None.

    Attributes:
        size: B; 0 until the forward is over.
        layers: names of the modules that ran.
        padded: the length to which the input was padded, for each layer that pads.
        scalars: outputs with a single element and a gradient, such as a loss of the model.
    """

    def __init__(
        self, *, compares: bool = False, only_dtypes: bool = False, units: Units | None = None
    ) -> None:
        self.compares = compares
        self.only_dtypes = only_dtypes
        self.units = units
        self.size = 0
        self.layers: list[str] = []
        self.where: list[str] = []
        self.shapes: list[torch.Size] = []
        self.padded: list[int] = []
        self.scalars: list[Tensor] = []
        self.summaries: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()
        self._greatest: list[Tensor] = []
        self._least: list[Tensor] = []

    def set_call(self, size: int, layers: Iterable[str]) -> None:
        """Record B and the names of the modules that ran."""
        self.size, self.layers = size, list(layers)

    def note(self, name: str, x: Tensor, *, padded_to: int | None = None) -> None:
        """Record the input of a layer, and the length to which the layer padded sequences.

        Args:
            name: name of the layer.
            x: the input: `[B, ...]`, or with `units` the samples' entries `[n, ...]`.
            padded_to: the length to which the layer padded, or None.
        """
        self._note(f"the input of layer '{name}'", x, self.units)
        if padded_to is not None:
            self.padded.append(padded_to)

    def note_outputs(self, outputs: Any) -> None:
        """Record the tensors that the model returned."""
        for _, leaf in tensors_of(outputs):
            if leaf.ndim:
                self._note_output(leaf)
            if is_scalar(leaf) and leaf.requires_grad:
                self.scalars.append(leaf.detach().flatten()[0])

    def _note_output(self, x: Tensor) -> None:
        units = self.units
        if units is None or tuple(x.shape[: len(units.shape)]) != units.shape:
            self._note(OUTPUT, x, None)
        else:
            self._note(OUTPUT, units.flattened(x, OUTPUT), units)

    def _note(self, where: str, x: Tensor, units: Units | None) -> None:
        self.dtypes.add(x.dtype)
        if self.only_dtypes:
            return
        self.where.append(where)
        shape, summaries = x.shape, row_summaries(x)
        if units is not None:
            shape = torch.Size((units.size, *shape[1:]))
            summaries = row_summaries(units.padded(summaries))
        self.shapes.append(shape)
        self.summaries.append(summaries)
        if x.is_floating_point() and x.numel():
            sizes = greatest(x) if units is None else units.padded(greatest(x)).amax(1)
            self._greatest.append(sizes.argmax())
            self._least.append(sizes.argmin())

    def telling(self, samples: list[int]) -> list[int]:
        """Return the samples that most likely determine a maximum or minimum over the batch.

        In the recorded tensors, these samples most often had the greatest or the least maximum.
        The first and the last sample are added, since code may use one of them for all samples.
        """
        kinds = (self._greatest, self._least)
        found = [Counter(map(int, kind)).most_common(len(samples) // 8) for kind in kinds]
        ends = [samples[0], samples[-1]] if len(samples) > 3 else []
        return ends + [row for rows in found for row, _ in rows]


def is_scalar(x: Tensor) -> bool:
    """Return whether a tensor has a single element, in any number of dimensions."""
    return x.numel() == 1

"""The audited run on packed documents: canaries that share rows with other canaries.

Each token of a document is the number of the document's canary. Padding is number 0, which no
document has. The losses include padding, so padding's contribution to a release is at number 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..packing import PackedBatch, PackTo
from .releases import Run

# Sizes with which some logical batches need several microbatches and a document needs two rows.
_TOKENS, _ROWS, _DOCUMENTS = 24, 3, 8
# Documents are short, so that a neighbor's token would be a large part of a gradient.
_MOST_TOKENS = 3


class PackedCanaryModel(nn.Module):
    """Computes losses [U] of U documents; each canary has a weight in a table and in a layer."""

    def __init__(self, canaries: int, *, scale: float):
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.Embedding(canaries, 1), nn.Linear(canaries, 1, bias=False)]
        )
        with torch.no_grad():
            for weight in self.parameters():
                # With weight 0, padding has a gradient but does not change losses.
                weight.view(-1)[0] = 0.0
        self.background = None
        self.canaries = canaries
        self.scale = scale

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return losses [U], sums over each document's tokens; the last loss includes padding."""
        tokens = batch.input_ids
        table, layer = self.tables
        each = table(tokens) + layer(F.one_hot(tokens, self.canaries).double())
        losses = each.new_zeros(batch.max_documents)
        owners = batch.sample_index % batch.max_documents
        return self.scale * losses.index_add(0, owners.flatten(), each.flatten())


class PackedRun(Run):
    """A run on packed documents, with the arguments and attributes of `Run`.

    Canary 0 stands for padding, and is not in the data.
    """

    _model_type = PackedCanaryModel

    def _new_loader(self, batch_size: int) -> DataLoader[Any]:
        numbers = self.dataset.numbers
        self._lengths = 1 + np.arange(self.canaries) % _MOST_TOKENS
        self._lengths[int(numbers[-1])] = _TOKENS // _ROWS + 1
        documents: Any = [torch.full((int(self._lengths[n]),), int(n)) for n in numbers]
        packing = PackTo(tokens=_TOKENS, rows=_ROWS, max_documents=_DOCUMENTS)
        return DataLoader(documents, batch_size=batch_size, collate_fn=packing)

    def _losses(self, batch: Any, device: torch.device) -> Tensor:
        losses: Tensor = self.model(batch.to(device))
        return losses

    def _drawn(self, batch: Any) -> NDArray[np.int64]:
        tokens = np.bincount(batch.input_ids.flatten(), minlength=self.canaries)
        tokens[0] = 0
        tokens *= bool(self.loader.is_real.any())  # A trial has no real rows.
        return np.asarray(tokens // self._lengths)

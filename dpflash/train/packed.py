"""Packed documents of a training job: each is trained on whole, wherever it is packed."""

from __future__ import annotations

from torch import Tensor

from ..packing import PackTo
from .config import TrainingConfig
from .data import TrainWindows

# Documents of fewer tokens, on average, leave space in a microbatch.
_TOKENS_OF_DOCUMENT = 64


class WholeDocuments(TrainWindows):
    """All tokens of each document; of one that is longer than seq_len + 1, a window of that many.

    Windows begin as those of `TrainWindows`.
    """

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        """The tokens of document `index` at the step last set, `[n]`, int64."""
        return self.tokens(index, self.step)


def pack_of(config: TrainingConfig, row_len: int) -> PackTo | None:
    """How a job packs its documents into rows of `row_len` tokens; None where it does not."""
    if not config.pack:
        return None
    rows = config.physical_batch_size
    tokens = rows * row_len
    documents = min(config.batch_size, tokens // _TOKENS_OF_DOCUMENT)
    return PackTo(tokens=tokens, rows=rows, max_documents=max(1, documents))

"""Packed documents of a training job: each step trains on whole documents."""

from __future__ import annotations

from torch import Tensor

from ..packing import PackTo
from .config import TrainingConfig
from .data import TrainWindows

# Assumed mean number of tokens of a document; shorter documents leave microbatches partly empty.
_TOKENS_OF_DOCUMENT = 64


class WholeDocuments(TrainWindows):
    """All tokens of each document, or a window of seq_len + 1 tokens of a longer document.

    A window's start is drawn as in `TrainWindows`.
    """

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        """Return the tokens of document `index` at the step that was set last, `[n]`, int64."""
        return self.tokens(index, self.step)


def pack_of(config: TrainingConfig, row_len: int) -> PackTo | None:
    """Return the packing into rows of `row_len` tokens; None if the job does not pack."""
    if not config.pack:
        return None
    rows = config.physical_batch_size
    tokens = rows * row_len
    documents = min(config.batch_size, tokens // _TOKENS_OF_DOCUMENT)
    return PackTo(tokens=tokens, rows=rows, max_documents=max(1, documents))

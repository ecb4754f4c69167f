"""TextClassifierModel: a trained text classifier, evaluated on labelled texts.

Letters: B texts, T tokens, C labels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..train.data import labelled_batches
from ..train.language_models import classified, encode_labelled
from ..train.pretrained import CLASSIFIER, head_of, load_model, load_tokenizer, max_tokens_of
from ..train.run import summed_loss
from .load import is_pretrained, pretrained_folder


@dataclass(frozen=True)
class Classification:
    """Results of a classifier on texts. Epsilon does not cover them.

    Attributes:
        texts: number of texts.
        accuracy: fraction of texts whose predicted label is correct.
        nats_per_text: mean loss of a text.
    """

    texts: int
    accuracy: float
    nats_per_text: float


class TextClassifierModel:
    """The classifier of a run or an export.

    Raises:
        FileNotFoundError, ValueError: as `dpflash.load`, or the model is not a text classifier.

    Attributes:
        labels: the names of the labels, in the order of the logits `[B, C]`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        own = pretrained_folder(Path(folder))
        if not is_pretrained(own) or head_of(own) != CLASSIFIER:
            raise ValueError(
                f"folder={str(folder)!r}: its model is no text classifier; leave label_field out"
            )
        model: Any = load_model(own)
        self._model = model
        self._tokenizer: Any = load_tokenizer(own)
        self.labels = [name for _, name in sorted(model.config.id2label.items())]

    def evaluate(self, contents: Sequence[bytes]) -> Classification:
        """Compute accuracy and loss on documents, each a label, a NUL byte and a text."""
        model, numbers = self._model, {name: n for n, name in enumerate(self.labels)}
        longest = max_tokens_of(model, self._tokenizer)
        known = model.get_input_embeddings().num_embeddings
        documents = encode_labelled(self._tokenizer, contents, known, numbers, longest)
        fitting = max(max(map(len, documents)) - 1, 1)
        nats, correct, count = 0.0, 0, len(documents)
        with torch.no_grad():
            for inputs, labels in labelled_batches(documents, fitting, None):
                logits = classified(model, inputs, self._tokenizer.pad_token_id or 0)
                nats += summed_loss(logits, labels)
                correct += int((logits.argmax(-1) == labels).sum())
        return Classification(count, correct / count, nats / count)

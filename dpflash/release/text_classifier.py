"""TextClassifierModel: evaluates a trained text classifier on labelled texts.

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
    """Results of a classifier on texts. Epsilon does not cover the results.

    Attributes:
        texts: number of texts.
        accuracy: fraction of texts whose predicted label is correct.
        nats_per_text: mean loss of a text, in nats.
        by_label: for each label, "texts" (number of texts with this label), "recall" (fraction of
            such texts with a correct prediction) and "precision" (fraction of correct predictions
            among predictions of this label). A fraction of no texts is None.
    """

    texts: int
    accuracy: float
    nats_per_text: float
    by_label: dict[str, dict[str, float | None]]


class TextClassifierModel:
    """The text classifier in the folder of a run or an export.

    Raises:
        FileNotFoundError, ValueError: as for `dpflash.load`, or the model is no text classifier.

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
        """Compute the `Classification` of documents, each a label, a NUL byte and a text."""
        model, numbers = self._model, {name: n for n, name in enumerate(self.labels)}
        longest = max_tokens_of(model, self._tokenizer)
        known = model.get_input_embeddings().num_embeddings
        documents = encode_labelled(self._tokenizer, contents, known, numbers, longest)
        fitting = max(max(map(len, documents)) - 1, 1)
        nats, count = 0.0, len(documents)
        counts = torch.zeros(
            len(self.labels), len(self.labels), dtype=torch.int64
        )  # [label, predicted]
        with torch.no_grad():
            for inputs, labels in labelled_batches(documents, fitting, None):
                logits = classified(model, inputs, self._tokenizer.pad_token_id or 0)
                nats += summed_loss(logits, labels)
                pairs = (labels, logits.argmax(-1))
                counts.index_put_(pairs, torch.ones_like(labels), accumulate=True)
        correct, texts, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
        by_label = {
            name: {
                "texts": int(texts[n]),
                "recall": int(correct[n]) / int(texts[n]) if texts[n] else None,
                "precision": int(correct[n]) / int(predicted[n]) if predicted[n] else None,
            }
            for name, n in numbers.items()
        }
        return Classification(count, int(correct.sum()) / count, nats / count, by_label)

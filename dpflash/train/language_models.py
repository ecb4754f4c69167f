"""The models that `dpflash train` trains: three classes with the same methods.

Letters: B documents, T tokens, V vocabulary, C labels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .. import losses
from ..distributed import ContextParallel, loss_weights
from ..nn import LongContextLM
from ..packing import PackedBatch, Units
from ..patterns import from_key
from ..privacy.card import CARD, follow_umask
from ..refusal import PrivateRefusal
from .config import TrainingConfig
from .data import (
    DOCUMENT_START,
    VOCAB_SIZE,
    LabelledTexts,
    Tokens,
    TrainWindows,
    held_out_batches,
    labelled_batches,
)
from .pretrained import (
    ADAPTER,
    CAUSAL,
    CLASSIFIER,
    load_model,
    load_tokenizer,
    max_tokens_of,
    quiet,
    quiet_peft,
    require_peft,
    require_transformers,
    start_token,
)

# Names in a job's folder: the file of a new model, and the folder of a pretrained model.
WEIGHTS = "model.pt"
PRETRAINED = "model"
ARCHITECTURE = "config.json"
FORMAT = "dpflash-model-1"


LanguageModel: TypeAlias = "ByteModel | PretrainedModel"


def language_model(config: TrainingConfig) -> LanguageModel:
    """Create the model class that fits a configuration."""
    if config.labels is not None:
        return TextClassifier(config)
    return ByteModel(config) if config.model is None else PretrainedModel(config)


class ByteModel:
    """Encodes documents as bytes; builds, calls and saves a new `LongContextLM`."""

    token = "byte"
    vocabulary = VOCAB_SIZE
    padding = DOCUMENT_START
    max_tokens: int | None = None
    released = WEIGHTS
    windows: type[TrainWindows] = TrainWindows
    held_out_batches = staticmethod(held_out_batches)

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config

    def encode(self, contents: Sequence[bytes]) -> Sequence[Tokens]:
        """Return the tokens of each document, which are its bytes."""
        return contents

    def build(self) -> LongContextLM:
        """Build the untrained model, with random weights from torch's generator."""
        config = self._config
        assert config.embed_dim and config.layers and config.heads
        return LongContextLM(
            VOCAB_SIZE,
            config.embed_dim,
            config.layers,
            config.heads,
            max_seq_len=config.seq_len,
            pattern=None if config.pattern is None else from_key(config.pattern),
        )

    def losses(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each document's window, `[B]`, in nats."""
        sample_losses: Tensor = model(inputs, targets)
        return sample_losses

    def packed_losses(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the mean loss of each packed document, `[max_documents]`, in nats."""
        document_losses: Tensor = model(batch.input_ids, batch.targets, packed=batch)
        return document_losses

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of inputs `[B, T]`."""
        logits: Tensor = model(inputs)
        return logits

    def save(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the files that may be published: the weights and their architecture."""
        assert isinstance(model, LongContextLM)
        write_architecture(model, folder)
        write_atomically(folder / WEIGHTS, lambda path: torch.save(weights, path))


class PretrainedModel:
    """A causal model of transformers, or LoRA adapters on it, with the methods of `ByteModel`."""

    token = "token"
    released = PRETRAINED
    windows: type[TrainWindows] = TrainWindows
    held_out_batches = staticmethod(held_out_batches)
    _head, _task = CAUSAL, "CAUSAL_LM"

    def __init__(self, config: TrainingConfig) -> None:
        assert config.model is not None
        self._config = config
        self._folder = config.model
        self._transformers = require_transformers(config.model)
        if (Path(config.model) / ADAPTER).is_file():
            raise ValueError(
                f"model={config.model!r}: the folder holds LoRA adapters. Merge them into their "
                "model first, by dpflash export RUN --out DIR or by merge_and_unload() and "
                "save_pretrained(DIR), then pass model=DIR"
            )
        if config.lora_rank is not None:
            require_peft(f"lora_rank={config.lora_rank}")
        initial: Any = self._load()
        self.vocabulary: int = initial.get_input_embeddings().num_embeddings
        self._initial: nn.Module | None = initial
        self._tokenizer = load_tokenizer(config.tokenizer or config.model)
        self.max_tokens = max_tokens_of(initial, self._tokenizer)
        start = start_token(self._tokenizer)
        self.padding = 0 if start is None else start

    def encode(self, contents: Sequence[bytes]) -> Sequence[Tokens]:
        """Return the token ids of each text; see `encode_texts`."""
        return encode_texts(self._tokenizer, contents, self.vocabulary)

    def _load(self) -> nn.Module:
        return load_model(self._folder, head=self._head)

    def build(self) -> nn.Module:
        """Return the folder's model in training mode, with new adapters for config.lora_rank."""
        model = self._initial if self._initial is not None else self._load()
        self._initial = None  # the next call loads another model
        rank = self._config.lora_rank
        if rank is not None:
            peft = require_peft(f"lora_rank={rank}")
            options = {"target_modules": "all-linear", "task_type": self._task}
            config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, **options)
            with quiet_peft():
                model = peft.get_peft_model(model, config)
        return model.train()

    def losses(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses, `[B]`; if context parallel, this rank's part of each."""
        sample_losses = losses.cross_entropy(self.logits(model, inputs), targets)
        return _own_part(sample_losses, model, targets)

    def packed_losses(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the losses, `[max_documents]`; if context parallel, this rank's part of each."""
        outputs: Any = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )
        document_losses = losses.cross_entropy(
            outputs.logits,
            batch.targets,
            sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )
        return _own_part(document_losses, model, batch.targets, batch.units)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return logits `[B, T, V]`. Padding follows the tokens, so no token attends to it."""
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
        return logits

    def save(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the model or its adapters, and the tokenizer, in the format of transformers."""
        target = folder / PRETRAINED
        target.mkdir(parents=True, exist_ok=True)
        card = target / CARD
        had_card = card.exists()
        with quiet(self._transformers):
            # Do not write `weights`: the names of adapters' weights differ in PEFT's files.
            save: Any = model.save_pretrained
            options = {} if self._config.lora_rank is None else {"save_embedding_layers": False}
            save(target, **options)
        if not had_card:  # PEFT writes a template without facts; `dpflash export` writes the card
            card.unlink(missing_ok=True)
        follow_umask(target)
        self._tokenizer.save_pretrained(target)


class TextClassifier(PretrainedModel):
    """A text classifier for the labels `config.labels`, with the methods of `PretrainedModel`.

    `encode` returns documents as `LabelledTexts` expects them.
    """

    token = "text"
    windows = LabelledTexts
    held_out_batches = staticmethod(labelled_batches)
    _head, _task = CLASSIFIER, "SEQ_CLS"

    def __init__(self, config: TrainingConfig) -> None:
        assert config.labels is not None
        self._labels = {label: number for number, label in enumerate(config.labels)}
        weights = config.class_weights
        self._criterion = nn.CrossEntropyLoss(None if weights is None else torch.tensor(weights))
        super().__init__(config)
        # Do not keep the model: `build` loads it again, with a random new head.
        self._initial = None
        self._pad = self._tokenizer.pad_token_id or 0
        self.padding = -1

    def _load(self) -> nn.Module:
        names = {number: label for label, number in self._labels.items()}
        return load_model(
            self._folder,
            head=self._head,
            id2label=names,
            label2id=self._labels,
            ignore_mismatched_sizes=True,
        )

    def encode(self, contents: Sequence[bytes]) -> Sequence[Tokens]:
        """Return the label's index and the token ids of each text; see `encode_labelled`."""
        longest = min(self._config.seq_len, self.max_tokens or self._config.seq_len)
        return encode_labelled(self._tokenizer, contents, self.vocabulary, self._labels, longest)

    def losses(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each text times the weight of its class, `[B]`, in nats."""
        logits = self.logits(model, inputs)
        return losses.of_criterion(self._criterion.to(logits.device), logits, targets)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return logits `[B, C]` of inputs `[B, T]`, whose padding is negative."""
        return classified(model, inputs, self._pad)

    def save(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the model or its adapters, a config with the labels, and the tokenizer."""
        super().save(model, weights, folder)
        base: Any = model
        base.config.save_pretrained(folder / PRETRAINED)


def classified(model: Any, inputs: Tensor, pad: int) -> Tensor:
    """Return a classifier's logits `[B, C]` of inputs `[B, T]`; negative ids are padding."""
    is_token = inputs >= 0
    outputs = model(input_ids=inputs.masked_fill(~is_token, pad), attention_mask=is_token.long())
    logits: Tensor = outputs.logits
    return logits


def _own_part(
    sample_losses: Tensor, model: nn.Module, targets: Tensor, units: Units | None = None
) -> Tensor:
    """Return this rank's part of each loss `[B]`; the whole loss if not context parallel."""
    parallel: ContextParallel | None = getattr(model, "context_parallel", None)
    if parallel is None:
        return sample_losses
    return sample_losses * loss_weights(targets, parallel.group, units=units)


def encode_texts(tokenizer: Any, contents: Sequence[bytes], vocabulary: int) -> list[Tokens]:
    """Return the token ids of each text, with start and end tokens if the tokenizer has them."""
    start, end = start_token(tokenizer), tokenizer.eos_token_id
    texts = [content.decode(errors="replace") for content in contents]
    # `verbose` would warn about texts that are too long for the model, but windows cut such texts.
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    first, last = ([] if token is None else [token] for token in (start, end))
    return _as_arrays(tokenizer, ([*first, *row, *last] for row in rows), vocabulary)


def encode_labelled(
    tokenizer: Any,
    contents: Sequence[bytes],
    vocabulary: int,
    labels: Mapping[str, int],
    max_tokens: int | None,
) -> list[Tokens]:
    """Return an array for each text: the index of its label, then its first token ids."""
    found = [content.partition(b"\0") for content in contents]
    texts = [text.decode(errors="replace") for _, _, text in found]
    options = {"truncation": max_tokens is not None, "max_length": max_tokens}
    rows = tokenizer(texts, **options)["input_ids"] if texts else []
    documents = _as_arrays(tokenizer, rows, vocabulary)
    numbers = [labels[label.decode()] for label, _, _ in found]
    return [np.array([n, *ids], np.int32) for n, ids in zip(numbers, documents, strict=True)]


def _as_arrays(tokenizer: Any, rows: Iterable[list[int]], vocabulary: int) -> list[Tokens]:
    documents: list[Tokens] = []
    for row in rows:
        ids = np.array(row, dtype=np.int32)
        if len(ids) and ids.max() >= vocabulary:
            raise PrivateRefusal(
                f"tokenizer={tokenizer.name_or_path!r}: the tokenizer makes a token that is not "
                f"one of the model's {vocabulary} tokens; pass the model's own tokenizer",
                token=int(ids.max()),
            ) from None
        documents.append(ids)
    return documents


def write_architecture(model: LongContextLM, folder: Path) -> None:
    """Write config.json, from which `dpflash.load` builds the model."""
    content = {"format": FORMAT, "model": "LongContextLM", "tokens": "bytes"}
    text = json.dumps({**content, "architecture": model.architecture}, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ARCHITECTURE, lambda path: path.write_text(text + "\n"))


def write_atomically(path: Path, write: Any) -> None:
    """Write a file atomically: other processes see the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

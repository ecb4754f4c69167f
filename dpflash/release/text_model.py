"""TextModel: evaluates documents and continues texts with a trained language model.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .. import _validate
from ..train.data import (
    DOCUMENT_START,
    IGNORE_INDEX,
    Tokens,
    held_out_batches,
    num_targets,
)
from ..train.language_models import encode_texts
from ..train.pretrained import (
    CAUSAL,
    head_of,
    load_tokenizer,
    max_tokens_of,
    quiet,
    require_transformers,
    start_token,
)
from ..train.run import summed_loss
from .load import is_pretrained, load, pretrained_folder


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on documents. Epsilon does not cover the loss.

    Attributes:
        documents: number of documents.
        tokens: number of tokens that were predicted.
        nats_per_token: mean loss of a token, in nats.
        bits_per_byte: total loss in bits / number of bytes; None if some text was not predicted.
    """

    documents: int
    tokens: int
    nats_per_token: float
    bits_per_byte: float | None

    @property
    def bits_per_token(self) -> float:
        """The mean loss of a token in bits."""
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; inf if it exceeds float's range."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf


class TextModel:
    """The language model in the folder of a run or an export.

    Raises:
        FileNotFoundError, ValueError: as for `dpflash.load`.

    Attributes:
        token: unit of the model's input, "byte" or "token".
        max_tokens: the largest number of tokens in an input; None for no limit.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        own = pretrained_folder(Path(folder))
        if is_pretrained(own) and head_of(own) != CAUSAL:
            raise ValueError(
                f"folder={str(folder)!r}: its model is no causal language model; to evaluate a "
                "text classifier pass --label-field NAME to dpflash evaluate"
            )
        model: Any = load(folder)
        self._model: Any = model
        self._tokenizer: Any = None
        self.token, self._padding = "byte", DOCUMENT_START
        if is_pretrained(own):
            self._transformers = require_transformers(own)
            self._tokenizer = load_tokenizer(own)
            self.token = "token"
            self._padding = start_token(self._tokenizer) or 0
            # Replace the model's own config, which may enable beam search or penalties.
            ends = model.generation_config.eos_token_id
            self._model.generation_config = self._transformers.GenerationConfig(
                eos_token_id=self._tokenizer.eos_token_id if ends is None else ends,
                pad_token_id=self._padding,
            )
            self.max_tokens = max_tokens_of(self._model, self._tokenizer)
        else:
            self.max_tokens = self._model.max_seq_len

    def evaluate(
        self,
        contents: Sequence[bytes],
        *,
        seq_len: int | None = None,
        max_windows: int | None = None,
        progress: bool = False,
    ) -> Evaluation:
        """Compute the loss on documents, which are cut into windows without overlap.

        Args:
            contents: the documents' bytes.
            seq_len: tokens per window; None for the longest document, or the model's maximum.
            max_windows: maximum number of windows; None for all.
            progress: whether to show a progress bar on stderr.

        Raises:
            ValueError: seq_len is above the model's maximum, or no token can be predicted.
        """
        _validate.optional(_validate.positive_int, seq_len=seq_len)
        if self.max_tokens is not None and seq_len is not None and seq_len > self.max_tokens:
            raise ValueError(
                f"seq_len={seq_len}: the model takes {self.max_tokens} tokens; pass at most this "
                "number"
            )
        documents: Sequence[Tokens] = contents
        if self._tokenizer is not None:
            known = self._model.get_input_embeddings().num_embeddings
            documents = encode_texts(self._tokenizer, contents, known)
        targets_of = [num_targets(document) for document in documents]
        fitting = min(max(max(targets_of, default=0), 1), seq_len or self.max_tokens or 2**62)
        total = sum(-(-count // fitting) for count in targets_of)
        batches = held_out_batches(documents, fitting, max_windows, padding=self._padding)
        nats, count = 0.0, 0
        with (
            torch.no_grad(),
            tqdm(
                total=min(total, max_windows or total), unit="window", disable=not progress
            ) as bar,
        ):
            for inputs, targets in batches:
                if self._tokenizer is None:
                    logits = self._model(inputs)
                else:
                    logits = self._model(input_ids=inputs, use_cache=False).logits
                nats += summed_loss(logits, targets)
                count += int((targets != IGNORE_INDEX).sum())
                bar.update(len(inputs))
        if not count:
            raise ValueError("data: no document has a token to predict; pass longer documents")
        # Without a start token, no loss predicts the first token of a document.
        starts = self._tokenizer is None or start_token(self._tokenizer) is not None
        is_whole = starts and count == sum(targets_of)
        per_byte = nats / math.log(2) / sum(map(len, contents))
        return Evaluation(len(documents), count, nats / count, per_byte if is_whole else None)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> str:
        """Continue a text.

        Args:
            prompt: the text; it may be empty.
            max_new_tokens: maximum number of tokens to add.
            temperature: divisor of the logits; 0 chooses the most likely token.
            top_k: number of most likely tokens to sample from; None for all tokens.
            seed: seed of the sampling; None for a different text in each call.

        Returns:
            The prompt and its continuation.

        Raises:
            ValueError: a number is out of range, or the model takes fewer tokens than requested.
        """
        _validate.positive_int(max_new_tokens=max_new_tokens)
        _validate.non_negative(temperature=temperature)
        _validate.finite(temperature=temperature)
        _validate.optional(_validate.positive_int, top_k=top_k)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if seed is None:
                torch.seed()
            else:
                torch.manual_seed(seed)
            if self._tokenizer is None:
                return self._generate_bytes(prompt, max_new_tokens, temperature, top_k)
            return self._generate_tokens(prompt, max_new_tokens, temperature, top_k)

    def _generate_bytes(
        self, prompt: str, max_new_tokens: int, temperature: float, top_k: int | None
    ) -> str:
        """Continue byte by byte; the model sees at most the last max_tokens tokens."""
        ids = [DOCUMENT_START, *prompt.encode(errors="replace")]
        for _ in range(max_new_tokens):
            seen = torch.tensor([ids[-self._model.max_seq_len :]])
            # DOCUMENT_START is not a byte, so it is never generated.
            logits = self._model(seen)[0, -1, :DOCUMENT_START]
            ids.append(_choose(logits, temperature, top_k))
        return bytes(ids[1:]).decode(errors="replace")

    def _generate_tokens(
        self, prompt: str, max_new_tokens: int, temperature: float, top_k: int | None
    ) -> str:
        tokenizer = self._tokenizer
        start = start_token(tokenizer)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = ids if start is None else [start, *ids]
        if not ids:
            raise ValueError(
                f"prompt={prompt!r}: the tokenizer makes no token from it, and has no start "
                "token; pass a longer prompt"
            )
        if self.max_tokens is not None and len(ids) + max_new_tokens > self.max_tokens:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} after a prompt of {len(ids)} tokens: the model "
                f"takes at most {self.max_tokens}; lower max_new_tokens, or shorten the prompt"
            )
        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": top_k or 0}
        tokens = torch.tensor([ids])
        with quiet(self._transformers):
            made = self._model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                **options,
            )
        whole: str = tokenizer.decode(made[0], skip_special_tokens=True)
        before: str = tokenizer.decode(made[0, : len(ids)], skip_special_tokens=True)
        if whole.startswith(before):  # decoding the new tokens alone drops a space before them
            return prompt + whole[len(before) :]
        return prompt + str(tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True))


def _choose(logits: Tensor, temperature: float, top_k: int | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = (values.double() / temperature).softmax(0)
    return int(tokens[torch.multinomial(probabilities, 1)])

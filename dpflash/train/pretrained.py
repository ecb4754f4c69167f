"""Loads models and tokenizers of transformers from folders, without any download."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

ADAPTER = "adapter_config.json"
CONFIG = "config.json"
_BASE = "base_model_name_or_path"
_ANY = 10**9  # a tokenizer with a larger max length than this has no limit
# The classes that load language models and classifiers of texts.
CAUSAL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
_HEADS = {"CAUSAL_LM": CAUSAL, "SEQ_CLS": CLASSIFIER}  # by PEFT's task_type


def require_transformers(folder: str | Path) -> Any:
    """Return the library transformers; raise ValueError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"model={str(folder)!r} needs transformers; pip install 'dpflash[transformers]'"
        ) from error
    return transformers


def require_peft(cause: str) -> Any:
    """Return the library peft; if it is not installed, raise ValueError that names `cause`."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"{cause}: needs peft; pip install 'dpflash[transformers]'") from error
    return peft


def load_model(
    folder: str | Path, *, head: str | None = None, merge: bool = False, **options: Any
) -> nn.Module:
    """Load the model in a folder, in float32 and in eval mode.

    Args:
        folder: a folder that `save_pretrained` wrote, with a model or with LoRA adapters. The
            base model of adapters must still be in the folder from which they were trained.
        head: the name of the transformers class that loads the model; None for `head_of(folder)`.
        merge: whether to add the adapters to the weights of their base model.
        options: keyword arguments of `from_pretrained`.
    """
    folder = _require_folder(folder, "model")
    transformers = require_transformers(folder)
    head = head or head_of(folder)
    if (folder / ADAPTER).is_file():
        peft = require_peft(f"model={str(folder)!r} holds LoRA adapters")
        if (folder / CONFIG).is_file():  # the config of a classifier holds its labels
            options = {"config": transformers.AutoConfig.from_pretrained(folder), **options}
        base = load_model(adapted_folder(folder), head=head, **options)
        with quiet_peft():
            model = peft.PeftModel.from_pretrained(base, folder)
        return (model.merge_and_unload() if merge else model).eval()
    kind = getattr(transformers, head)
    with quiet(transformers):
        model = _from_pretrained(kind, folder, "model", dtype=torch.float32, **options)
    if head == CAUSAL:
        _require_causal(model, folder)
    return model


def head_of(folder: Path) -> str:
    """Return the name of the transformers class that loads the model in a folder."""
    if (folder / ADAPTER).is_file():
        task = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("task_type")
        return _HEADS.get(task) or head_of(adapted_folder(folder))
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"model={str(folder)!r}: the folder has no {CONFIG}; pass the folder of a model of "
            "transformers"
        )
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    name: str = (config.get("architectures") or [""])[0]
    if name.endswith("ForSequenceClassification"):
        return CLASSIFIER
    is_own = hasattr(require_transformers(folder), name)
    return name if is_own and not name.endswith(("ForCausalLM", "LMHeadModel")) else CAUSAL


@torch.no_grad()
def _require_causal(model: Any, folder: Path) -> None:
    """Raise ValueError if an output depends on a later token, as in encoders such as BERT."""
    tokens = torch.arange(16).remainder(model.config.get_text_config().vocab_size)[None]
    changed = tokens.clone()
    changed[0, -1] = tokens[0, 0]
    one, other = (model(input_ids=x).logits[0, :-1].float() for x in (tokens, changed))
    if not torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max())):
        raise ValueError(
            f"model={str(folder)!r}: {type(model).__name__} sees later tokens, as encoders do, "
            "so it would learn to copy the token that it must predict. Pass the folder of a "
            "causal language model, such as a GPT or Llama. To train an encoder as a classifier "
            "of texts, pass label_field and labels, or use DPTrainer"
        )


def adapted_folder(folder: Path) -> Path:
    """Return the folder of the adapters' base model; raise if the folder no longer exists."""
    peft = require_peft(f"model={str(folder)!r} holds LoRA adapters")
    base = Path(peft.PeftConfig.from_pretrained(folder).base_model_name_or_path)
    if not base.is_dir():
        raise ValueError(
            f"model={str(folder)!r}: the adapters belong to the model in {str(base)!r}, which is "
            f"missing; restore that folder, or set {_BASE!r} in {folder / ADAPTER}"
        )
    return base


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a folder."""
    folder = _require_folder(folder, "tokenizer")
    return _from_pretrained(require_transformers(folder).AutoTokenizer, folder, "tokenizer")


def max_tokens_of(model: Any, tokenizer: Any) -> int | None:
    """Return the largest number of tokens that model and tokenizer support; None for no limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    given = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < _ANY]
    return min(given, default=None)


def start_token(tokenizer: Any) -> int | None:
    """Return the id of the token that starts each text; None if the tokenizer has none."""
    for name in ("bos_token_id", "eos_token_id", "cls_token_id"):
        found: int | None = getattr(tokenizer, name, None)
        if found is not None:
            return found
    return None


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Suppress transformers' progress bars and reports, so that only `dpflash train` prints."""
    logging = transformers.utils.logging
    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppress peft's FutureWarning about an attribute that transformers will rename."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _require_folder(folder: str | Path, name: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"{name}={str(folder)!r}: no such folder; nothing is downloaded, so pass the folder "
            f"of a {name} that save_pretrained wrote"
        )
    return path


def _from_pretrained(kind: Any, folder: Path, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{name}={str(folder)!r}: transformers cannot read it ({first}); pass the folder of a "
            f"{name} that save_pretrained wrote"
        ) from error

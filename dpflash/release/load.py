"""`dpflash.load`: loads the model of a run's folder or of an export."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..nn import LongContextLM
from ..patterns import from_key
from ..train.language_models import ARCHITECTURE, FORMAT, PRETRAINED, WEIGHTS
from ..train.pretrained import ADAPTER, load_model
from ..train.report import REPORT

SAFETENSORS = "model.safetensors"


def load(folder: str | os.PathLike[str]) -> nn.Module:
    """Load the trained model in a folder.

    Args:
        folder: the folder of a `dpflash train` run or of a `dpflash export`, the output_dir of a
            `DPTrainer`, or a folder that its `save_model` wrote. Nothing is downloaded.

    Returns:
        A `dpflash.nn.LongContextLM`, or a model of transformers (with its adapters, if the folder
        has some). The model is on the CPU, in float32 and in eval mode.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the folder has no model, config.json and the weights have different
            architectures, a file is damaged, or a library is missing.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(
            f"folder={str(folder)!r}: no such folder; pass the folder of a run or an export"
        )
    if is_pretrained(path):
        return load_model(pretrained_folder(path))
    saved, architecture = _read_weights(path)
    described = _read_config(path)
    different = sorted(
        name
        for name in described.keys() | architecture.keys()
        if described.get(name) != architecture.get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            f"folder={str(folder)!r}: {ARCHITECTURE} says {name}={described.get(name)!r}, and the "
            f"weights are of a model with {name}={architecture.get(name)!r}; the two files do not "
            "belong together, restore both"
        )
    model = _build(path, architecture)
    if architecture["tie_embeddings"]:
        saved = {**saved, "lm_head.weight": saved["token_embedding.weight"]}
    try:
        model.load_state_dict(saved)
    except RuntimeError as error:
        raise ValueError(f"folder={str(folder)!r}: {' '.join(str(error).split())}") from error
    return model.eval()


def is_pretrained(folder: Path) -> bool:
    """Whether the model in a folder is a model of transformers."""
    if pretrained_folder(folder) != folder or (folder / ADAPTER).is_file():
        return True
    config = folder / ARCHITECTURE
    return config.is_file() and "model_type" in _read_json(config)


def pretrained_folder(folder: Path) -> Path:
    """Return the folder that transformers can load: the folder itself, or a subfolder of a run.

    If a `DPTrainer` wrote only checkpoints, the newest checkpoint is returned.
    """
    if (folder / PRETRAINED).is_dir():
        return folder / PRETRAINED
    has_model = (folder / ARCHITECTURE).is_file() or (folder / ADAPTER).is_file()
    checkpoints = [] if has_model else folder.glob("checkpoint-*")
    numbers = {int(n): p for p in checkpoints if (n := p.name.rpartition("-")[2]).isdecimal()}
    return numbers[max(numbers)] if numbers else folder


def report_of(folder: Path) -> Path:
    """Return the path of a run's report, beside the model (`DPTrainer`) or in the run's folder."""
    beside = pretrained_folder(folder) / REPORT
    return beside if beside.is_file() else folder / REPORT


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / ARCHITECTURE
    if not path.is_file():
        raise ValueError(
            f"folder={str(folder)!r}: has no {ARCHITECTURE}, which says how the model is built; "
            "pass the folder of a finished run, or of an export"
        )
    content = _read_json(path)
    if content.get("format") != FORMAT or not isinstance(content.get("architecture"), dict):
        raise ValueError(
            f"folder={str(folder)!r}: {ARCHITECTURE} has neither the format {FORMAT!r} nor the "
            "format of transformers; pass the folder of a run or an export"
        )
    architecture: dict[str, Any] = content["architecture"]
    return architecture


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); restore it") from error
    return content if isinstance(content, dict) else {}


def _read_weights(folder: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    for name, read in ((SAFETENSORS, _read_safetensors), (WEIGHTS, _read_torch)):
        if (folder / name).is_file():
            saved, architecture = read(folder / name)
            if architecture is None:
                raise ValueError(
                    f"{folder / name}: does not contain the model's architecture, which dpflash "
                    "train writes into it; build the model yourself and call load_state_dict"
                )
            return saved, architecture
    raise ValueError(
        f"folder={str(folder)!r}: has neither {WEIGHTS} nor {SAFETENSORS}; a run writes its model "
        f"when it ends or is interrupted: dpflash train --resume {folder}"
    )


def _read_safetensors(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any] | None]:
    try:
        with safe_open(path, framework="pt") as file:
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = (file.metadata() or {}).get("architecture")
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error}); export the run again") from error
    return saved, None if text is None else json.loads(text)


def _read_torch(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any] | None]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}); resume the run") from error
    return saved, getattr(saved, "_metadata", {}).get("", {}).get("architecture")


def _build(folder: Path, architecture: Mapping[str, Any]) -> LongContextLM:
    key = architecture.get("pattern")
    try:
        return LongContextLM(**{**architecture, "pattern": None if key is None else from_key(key)})
    except TypeError as error:
        raise ValueError(
            f"folder={str(folder)!r}: this version of dpflash does not know the architecture "
            f"({error}); use the version in the model's README.md"
        ) from error

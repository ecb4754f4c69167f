"""Writes and reads tensors in a folder, in the format of torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..distributed.collectives import exchanging


def write(
    folder: Path, tensors: dict[str, Tensor], name: str, group: ProcessGroup | None
) -> list[str]:
    """Write tensors into a folder that all ranks share; all ranks call this together.

    Each rank writes its part. Return the names of all files, which are equal on all ranks. If a
    rank fails, all ranks raise a RuntimeError whose message begins with `name`.
    """
    try:
        with exchanging(name, group), _quiet():
            written = dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(folder),
                no_dist=group is None,
            )
    # torch raises CheckpointException on all ranks; it is not a subclass of Exception.
    except CheckpointException as error:
        raise RuntimeError(f"{name}: {_reasons(error)}; nothing was replaced") from error
    assert written.storage_data is not None
    parts = {info.relative_path for info in written.storage_data.values()}
    return [".metadata", *sorted(parts)]


def read_(folder: Path, targets: dict[str, Any], files: frozenset[str]) -> None:
    """Fill the tensors of `targets`, sharded tensors with this rank's part.

    Each rank reads independently, so that no rank waits for a rank that failed.
    """
    try:
        with _quiet():
            dcp.load(targets, storage_reader=_Reader(folder, files), no_dist=True)
    except CheckpointException as error:
        raise ValueError(
            f"path={str(folder)!r}: not a readable checkpoint ({_reasons(error)}); use an earlier "
            "copy"
        ) from error


class _Reader(dcp.FileSystemReader):
    """Reads a folder without executing any code that its files may contain."""

    def __init__(self, folder: Path, files: frozenset[str]):
        super().__init__(folder)
        self._files = files

    def read_metadata(self) -> Metadata:
        with open(self.path / ".metadata", "rb") as file:  # type: ignore[operator]
            found = _MetadataUnpickler(file).load()
        entries = found.state_dict_metadata.values()
        if not all(isinstance(entry, TensorStorageMetadata) for entry in entries):
            raise ValueError("it holds values that are not tensors")
        if any(info.relative_path not in self._files for info in found.storage_data.values()):
            raise ValueError("it names files that are not part of the checkpoint")
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes that torch.distributed.checkpoint uses in its metadata."""

    def find_class(self, module: str, name: str) -> Any:
        refused = pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")
        if "." in name:
            raise refused
        found = super().find_class(module, name) if module in _METADATA_MODULES else None
        plain = isinstance(found, type) and found.__module__ == module
        if plain and module != "torch" or found is torch.Size or isinstance(found, torch.dtype):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        raise refused


_METADATA_MODULES = (
    "torch",
    "pathlib",
    "pathlib._local",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _) in error.failures.items()
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that a single process reads or writes, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield

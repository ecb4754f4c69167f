"""Byte-level documents for language modelling; one document is one unit of privacy.

Each file of a folder is a document. Models train on windows of a document's tokens, which are
`DOCUMENT_START` followed by the document's bytes.
"""

import os
import sysconfig
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import overload

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import _validate

DOCUMENT_START = 256
VOCAB_SIZE = 257
IGNORE_INDEX = -100

_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
# Binary files have a NUL byte among the first bytes, so they are not read to the end.
_SNIFFED_BYTES = 65_536
_HELD_OUT = 0.1  # expected fraction of held-out documents


def default_data_dir() -> Path:
    """The folder of Python's standard library, whose ``*.py`` files exist on every machine."""
    return Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class ByteDocuments(Sequence[bytes]):
    """The documents of a folder, each a privacy unit, in the order of their paths.

    Attributes:
        paths: path of each document relative to the folder, with forward slashes.
        contents: its bytes, never empty and no two equal.
        num_binary: files left out because they hold a NUL byte.
        num_unreadable: files and folders left out because they could not be read.
        num_empty: files left out because they are empty.
        num_duplicates: files left out because an earlier one has the same bytes.

    Guarantees:
        No document occurs twice, so a unit of privacy is one document. Documents that differ in
        one byte (such as in a licence header) are different units, however similar they are.
    """

    paths: tuple[str, ...]
    contents: tuple[bytes, ...]
    num_binary: int = 0
    num_unreadable: int = 0
    num_empty: int = 0
    num_duplicates: int = 0

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        *,
        suffixes: Collection[str] | None = None,
        max_total_bytes: int = 512 * 2**20,
    ) -> "ByteDocuments":
        """Read the files of a folder and its subfolders.

        Skips hidden files and folders, `__pycache__`, `site-packages` and `dist-packages`, and
        does not follow links to folders.

        Args:
            folder: the folder to read.
            suffixes: file name suffixes to read, such as ``(".py", ".md")``; None for all.
            max_total_bytes: maximum size of all documents, which are held in memory.

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: it is not a folder, cannot be listed or holds no usable file, or the
                documents exceed max_total_bytes.
        """
        root = Path(folder)
        _validate.positive_int(max_total_bytes=max_total_bytes)
        if isinstance(suffixes, str):
            raise ValueError(f"suffixes={suffixes!r}: expected a collection; pass ({suffixes!r},)")
        names, num_unreadable = _file_names(root, suffixes)
        reader = _Reader(root, max_total_bytes, num_unreadable)
        for name in names:
            reader.read(name)
        documents = cls(
            tuple(reader.documents.values()),
            tuple(reader.documents),
            reader.num_binary,
            reader.num_unreadable,
            reader.num_empty,
            reader.num_duplicates,
        )
        if documents.num_unreadable:
            warnings.warn(
                f"{root}: {documents.num_unreadable} files or folders could not be read and are "
                "left out; check their permissions",
                stacklevel=2,
            )
        if not documents:
            wanted = "any suffix" if suffixes is None else f"suffixes {sorted(suffixes)}"
            raise ValueError(
                f"{root}: no usable file of {wanted} (left out: {documents.left_out or 'none'}); "
                "pass a folder with text files or other suffixes"
            )
        return documents

    def __len__(self) -> int:
        return len(self.contents)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        return self.contents[index]

    @property
    def left_out(self) -> str:
        """Numbers of files or folders left out, by reason; empty if none, or after `split`."""
        counts = {
            "binary": self.num_binary,
            "unreadable": self.num_unreadable,
            "empty": self.num_empty,
            "duplicate": self.num_duplicates,
        }
        return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)

    def split(self) -> tuple["ByteDocuments", "ByteDocuments"]:
        """Split into training documents and held-out documents, about a tenth of them.

        Returns:
            The pair (train, held_out), without the numbers of files left out.

        Raises:
            ValueError: one of the two would be empty.

        Guarantees:
            The split of a document depends on its path alone: adding or removing another
            document does not move it.
        """
        held_out: list[tuple[str, bytes]] = []
        train: list[tuple[str, bytes]] = []
        for path, content in zip(self.paths, self.contents, strict=True):
            split = held_out if _uniform(path) < _HELD_OUT else train
            split.append((path, content))
        if not held_out or not train:
            raise ValueError(
                f"{_validate.counted(len(self), 'document')} gave {len(train)} for training and "
                f"{len(held_out)} held out: expected at least one of both; add files to the data "
                f"folder, {round(5 / _HELD_OUT)} or more make an empty split unlikely"
            )
        return _documents(train), _documents(held_out)


def _documents(pairs: list[tuple[str, bytes]]) -> ByteDocuments:
    """`ByteDocuments` from (path, content) pairs."""
    paths, contents = zip(*pairs, strict=True)
    return ByteDocuments(paths, contents)


def _uniform(path: str) -> float:
    """A pseudorandom number in [0, 1) that depends on the path alone."""
    digest = blake2b(path.encode(errors="surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _file_names(root: Path, suffixes: Collection[str] | None) -> tuple[list[str], int]:
    """Sorted relative paths of the files, and the number of folders that could not be listed."""
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such folder; check the path")
    if not root.is_dir():
        raise ValueError(f"{root}: expected a folder of text files; pass the folder that holds it")
    unlisted: list[OSError] = []
    names = []
    for parent, folders, files in os.walk(root, onerror=unlisted.append):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _SKIPPED_FOLDERS]
        for file in files:
            if not file.startswith(".") and (suffixes is None or file.endswith(tuple(suffixes))):
                names.append(Path(parent, file).relative_to(root).as_posix())
    if any(error.filename == os.fspath(root) for error in unlisted):
        raise ValueError(f"{root}: cannot be listed ({unlisted[0]}); check its permissions")
    return sorted(names), len(unlisted)


class _Reader:
    """Reads files one by one and keeps each distinct content under its first path."""

    def __init__(self, root: Path, max_total_bytes: int, num_unreadable: int) -> None:
        self.root = root
        self.max_total_bytes = max_total_bytes
        self.documents: dict[bytes, str] = {}
        self.total_bytes = 0
        self.num_binary = 0
        self.num_unreadable = num_unreadable
        self.num_empty = 0
        self.num_duplicates = 0

    def read(self, name: str) -> None:
        """Read one file; keep it, or count the reason why it is left out."""
        path = self.root / name
        try:
            # Opening a named pipe would block until something writes to it.
            if not path.is_file():
                raise FileNotFoundError(path)
            with path.open("rb") as file:
                content = file.read(_SNIFFED_BYTES)
                if b"\0" not in content:
                    # One byte above the limit suffices to detect that it is exceeded.
                    content += file.read(self.max_total_bytes + 1)
        except OSError:
            self.num_unreadable += 1
            return
        if b"\0" in content:
            self.num_binary += 1
        elif not content:
            self.num_empty += 1
        elif content in self.documents:
            self.num_duplicates += 1
        else:
            self._keep(name, content)

    def _keep(self, name: str, content: bytes) -> None:
        """Add a document; raise if the documents exceed the limit."""
        self.total_bytes += len(content)
        if self.total_bytes > self.max_total_bytes:
            raise ValueError(
                f"max_total_bytes={self.max_total_bytes}: exceeded by the documents of "
                f"{self.root} at {name}; raise it, or pass a smaller folder or fewer suffixes"
            )
        self.documents[content] = name


class TrainWindows(Dataset[tuple[Tensor, Tensor]]):
    """One window of each document, with a random start that changes with every step.

    A document's tokens are `DOCUMENT_START` and its bytes. A window's start is a pure function of
    (key, step, index), so a resumed run sees the same windows as an uninterrupted one. DataLoader
    worker processes hold copies that `set_step` does not reach; load in the main process
    (``num_workers=0``), or use `window`.

    Args:
        documents: each is one privacy unit.
        seq_len: tokens per window, at least 1.
        key: 16 to 64 bytes, from `secrets.token_bytes`, or fixed for a repeatable run.

    Raises:
        ValueError: there are no documents, seq_len is below 1, or the key has another length.

    Guarantees:
        Item i comes from document i alone.
    """

    def __init__(self, documents: Sequence[bytes], seq_len: int, *, key: bytes) -> None:
        _validate.positive_int(seq_len=seq_len)
        if len(documents) == 0:
            raise ValueError("documents are empty: expected at least one; check the folder")
        if not 16 <= len(key) <= 64:
            raise ValueError(
                f"key has {len(key)} bytes: expected 16 to 64; use secrets.token_bytes(32)"
            )
        self.documents = documents
        self.seq_len = seq_len
        self.step = 0
        self._key = bytes(key)

    def __len__(self) -> int:
        return len(self.documents)

    def set_step(self, step: int) -> None:
        """Use the starts of this step, from 0 to 2^64 - 1, in the following items."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**64:
            raise ValueError(
                f"step={step!r}: expected an integer from 0 to 2^64 - 1; count from 0"
            )
        self.step = step

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The window of document `index` at the step last set; see `window`."""
        return self.window(index, self.step)

    def window(self, index: int, step: int) -> tuple[Tensor, Tensor]:
        """A window of one document.

        Args:
            index: index of the document, from 0.
            step: step, on which the start depends.

        Returns:
            inputs: `[seq_len]`, int64, 0..256, padded with 256.
            targets: `[seq_len]`, int64, the token after each input, padded with -100.

        Raises:
            IndexError: the index is outside of 0..len-1.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index={index}: expected 0..{len(self) - 1}")
        document = self.documents[index]
        num_starts = max(len(document) - self.seq_len, 0) + 1
        label = int(step).to_bytes(8, "little") + int(index).to_bytes(8, "little")
        draw = int.from_bytes(blake2b(label, key=self._key, digest_size=16).digest(), "little")
        return _window(document, draw % num_starts, self.seq_len)


def held_out_batches(
    documents: Sequence[bytes], seq_len: int, max_windows: int, *, batch_size: int = 8
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fixed windows for evaluation, the same in every call.

    Each document is split into windows of seq_len without overlap. The first windows of all
    documents come first, then their second windows, and so on, so that a small max_windows still
    covers many documents.

    Args:
        documents: the documents to evaluate on.
        seq_len: tokens per window.
        max_windows: maximum number of windows.
        batch_size: windows per batch; the last batch may be smaller.

    Yields:
        inputs and targets `[windows, seq_len]`, int64, padded as by `TrainWindows.window`.

    Raises:
        ValueError: a number is below 1.
    """
    _validate.positive_int(seq_len=seq_len, max_windows=max_windows, batch_size=batch_size)
    windows = islice(_windows_in_rounds(documents, seq_len), max_windows)
    while batch := list(islice(windows, batch_size)):
        yield (
            torch.stack([inputs for inputs, _ in batch]),
            torch.stack([targets for _, targets in batch]),
        )


def _windows_in_rounds(
    documents: Sequence[bytes], seq_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first window of every document, then the second windows, and so on."""
    start = 0
    while documents := [document for document in documents if start < len(document)]:
        for document in documents:
            yield _window(document, start, seq_len)
        start += seq_len


def _window(document: bytes, start: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the tokens from `start` on; token 0 is `DOCUMENT_START`."""
    # Token t > 0 is byte t - 1, so the targets are the bytes from `start` on.
    following = document[start : start + seq_len]
    targets = torch.full((seq_len,), IGNORE_INDEX)
    inputs = torch.full((seq_len,), DOCUMENT_START)
    if following:
        values = torch.frombuffer(bytearray(following), dtype=torch.uint8).to(torch.int64)
        targets[: len(values)] = values
        inputs[1 : len(values)] = values[:-1]
        if start > 0:
            inputs[0] = document[start - 1]
    return inputs, targets

"""Documents for language modelling, and the privacy unit of each document.

A document is a file, or a record of a JSONL file. A privacy unit is one document, all documents of
a folder, or all records with the same value in some field. Models train on windows of a document's
tokens: `DOCUMENT_START` followed by the document's bytes, or an array of token ids.
"""

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import _validate
from ..refusal import PrivateRefusal, PrivateWarning, warn

DOCUMENT_START = 256
VOCAB_SIZE = 257
IGNORE_INDEX = -100
UNITS = ("file", "record", "folder")
_FIELD = "field:"
HELD_OUT = 0.1  # default fraction of held-out documents

# A document's bytes, or its token ids `[n]`, of which the first is never a target.
Tokens = bytes | np.ndarray

_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
# A file with a NUL byte among this number of first bytes is binary, and is not read to the end.
_SNIFFED_BYTES = 65_536
_JSONL = ".jsonl"
_REASONS = ("binary", "unreadable", "empty", "malformed", "duplicate")


def check_unit(unit: str) -> None:
    """Raise ValueError unless unit is "file", "record", "folder" or "field:NAME"."""
    if not (unit.startswith(_FIELD) and unit != _FIELD):
        _validate.one_of(unit=(unit, (*UNITS, f"{_FIELD}NAME")))


def has_several_documents(unit: str) -> bool:
    """Whether a unit of this kind may consist of several documents."""
    return unit == "folder" or unit.startswith(_FIELD)


def noun_of(unit: str, name: str | None = None) -> str:
    """Return the noun for a unit: `name`, else "file", or "patient" for "field:patient"."""
    return name or unit.removeprefix(_FIELD)


def default_data_dir() -> Path:
    """Return the folder of Python's standard library, whose files exist on every machine."""
    return Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class ByteDocuments(Sequence[bytes]):
    """Documents in the order of their paths, and the privacy unit that each belongs to.

    Guarantees:
        If each document is a unit, no document occurs twice. Documents that differ in one byte
        (such as in a licence header) are different units, however similar they are. If units have
        several documents, the documents kept for a unit do not depend on other units.
    """

    # path of each document relative to the folder, with forward slashes; a record's path ends in a
    # colon and the number of its line
    paths: tuple[str, ...]
    contents: tuple[bytes, ...]  # the bytes of each document, not empty, distinct within a unit
    # reason -> number of files, records or folders left out: "binary" (with a NUL byte),
    # "unreadable", "empty", "malformed" (a line of a JSONL file that is not an object),
    # "duplicate" (the same bytes as an earlier document, of the same unit if units have several
    # documents), and "without ..." or "with ..." if a record's text, unit or label is missing or
    # unknown
    skipped: Mapping[str, int] = field(default_factory=dict)
    unit: str = "file"  # "file", "record", "folder" or "field:NAME"
    # the unit of each document; None if each document is a unit
    owners: tuple[str, ...] | None = None

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        unit: str = "file",
        field: str = "text",
        label_field: str | None = None,
        labels: Collection[str] | None = None,
        suffixes: Collection[str] | None = None,
        max_total_bytes: int = 512 * 2**20,
    ) -> "ByteDocuments":
        """Read a file, or the files of a folder and its subfolders.

        `field` is the key of a record's text. With `label_field`, the key of its label, a document
        is the label, a NUL byte and the text; records with labels not in `labels` are left out.
        - With unit "file" or "folder", a document is a file; for a .jsonl file, the texts of its
          records together. With "folder", a file directly in `path` is a unit.
        - With "record" or "field:NAME", a document is a line of a JSONL file. Without `suffixes`,
          only .jsonl files are read.
        - Hidden files and folders, `__pycache__`, `site-packages` and `dist-packages` are skipped,
          and links to folders are not followed.
        Raises PrivateRefusal if no document is usable, or documents exceed max_total_bytes.
        """
        root = Path(path)
        _validate.positive_int(max_total_bytes=max_total_bytes)
        check_unit(unit)
        if isinstance(suffixes, str):
            raise ValueError(f"suffixes={suffixes!r}: expected a collection; pass ({suffixes!r},)")
        if _are_records(unit) and suffixes is None:
            suffixes = (_JSONL,)
        if root.is_file():
            root, names, num_unreadable = root.parent, [root.name], 0
        else:
            names, num_unreadable = _file_names(root, suffixes)
        reader = _Reader(root, max_total_bytes, unit, field, label_field, labels)
        reader.skipped["unreadable"] = num_unreadable
        for name in names:
            reader.read(name)
        owners = tuple(owner for owner, _ in reader.documents)
        documents = cls(
            tuple(reader.documents.values()),
            tuple(content for _, content in reader.documents),
            reader.skipped,
            unit,
            owners if has_several_documents(unit) else None,
        )
        if reader.skipped["unreadable"]:
            warn(
                f"{root}: some files or folders could not be read and are left out; check their "
                "permissions",
                PrivateWarning,
            )
        if not documents:
            wanted = "any suffix" if suffixes is None else f"suffixes {sorted(suffixes)}"
            names_unit = unit.startswith(_FIELD)
            kind = "JSONL" if _are_records(unit) else "text"
            noun = "record" if names_unit else unit
            raise PrivateRefusal(
                f"{path}: no usable {noun} in files of {wanted}. A line of a JSONL file must be "
                f"an object with a string in field {field!r} (--field)"
                + (f", one of the labels in {label_field!r} (--label-field)" * bool(labels))
                + (f", and a string or a number in the field of {unit=}" if names_unit else "")
                + f"; or pass a folder with {kind} files, or other suffixes",
                left_out=documents.left_out or "none",
            ) from None
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
    def num_units(self) -> int:
        """The number of privacy units."""
        return len(self) if self.owners is None else len(set(self.owners))

    def documents_at_once(self, examples_per_unit: int | None) -> int:
        """Return the number of documents in a step if the step samples all units."""
        if self.owners is None or examples_per_unit is None:
            return len(self)
        return sum(min(count, examples_per_unit) for count in Counter(self.owners).values())

    @property
    def left_out(self) -> str:
        """The numbers in `skipped` as text, such as "3 binary, 2 empty"; empty after `split`."""
        return ", ".join(f"{number} {kind}" for kind, number in self.skipped.items() if number)

    def split(self, held_out: float = HELD_OUT) -> tuple["ByteDocuments", "ByteDocuments"]:
        """Return (train, held_out); `held_out` is the expected fraction of held-out units.

        Guarantees:
            Whether a unit is held out depends only on the file's path, the record's text, or the
            name of a unit with several documents. Other units do not change it.
        """
        parts: tuple[list[int], ...] = ([], [])
        for index in range(len(self)):
            parts[_uniform(self._key(index)) < held_out].append(index)
        train, kept = (self._part(part) for part in parts)
        if not train or (held_out and not kept):
            noun = noun_of(self.unit)
            raise PrivateRefusal(
                f"eval_fraction={held_out:g}: it held out no {noun} for evaluation, or left none "
                "for training. This can happen with few units: each is held out with this "
                "probability, by its name or text. Pass eval_fraction=0 to train without an "
                "evaluation, eval_data with other documents, or another eval_fraction",
                training=train.num_units,
                held_out=kept.num_units,
                left_out=self.left_out,
            ) from None
        return train, kept

    def without(self, others: "ByteDocuments") -> "ByteDocuments":
        """Return the documents that are not in `others` and share no unit with them."""
        known = set(others.contents)
        units = set(others.owners or ())
        return self._part(
            [
                index
                for index, content in enumerate(self.contents)
                if content not in known
                and (self.owners is None or self.owners[index] not in units)
            ]
        )

    def _key(self, index: int) -> bytes:
        if self.unit == "record":
            return self.contents[index]
        name = self.paths[index] if self.owners is None else self.owners[index]
        return name.encode(errors="surrogatepass")

    def _part(self, indices: list[int]) -> "ByteDocuments":
        return ByteDocuments(
            tuple(self.paths[i] for i in indices),
            tuple(self.contents[i] for i in indices),
            unit=self.unit,
            owners=None if self.owners is None else tuple(self.owners[i] for i in indices),
        )


def _are_records(unit: str) -> bool:
    return unit == "record" or unit.startswith(_FIELD)


def _uniform(key: bytes) -> float:
    digest = blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _file_names(root: Path, suffixes: Collection[str] | None) -> tuple[list[str], int]:
    """Return (sorted relative paths of the files, number of folders that cannot be listed)."""
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder; check the path")
    if not root.is_dir():
        raise ValueError(f"{root}: neither a file nor a folder; pass a file or a folder")
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
    """Reads files one by one; keeps equal documents of a unit once, under the first path."""

    def __init__(
        self,
        root: Path,
        max_total_bytes: int,
        unit: str,
        field: str,
        label_field: str | None = None,
        labels: Collection[str] | None = None,
    ) -> None:
        self.root = root
        self.unit = unit
        self.field = field
        self.label_field = label_field
        self.labels = labels
        self.max_total_bytes = max_total_bytes
        # (unit, content) -> path. The unit is "" if each document is a unit, so that equal
        # documents are kept once.
        self.documents: dict[tuple[str, bytes], str] = {}
        self.total_bytes = 0
        self.skipped = dict.fromkeys(_REASONS, 0)

    def read(self, name: str) -> None:
        path = self.root / name
        if _are_records(self.unit) or name.endswith(_JSONL):
            self._read_records(name)
            return
        try:
            # Opening a named pipe would block until something writes to it.
            if not path.is_file():
                raise FileNotFoundError(path)
            with path.open("rb") as file:
                content = file.read(_SNIFFED_BYTES)
                if b"\0" not in content:
                    # Read one byte more than the limit, to notice a file that exceeds the limit.
                    content += file.read(self.max_total_bytes + 1)
        except OSError:
            self.skipped["unreadable"] += 1
            return
        if b"\0" in content:
            self.skipped["binary"] += 1
        else:
            self._add(name, content, self._folder_of(name))

    def _folder_of(self, name: str) -> str:
        return name.split("/")[0] if self.unit == "folder" else ""

    def _read_records(self, name: str) -> None:
        texts = []
        try:
            with (self.root / name).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    record = self._record(line)
                    if isinstance(record, str):
                        self.skipped[record] = self.skipped.get(record, 0) + 1
                        continue
                    text, owner = record
                    if _are_records(self.unit):
                        self._add(f"{name}:{number}", text, owner)
                    else:
                        texts.append(text)
        except OSError:
            self.skipped["unreadable"] += 1
            return
        if not _are_records(self.unit):
            self._add(name, b"\n".join(texts), self._folder_of(name))

    def _record(self, line: bytes) -> tuple[bytes, str] | str:
        """Return (text, unit) of a line, or the reason why the line is left out."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return "malformed"
        if not isinstance(record, dict):
            return "malformed"
        if not isinstance(text := record.get(self.field), str):
            return f"without a string in {self.field!r}"
        owner = record.get(noun_of(self.unit)) if self.unit.startswith(_FIELD) else ""
        is_unit = isinstance(owner, str | int) and not isinstance(owner, bool)
        if not is_unit or (owner == "" and self.unit.startswith(_FIELD)):
            return f"without a string or a number in {noun_of(self.unit)!r}"
        content = text.encode(errors="replace")
        if self.labels is not None and content:
            if (label := record.get(self.label_field)) is None:
                return f"without a label in {self.label_field!r}"
            label = label if isinstance(label, str) else json.dumps(label)
            if label not in self.labels:
                return f"with a label in {self.label_field!r} that is none of the labels"
            content = label.encode() + b"\0" + content
        return content, str(owner)

    def _add(self, name: str, content: bytes, owner: str) -> None:
        if not content:
            self.skipped["empty"] += 1
        elif (owner, content) in self.documents:
            self.skipped["duplicate"] += 1
        else:
            self.documents[owner, content] = name
            self.total_bytes += len(content)
        if self.total_bytes > self.max_total_bytes:
            raise PrivateRefusal(
                f"max_total_bytes={self.max_total_bytes}: exceeded by the documents of "
                f"{self.root}; pass a larger number, a smaller folder or fewer suffixes",
                place=name,
            ) from None


class TrainWindows(Dataset[tuple[Tensor, Tensor]]):
    """One window of seq_len tokens of each document; its random start changes with every step.

    A window's start is a pure function of (key, step, index), so a resumed run trains on the same
    windows as an uninterrupted run. `set_step` does not change the copies in DataLoader worker
    processes: load in the main process (``num_workers=0``), or use `window`. Each document is one
    privacy unit. The key must have 16 to 64 bytes.

    Guarantees:
        Item i comes from document i alone.
    """

    def __init__(
        self,
        documents: Sequence[Tokens],
        seq_len: int,
        *,
        key: bytes,
        padding: int = DOCUMENT_START,
    ) -> None:
        _validate.positive_int(seq_len=seq_len)
        if len(documents) == 0:
            raise ValueError("documents are empty: expected at least one; check the folder")
        if not 16 <= len(key) <= 64:
            raise ValueError(
                f"key has {len(key)} bytes: expected 16 to 64; use secrets.token_bytes(32)"
            )
        self.documents = documents
        self.seq_len = seq_len
        self.padding = padding
        self.step = 0
        self._key = bytes(key)

    def __len__(self) -> int:
        return len(self.documents)

    def set_step(self, step: int) -> None:
        """Set the step, from 0 to 2^64 - 1, which determines the windows' starts from now on."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**64:
            raise ValueError(
                f"step={step!r}: expected an integer from 0 to 2^64 - 1; count from 0"
            )
        self.step = step

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the window of document `index` at the step that was set last; see `window`."""
        return self.window(index, self.step)

    def window(self, index: int, step: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) `[seq_len]`, int64, of a window of one document.

        The target of an input token is the next token. If the document is shorter, inputs are
        padded with `padding`, and targets with -100.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index={index}: expected 0..{len(self) - 1}")
        return _window(self.documents[index], self._start(index, step), self.seq_len, self.padding)

    def tokens(self, index: int, step: int) -> Tensor:
        """Return at most seq_len + 1 tokens of one document, without padding; see `window`."""
        start = self._start(index, step)
        return _tokens(self.documents[index], start, start + self.seq_len + 1)

    def _start(self, index: int, step: int) -> int:
        num_starts = max(num_targets(self.documents[index]) - self.seq_len, 0) + 1
        label = int(step).to_bytes(8, "little") + int(index).to_bytes(8, "little")
        draw = int.from_bytes(blake2b(label, key=self._key, digest_size=16).digest(), "little")
        return draw % num_starts


class LabelledTexts(TrainWindows):
    """The first seq_len tokens of each text, and the index of its label.

    A document is an array: the label's index, then the text's token ids. `padding` is negative.
    """

    def window(self, index: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return (inputs `[seq_len]`, index of the label `[]`), int64."""
        label, *_ = found = _tokens(self.documents[index], 0, self.seq_len + 1)
        inputs = torch.full((self.seq_len,), self.padding)
        inputs[: len(found) - 1] = found[1:]
        return inputs, label


def num_targets(document: Tokens) -> int:
    """Return the number of a document's tokens that are targets, which a model predicts."""
    return len(document) if isinstance(document, bytes) else max(0, len(document) - 1)


def held_out_batches(
    documents: Sequence[Tokens],
    seq_len: int,
    max_windows: int | None,
    *,
    batch_size: int = 8,
    padding: int = DOCUMENT_START,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) `[windows, seq_len]` for evaluation, the same in every call.

    The first windows of all documents come first, then their second windows, and so on, so that a
    small max_windows still covers many documents. max_windows=None yields all windows.
    """
    _validate.positive_int(seq_len=seq_len, batch_size=batch_size)
    _validate.optional(_validate.positive_int, max_windows=max_windows)
    windows = islice(_windows_in_rounds(documents, seq_len, padding), max_windows)
    while batch := list(islice(windows, batch_size)):
        inputs, targets = map(torch.stack, zip(*batch, strict=True))
        yield inputs, targets


def labelled_batches(
    documents: Sequence[Tokens],
    seq_len: int,
    max_windows: int | None,
    *,
    batch_size: int = 8,
    padding: int = -1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs `[texts, seq_len]`, label indices `[texts]`) for evaluation."""
    texts = LabelledTexts(documents, seq_len, key=bytes(16), padding=padding)
    windows = (texts.window(index) for index in range(len(texts))[:max_windows])
    while batch := list(islice(windows, batch_size)):
        inputs, labels = map(torch.stack, zip(*batch, strict=True))
        yield inputs, labels


def _windows_in_rounds(
    documents: Sequence[Tokens], seq_len: int, padding: int
) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    while documents := [document for document in documents if start < num_targets(document)]:
        for document in documents:
            yield _window(document, start, seq_len, padding)
        start += seq_len


def _window(document: Tokens, start: int, seq_len: int, padding: int) -> tuple[Tensor, Tensor]:
    tokens = _tokens(document, start, start + seq_len + 1)
    targets = torch.full((seq_len,), IGNORE_INDEX)
    inputs = torch.full((seq_len,), padding)
    count = max(len(tokens) - 1, 0)
    targets[:count] = tokens[1:]
    inputs[:count] = tokens[:-1]
    return inputs, targets


def _tokens(document: Tokens, start: int, stop: int) -> Tensor:
    """Return tokens start to stop - 1; token 0 of a document of bytes is `DOCUMENT_START`."""
    if not isinstance(document, bytes):
        return torch.from_numpy(document[start:stop].astype(np.int64))
    values = np.frombuffer(document[max(start - 1, 0) : stop - 1], dtype=np.uint8)
    tokens = torch.from_numpy(values.astype(np.int64))
    return tokens if start else torch.cat([torch.tensor([DOCUMENT_START]), tokens])

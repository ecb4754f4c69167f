"""An append-only file that several processes share, and a guard that detects truncation.

It handles bytes only; `ledger.py` interprets the lines.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Tail:
    """The end of a file when it was last read or written."""

    size: int  # bytes of all complete lines
    last: bytes  # the last complete line; b"" if there is none
    unfinished: bytes  # bytes after the last complete line
    guard: bytes | None  # content of the guard file; None if it does not exist


class LedgerFile:
    """A file to which lines are only appended, and its guard.

    The guard is a second file, `<file>.guard`, with a copy of the last line. It is created before
    the first line is appended, and replaced after each line. Every append holds an exclusive
    `flock` of the file and calls fsync twice; the first append calls it four times.

    Guarantees:
        A line whose `append` returned is in the file, and the guard holds that line or a later
        one, even if a process dies at any time. So a file without the line in its guard was
        truncated or changed, and an unfinished last line is from an `append` that did not return.
        A failed `append` removes only bytes that it wrote.

    Raises:
        ValueError: this platform has no `flock`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        # Absolute, since the working directory may change. Real, so that links share one guard.
        self._file = Path(os.path.realpath(path))
        self.guard_path = Path(f"{self._file}.guard")
        if fcntl is None:
            raise ValueError(
                f"ledger={str(path)!r}: this platform has no fcntl.flock, so another process "
                "could overwrite the ledger; use Linux or macOS, or leave ledger out"
            )

    def read(self) -> tuple[bytes, Tail]:
        """Return all complete lines and the end of the file; a missing file counts as empty."""
        try:
            # Read the guard first. If the guard exists but the file does not, the file was lost.
            guard = self._read_guard()
            try:
                with self._locked(os.O_RDONLY, fcntl.LOCK_SH) as handle:
                    content, guard = _read_all(handle), self._read_guard()
            except FileNotFoundError:
                content = b""
        except OSError as error:
            raise ValueError(
                f"ledger={str(self.path)!r}: cannot be read ({error.strerror}), so the privacy "
                "spent so far is unknown; pass the path of a file that can be read and written"
            ) from error
        size = content.rfind(b"\n") + 1
        whole, unfinished = content[:size], content[size:]
        last = whole[whole.rfind(b"\n", 0, size - 1) + 1 :] if whole else b""
        return whole, Tail(size, last, unfinished, guard)

    def append(self, line: bytes, tail: Tail) -> Tail:
        """Write one line, with its newline, and return when it and the guard are on the disk.

        `tail` is the end of the file when this process last read or wrote it. Return the new end.
        Raises RuntimeError if the file or its guard was changed since then, and OSError if either
        could not be written; the file is then unchanged.
        """
        # A missing file is created only if it had no lines.
        new = tail.size == 0 and not self._file.exists()
        if new:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if new else 0)
            with self._locked(flags, fcntl.LOCK_EX) as handle:
                self._require_unchanged(handle, tail)
                self._write(handle, line, tail)
        except FileNotFoundError:
            if new:
                raise
            self.refuse_changed()
        return Tail(tail.size + len(line), line, b"", line)

    def refuse_changed(self) -> NoReturn:
        """Raise RuntimeError, since another process has changed the file."""
        raise RuntimeError(
            f"ledger {self.path} or its guard {self.guard_path} was changed or removed by another "
            "process or engine, so this engine's record of the privacy spent is incomplete. "
            "Nothing was released. Start again with the ledger's present content"
        )

    @contextmanager
    def _locked(self, flags: int, kind: int) -> Iterator[int]:
        handle = _open_regular(self._file, flags)
        try:
            try:
                fcntl.flock(handle, kind)
            except OSError as error:
                raise OSError(error.errno, f"it cannot be locked: {error.strerror}") from error
            try:
                if not os.path.samestat(os.fstat(handle), os.stat(self._file)):
                    self.refuse_changed()
                yield handle
            finally:
                # Closing does not unlock if a process was forked: it shares the descriptor.
                fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)

    def _require_unchanged(self, handle: int, tail: Tail) -> None:
        length = len(tail.last) + len(tail.unfinished)
        found = os.pread(handle, length + 1, tail.size - len(tail.last))
        # `last` alone is also valid: a failed `append` has removed the unfinished line.
        same = found in (tail.last + tail.unfinished, tail.last)
        if same and self._read_guard() in (tail.guard, tail.last):
            return
        if found.startswith(tail.last) and len(found) > len(tail.last):
            raise RuntimeError(
                f"ledger {self.path}: another process or engine has added to it (a fork of this "
                "process counts as another process), so this engine's record of the privacy "
                "spent is incomplete. Nothing was released. Give each running engine its own "
                "ledger, or start again with this ledger"
            )
        self.refuse_changed()

    def _write(self, handle: int, line: bytes, tail: Tail) -> None:
        if tail.unfinished:
            os.ftruncate(handle, tail.size)
        # Write the guard if a process died before it did: a guard lags one line at most.
        if tail.guard != tail.last or tail.size == 0:
            self._write_guard(tail.last, handle)
            flush_folder(self.guard_path.parent)
        written = b""
        try:
            written = line[: os.write(handle, line)]
            if written != line:
                raise OSError(
                    errno.ENOSPC, f"ledger {self.path}: a line was written in part; disk full?"
                )
            os.fsync(handle)
            # A process that ignores the lock may have written too.
            if os.fstat(handle).st_size != tail.size + len(line):
                self.refuse_changed()
            self._write_guard(line, handle)
        except BaseException:
            # The release is not made. But if the guard has the line, the line stays, and counts.
            if self._read_guard() != line:
                _undo_write(handle, written)
            raise

    def _read_guard(self) -> bytes | None:
        try:
            handle = _open_regular(self.guard_path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return _read_all(handle)
        finally:
            os.close(handle)

    def _write_guard(self, line: bytes, like: int) -> None:
        """Replace the guard atomically. The folder is not flushed: the old guard is valid too."""
        temporary = Path(f"{self.guard_path}.tmp")
        temporary.unlink(missing_ok=True)  # a process that died may have left it
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchmod(handle, stat.S_IMODE(os.fstat(like).st_mode))
            if os.write(handle, line) != len(line):
                raise OSError(
                    errno.ENOSPC, f"{temporary}: the guard was written in part; disk full?"
                )
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, self.guard_path)


def _open_regular(path: Path, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def _read_all(handle: int) -> bytes:
    with open(handle, "rb", closefd=False) as file:
        return file.read()


def _undo_write(handle: int, written: bytes) -> None:
    end = os.lseek(handle, 0, os.SEEK_CUR)  # where the write ended
    start = end - len(written)
    if os.fstat(handle).st_size == end and os.pread(handle, len(written), start) == written:
        os.ftruncate(handle, start)


def flush_folder(folder: Path) -> None:
    """Flush a folder, so that the name of a new file is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

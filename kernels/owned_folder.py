"""A folder whose files only the user and root can have written, for files that run as code.

Where the system has no owners of files (Windows), nothing is checked.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HAS_OWNERS = hasattr(os, "geteuid")
_MAX_LINKS = 40
# O_NONBLOCK: opening a named pipe would wait for a writer.
_READ = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_IS_A_LINK = (errno.ELOOP, errno.EMLINK)  # what O_NOFOLLOW reports, by system
_LOCK = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_locks_held: set[int] = set()


def _close_locks_after_fork() -> None:
    """A child's copy of a descriptor would hold its parent's lock after the parent has crashed."""
    for lock in _locks_held:
        os.close(lock)
    _locks_held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks_after_fork)


class UnsafePathError(OSError):
    """Somebody besides the user and root can change what a path names."""


class OwnedFolder:
    """A folder that was checked, and is safe to use by its path: nobody else can change that path.

    Every component of the path must belong to the user or root and must not be writable by its
    group or others. Sticky folders (/tmp) may be above the folder: what the user owns there stays.
    Links are followed component by component and checked like folders; the folder itself
    must not be a link.

    Args:
        path: an absolute path.
        make: make what is missing of the path, with mode 0700.

    Raises:
        UnsafePathError: a component fails the check; the message names it.
        OSError: the folder does not exist, or cannot be made.
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if not path.is_absolute():
            raise UnsafePathError(f"{path} depends on the working directory")
        self.path = path
        at, rest, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
        _check(at, os.lstat(at), shared=bool(rest))
        while rest:
            name = rest.pop()
            if name == "..":  # `at` contains no links, so its parent is what ".." means
                at = at.parent
                continue
            entry = at / name
            status = _status(entry, make)
            if not stat.S_ISLNK(status.st_mode):
                _check(entry, status, shared=bool(rest))
                at = entry
                continue
            links += 1
            if not rest or links > _MAX_LINKS:
                raise UnsafePathError(f"{entry} is a symbolic link")
            _check(entry, status)
            target = at / os.readlink(entry)
            rest += reversed(target.parts[1:])
            at = Path(target.anchor)
        if not os.path.isdir(at):
            raise NotADirectoryError(f"{path} is not a folder")

    def open(self, name: str) -> int:
        """A descriptor of a file of the folder, to be closed by the caller.

        Raises:
            UnsafePathError: it is a link or no regular file, or others own it or can write it.
            OSError: it does not exist or cannot be opened.
        """
        path = self.path / name
        try:
            descriptor = os.open(path, _READ)
        except OSError as error:
            if error.errno in _IS_A_LINK:
                raise UnsafePathError(f"{path} is a symbolic link") from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafePathError(f"{path} is not a regular file")
            _check(path, status)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str) -> bytes:
        """The content of a file; raises as `open` does."""
        with open(self.open(name), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Replace a file in one step, with mode 0600; on an OSError the old one stays."""
        copy = None
        try:
            with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as copy:
                copy.write(content)
            os.chmod(copy.name, 0o600)
            os.replace(copy.name, self.path / name)
        except OSError:
            if copy is not None:
                Path(copy.name).unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be removed."""
        try:
            (self.path / name).unlink()
        except OSError:
            return

    @contextmanager
    def locked(self, name: str, waiting_for: str) -> Iterator[None]:
        """One process at a time; the system unlocks what a crashed process held.

        Where the lock file cannot be made, or the file system has no locks, nobody waits.

        Args:
            name: of the lock file, which stays.
            waiting_for: in words, for a message to stderr.
        """
        lock = self._lock(name, waiting_for)
        try:
            yield
        finally:
            if lock in _locks_held:  # not in a child forked meanwhile
                _locks_held.discard(lock)
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def _lock(self, name: str, waiting_for: str) -> int | None:
        if fcntl is None:
            return None
        try:
            lock = os.open(self.path / name, _LOCK, 0o600)
        except OSError:
            return None
        _locks_held.add(lock)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"dpflash: waiting for {waiting_for}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
        except BaseException as error:
            _locks_held.discard(lock)
            os.close(lock)
            if isinstance(error, OSError):
                return None
            raise
        return lock


@contextmanager
def temporary_folder(base: Path) -> Iterator[OwnedFolder]:
    """A folder of mode 0700 in `base`, removed at the end; raises as `OwnedFolder` does."""
    with tempfile.TemporaryDirectory(
        prefix="dpflash-", dir=base, ignore_cleanup_errors=True
    ) as path:
        yield OwnedFolder(Path(path))


def temporary_bases() -> list[Path]:
    """Where temporary folders can be made: the system's folder, and Linux' shared memory."""
    bases = [Path("/dev/shm")]
    try:
        bases.insert(0, Path(tempfile.gettempdir()).absolute())
    except FileNotFoundError:
        pass
    return [base for base in bases if base.is_dir()]


def _status(path: Path, make: bool) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not make:
            raise
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another process was faster; whose it is, is checked next
        pass
    return os.lstat(path)


def _check(path: Path, status: os.stat_result, *, shared: bool = False) -> None:
    """Raises unless the user or root owns the path and nobody else can write it.

    Args:
        path: for the message.
        status: of the path.
        shared: accept a sticky folder that others can write.
    """
    if not _HAS_OWNERS:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafePathError(
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022 and not (shared and mode & stat.S_ISVTX) and not stat.S_ISLNK(status.st_mode):
        raise UnsafePathError(
            f"{path} can be written by its group or others (mode {mode:04o}; "
            f"`chmod go-w {path}` changes that)"
        )

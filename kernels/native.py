"""Compiles the C++ sources of this folder for this machine, once, and loads the library.

The sources need no torch headers and no build system: one call of the compiler takes some seconds.
The library is cached in the user's cache folder, under a hash of the sources, options, CXX, the
processor and the system libraries. Since a cached library is code, it is loaded only if nobody but
the user and root could have written it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import filelock

_FOLDER = Path(__file__).resolve().parent
# Headers and .cpp files; one call of the compiler makes one library of all .cpp files.
_SOURCES = (
    *("attention_cpu.cpp", "tiles.h", "vectors.h", "threads.h"),
    *("grads_cpu.cpp", "chacha20.h", "normal_tail.h", "rounded_normal.h", "rotary_cpu.cpp"),
)
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
# Options to try in turn; without an option the compiler uses its default processor.
_PROCESSORS = (("-march=native",), ("-mcpu=native",), ())
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 600
_loads = itertools.count()


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None, with one warning, if they do not compile or load."""
    return _load_once()[0]


def describe() -> str:
    """Return which implementation of attention, exact sums and noise runs on this CPU."""
    found, missing = _load_once()
    if found is None:
        return f"plain PyTorch, with O(T^2) time and memory for T tokens: {missing}"
    return f"C++ kernels, vectors of {8 * found.vector_bytes()} bits"


@functools.cache
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    """Return (library, "") or (None, the reason why there is no library)."""
    try:
        return load(), ""
    except OSError as error:
        warnings.warn(
            "attention on the CPU, exact sums and noise run in plain PyTorch without their C++ "
            "kernels: attention takes O(T^2) time and memory for T tokens, sums and noise take "
            f"about ten times as long: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, str(error)


def load(processor: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Load the library from the cache, or compile and load it.

    Args:
        processor: compiler options that select the processor; None means this machine's.

    Returns:
        The library; its `_name` is its path in the cache, or the reason why it is not cached.

    Raises:
        OSError: there is no C++ compiler, or it failed; the message names a remedy.
    """
    origin = _origin()
    names = {
        options: f"kernels-{_digest(origin, options)}.so"
        for options in (_PROCESSORS if processor is None else (processor,))
    }
    try:
        cache = _cache()
    except OSError as error:
        return _compiled(names, None, f"the cache folder is not used: {error}")
    found = _cached(cache, names.values())
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a lock, each process compiles
            stack.enter_context(_locked(cache / "kernels.lock"))
        # Another process may have compiled the library in the meantime.
        return _cached(cache, names.values()) or _compiled(names, cache, "")


def _cache() -> Path:
    """Return the user's cache folder; create it if it is missing.

    Raises:
        OSError: there is no home folder, or other users could change the folder's files.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path(os.path.expanduser("~"), ".cache")
    if not base.is_absolute():
        raise OSError("this user has no home folder")
    folder = base / "dpflash"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_owner(folder, os.lstat(folder))
    return folder


def _require_owner(path: Path, status: os.stat_result) -> None:
    """Raise OSError unless the user or root owns the path and nobody else can write to it."""
    if stat.S_ISLNK(status.st_mode):
        raise OSError(f"{path} is a symbolic link")
    if not hasattr(os, "geteuid"):  # Windows has no user ids
        return
    if status.st_uid not in (0, os.geteuid()):
        raise OSError(
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
        )
    if status.st_mode & 0o022:
        raise OSError(
            f"{path} can be written by its group or others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}; `chmod go-w {path}` changes that)"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system releases the lock of a crashed process."""
    lock = filelock.FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        print("dpflash: waiting for another process that compiles CPU kernels", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _cached(folder: Path, names: Iterable[str]) -> ctypes.CDLL | None:
    """Return the first cached library that only the user could write and that is intact."""
    for path in (folder / name for name in names):
        # OSError is raised if a file is missing, unsafe, damaged, or for other system libraries.
        with contextlib.suppress(OSError):
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
                # The owner of the open file is checked, since the path may be replaced meanwhile.
                _require_owner(path, os.fstat(file.fileno()))
                content = file.read()
            # Loading a damaged library may crash.
            if content[-32:] == hashlib.sha256(content[:-32]).digest():
                return _dlopen(content, str(path))
    return None


def _dlopen(content: bytes, name: str) -> ctypes.CDLL:
    """Load a library from a file in memory or, if the system has none, from a temporary file.

    So the bytes that run are the checked bytes, and the cache may be mounted noexec.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            file = stack.enter_context(open(os.memfd_create("dpflash-kernels"), "wb"))
            # The path is unique: for a known path, the loader returns the library loaded before.
            path = f"/proc/self/{'./' * next(_loads)}fd/{file.fileno()}"
        else:
            folder = tempfile.TemporaryDirectory(prefix="dpflash-", ignore_cleanup_errors=True)
            path = os.path.join(stack.enter_context(folder), "kernels.so")
            file = stack.enter_context(open(path, "wb"))
        file.write(content)
        file.flush()
        try:
            library = ctypes.CDLL(path)
            for function in ("problem_bytes", "vector_bytes"):
                getattr(library, function).restype = ctypes.c_int64
        except (OSError, AttributeError) as error:
            raise OSError(str(error).replace(path, "").strip(": ")) from None
    library._name = name
    return library


def _compiled(
    names: Mapping[tuple[str, ...], str], cache: Path | None, reason: str
) -> ctypes.CDLL:
    """Compile for the first processor that the compiler supports; load and cache the library.

    Args:
        names: maps compiler options that select a processor to the library's file name.
        cache: folder to cache the library in, or None.
        reason: the reason why there is no cache.

    Raises:
        OSError: there is no compiler, or it failed.
    """
    compiler = _compiler()
    print(
        f"dpflash: compiling CPU kernels ({shlex.join(compiler)}; once, some seconds)",
        file=sys.stderr,
    )
    complaint = ""
    for options, name in names.items():
        try:
            content = _compile([*compiler, *_FLAGS, *options])
        except OSError as error:
            complaint = str(error)
            continue
        try:
            library = _dlopen(content, name)
        except OSError as error:
            complaint = f"its library does not load (does it compile C only, like gcc?): {error}"
            continue
        try:
            if cache is not None:
                _write(cache / name, content + hashlib.sha256(content).digest())
                library._name = str(cache / name)
                return library
        except OSError as error:
            reason = f"{cache} cannot be written: {error}"
        warnings.warn(
            f"CPU kernels are compiled again in each process, since {reason}; to cache them, "
            "correct this, or set XDG_CACHE_HOME to a folder that only you can write to",
            RuntimeWarning,
            stacklevel=3,
        )
        library._name = f"compiled for this process: {reason}"
        return library
    raise OSError(f"{shlex.join(compiler)}: {complaint}; let CXX name a C++ compiler, such as g++")


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX, or the first compiler that is installed.

    Raises:
        OSError: there is no C++ compiler; the message names a remedy.
    """
    named = os.environ.get("CXX")
    try:
        commands = [shlex.split(named)] if named else [[name] for name in _COMPILERS]
    except ValueError:
        commands = []
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    if named:
        missing = f": {commands[0][0]!r} is not installed" if commands and commands[0] else ""
        raise OSError(
            f"CXX={named!r} is not a command{missing}; unset CXX or let it name a C++ compiler"
        )
    raise OSError(
        f"no C++ compiler found (looked for {', '.join(_COMPILERS)}); install one, for instance "
        "g++, or set CXX to its command"
    )


def _compile(command: list[str]) -> bytes:
    """Compile and return the library's bytes; raise OSError with the compiler's message."""
    sources = [str(_FOLDER / name) for name in _SOURCES if name.endswith(".cpp")]
    with tempfile.TemporaryDirectory(prefix="dpflash-", ignore_cleanup_errors=True) as folder:
        made = Path(folder, "kernels.so")
        try:
            done = subprocess.run(
                [*command, *sources, "-o", str(made)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_SECONDS,
                env={**os.environ, "TMPDIR": folder},
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"it took more than {_SECONDS} s") from None
        if done.returncode != 0 or not made.exists():
            raise OSError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
        return made.read_bytes()


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, with mode 0600; on an OSError the old file stays."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as copy:
        try:
            copy.write(content)
            copy.flush()
            os.replace(copy.name, path)
        except OSError:
            Path(copy.name).unlink(missing_ok=True)
            raise


def _origin() -> bytes:
    """Return the bytes that, hashed with the compiler options, name a cached library.

    The compiler is included only if CXX names it, so a cached library runs without a compiler.
    """
    sources = [(_FOLDER / name).read_bytes() for name in _SOURCES]
    machine = (platform.machine(), *_processor(), *_system_libraries())
    words = [os.environ.get("CXX", ""), *_FLAGS, *machine]
    return b"\0".join([*sources, *(word.encode() for word in words)])


def _digest(origin: bytes, options: tuple[str, ...]) -> str:
    return hashlib.sha256(origin + "\0".join(("", *options)).encode()).hexdigest()[:32]


def _processor() -> Iterator[str]:
    """Yield the processor's features, since machines that share a home folder may differ."""
    yield platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            yield from sorted({line for line in lines if line.startswith(("flags", "Features"))})
    except OSError:
        return


def _system_libraries() -> Iterator[str]:
    """Yield versions of libc and libstdc++: a library does not load with older versions."""
    yield from platform.libc_ver()
    yield sysconfig.get_config_var("MULTIARCH") or ""
    yield platform.mac_ver()[0]
    try:
        ctypes.CDLL("libstdc++.so.6")
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            names = {os.path.basename(line.strip()) for line in lines}
    except OSError:
        return
    yield from sorted(name for name in names if name.startswith("libstdc++.so"))

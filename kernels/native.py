"""Compiles the C++ sources of this folder for the machine at hand, once, and loads them.

No torch headers, no build system: one call of the compiler, some seconds. The library is kept in
the user's cache under a name that says what it was made from, by whom and for which processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
# Headers and .cpp files; one call of the compiler makes one library of all .cpp files.
_SOURCES = ("attention_cpu.cpp", "tiles.h", "vectors.h", "threads.h")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
# The last resort is what the compiler takes for granted on this kind of machine.
_PROCESSORS = (("-march=native",), ("-mcpu=native",), ())
_SECONDS = 600
_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one warning, where they cannot be had."""
    return _found()[0]


def describe() -> str:
    """In words, what runs attention on this machine's CPU."""
    found, missing = _found()
    if found is None:
        return f"plain PyTorch, time and memory as the square of the tokens: {missing}"
    return f"C++ kernels, vectors of {8 * found.vector_bytes()} bits"


def _found() -> tuple[ctypes.CDLL | None, str]:
    with _lock:
        return _load_once()


@functools.lru_cache(maxsize=1)
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    try:
        return load(), ""
    except OSError as error:
        warnings.warn(
            "attention on the CPU runs in plain PyTorch, which takes time and memory as the "
            f"square of the tokens, for want of its C++ kernels: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, str(error)


def load(processor: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Compiles what has not been compiled before, and loads it.

    Args:
        processor: the compiler's options that say for which processor; None, the one at hand.

    Raises:
        OSError: there is no C++ compiler, or it failed; the message says what to do.
    """
    origin, folder = _origin(), _cache()
    kept = {
        options: None if folder is None else folder / f"kernels-{_digest(origin, options)}.so"
        for options in (_PROCESSORS if processor is None else (processor,))
    }
    for path in kept.values():
        if path is not None and _is_whole(path):
            return _opened(path)
    compiler = _compiler()
    print(
        f"dpflash: compiling CPU kernels ({shlex.join(compiler)}; once, some seconds)",
        file=sys.stderr,
    )
    complaint = ""
    for options, path in kept.items():
        with tempfile.TemporaryDirectory(prefix="dpflash-", ignore_cleanup_errors=True) as made_in:
            made = Path(made_in) / "kernels.so"
            complaint = _compile([*compiler, *_FLAGS, *options], made)
            if not complaint:
                return _opened(_keep(made, path))
    raise OSError(f"{shlex.join(compiler)}: {complaint}; let CXX name a C++ compiler that works")


def _is_whole(path: Path) -> bool:
    """Whether the file is as `_keep` wrote it: the loader of a damaged one may crash."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("problem_bytes", "vector_bytes"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def _compiler() -> list[str]:
    """The command of the C++ compiler: the environment's CXX, or the first that is installed."""
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


def _compile(command: list[str], made: Path) -> str:
    """What was wrong; nothing if the compiler made a library that loads."""
    sources = [str(_FOLDER / name) for name in _SOURCES if name.endswith(".cpp")]
    done = _ran([*command, *sources, "-o", str(made)])
    if done.returncode != 0 or not made.exists():
        return done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
    try:
        _opened(made)
    except OSError as error:
        return f"what it made does not load (is it a compiler of C alone, like gcc?): {error}"
    return ""


def _ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{shlex.join(command)} took more than {_SECONDS} s") from error


def _keep(made: Path, kept: Path | None) -> Path:
    """Moves the library into the cache, in one step; where that cannot be, it stays."""
    if kept is None:
        return made
    content = made.read_bytes()
    copy = None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as copy:
            copy.write(content + hashlib.sha256(content).digest())
        os.chmod(copy.name, 0o755)
        os.replace(copy.name, kept)
    except OSError:
        if copy is not None:
            Path(copy.name).unlink(missing_ok=True)
        return made
    return kept


def _cache() -> Path | None:
    """The user's own folder; None where the system names none, or one that moves with the work."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path(os.path.expanduser("~"), ".cache")
    return base / "dpflash" if base.is_absolute() else None


def _origin() -> bytes:
    """What a library depends on, but for the options.

    Not the compiler, unless CXX names it: where there is none, what was made before still runs.
    """
    sources = [(_FOLDER / name).read_bytes() for name in _SOURCES]
    words = [os.environ.get("CXX", ""), *_FLAGS, platform.machine(), *_processor()]
    return b"\0".join([*sources, *(word.encode() for word in words)])


def _digest(origin: bytes, options: tuple[str, ...]) -> str:
    return hashlib.sha256(origin + "\0".join(("", *options)).encode()).hexdigest()[:32]


def _processor() -> Iterator[str]:
    """What this processor can do: home folders are shared between machines that differ."""
    yield platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            yield from sorted({line for line in lines if line.startswith(("flags", "Features"))})
    except OSError:
        return

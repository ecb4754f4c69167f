"""Compiles the C++ sources of this folder for the machine at hand, once, and loads them.

No torch headers, no build system: one call of the compiler, some seconds. The library is kept in
the user's cache under a name that says what it was made from, by whom and for which processor and
system libraries. A kept library is code: it is loaded only where nobody but the user and root can
have written it.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import hashlib
import itertools
import json
import os
import platform
import shlex
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import cpp_compiler
from .owned_folder import OwnedFolder, UnsafePathError, temporary_bases, temporary_folder

_FOLDER = Path(__file__).resolve().parent
# Headers and .cpp files; one call of the compiler makes one library of all .cpp files.
_SOURCES = (
    *("attention_cpu.cpp", "tiles.h", "vectors.h", "threads.h"),
    *("grads_cpu.cpp", "chacha20.h", "normal_tail.h", "rounded_normal.h"),
)
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
# The last resort is what the compiler takes for granted on this kind of machine.
_PROCESSORS = (("-march=native",), ("-mcpu=native",), ())
_loads = itertools.count()
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
    """In words, what runs attention, exact sums and noise on this machine's CPU."""
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
            "attention on the CPU, exact sums and noise run in plain PyTorch, for want of their "
            "C++ kernels: attention takes time and memory as the square of the tokens, sums and "
            f"noise some ten times as long: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, str(error)


def load(processor: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """Compile the library unless that was done before, and load it.

    Args:
        processor: the compiler's options that say for which processor; None, the one at hand.

    Returns:
        The library; its `_name` says where it is kept, or why it is not.

    Raises:
        OSError: there is no C++ compiler, or it failed; the message says what to do.
    """
    origin = _origin()
    names = {
        options: f"kernels-{_digest(origin, options)}.so"
        for options in (_PROCESSORS if processor is None else (processor,))
    }
    try:
        folder = OwnedFolder(_cache(), make=True)
    except OSError as error:
        reason = f"the cache folder is not used: {error}"
        _warn_not_kept(reason)
        library = _compiled(names, None, "")
        library._name = f"compiled for this process: {reason}"
        return library
    found = _kept(folder, names.values(), warn=False)
    if found is not None:
        return found
    job = hashlib.sha256("".join(names.values()).encode()).hexdigest()[:32]
    with folder.locked(f"kernels-{job}.lock", "another process that compiles CPU kernels"):
        found = _kept(folder, names.values(), warn=True)  # compiled since by another process?
        if found is not None:
            return found
        return _compiled(names, folder, f"kernels-{job}.failed")


def _warn_not_kept(reason: str) -> None:
    warnings.warn(
        f"CPU kernels are compiled again in each process, since {reason}; to keep them, repair "
        "that or let XDG_CACHE_HOME name a folder that only you can write",
        RuntimeWarning,
        stacklevel=4,
    )


def _kept(folder: OwnedFolder, names: Iterable[str], *, warn: bool) -> ctypes.CDLL | None:
    """The first library that is kept, safe and whole, and loads."""
    for name in names:
        try:
            return _load_kept(folder, name)
        except UnsafePathError as error:
            if warn:
                message = f"CPU kernels are compiled again and replaced, since {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=4)
        except OSError:  # missing, damaged, or made for other system libraries
            continue
    return None


def _load_kept(folder: OwnedFolder, name: str) -> ctypes.CDLL:
    """Loads a kept library from the descriptor that was checked, or else a copy of it."""
    path = folder.path / name
    with open(folder.open(name), "rb") as file:
        content = file.read()
        if content[-32:] != hashlib.sha256(content[:-32]).digest():
            # The loader of a damaged library may crash.
            raise OSError(f"{path} is damaged")
        try:
            library = _dlopen(file.fileno(), path)
        except OSError as error:  # the file system may forbid to run what is on it (noexec)
            library = _load_elsewhere(content, [str(error)])
    library._name = str(path)
    return library


def _load_elsewhere(content: bytes, reasons: list[str]) -> ctypes.CDLL:
    """Loads a library from the first place that allows it: temporary folders, then memory.

    Raises:
        OSError: none does; the message has every place's reason, after those given.
    """
    for base in temporary_bases():
        try:
            with temporary_folder(base) as folder:
                folder.write("kernels.so", content)
                with open(folder.open("kernels.so"), "rb") as file:
                    return _dlopen(file.fileno(), folder.path / "kernels.so")
        except OSError as error:
            reasons.append(str(error))
    if hasattr(os, "memfd_create"):
        try:
            with open(os.memfd_create("dpflash-kernels"), "wb") as file:
                file.write(content)
                file.flush()
                return _dlopen(file.fileno(), Path("memory"))
        except OSError as error:
            reasons.append(str(error))
    raise OSError("; ".join(dict.fromkeys(reasons)))


def _dlopen(descriptor: int, path: Path) -> ctypes.CDLL:
    """Loads the file that is open; by its path where the system has no /proc/self/fd.

    By its path it is safe as well: nobody else can replace a file of an `OwnedFolder`.
    """
    open_files = "/proc/self/fd"
    folder, file = path.parent, path.name
    if os.path.exists(open_files):
        folder, file = Path(open_files), str(descriptor)
    # A name of its own: the loader takes a name that it had before for the library of that time.
    name = f"{folder}/{'./' * next(_loads)}{file}"
    try:
        library = ctypes.CDLL(name)
        for function in ("problem_bytes", "vector_bytes"):
            getattr(library, function).restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        reason = str(error).replace(name, "").strip(": ")
        raise OSError(f"{path} does not load: {reason}") from None
    return library


def _compiled(
    names: dict[tuple[str, ...], str], folder: OwnedFolder | None, record: str
) -> ctypes.CDLL:
    """Compiles for the first processor that the compiler knows, keeps the library and loads it.

    Args:
        names: the library's file name by the compiler's options for a processor.
        folder: where to keep it; None, nowhere.
        record: the file in `folder` that remembers a failure.

    Raises:
        OSError: no compiler, or it failed now, or it failed before and was not changed since.
    """
    compiler = cpp_compiler.find()
    identity = cpp_compiler.identity(compiler)
    if folder is not None:
        _raise_if_failed_before(folder, record, identity)
    print(
        f"dpflash: compiling CPU kernels ({shlex.join(compiler)}; once, some seconds)",
        file=sys.stderr,
    )
    complaint = ""
    for options, name in names.items():
        content, complaint = _compile([*compiler, *_FLAGS, *options], folder)
        if complaint:
            continue
        try:
            library = _keep(content, folder, name)
        except OSError as error:
            complaint = (
                f"what it made does not load (is it a compiler of C alone, like gcc?): {error}"
            )
            continue
        if folder is not None:
            folder.remove(record)
        return library
    reason = f"{shlex.join(compiler)}: {complaint}; let CXX name a C++ compiler that works"
    if folder is not None:
        reason = _remember_failure(folder, record, identity, reason)
    raise OSError(reason)


def _compile(command: list[str], folder: OwnedFolder | None) -> tuple[bytes, str]:
    """The library's content, or what the compiler complained about.

    Raises:
        OSError: there is no folder to compile in.
    """
    sources = [_FOLDER / name for name in _SOURCES if name.endswith(".cpp")]
    reasons = []
    for base in [*temporary_bases(), *([] if folder is None else [folder.path])]:
        try:
            with temporary_folder(base) as build:
                made = build.path / "kernels.so"
                complaint = cpp_compiler.compile_library(command, sources, made)
                return (b"", complaint) if complaint else (build.read(made.name), "")
        except OSError as error:
            reasons.append(str(error))
    raise OSError(f"no temporary folder to compile in, set TMPDIR: {'; '.join(reasons)}")


def _keep(content: bytes, folder: OwnedFolder | None, name: str) -> ctypes.CDLL:
    """Load the compiled library, from the cache if it can be kept there."""
    if folder is None:
        return _load_elsewhere(content, [])
    try:
        folder.write(name, content + hashlib.sha256(content).digest())
    except OSError as error:
        reason = f"{folder.path} cannot be written: {error}"
        _warn_not_kept(reason)
        library = _load_elsewhere(content, [])
        library._name = f"compiled for this process: {reason}"
        return library
    try:
        return _load_kept(folder, name)
    except OSError:
        folder.remove(name)
        raise


def _raise_if_failed_before(
    folder: OwnedFolder, record: str, identity: dict[str, str | int]
) -> None:
    try:
        failure = json.loads(folder.read(record))
        same = failure["compiler"] == identity
        reason = f"{failure['reason']} (on {failure['date']})"
    except (OSError, ValueError, TypeError, KeyError):
        return
    if same:
        raise OSError(_how_to_retry(reason, folder.path / record))


def _remember_failure(
    folder: OwnedFolder, record: str, identity: dict[str, str | int], reason: str
) -> str:
    """Spares later processes the time; returns the reason with how to try again."""
    date = datetime.date.today().isoformat()
    failure = {"reason": reason, "date": date, "compiler": identity}
    try:
        folder.write(record, json.dumps(failure, indent=2).encode())
    except OSError:
        return reason
    return _how_to_retry(reason, folder.path / record)


def _how_to_retry(reason: str, record: Path) -> str:
    return f"{reason}; dpflash tries again when the compiler changes, or when you delete {record}"


def _cache() -> Path:
    """The user's own folder.

    Raises:
        OSError: the system names none, or one that moves with the working directory.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path(os.path.expanduser("~"), ".cache")
    if not base.is_absolute():
        raise OSError("this user has no home folder")
    return base / "dpflash"


def _origin() -> bytes:
    """The inputs of a library, but for the options.

    Not the compiler, unless CXX names it: where there is none, what was made before still runs.
    """
    sources = [(_FOLDER / name).read_bytes() for name in _SOURCES]
    machine = (platform.machine(), *_processor(), *_system_libraries())
    words = [os.environ.get("CXX", ""), *_FLAGS, *machine]
    return b"\0".join([*sources, *(word.encode() for word in words)])


def _digest(origin: bytes, options: tuple[str, ...]) -> str:
    return hashlib.sha256(origin + "\0".join(("", *options)).encode()).hexdigest()[:32]


def _processor() -> Iterator[str]:
    """The processor's features: home folders are shared between machines that differ."""
    yield platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            yield from sorted({line for line in lines if line.startswith(("flags", "Features"))})
    except OSError:
        return


def _system_libraries() -> Iterator[str]:
    """Versions of libc and libstdc++: what was linked against newer ones does not load."""
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

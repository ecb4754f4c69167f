"""The C++ compiler of this machine: which one it is, and one call of it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 600
_SECONDS_FOR_VERSION = 20


def find() -> list[str]:
    """The command of the C++ compiler: the environment's CXX, or the first that is installed.

    Raises:
        OSError: there is none; the message says what to do.
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


def identity(command: list[str]) -> dict[str, str | int]:
    """The identity of the compiler: path, size, time and version of the command."""
    path = os.path.realpath(shutil.which(command[0]) or command[0])
    status = os.stat(path)
    try:
        version = _run([*command, "--version"], _SECONDS_FOR_VERSION).stdout
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    return {
        "command": shlex.join(command),
        "path": path,
        "modified": status.st_mtime_ns,
        "size": status.st_size,
        "version": version,
    }


def compile_library(command: list[str], sources: list[Path], made: Path) -> str:
    """Compile all sources to one library; return the error message, empty for success.

    Args:
        command: of the compiler, with its options.
        sources: the .cpp files.
        made: the library. The compiler's own temporary files are written beside it.
    """
    try:
        done = _run([*command, *map(str, sources), "-o", str(made)], _SECONDS, made.parent)
    except subprocess.TimeoutExpired:
        return f"it took more than {_SECONDS} s"
    except OSError as error:
        return f"it does not run: {error}"
    if done.returncode != 0 or not made.exists():
        return done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
    return ""


def _run(
    command: list[str], seconds: float, temporary: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        env=None if temporary is None else {**os.environ, "TMPDIR": str(temporary)},
        umask=0o077 if os.name == "posix" else -1,
    )

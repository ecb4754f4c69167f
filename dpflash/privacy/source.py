"""The code that a run is of, and what else a ledger keeps of a run besides its steps."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dpflash.accounting as accounting
import dpflash.kernels as kernels

from ..distributed.mesh import Ranks
from .ledger import today


@functools.cache
def source_digest() -> str:
    """Versions of torch and a hash of dpflash's own files, by which ranks compare their code.

    The hash is the same in a checkout and in an installed wheel of it.
    """
    folders = [("", str(Path(__file__).parents[1]))]
    folders += [("kernels/", folder) for folder in kernels.__path__]
    folders += [("accounting/", folder) for folder in accounting.__path__]
    files = {
        name + path.relative_to(folder).as_posix(): path
        for name, folder in folders
        for path in Path(folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    }
    found = hashlib.sha256()
    for name in sorted(name for name in files if not name.startswith("bench/")):
        content = files[name].read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return f"torch {torch.__version__}, dpflash {found.hexdigest()[:32]}"


def library_version() -> str:
    """The version of dpflash that is installed."""
    try:
        return version("dpflash")
    except PackageNotFoundError:
        return "not installed"


def about_run(name: str | None, data: str | None, is_seeded: bool, ranks: Ranks) -> dict[str, Any]:
    """What a ledger keeps of a run that begins today; on all ranks what the first one passes.

    Beside that it keeps the public size of the dataset and the bound.

    Args:
        name: of the run.
        data: name of the dataset.
        is_seeded: whether a seed gives its noise, which whoever knows the seed can subtract.
        ranks: of the run.
    """
    own = {
        "name": name,
        "day": today(),
        "version": library_version(),
        "source": source_digest(),
        "data": data,
        "seeded": "yes" if is_seeded else "no",
    }
    of_first = ranks.broadcast_from_first(json.dumps(own).encode(), "the ledger's run")
    about: dict[str, Any] = json.loads(of_first)
    return about

"""The digest of dpflash's code, and the facts about a run that a ledger records."""

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
    """Return torch's version and a hash of dpflash's files, by which ranks compare their code.

    The hash is the same in a checkout and in a wheel built from it.
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


def code_digest() -> str:
    """Return the part of `source_digest` that is the hash of dpflash's files."""
    return source_digest().split()[-1]


def library_version() -> str:
    """Return the version of dpflash that is installed."""
    try:
        return version("dpflash")
    except PackageNotFoundError:
        return "not installed"


def about_run(name: str | None, data: str | None, is_seeded: bool, ranks: Ranks) -> dict[str, Any]:
    """Return the facts that a ledger records about a run; all ranks return the first rank's facts.

    The caller adds the public size of the dataset and max_grad_norm.

    Args:
        name: name of the run.
        data: name of the dataset.
        is_seeded: whether the noise is derived from a seed, so that it can be subtracted.
        ranks: the ranks of the run.
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

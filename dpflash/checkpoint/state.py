"""Checkpoints in one file: written atomically, and checked against the run that reads them."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from ..privacy.ledger import Ledger
from ..refusal import PrivateRefusal, warn

FORMAT = "dpflash-checkpoint-4"
# The only key in the state_dict of an engine. The value is a string, since
# torch.distributed.checkpoint would store each number of a history separately.
_ENGINE = "dpflash-engine-1"
_UNITS = "entries of each unit"  # in a sampling scheme: a digest


def write(path: str | os.PathLike[str], state: dict[str, Any], *, format: str = FORMAT) -> None:
    """Write a checkpoint atomically: at any time the file is the old or the new checkpoint.

    Only the owner can read the file, since a run with a seed saves the run's key, from which the
    noise of the releases can be computed and subtracted.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        torch.save({"format": format, **state}, file)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that only its owner can read; after the with block it replaces `path`."""
    outer = sys.exc_info()[1]  # an exception that the caller handles
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        # If the disk is full, only the context of torch.save's RuntimeError says so.
        said = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(said, OSError) and said.errno is not None and said is not outer:
            raise OSError(said.errno, said.strerror, str(path)) from error
        raise


def read(path: str | os.PathLike[str], *, format: str = FORMAT) -> dict[str, Any]:
    """Read a checkpoint file; refuse a missing or damaged file, or one of another format."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path={str(path)!r}: no checkpoint there")
    try:
        # torch.load does not check the checksums that torch.save writes.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (  # OSError: torch seeks to before the start of a truncated file
        RuntimeError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        ValueError,
        LookupError,
        TypeError,
    ) as e:
        raise ValueError(
            f"path={str(path)!r}: not a readable checkpoint (damaged or truncated); use an "
            "earlier copy"
        ) from e
    found = state.get("format") if isinstance(state, dict) else None
    if isinstance(state, dict) and "privacy_accountant_state_dict" in state:
        raise ValueError(
            f"path={str(path)!r}: a checkpoint of Opacus. Load its model's state before "
            "make_private, and pass its accountant, PrivacyEngine(accountant=...)"
        )
    if not isinstance(found, str) or found != format:
        kind = f"of format {found!r}" if isinstance(found, str) else "another file"
        raise ValueError(
            f"path={str(path)!r}: {kind}, not a dpflash checkpoint of format {format!r}; pass a "
            "path that engine.save_checkpoint of this version wrote"
        )
    return state


def as_text(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the engine's own part of a checkpoint as JSON text under one key."""
    return {_ENGINE: json.dumps(state)}


def from_text(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's own part of a checkpoint from the result of `as_text`."""
    text = state_dict.get(_ENGINE) if isinstance(state_dict, Mapping) else None
    state = json.loads(text) if isinstance(text, str) else None
    if not isinstance(state, dict):
        raise ValueError(
            "state_dict is not that of an engine: pass the value that engine.state_dict() returned"
        )
    return state


def check_model(
    where: str,
    state: Mapping[str, Any],
    *,
    shapes: dict[str, tuple[int, ...] | None],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Refuse a checkpoint of another model or optimizer.

    `where` names the checkpoint in messages. `state["module"]` holds tensors or shapes. `shapes`
    holds the shapes of the model's tensors, by name.
    """
    where = f"{where}: the checkpoint does not fit"
    saved = shapes_of(state["module"])
    if shapes != saved:
        names = shapes.keys() | saved.keys()
        different = sorted(k for k in names if shapes.get(k, "") != saved.get(k, ""))
        raise ValueError(
            f"{where} the model: {', '.join(different[:5])} differ. Build the model as before"
        )
    groups = state["optimizer"]["param_groups"]
    own = [(len(g["params"]), set(o.defaults)) for o in optimizers for g in o.param_groups]
    if [size for size, _ in own] != [len(g["params"]) for g in groups]:
        raise ValueError(f"{where} the optimizer's parameter groups. Build it as before")
    # Schedulers add keys to the groups, so only the optimizer's own options are required.
    if any(not options <= set(g) for (_, options), g in zip(own, groups, strict=True)):
        raise ValueError(f"{where} the optimizer: its options differ. Build it as before")


def check_fits(
    where: str,
    state: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    mechanism: str,
    ledger: Ledger | None,
) -> None:
    """Raise if a checkpoint, or the engine's part of a checkpoint, does not match this run.

    `where` names the checkpoint in messages. `own` describes this run: "sampling" is the loader's
    sampling scheme, "clipping" is the argument clipping=, and "shares" holds the pair
    (name, bound / max_grad_norm) of each clipping group. `mechanism` is the accountant's name.
    """
    where = f"{where}: the checkpoint does not fit"
    if state["sampling"] != own["sampling"]:
        saved, now = (dict(scheme) for scheme in (state["sampling"], own["sampling"]))
        # The entries' units are private, and a digest of the units would allow to test guesses.
        units = saved.pop(_UNITS, None), now.pop(_UNITS, None)
        if None in units:
            saved["unit_of"], now["unit_of"] = (digest is not None for digest in units)
        elif saved == now:
            raise PrivateRefusal(
                f"{where} the data loader: the entries' privacy units have changed since the "
                "checkpoint. Call make_private with the same data and unit_of"
            ) from None
        raise ValueError(
            f"{where} the data loader: saved with {saved}, now {now}. Call "
            "make_private with the same data, units (unit_of) and batch size. To continue with "
            "other data, load the checkpoint with the old loader, call engine.detach(model), and "
            "call that engine's make_private with the new loader: the epsilons add up"
        )
    if state["spending"]["accountant"]["mechanism"] != mechanism:
        raise ValueError(
            f"{where} the accountant: saved with "
            f"{state['spending']['accountant']['mechanism']!r}, now {mechanism!r}. Build "
            "PrivacyEngine(accountant=...) as it was"
        )
    if state["clipping"] == own["clipping"]:
        _check_shares(where, state, own["shares"])
    releases = state["ledger_releases"]
    if ledger is None:
        if releases is None:
            return
        raise ValueError(
            f"{where} the engine: the checkpoint was written with a ledger, and the engine has "
            "none. Build PrivacyEngine(ledger=...) with that run's ledger"
        )
    if releases is None:
        raise ValueError(
            f"{where} the engine: the checkpoint was written without a ledger, and the engine has "
            "one, which lacks the checkpoint's steps. Build PrivacyEngine() without a ledger"
        )
    if ledger.digest(releases) not in (state["ledger_digest"], None):
        raise ValueError(
            f"{where} the ledger {ledger.path}: it is of another run. Use the checkpoint's ledger"
        )
    if ledger.releases < releases:
        raise ValueError(
            f"{where} the ledger {ledger.path}: the ledger has {ledger.releases} releases, the "
            f"checkpoint {releases}. Restore the missing lines, without which epsilon is unknown"
        )


def _check_shares(
    where: str, state: Mapping[str, Any], shares: Sequence[tuple[str, float]]
) -> None:
    """Raise if the clipping groups' bounds have other ratios than in the checkpoint."""
    saved = state["shares"]
    if len(saved) != len(shares):
        raise ValueError(
            f"{where} the clipping groups: saved with {len(saved)}, now {len(shares)}. Train the "
            "same parameters with the same clipping"
        )
    bound = state["max_grad_norm"]
    different = [
        f"{name!r} was {before * bound:.6g} and would be {now * bound:.6g}"
        for (_, before), (name, now) in zip(saved, shares, strict=True)
        if not math.isclose(before, now, rel_tol=1e-9)
    ]
    if different:
        raise ValueError(
            f"{where} the bounds of the clipping groups: with max_grad_norm={bound!r} for all "
            f"groups together, {', '.join(different)}. Pass make_private the max_grad_norm of "
            "the checkpoint's run"
        )


def shapes_of(values: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each value that is a tensor or a shape, and None for other values."""
    return {
        k: tuple(v.shape) if isinstance(v, torch.Tensor) else v if isinstance(v, tuple) else None
        for k, v in values.items()
    }


def warn_of_changes(
    state: Mapping[str, Any],
    *,
    restored: Mapping[str, object],
    unchanged: Mapping[str, object],
) -> None:
    """Warn if arguments of make_private differ from the arguments in the checkpoint's run.

    Values in `restored` are replaced by the checkpoint's values; values in `unchanged` stay.
    """
    for name, value in restored.items():
        if value != state[name]:
            warn(
                f"{name} is {state[name]!r} from the checkpoint, not {value!r}; set "
                f"optimizer.{name} to change it",
            )
    for name, value in unchanged.items():
        if value != state[name]:
            warn(
                f"{name} was {state[name]!r} in the checkpoint's run and is now {value!r}, the "
                "value passed to make_private",
            )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse values that could be written to a checkpoint but not read back."""
    for name, value in extra.items():
        buffer = io.BytesIO()
        try:
            torch.save({name: value}, buffer)
            buffer.seek(0)
            torch.load(buffer, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"extra[{name!r}] is a {type(value).__module__}.{type(value).__qualname__}: "
                "expected plain numbers, strings, tensors, or lists and dicts of them; convert "
                "it, for example with float() or str()"
            ) from error

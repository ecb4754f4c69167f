"""Checkpoints of several ranks: a folder into which each rank writes its part.

    path/current              the name of the current sub-folder, replaced atomically
    path/state-<n>-<token>/   tensors, as torch.distributed.checkpoint writes them, and the file
                              ENGINE with all other state

Any number of ranks can read a checkpoint, whether it is a file or a folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.collectives import rank_in, world_size
from ..distributed.fsdp import as_grad, is_sharded, local_rows
from ..distributed.mesh import Ranks
from ..privacy.keys import place_of
from ..privacy.ledger_file import flush_folder
from ..verification.contents import checksums
from . import state as checkpoint

FORMAT = "dpflash-checkpoint-folder-1"
POINTER = "current"
ENGINE = "engine.pt"
_STATE_FOLDER = re.compile(r"state-\d+-[0-9a-f]{16}")


def save(
    path: str | os.PathLike[str],
    own_state: Callable[[], dict[str, Any]],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    as_folder: bool,
) -> None:
    """Write a checkpoint with the first rank's engine state; all ranks call this together.

    With `as_folder` each rank writes its part into a folder, else this process writes one file.
    If any rank raises an error, an earlier checkpoint stays unchanged.
    """
    path = Path(path)
    if not as_folder:
        if path.is_dir():
            raise ValueError(
                f"path={str(path)!r} is a folder, and a single process writes its checkpoint "
                "as one file; pass another path"
            )
        tensors = {k: _whole(v) for k, v in _inner(model).state_dict().items()}
        optimized = optimizer.state_dict()
        optimized["state"] = {
            i: {k: _whole(v) for k, v in values.items()}
            for i, values in optimized["state"].items()
        }
        checkpoint.write(path, {"module": tensors, "optimizer": optimized, **own_state()})
        return
    call = f"save_checkpoint(path={str(path)!r})"
    # Compare first, since ranks with different arguments would wait for different exchanges.
    state = ranks.run_on_all(call, own_state)
    found = checksums(p for p in model.parameters() if not is_sharded(p))
    same = {"releases": state["releases"], "what the parameters have become": found}
    ranks.agree(call, {"path": str(path), **same})
    name = ranks.run_on_first(call, lambda: _begin(path, state["releases"])).decode()
    try:
        _fill(path / name, state, call, model=model, optimizer=optimizer, ranks=ranks)
        ranks.run_on_first(call, lambda: _point_to(path, name))
    except BaseException:
        if ranks.is_first and _current(path) != name:
            shutil.rmtree(path / name, ignore_errors=True)
        raise
    if ranks.is_first:
        # The checkpoint is complete; the next save removes old folders that remain.
        with suppress(OSError):
            _remove_others(path, name)


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    check: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Read a checkpoint, file or folder, without changing anything; all ranks call this together.

    Return the engine's state. The entry "module" is for `put`, and the entry "optimizer" for the
    optimizer's load_state_dict; they hold this rank's part of each sharded parameter. `check` must
    raise ValueError if a state does not match. A missing, damaged or mismatched checkpoint raises
    FileNotFoundError or ValueError; ranks that did not find the fault raise RankError.
    """
    path = Path(path)
    call = f"load_checkpoint(path={str(path)!r})"
    # The first rank finds the current sub-folder, since ranks could otherwise read different
    # sub-folders while another job saves.
    name = ranks.run_on_first(call, lambda: _find(path)).decode()

    def read() -> dict[str, Any]:
        # Read the sub-folder by name, since the pointer may have changed meanwhile.
        state = _read_engine(path, name)
        check(state)
        if name:
            _read_tensors(path, name, state, model, optimizer, ranks)
        else:
            _take_parts(state, model, optimizer)
        return state

    state = ranks.run_on_all(call, read)
    ranks.agree(call, place_of(state))
    return state


def read_plain(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the engine's state and `extra` of a checkpoint, file or folder, without a model."""
    path = Path(path)
    return _read_engine(path, _find(path).decode())


def put(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy the tensors that `load` read into the model."""
    _inner(model).load_state_dict(tensors)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return the full shapes of the model's checkpointed tensors, by names without wrappers."""
    return checkpoint.shapes_of(_inner(model).state_dict())


# Writing a folder


def _begin(path: Path, releases: int) -> bytes:
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"path={str(path)!r} is a file, and an engine with a mesh writes its checkpoint as a "
            "folder; pass another path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    # Remove the remains of an unfinished save, which could fill the disk.
    _remove_others(path, _current(path))
    name = f"state-{releases}-{secrets.token_hex(8)}"
    (path / name).mkdir(mode=0o700)
    return name.encode()


def _fill(
    folder: Path,
    state: dict[str, Any],
    call: str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    def split() -> tuple[dict[str, Tensor], dict[str, Any]]:
        if not folder.is_dir():
            raise ValueError(
                f"path={str(folder.parent)!r}: this rank does not see the folder that the first "
                "rank made there; pass a path on a file system that all ranks share"
            )
        return _split(model, optimizer)

    tensors, plain = ranks.run_on_all(call, split)
    # Import here, since the import is slow and few runs need it.
    from . import tensor_io

    names = tensor_io.write(folder, tensors, call, ranks.everyone)
    own = ranks.run_on_all(call, lambda: _digests(folder, names, ranks))
    files = {name: digest for part in ranks.gather(own, call) for name, digest in part.items()}

    def finish() -> bytes:
        whole = {**plain, **state, "files": files}
        checkpoint.write(folder / ENGINE, whole, format=FORMAT)
        flush_folder(folder)
        return b""

    ranks.run_on_first(call, finish)


def _point_to(path: Path, name: str) -> bytes:
    # Flush the sub-folder's entries to the disk before the pointer to it is written.
    flush_folder(path)
    with checkpoint.replaced(path / POINTER) as file:
        file.write(f"{name}\n".encode())
    flush_folder(path)
    return b""


def _remove_others(path: Path, name: str | None) -> None:
    for child in path.iterdir():
        if _STATE_FOLDER.fullmatch(child.name) and child.name != name:
            shutil.rmtree(child, ignore_errors=True)
        elif child.name.startswith(POINTER) and child.suffix == ".tmp":
            child.unlink(missing_ok=True)


def _split(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    module: dict[str, Any] = {}
    for name, value in _inner(model).state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"module/{name}"] = value
            module[name] = tuple(value.shape)
        else:
            module[name] = {"value": value}
    names = _names(model, optimizer)
    saved = optimizer.state_dict()
    values: dict[str, dict[str, Any]] = {}
    specs: dict[str, dict[str, Any]] = {}
    for index, entries in saved["state"].items():
        name = names[index]
        values[name], specs[name] = {}, {}
        for key, value in entries.items():
            # Scalars, such as step counts, are equal on all ranks, perhaps on another device.
            if isinstance(value, Tensor) and (value.ndim or is_sharded(value)):
                tensors[f"optimizer/{name}/{key}"] = value
                specs[name][key] = (tuple(value.shape), value.dtype)
            else:
                values[name][key] = value
    plain = {
        "module": module,
        "optimizer": {
            "param_groups": saved["param_groups"],
            "names": names,
            "values": values,
            "tensors": specs,
        },
    }
    return tensors, plain


# Reading


def _find(path: Path) -> bytes:
    if not path.is_dir():
        return b""
    try:
        text = (path / POINTER).read_text()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"path={str(path)!r} is a folder without a file {POINTER!r}, so no checkpoint was "
            "finished there"
        ) from None
    except UnicodeDecodeError:
        text = ""
    name = text.removesuffix("\n")
    if not _STATE_FOLDER.fullmatch(name):
        raise ValueError(
            f"path={str(path)!r}: the file {POINTER!r} in it is damaged and names no checkpoint; "
            "use an earlier copy"
        )
    if not (path / name / ENGINE).is_file():
        raise ValueError(
            f"path={str(path)!r}: the file {POINTER!r} in it names {name!r}, which is missing or "
            "incomplete; use an earlier copy"
        )
    return name.encode()


def _current(path: Path) -> str | None:
    try:
        return _find(path).decode() or None
    except (OSError, ValueError):
        return None


def _read_engine(path: Path, name: str) -> dict[str, Any]:
    """Read a checkpoint's file, or the file ENGINE in its sub-folder `name`."""
    return checkpoint.read(path / name / ENGINE, format=FORMAT) if name else checkpoint.read(path)


def _take_parts(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace full tensors, as read from a file, by this rank's parts of the tensors."""
    own = _inner(model).state_dict()
    state["module"] = {k: _part(v, own[k]) for k, v in state["module"].items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state["optimizer"]["state"] = {
        i: {k: _part(v, parameters[i]) for k, v in values.items()}
        for i, values in state["optimizer"]["state"].items()
    }


def _read_tensors(
    path: Path,
    name: str,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    """Read the folder's tensors into `state`, in place of their shapes and dtypes."""
    folder = path / name
    saved, names = state["optimizer"], _names(model, optimizer)
    if names != saved["names"]:
        raise ValueError(
            f"path={str(path)!r}: the checkpoint does not fit the optimizer, which has other "
            "parameters or another order of parameters. Build the optimizer as in that run"
        )
    for file, digest in _digests(folder, list(state["files"]), ranks).items():
        if digest != state["files"][file]:
            raise ValueError(
                f"path={str(path)!r}: the file {name}/{file} is damaged (its digest is wrong); "
                "use an earlier copy"
            )
    own = _inner(model).state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Read into new tensors: a failed read would leave the model's tensors partly overwritten.
    targets: dict[str, Any] = {
        f"module/{k}": torch.empty_like(own[k], device="cpu", requires_grad=False)
        for k, shape in state["module"].items()
        if not isinstance(shape, dict)
    }
    for index, parameter_name in enumerate(names):
        for key, (shape, dtype) in saved["tensors"].get(parameter_name, {}).items():
            targets[f"optimizer/{parameter_name}/{key}"] = _target(parameters[index], shape, dtype)
    from . import tensor_io

    tensor_io.read_(folder, targets, frozenset(state["files"]))
    state["module"] = {
        k: shape["value"] if isinstance(shape, dict) else targets[f"module/{k}"]
        for k, shape in state["module"].items()
    }
    state["optimizer"] = {
        "param_groups": saved["param_groups"],
        "state": {
            index: {
                **saved["values"][n],
                **{k: targets[f"optimizer/{n}/{k}"] for k in saved["tensors"][n]},
            }
            for index, n in enumerate(names)
            if n in saved["values"]
        },
    }


def _target(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor into which the optimizer's state of a parameter is read."""
    if is_sharded(parameter) and tuple(shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def _part(value: Any, own: Any) -> Any:
    """Return this rank's part of a full tensor, sharded like `own`; keep other values whole."""
    if not isinstance(value, Tensor) or not isinstance(own, Tensor) or not is_sharded(own):
        return value
    if value.shape != own.shape:
        return value
    begin, end = local_rows(own)
    return as_grad(value[begin:end].clone(), own)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, Tensor) and is_sharded(value) else value


# Names


def _inner(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {p: n for n, p in _inner(model).named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def _digests(folder: Path, names: list[str], ranks: Ranks) -> dict[str, str]:
    found = {}
    for name in names[rank_in(ranks.everyone) :: world_size(ranks.everyone)]:
        digest = hashlib.blake2b(digest_size=16)
        with open(folder / name, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        found[name] = digest.hexdigest()
    return found

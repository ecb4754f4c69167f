"""`dpflash check`: checks that a model and its loss keep the samples of a batch independent."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

_SHAPE = (
    "expected package.module:function or path/file.py:function, where function() returns "
    "(model, batch, loss_fn) and loss_fn(model, batch) the losses [B], or a scalar with "
    "--loss-reduction"
)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash check`."""
    parser.description = (
        "Find modules and losses that make the samples of a batch depend on each other (batch "
        "statistics, a loss divided by the number of the batch's tokens), layers that cannot be "
        "trained privately, and parameters without a gradient. For each finding the remedy is "
        "printed. This is a test on one batch, not a proof. Exit status: 0 if no error was found, "
        "1 if one was found, 2 if nothing could be checked."
    )
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="package.module:function or path/file.py:function. function() returns "
        "(model, batch, loss_fn); the batch has two or more samples (4 to 8 are enough)",
    )
    parser.add_argument(
        "--loss-reduction",
        choices=("mean", "sum"),
        help="pass it if loss_fn returns a scalar, the mean or the sum over samples, as for "
        "make_private(loss_reduction=...). The check tests that it is",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ..check import run_check

    result = _call(args.target, _function(args.target))
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(f"{args.target}: it returned {type(result).__name__}; {_SHAPE}")
    report = run_check(*result, loss_reduction=args.loss_reduction)
    print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2) if args.json else report)
    return 0 if report.ok else 1


def _function(target: str) -> Callable[[], Any]:
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ValueError(f"{target!r}: {_SHAPE}")
    module = _call(target, lambda: _module(where))
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = f"it has {', '.join(known[:8])}" if known else "it has no public function"
        raise ValueError(f"{target}: {where} has no function {name!r}; {hint}")
    found: Callable[[], Any] = function
    return found


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"{where}: there is no such file; check the path")
    # Like `python file.py`, so that the file can import other files of its folder.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _call(target: str, function: Callable[[], Any]) -> Any:
    """Call the user's code; if it fails, print the traceback and raise a one-line ValueError."""
    try:
        return function()
    except (ValueError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise ValueError(f"{target}: {type(error).__name__}: {error}") from error

"""The command line: one program, one subcommand per file of this package."""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from dpflash import __version__

from ..refusal import PrivateRefusal
from ._parser import Names, Parser, as_typed

__all__ = ["main"]

_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
_BROKEN_PIPE = 141  # what a shell reports for a program that writes to a closed pipe
# Subcommand -> (file of this package that implements it, its line in `dpflash --help`).
_COMMANDS = {
    "train": ("train", "train a language model or a classifier on your files, privately"),
    "evaluate": ("evaluate", "compute the loss or the accuracy of a trained model on documents"),
    "generate": ("generate", "continue a text with a trained model"),
    "export": ("export", "write a trained model and its model card for release"),
    "estimate": ("estimate", "estimate the memory and the time of a training step"),
    "epsilon": ("epsilon", "compute epsilon from the noise, the sampling and the steps of a run"),
    "calibrate": (
        "epsilon",
        "compute the noise, the steps or the sample rate that meet an epsilon",
    ),
    "budget": ("budget", "compute the total epsilon of the runs in a ledger"),
    "ledger": ("ledger", "verify, sign, report or correct a ledger"),
    "check": ("check", "find modules and losses that cannot be trained privately"),
    "audit": (
        "audit",
        "attack private training, and compare the leakage with the claimed epsilon",
    ),
    "doctor": ("doctor", "report the hardware, the libraries and the kernels that dpflash uses"),
    "bench": ("bench", "run benchmarks on this machine"),
}


def _build_parser(command: str | None) -> Parser:
    parser = Parser(
        prog="dpflash", description="Differentially private training of long-context transformers."
    )
    parser.add_argument("--version", action="version", version=f"dpflash {__version__}")
    names = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, action=Names)
    for name, (file, about) in _COMMANDS.items():
        subparser = names.add_parser(name, help=about)
        if name == command:
            module = import_module(f"{__name__}.{file}")
            getattr(module, f"add_{name}_arguments")(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status.

    The status is 2 for an invalid argument or file, 130 after Ctrl-C, 141 if the reader of a pipe
    has ended, else the subcommand's status.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _build_parser(argv[0] if argv else None)
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # such as in `dpflash check FILE.py:FUNCTION | head`
        # Python flushes stdout again at exit, which must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (ValueError, OSError, PrivateRefusal) as error:
        text = as_typed(" ".join(str(error).split()), parser)
        print(f"dpflash: error: {text}", file=sys.stderr)
        if isinstance(error, PrivateRefusal) and error.details:
            print(f"dpflash: private, do not publish: {error.details}", file=sys.stderr)
        return 2
    return status


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"dpflash: warning: {message}", file=sys.stderr)

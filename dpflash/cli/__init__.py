"""The command line: one program, one subcommand per file of this package."""

import argparse
import sys
from collections.abc import Sequence

from dpflash import __version__

__all__ = ["main"]

_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


def _build_parser() -> argparse.ArgumentParser:
    from .bench import add_bench_parser
    from .budget import add_budget_parser
    from .check import add_check_parser
    from .doctor import add_doctor_parser
    from .privacy import add_calibrate_parser, add_epsilon_parser
    from .train import add_train_parser

    parser = argparse.ArgumentParser(
        prog="dpflash", description="Differentially private training of long-context transformers."
    )
    parser.add_argument("--version", action="version", version=f"dpflash {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_train_parser(subparsers)
    add_epsilon_parser(subparsers)
    add_calibrate_parser(subparsers)
    add_budget_parser(subparsers)
    add_check_parser(subparsers)
    add_doctor_parser(subparsers)
    add_bench_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the words after the program's name; by default those of this process.

    Returns:
        The exit status: the subcommand's own, 2 for a refused argument or file, 130 after Ctrl-C.
    """
    args = _build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"dpflash: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return status

"""`dpflash epsilon` and `dpflash calibrate`: from noise to epsilon, and from epsilon to noise."""

from __future__ import annotations

import argparse
import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from dpflash.accounting import create_accountant, get_noise_multiplier

__all__ = ["add_calibrate_parser", "add_epsilon_parser"]

_LABELS = {
    "noise_multiplier": "noise multiplier",
    "epsilon": "epsilon (upper bound)",
    "epsilon_lower": "epsilon (lower bound)",
    "target_epsilon": "target epsilon",
    "delta": "delta",
    "sample_rate": "sample rate",
    "steps": "steps",
    "accountant": "accountant",
    "sampler": "sampler",
    "neighboring_relation": "neighboring relation",
}
_ROUNDING = {"epsilon": ROUND_CEILING, "epsilon_lower": ROUND_FLOOR}
_SHOWN_DIGITS = 6
_ASSUMPTIONS = (
    "It holds for Poisson sampling (each sample enters each batch independently) and for data "
    "sets that differ by one added or removed sample. A shuffled loader has another epsilon."
)


def add_epsilon_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `epsilon` to the subcommands of `dpflash`."""
    parser = subparsers.add_parser(
        "epsilon",
        help="say what epsilon a run with this noise has",
        description=f"Say what epsilon a run with this noise has. {_ASSUMPTIONS}",
    )
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        required=True,
        metavar="S",
        help="standard deviation of the noise over the clipping bound, e.g. 1.1",
    )
    _add_run_arguments(parser)
    parser.set_defaults(run=_run_epsilon)


def add_calibrate_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `calibrate` to the subcommands of `dpflash`."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find the least noise that keeps a run within an epsilon",
        description=f"Find the least noise that keeps a run within an epsilon. {_ASSUMPTIONS}",
    )
    parser.add_argument(
        "--target-epsilon",
        type=float,
        required=True,
        metavar="E",
        help="epsilon that the run may have at its end, e.g. 3",
    )
    _add_run_arguments(parser)
    parser.set_defaults(run=_run_calibrate)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What both subcommands ask about the run."""
    parser.add_argument(
        "--sample-rate",
        type=float,
        required=True,
        metavar="Q",
        help="chance of one sample to be in one batch: expected batch size / data set size",
    )
    parser.add_argument(
        "--steps", type=int, required=True, metavar="N", help="number of optimizer steps"
    )
    parser.add_argument(
        "--delta",
        type=float,
        required=True,
        metavar="D",
        help="delta of the guarantee, well below 1 / data set size, e.g. 1e-6",
    )
    parser.add_argument(
        "--accountant",
        default="contour",
        metavar="A",
        help="name of the accountant (default: contour)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead; null stands for no finite or no known value",
    )


def _run_epsilon(args: argparse.Namespace) -> int:
    _print(_report(args, args.noise_multiplier), args.json)
    return 0


def _run_calibrate(args: argparse.Namespace) -> int:
    noise_multiplier = get_noise_multiplier(
        target_epsilon=args.target_epsilon,
        target_delta=args.delta,
        sample_rate=args.sample_rate,
        steps=args.steps,
        accountant=args.accountant,
    )
    # A number that can be typed again, and still enough noise.
    noise_multiplier = float(_rounded(noise_multiplier, ROUND_CEILING))
    report = _report(args, noise_multiplier)
    _print({**report, "target_epsilon": args.target_epsilon}, args.json)
    return 0


def _report(args: argparse.Namespace, noise_multiplier: float) -> dict[str, Any]:
    """The guarantee of the run, with all that it rests on."""
    accountant = create_accountant(args.accountant)
    accountant.history = [(noise_multiplier, args.sample_rate, args.steps)]
    interval = accountant.get_epsilon(args.delta, interval=True)
    return {
        "epsilon": interval.upper,
        "epsilon_lower": interval.lower,
        "delta": args.delta,
        "noise_multiplier": noise_multiplier,
        "sample_rate": args.sample_rate,
        "steps": args.steps,
        "accountant": accountant.mechanism(),
        "sampler": "poisson",
        "neighboring_relation": "add_remove",
    }


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        finite = {key: None if value == math.inf else value for key, value in report.items()}
        print(json.dumps(finite, indent=2))
        return
    width = max(map(len, _LABELS.values()))
    for key, label in _LABELS.items():
        value = report.get(key)
        if value is not None:
            shown = _rounded(value, _ROUNDING[key]) if key in _ROUNDING else str(value)
            print(f"{label:<{width}}  {shown}")


def _rounded(value: float, rounding: str) -> str:
    """The value in some digits, its error on the side that is asked for."""
    return str(Context(prec=_SHOWN_DIGITS, rounding=rounding).create_decimal_from_float(value))

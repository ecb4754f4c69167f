"""`dpflash calibrate --for quality`: compares the error of several runs at one epsilon."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any

from tqdm import tqdm

from dpflash._validate import one_of, optional, positive, positive_int, probability
from dpflash.accounting import create_accountant, epochs_to_steps
from dpflash.accounting.events import ADD_REMOVE
from dpflash.noise import BandsOfRun, compare_bands

from ._figures import check_plot, draw_errors, save
from ._parser import add_options
from ._runs import CYCLIC_POISSON, POISSON, accounting
from ._tables import as_json, rounded_up, table

QUALITY = "quality"

_OPTIONS = {
    "--for WHAT": f"{QUALITY}: compare the error of runs on --num-samples samples: for several "
    "--bands (default: powers of two; 1 is independent noise), --batch-size (one size adds its "
    "half and double) and --epochs. --plot draws the errors",
    "--parameters N": f"with --for {QUALITY}: number of trained parameters, to print the bytes of "
    "the states; needed for --max-memory",
    "--max-memory N": f"with --for {QUALITY}: maximum number of bytes of the states of banded "
    "noise, (bands - 1) x 8 for each parameter",
}
_NEEDED = {
    "num_samples": "--num-samples M",
    "batch_size": "--batch-size B",
    "epochs": "--epochs X",
}
_UNUSED = ("noise_multiplier", "sample_rate", "max_batch_size", "examples_per_unit", "steps")
_COLUMNS = {
    "batch_size": "batch size",
    "epochs": "epochs",
    "steps": "steps",
    "bands": "bands",
    "noise_multiplier": "noise multiplier",
    "scaled_error": "error",
    "over_independent": "over independent",
    "state_bytes": "bytes of states",
}
_NOTE = """\
error: the standard deviation that the noise causes in an element of a parameter (root mean square
  over the steps), divided by the clipping bound, if the learning rates of all steps add up to 1.
  That a model learns less in fewer and larger steps, or more in more epochs, is not counted.
over independent: the error divided by that of independent noise with the same batch size and
  epochs."""


def add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--for quality`."""
    add_options(parser, _OPTIONS)


def run_quality(args: argparse.Namespace) -> int:
    """Compare the runs that the arguments describe, and print them."""
    one_of(**{"for": (getattr(args, "for"), (QUALITY,))})
    _check(args)
    sizes = _batch_sizes(args)
    found: list[BandsOfRun] = []
    with accounting():
        runs = list(product(sizes, args.epochs))
        # The bar appears only in a terminal, and only if the search takes more than 2 seconds.
        for size, epochs in tqdm(runs, unit="run", delay=2, disable=None, leave=False):
            found += compare_bands(
                num_samples=args.num_samples,
                batch_size=size,
                epochs=epochs,
                target_epsilon=args.target_epsilon,
                target_delta=args.delta,
                bands=_fitting_bands(args, size, epochs),
                parameters=args.parameters,
                max_memory=args.max_memory,
                relation=args.neighboring_relation or ADD_REMOVE,
                accountant=args.accountant,
            )
    left_out = set(args.bands or ()) - {run.noise.bands for run in found}
    if left_out:
        print(
            f"dpflash: warning: bands={sorted(left_out)!r}: left out, since each run would have "
            "fewer steps than bands, parts smaller than a batch, or states above --max-memory",
            file=sys.stderr,
        )
    found.sort(key=lambda run: (run.batch_size, run.epochs, run.noise.bands))
    best = min(found, key=lambda run: run.scaled_error)
    if args.plot is not None:
        save(draw_errors(found, best), args.plot)
    rows = [_row(args, run, found) for run in found]
    if args.json:
        print(as_json(_report(args, rows, rows[found.index(best)])))
    else:
        print(_text(rows, found.index(best)))
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in _UNUSED:
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"{name}={value!r}: --for {QUALITY} does not use it; drop it")
    if args.sampler != POISSON:
        raise ValueError(
            f"sampler={args.sampler!r}: --for {QUALITY} compares poisson, with one band, and "
            "cyclic_poisson; drop it"
        )
    for name, usage in _NEEDED.items():
        if getattr(args, name) is None:
            raise ValueError(f"{name}=None: --for {QUALITY} needs it; pass {usage}")
    probability(delta=args.delta)
    positive_int(num_samples=args.num_samples)
    optional(positive_int, parameters=args.parameters, max_memory=args.max_memory)
    for name in ("batch_size", "bands"):
        for value in getattr(args, name) or ():
            positive_int(**{name: value})
    for value in args.epochs:
        positive(epochs=value)
    create_accountant(args.accountant)
    if args.plot is not None:
        check_plot(args.plot, args.accountant)


def _batch_sizes(args: argparse.Namespace) -> list[int]:
    """Return the batch sizes to compare; a single size is compared with its half and double."""
    sizes = sorted(set(args.batch_size))
    if len(args.batch_size) > 1:
        return sizes
    (size,) = sizes
    others = {max(1, size // 2), size} | ({2 * size} if 2 * size <= args.num_samples else set())
    return sorted(others)


def _fitting_bands(args: argparse.Namespace, size: int, epochs: float) -> list[int] | None:
    """Return 1 and the values of --bands that a run allows; None (powers of two) without it."""
    if args.bands is None:
        return None
    batches = max(1, -(-args.num_samples // size))
    steps = epochs_to_steps(epochs=epochs, sample_rate=1 / batches)
    most = min(args.num_samples // size, steps)
    return sorted({1, *(bands for bands in args.bands if bands <= most)})


def _row(args: argparse.Namespace, run: BandsOfRun, found: list[BandsOfRun]) -> dict[str, Any]:
    independent = next(
        other
        for other in found
        if (other.batch_size, other.epochs, other.noise.bands) == (run.batch_size, run.epochs, 1)
    )
    return {
        "batch_size": run.batch_size,
        "epochs": run.epochs,
        "steps": run.steps,
        "bands": run.noise.bands,
        "sampler": POISSON if run.noise.bands == 1 else CYCLIC_POISSON,
        "noise_multiplier": run.noise_multiplier,
        "expected_error": run.expected_error,
        "scaled_error": run.scaled_error,
        "over_independent": run.expected_error / independent.expected_error,
        "state_bytes": None if args.parameters is None else run.noise.state_bytes(args.parameters),
    }


def _report(
    args: argparse.Namespace, rows: list[dict[str, Any]], best: dict[str, Any]
) -> dict[str, Any]:
    return {
        "target_epsilon": args.target_epsilon,
        "delta": args.delta,
        "num_samples": args.num_samples,
        "parameters": args.parameters,
        "max_memory": args.max_memory,
        "accountant": args.accountant,
        "neighboring_relation": args.neighboring_relation or ADD_REMOVE,
        "best": best,
        "runs": rows,
    }


def _text(rows: list[dict[str, Any]], best: int) -> str:
    keys = [key for key in _COLUMNS if rows[best][key] is not None]
    cells = [
        ["best" * (number == best), *(_shown(key, row[key]) for key in keys)]
        for number, row in enumerate(rows)
    ]
    return f"{table(cells, ['', *(_COLUMNS[key] for key in keys)])}\n{_NOTE}"


def _shown(key: str, value: float) -> str:
    if key == "noise_multiplier":
        return rounded_up(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""`dpflash epsilon` computes a run's epsilon; `dpflash calibrate` finds a run for an epsilon."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from typing import Any

from dpflash._validate import finite, non_negative, optional, positive
from dpflash.accounting import Accountant, get_sample_rate, noise_multiplier_for, remaining_steps

from ._figures import check_plot, draw, epsilon_curve, save, tradeoff_of
from ._parser import add_options
from ._quality import QUALITY, add_quality_arguments, run_quality
from ._runs import ALLOCATION, OF_RUN, POISSON, Run, accounting, add_run_arguments, run_of
from ._tables import (
    add_output_arguments,
    as_json,
    described,
    rounded_down,
    rounded_up,
    table,
    upper_end,
)

_ASSUMPTIONS = (
    "By default batches are sampled by Poisson sampling (each sample enters each batch "
    "independently), and neighboring datasets differ in one added or removed sample. For other "
    "runs pass --sampler, --neighboring-relation or --examples-per-unit: a shuffled loader, for "
    "example, has another epsilon."
)
_NOISE = {
    "--noise-multiplier S": "standard deviation of the noise over the clipping bound, e.g. 1.1"
}


# Options for which `calibrate --for quality` compares several values.
_SEVERAL = {
    "--batch-size B": "--batch-size B...",
    "--bands N": "--bands N...",
    "--epochs N": "--epochs X...",
}


def add_epsilon_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash epsilon`."""
    parser.description = (
        f"Compute the epsilon of a run from its noise, sampling and steps. {_ASSUMPTIONS}"
    )
    add_options(parser, _NOISE, required=["--noise-multiplier"])
    add_run_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=_run_epsilon)


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash calibrate`."""
    parser.description = (
        "Compute the least noise, the largest number of steps or the largest sample rate with "
        "which a run meets --target-epsilon: pass two of --noise-multiplier, --steps and "
        f"--sample-rate, and the third is computed. {_ASSUMPTIONS} With --for quality, compute "
        "the number of bands, the batch size and the epochs with the least error at the epsilon."
    )
    target = {"--target-epsilon E": "maximum epsilon at the end of the run, e.g. 3"}
    add_options(parser, {**target, **_NOISE}, required=["--target-epsilon"])
    add_run_arguments(parser, _SEVERAL)
    add_quality_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=_run_calibrate)


def _run_epsilon(args: argparse.Namespace) -> int:
    non_negative(noise_multiplier=args.noise_multiplier)
    finite(noise_multiplier=args.noise_multiplier)
    run = run_of(args)
    if run.lacks_rate:
        raise ValueError(
            f"sample_rate=None: the {run.sampler} sampler needs it; pass --sample-rate Q, or "
            "--batch-size B with --num-samples M"
        )
    if run.count is None:
        name = _count_name(run)
        raise ValueError(f"{name}=None: the {run.sampler} sampler needs it; pass --{name} N")
    if args.plot is not None:
        check_plot(args.plot, args.accountant)
    with accounting():
        _print(args, run, args.noise_multiplier, {})
    return 0


def _run_calibrate(args: argparse.Namespace) -> int:
    positive(target_epsilon=args.target_epsilon)
    finite(target_epsilon=args.target_epsilon)
    if getattr(args, "for") is not None:
        return run_quality(args)
    _take_single(args)
    run = run_of(args)
    optional(positive, noise_multiplier=args.noise_multiplier, sample_rate=run.sample_rate)
    optional(finite, noise_multiplier=args.noise_multiplier)
    _check_one_unknown(args, run)
    if args.plot is not None:
        check_plot(args.plot, args.accountant)
    with accounting():
        run, noise_multiplier = _solved(args, run)
        assert run.count is not None
        later = run.spent(args.accountant, noise_multiplier, run.count + run.epoch())
        found = {
            "target_epsilon": args.target_epsilon,
            "epsilon_one_more_epoch": later.get_epsilon(args.delta),
        }
        _print(args, run, noise_multiplier, found)
    return 0


def _take_single(args: argparse.Namespace) -> None:
    """Replace lists of one value by the value; refuse longer lists and --for quality's options."""
    for name in ("parameters", "max_memory"):
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"{name}={value!r}: drop it, or pass --for {QUALITY}")
    for name in ("batch_size", "bands", "epochs"):
        values = getattr(args, name)
        if values is None:
            continue
        if len(values) > 1:
            raise ValueError(f"{name}={values!r}: pass one, or --for {QUALITY} to compare several")
        (value,) = values
        setattr(args, name, int(value) if value == value // 1 else value)


def _check_one_unknown(args: argparse.Namespace, run: Run) -> None:
    known = {"noise_multiplier": args.noise_multiplier, _count_name(run): run.count}
    if not run.counts_epochs:
        known["sample_rate"] = run.sample_rate
    unknown = [name for name, value in known.items() if value is None]
    if len(unknown) == 1:
        return
    words = ", ".join(f"{name}={value!r}" for name, value in known.items())
    options = ", ".join(f"--{name.replace('_', '-')}" for name in unknown or known)
    remedy = f"drop one of {options}, or use dpflash epsilon"
    if unknown:
        remedy = f"pass all but one of {options}"
    raise ValueError(f"{words}: expected all but one, to compute the last; {remedy}")


def _count_name(run: Run) -> str:
    return "epochs" if run.counts_epochs else "steps"


def _solved(args: argparse.Namespace, run: Run) -> tuple[Run, float]:
    """Compute the unknown value; return the run and its noise multiplier.

    The computed value is rounded to few digits, so that it can be passed to --noise-multiplier or
    --sample-rate. If epsilon would then exceed the target, the value is not rounded.
    """
    if args.noise_multiplier is None:
        return run, _noise(args, run)
    if run.lacks_rate:
        return _with_rate(args, run), args.noise_multiplier
    count = remaining_steps(
        run.accountant(args.accountant),
        run.event(args.noise_multiplier),
        target_epsilon=args.target_epsilon,
        target_delta=args.delta,
    )
    if count == 0:
        raise ValueError(
            f"target_epsilon={args.target_epsilon!r}: not even one "
            f"{run.unit} is possible at delta={args.delta!r}, "
            f"noise_multiplier={args.noise_multiplier!r}; raise one of them"
        )
    return replace(run, count=count * (run.bands or 1)), args.noise_multiplier


def _noise(args: argparse.Namespace, run: Run) -> float:
    exact = noise_multiplier_for(
        run.event,
        run.events(),
        target_epsilon=args.target_epsilon,
        target_delta=args.delta,
        accountant=run.accountant(args.accountant),
    )
    rounded = float(rounded_up(exact))
    meets = run.spent(args.accountant, rounded).get_epsilon(args.delta) <= args.target_epsilon
    return rounded if meets else exact


def _with_rate(args: argparse.Namespace, run: Run) -> Run:
    assert run.sampler == POISSON and run.count is not None
    exact = get_sample_rate(
        target_epsilon=args.target_epsilon,
        target_delta=args.delta,
        noise_multiplier=args.noise_multiplier,
        steps=run.count,
        examples_per_unit=run.examples_per_unit or 1,
        accountant=run.accountant(args.accountant),
    )
    rounded = replace(run, sample_rate=float(rounded_down(exact)))
    accountant = rounded.spent(args.accountant, args.noise_multiplier)
    meets = accountant.get_epsilon(args.delta) <= args.target_epsilon
    return rounded if meets else replace(run, sample_rate=exact)


def _print(
    args: argparse.Namespace, run: Run, noise_multiplier: float, found: dict[str, Any]
) -> None:
    """Print the run's guarantee, after writing its plot if --plot was passed."""
    accountant = run.spent(args.accountant, noise_multiplier)
    report = {**_report(args, run, noise_multiplier, accountant), **found}
    if args.plot is not None:
        save(_figure(args, run, noise_multiplier, accountant), args.plot)
    if math.isinf(report["epsilon"]) and run.spills(args.delta):
        print(
            f"dpflash: warning: max_batch_size={run.max_batch_size!r}: batches exceed it with a "
            f"probability above delta={args.delta!r}, so epsilon is infinite; raise "
            "--max-batch-size",
            file=sys.stderr,
        )
    if args.json:
        print(as_json(report))
    else:
        print(table(_rows(report, accountant)))


def _report(
    args: argparse.Namespace, run: Run, noise_multiplier: float, accountant: Accountant
) -> dict[str, Any]:
    interval = accountant.get_epsilon(args.delta, interval=True)
    # Computing the advantage takes half a minute with Opacus' accountant.
    is_slow = accountant.mechanism() == "prv"
    return {
        "epsilon": interval.upper,
        "epsilon_lower": interval.lower,
        "delta": args.delta,
        "advantage": None if is_slow else accountant.get_advantage(),
        "noise_multiplier": noise_multiplier,
        **{name: getattr(run, name) for name in ("sample_rate", *OF_RUN)},
        "steps": None if run.counts_epochs else run.count,
        "epochs": run.count if run.counts_epochs else None,
        "accountant": accountant.mechanism(),
        "is_bound": accountant.is_bound,
        "sampler": run.sampler,
        "neighboring_relation": accountant.neighboring_relation,
    }


def _rows(report: dict[str, Any], accountant: Accountant) -> list[tuple[str, str]]:
    rows: list[tuple[str, Any]] = [
        ("mechanism", f"Gaussian, noise multiplier {report['noise_multiplier']}"),
        *(
            (label, report[key])
            for key, label in {
                "sampler": "sampler",
                "sample_rate": "sample rate",
                "batch_size": "batch size",
                "num_samples": "dataset size",
                "max_batch_size": "largest batch",
                "examples_per_unit": "samples of a unit, at most",
                "bands": "bands",
                "steps": "steps",
                "epochs": "epochs",
                "neighboring_relation": "neighboring relation",
            }.items()
        ),
        ("accountant", described(accountant)),
        ("delta", report["delta"]),
        ("target epsilon", report.get("target_epsilon")),
    ]
    for key, label in {
        "epsilon": upper_end("epsilon", accountant),
        "epsilon_lower": "epsilon (lower bound)",
        "advantage": upper_end("membership inference advantage", accountant),
        "epsilon_one_more_epoch": upper_end("epsilon after one more epoch", accountant),
    }.items():
        if report.get(key) is not None:
            shown = rounded_down if key == "epsilon_lower" else rounded_up
            rows.append((label, shown(report[key])))
    return [(label, str(value)) for label, value in rows if value is not None]


def _figure(
    args: argparse.Namespace, run: Run, noise_multiplier: float, accountant: Accountant
) -> Any:
    event, count = run.event(noise_multiplier), run.events()
    curves = [epsilon_curve(args.accountant, event, count, args.delta)]
    if args.accountant != "rdp" and run.sampler != ALLOCATION:
        curves.append(epsilon_curve("rdp", event, count, args.delta, is_thin=True))
    return draw(
        curves,
        tradeoff_of(accountant),
        delta=args.delta,
        unit=run.unit,
        target_epsilon=getattr(args, "target_epsilon", None),
    )

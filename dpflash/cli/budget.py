"""`dpflash budget`: computes the total epsilon of a ledger's runs, and the remaining steps."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from dpflash._validate import large_delta, probability
from dpflash.accounting import Accountant, create_accountant
from dpflash.privacy.budget import PrivacyBudget
from dpflash.privacy.ledger import LedgerLine
from dpflash.privacy.ledger_proof import verify
from dpflash.privacy.ledger_runs import cell, label, opened, refusals_of, runs_of, together
from dpflash.privacy.spending import DEFAULT_ACCOUNTANT, Spending

from ._figures import Curve, Tradeoff, check_plot, draw, save, tradeoff_of
from ._parser import add_options
from ._runs import DELTA, accounting
from ._tables import (
    add_output_arguments,
    as_json,
    described,
    rounded_down,
    rounded_up,
    table,
    upper_end,
)

_COLUMNS = {
    "steps": "steps",
    "sampler": "sampler",
    "noise_multiplier": "noise multiplier",
    "sample_rate": "sample rate",
    "neighboring_relation": "relation",
}
_MECHANISM = "Gaussian noise on sums of clipped gradients (DP-SGD)"
_MAX_POINTS = 200
_OPTIONS = {
    "--delta D": DELTA,
    "--epsilon E": "privacy budget: also print how many more steps like those of the last run it "
    "allows (epochs of shuffled and random_allocation, rounds of cyclic_poisson)",
    "--accountant NAME": f"name of the accountant (default: {DEFAULT_ACCOUNTANT})",
}


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash budget`."""
    parser.description = (
        "Compute the total epsilon of all runs in a ledger, or in several ledgers of the same "
        "data, from the samplers of the runs and under a neighboring relation that holds for all "
        "runs. If one ledger is a copy of another, the lines in both ledgers count once. Ledgers "
        "whose privacy units have different names are refused: correct a name by dpflash ledger "
        "rename. Exit status: 0, 1 if the total exceeds --epsilon, or 2 if a ledger is damaged."
    )
    parser.add_argument(
        "ledgers",
        nargs="+",
        metavar="LEDGER",
        help="file that PrivacyEngine(ledger=...) or dpflash train wrote",
    )
    add_options(parser, _OPTIONS, required=["--delta"])
    add_output_arguments(parser)
    parser.set_defaults(run=_run_budget, accountant=DEFAULT_ACCOUNTANT)


def _run_budget(args: argparse.Namespace) -> int:
    ledgers = opened(args.ledgers)
    for path in args.ledgers:
        verify(path)  # also its signatures, if there are some
    probability(delta=args.delta)
    budget = None if args.epsilon is None else PrivacyBudget(args.epsilon, args.delta)
    create_accountant(args.accountant)
    if args.plot is not None:
        check_plot(args.plot, args.accountant)
    with accounting():
        spending, lines = together(ledgers, args.accountant)
        report = _report(spending, lines, budget, args.delta)
        if args.plot is not None:
            save(_figure(spending, lines, args), args.plot)
    sizes = [size for line in lines if (size := (line.about or {}).get("dataset_size"))]
    if sizes and (problem := large_delta(args.delta, max(sizes), "unit")):
        print(f"dpflash: warning: {problem}", file=sys.stderr)
    print(as_json(report) if args.json else _tables(report, spending.accountant))
    is_exceeded = args.epsilon is not None and report["epsilon"] > args.epsilon
    if is_exceeded:
        print(f"dpflash: the budget of epsilon {args.epsilon:g} is exceeded", file=sys.stderr)
    return int(is_exceeded)


def _report(
    spending: Spending, lines: list[LedgerLine], budget: PrivacyBudget | None, delta: float
) -> dict[str, Any]:
    epsilon = spending.epsilon(delta)
    runs = runs_of(lines)
    events = [line.event for line in lines if line.event is not None]
    remaining = None
    if budget is not None and events:
        spending.set_budget(budget)
        remaining = spending.remaining(events[-1])
    return {
        "epsilon": epsilon.upper,
        "epsilon_lower": epsilon.lower,
        "delta": delta,
        "steps": sum(line.steps for line in lines),
        "private_refusals": refusals_of(lines),
        "runs": runs,
        "accountant": spending.accountant.mechanism(),
        "neighboring_relation": spending.relation,
        "privacy_unit": spending.unit,
        "earlier_names": [line.was for line in lines if line.was is not None],
        "remaining_steps": remaining,
    }


def _tables(report: dict[str, Any], accountant: Accountant) -> str:
    runs = [[label(run), *(cell(run[key]) for key in _COLUMNS)] for run in report["runs"]]
    samplers = ", ".join(sorted({run["sampler"] for run in report["runs"]})) or "none"
    lower, remaining = report["epsilon_lower"], report["remaining_steps"]
    summary = [
        ("mechanism", _MECHANISM),
        ("sampler", samplers),
        ("neighboring relation", report["neighboring_relation"]),
        ("privacy unit", report["privacy_unit"] or "none"),
        *(("  was called", name) for name in report["earlier_names"]),
        ("accountant", described(accountant)),
        ("delta", str(report["delta"])),
        ("steps", str(report["steps"])),
        ("private refusals", str(report["private_refusals"])),
        (upper_end("epsilon", accountant), rounded_up(report["epsilon"])),
    ]
    if lower is not None:
        summary.append(("epsilon (lower bound)", rounded_down(lower)))
    if remaining is not None:
        names = {"shuffled": "epochs", "random_allocation": "epochs", "cyclic_poisson": "rounds"}
        name = names.get(report["runs"][-1]["sampler"], "steps")
        summary.append((f"remaining {name}", str(remaining)))
    header = ["run", *_COLUMNS.values()]
    return f"{table(runs, header)}\n\n{table(summary)}"


def _figure(spending: Spending, lines: list[LedgerLine], args: argparse.Namespace) -> Any:
    label = described(spending.accountant)
    steps, epsilons = _points(spending, lines, args.accountant, args.delta)
    tradeoff = Tradeoff(label, [0.0, 1.0], [0.0, 0.0])
    if not spending.noiseless:
        tradeoff = tradeoff_of(spending.accountant)
    curve = Curve(label, steps, epsilons)
    return draw([curve], tradeoff, delta=args.delta, target_epsilon=args.epsilon)


def _points(
    spending: Spending, lines: list[LedgerLine], accountant: str, delta: float
) -> tuple[list[int], list[float]]:
    total = sum(line.steps for line in lines)
    every = -(-total // _MAX_POINTS) or 1
    partial = Spending(create_accountant(accountant), relation=spending.relation)
    steps, epsilons = [0], [0.0]
    done = 0
    for line in lines:
        last = done + line.steps
        while done < last:
            until = min(last, done - done % every + every)
            if line.event is not None:
                partial.add(line.event, until - done)
            done = until
            if done % every == 0 or done == total:
                steps.append(done)
                epsilons.append(partial.epsilon(delta).upper)
    return steps, [e if math.isfinite(e) else math.nan for e in epsilons]

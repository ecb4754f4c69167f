"""`dpflash budget`: what the runs in a ledger have spent together, and what is left."""

from __future__ import annotations

import argparse
import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import Any

from dpflash._validate import probability
from dpflash.accounting import Event, FixedSizeGaussian, create_accountant
from dpflash.budget import PrivacyBudget
from dpflash.ledger import LedgerLine
from dpflash.relations import DEFAULT_ACCOUNTANT
from dpflash.spending import Spending

__all__ = ["add_budget_parser"]

_LABELS = {
    "mechanism": "mechanism",
    "sampler": "sampler",
    "neighboring_relation": "neighboring relation",
    "accountant": "accountant",
    "delta": "delta",
    "steps": "steps",
    "epsilon": "epsilon (upper bound)",
    "epsilon_lower": "epsilon (lower bound)",
    "remaining_steps": "remaining steps",
}
_COLUMNS = {
    "run": "run",
    "steps": "steps",
    "sampler": "sampler",
    "noise_multiplier": "noise multiplier",
    "sample_rate": "sample rate",
    "neighboring_relation": "relation",
}
_MECHANISM = "Gaussian noise on sums of clipped gradients (DP-SGD)"
_SHOWN_DIGITS = 6
_MOST_POINTS = 200


def add_budget_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `budget` to the subcommands of `dpflash`."""
    parser = subparsers.add_parser(
        "budget",
        help="say what the runs in a ledger have spent together",
        description=(
            "Say what the runs in a ledger have spent together, accounted for by the samplers "
            "that they used and for a neighboring relation that holds for all of them."
        ),
    )
    parser.add_argument(
        "ledger", metavar="LEDGER", help="file that PrivacyEngine(ledger=...) or train wrote"
    )
    parser.add_argument(
        "--delta",
        type=float,
        required=True,
        metavar="D",
        help="delta of the guarantee, well below 1 / data set size, e.g. 1e-6",
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="a budget: say how many more steps (of a shuffled loader: passes) of the last kind "
        "fit into it",
    )
    parser.add_argument(
        "--accountant",
        default=DEFAULT_ACCOUNTANT,
        metavar="A",
        help=f"name of the accountant (default: {DEFAULT_ACCOUNTANT})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead; null stands for no finite or no known value",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw epsilon over the steps")
    parser.set_defaults(run=_run_budget)


def _run_budget(args: argparse.Namespace) -> int:
    if not Path(args.ledger).exists():
        raise FileNotFoundError(f"ledger={args.ledger!r}: no such file; pass the path of a ledger")
    probability(delta=args.delta)
    budget = None if args.epsilon is None else PrivacyBudget(args.epsilon, args.delta)
    spending = Spending(args.accountant, ledger=args.ledger)
    assert spending.ledger is not None
    lines = spending.ledger.lines
    report = _report(spending, lines, budget, args.delta)
    if args.plot is not None:
        _plot(args.plot, spending, lines, args)
    if args.json:
        print(json.dumps(_finite(report), indent=2, allow_nan=False))
        return 0
    print("\n".join(_table(report)))
    return 0


def _report(
    spending: Spending, lines: list[LedgerLine], budget: PrivacyBudget | None, delta: float
) -> dict[str, Any]:
    """The guarantee of everything in the ledger, with all that it rests on."""
    epsilon = spending.epsilon(delta)
    runs = _runs(lines)
    events = [line.event for line in lines if line.event is not None]
    remaining = None
    if budget is not None and events:
        spending.budget = budget
        remaining = spending.remaining(events[-1])
    return {
        "epsilon": epsilon.upper,
        "epsilon_lower": epsilon.lower,
        "delta": delta,
        "steps": lines[-1].last if lines else 0,
        "runs": runs,
        "accountant": spending.accountant.mechanism(),
        "neighboring_relation": spending.relation,
        "remaining_steps": remaining,
    }


def _runs(lines: list[LedgerLine]) -> list[dict[str, Any]]:
    """One entry for each run and kind of step; what was paid for belongs to its payment."""
    last: dict[str, Event | None] = {}
    steps: dict[tuple[str, Event | None], int] = {}
    for line in lines:
        last[line.run] = line.event or last.get(line.run)
        key = (line.run, last[line.run])
        steps[key] = steps.get(key, 0) + line.steps
    return [
        {
            "run": run,
            "steps": count,
            "sampler": "none" if event is None else event.sampler,
            "noise_multiplier": getattr(event, "noise_multiplier", None),
            "sample_rate": _sample_rate(event),
            "neighboring_relation": None if event is None else event.relation,
        }
        for (run, event), count in steps.items()
    ]


def _sample_rate(event: Event | None) -> float | None:
    if isinstance(event, FixedSizeGaussian):
        return event.batch_size / event.num_samples
    return getattr(event, "sample_rate", None)


def _table(report: dict[str, Any]) -> list[str]:
    rows = [tuple(_COLUMNS.values())]
    rows += [tuple(_shown(run[key], key) for key in _COLUMNS) for run in report["runs"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    table = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    samplers = ", ".join(sorted({run["sampler"] for run in report["runs"]})) or "none"
    report = {"mechanism": _MECHANISM, "sampler": samplers, **report}
    width = max(map(len, _LABELS.values()))
    known = [(key, report[key]) for key in _LABELS if report[key] is not None]
    summary = [f"{_LABELS[key]:<{width}}  {_shown(value, key)}" for key, value in known]
    return [*(line.rstrip() for line in table), "", *summary]


def _shown(value: Any, key: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and key != "delta":
        # An upper end is rounded up, a lower one down.
        rounding = ROUND_FLOOR if key == "epsilon_lower" else ROUND_CEILING
        context = Context(prec=_SHOWN_DIGITS, rounding=rounding)
        return str(context.create_decimal_from_float(value)) if "epsilon" in key else f"{value:g}"
    return str(value)


def _plot(
    path: str, spending: Spending, lines: list[LedgerLine], args: argparse.Namespace
) -> None:
    """Draw epsilon after each of some steps, all of them under the ledger's one relation."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            f"plot={path!r}: it needs matplotlib; pip install 'dpflash[plot]', or drop --plot"
        ) from error
    from matplotlib.figure import Figure

    steps, epsilons = _points(spending, lines, args.accountant, args.delta)
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False}):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, epsilons, color="#1f5fa8", marker="." * (len(steps) == 1))
        if args.epsilon is not None:
            axes.axhline(args.epsilon, color="#666666", linestyle="--", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(f"epsilon at delta = {args.delta:g}")
        axes.spines["right"].set_visible(False)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=150, format="png")


def _points(
    spending: Spending, lines: list[LedgerLine], accountant: str, delta: float
) -> tuple[list[int], list[float]]:
    total = lines[-1].last if lines else 0
    every = -(-total // _MOST_POINTS) or 1
    partial = Spending(create_accountant(accountant), relation=spending.relation)
    steps, epsilons = [0], [0.0]
    for line in lines:
        done = line.first - 1
        while done < line.last:
            until = min(line.last, done - done % every + every)
            if line.event is not None:
                partial.add(line.event, until - done)
            done = until
            if done % every == 0 or done == total:
                steps.append(done)
                epsilons.append(partial.epsilon(delta).upper)
    return steps, [e if math.isfinite(e) else math.nan for e in epsilons]


def _finite(value: Any) -> Any:
    """The value with None for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value

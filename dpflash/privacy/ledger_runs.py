"""Splits a ledger into runs: the steps, spending and recorded facts of each run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any

from dpflash.accounting import Event, FixedSizeGaussian

from .._json import finite
from .ledger import LOST, REFUSED, Ledger, LedgerLine
from .privacy_unit import kind_of
from .spending import Spending

_RUN = re.compile("[0-9a-f]{64}")  # the random name of an engine's run
_SHOWN = 12  # digits of the name that are shown


def opened(paths: Iterable[str | os.PathLike[str]]) -> list[Ledger]:
    """Open the ledgers at these paths; raise FileNotFoundError if one is missing."""
    ledgers = []
    for path in paths:
        ledgers.append(Ledger(path))
        if not Path(path).exists():
            raise FileNotFoundError(
                f"ledger={str(path)!r}: no such file; pass the path of a ledger"
            )
    return ledgers


def together(ledgers: Sequence[Ledger], accountant: str) -> tuple[Spending, list[LedgerLine]]:
    """Return the joint spending of several ledgers of the same data, and their lines.

    A line that an engine wrote is counted once, even if several ledgers contain the line because
    one is a copy: the random name of its run identifies the line. A line that was appended by hand
    is counted in each ledger, since equal lines may belong to two releases.
    """
    if len({ledger.path.resolve() for ledger in ledgers}) < len(ledgers):
        names = [str(ledger.path) for ledger in ledgers]
        raise ValueError(f"ledgers={names}: one is given twice; pass each ledger once")
    # First check each ledger alone, against the epsilon that its lines state.
    spending, *_ = [Spending(accountant, ledger=ledger) for ledger in ledgers]
    lines = list(ledgers[0].lines)
    for ledger in ledgers[1:]:
        _require_same_unit(ledgers[0], ledger)
        known = {line.digest for line in lines}
        own = [x for x in ledger.lines if x.digest not in known or not _RUN.fullmatch(x.run)]
        spending.include(own, ledger.names)
        lines += own
    return spending, lines


def _require_same_unit(first: Ledger, other: Ledger) -> None:
    units = first.unit, other.unit
    if None in units or units[0] == units[1]:
        return
    text = (
        f"ledgers {first.path} and {other.path}: their privacy units are {units[0]!r} and "
        f"{units[1]!r}, and one epsilon cannot be for both units; pass each ledger by itself"
    )
    names = [str(unit).partition(": ")[2] for unit in units]
    if kind_of(str(units[0])) == kind_of(str(units[1])):
        pairs = zip((first.path, other.path), names[::-1], strict=True)
        commands = [
            f"dpflash ledger rename {quote(str(path))} --unit-name {quote(name)}"
            for path, name in pairs
            if name
        ]
        text += f". If both names mean the same units, correct one: {' or '.join(commands)}"
    raise ValueError(text)


def by_run(lines: Iterable[LedgerLine]) -> list[list[LedgerLine]]:
    """Return one list of lines for each run, without notes."""
    runs: dict[str, list[LedgerLine]] = {}
    for line in lines:
        if line.note is None:
            runs.setdefault(line.run, []).append(line)
    return list(runs.values())


def alone(lines: Iterable[LedgerLine], spending: Spending) -> Spending:
    """Return the spending of one run, under the neighboring relation of `spending`."""
    own = Spending(spending.accountant.mechanism(), relation=spending.relation)
    for line in lines:
        if line.event is not None:
            own.add(line.event, line.steps)
    return own


def refusals_of(lines: Iterable[LedgerLine]) -> int:
    """Return the number of runs that ended with a private refusal."""
    return len({line.run for line in lines if line.note in (REFUSED, LOST)})


def lines_of(ledger: Ledger, run: str) -> list[LedgerLine]:
    """Return the lines of one run."""
    return [line for line in ledger.lines if line.run == run]


def epsilon_by_run(
    ledgers: Sequence[Ledger], delta: float, accountant: str, own_run: str | None = None
) -> dict[str, Any] | None:
    """Return epsilon of each run, of each ledger, and of all ledgers together, for a model card.

    Returns:
        None if there is only one run. Else a dict of plain values:
        - "rows": name (with the first day and marks for seeded runs and `own_run`), steps, privacy
          unit, relation and epsilon of each run and ledger.
        - "total": epsilon and relation of all ledgers together; None if privacy units differ.
        - "seeded": whether a run was seeded.
        - "epsilon_of_own_run": None if infinite or unknown.
    """
    rows: list[tuple[Any, ...]] = []
    epsilon_of_own_run: float | None = None

    def add(name: str, lines: Iterable[LedgerLine], spent: Spending, unit: str | None) -> None:
        steps = sum(line.steps for line in lines)
        rows.append((name, steps, unit, spent.relation, finite(spent.epsilon(delta).upper)))

    for ledger in ledgers:
        own, runs = Spending(accountant, ledger=ledger), by_run(ledger.lines)
        for lines in runs if len(runs) > 1 or len(ledgers) > 1 else []:
            name = f"run {label(runs_of(lines)[0])}{_marks(lines, own_run)}"
            add(name, lines, alone(lines, own), own.unit)
            if lines[0].run == own_run:
                epsilon_of_own_run = rows[-1][-1]
        if len(ledgers) > 1 and len(runs) > 1:
            add(f"these {len(runs)} runs of one ledger", ledger.lines, own, own.unit)
    total: dict[str, Any] | None = None
    if rows and len({ledger.unit for ledger in ledgers if ledger.lines}) == 1:
        spending, all_lines = together(ledgers, accountant)
        add("all together", all_lines, spending, spending.unit)
        total = {"epsilon": rows[-1][-1], "neighboring_relation": spending.relation}
    seeded = any("yes" in kept_of(ledger.lines, "seeded") for ledger in ledgers)
    if not rows:
        return None
    found = {"rows": rows, "total": total, "seeded": seeded}
    return {**found, "epsilon_of_own_run": epsilon_of_own_run}


def facts_of(ledgers: Iterable[Ledger], run: str | None) -> dict[str, str]:
    """Return a run's name with its first day, and the names of its data, as ledgers have them."""
    lines = [line for ledger in ledgers for line in ledger.lines if line.run == run]
    if not any(line.note is None for line in lines):
        return {}
    days = "".join(f", {day}" for day in kept_of(lines, "day")[:1])
    data = ", ".join(kept_of(lines, "data")) or "not recorded"
    return {"run": f"{label(runs_of(lines)[0])}{days}", "data": data}


def _marks(lines: Sequence[LedgerLine], own_run: str | None) -> str:
    seeded, is_own = "yes" in kept_of(lines, "seeded"), lines[0].run == own_run
    marks = [*kept_of(lines, "day")[:1], *["seeded"] * seeded, *["this run"] * is_own]
    return "".join(f", {mark}" for mark in marks)


def runs_of(lines: Iterable[LedgerLine]) -> list[dict[str, Any]]:
    """Return one dict per run and event; lines without an event count for the run's last event."""
    last: dict[str, Event | None] = {}
    names: dict[str, str | None] = {}
    steps: dict[tuple[str, Event | None], int] = {}
    for line in (line for line in lines if line.note is None):
        last[line.run] = line.event or last.get(line.run)
        names[line.run] = (line.about or {}).get("name") or names.get(line.run)
        key = (line.run, last[line.run])
        steps[key] = steps.get(key, 0) + line.steps
    return [
        {
            "run": run,
            "name": names[run],
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


def label(run: dict[str, Any]) -> str:
    """Return a run's given name and, to make it unique, the first digits of its random name."""
    short: str = run["run"][:_SHOWN]
    return short if run["name"] is None else f"{run['name']} ({short})"


def cell(value: Any) -> str:
    """Return a value as text for a table; a float with six digits, if these are exact."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return "-" if value is None else str(value)


def corrections_of(lines: Iterable[LedgerLine]) -> list[dict[str, Any]]:
    """Return the lines that correct the name of the privacy unit."""
    return [
        {"line": number, "was": line.was, "unit": line.unit, "day": (line.about or {}).get("day")}
        for number, line in enumerate(lines, start=1)
        if line.was is not None
    ]


def kept_of(lines: Iterable[LedgerLine], *keys: str) -> list[str]:
    """Return the distinct facts that runs recorded under `keys` (such as "day"), in order."""
    found = [[line.about.get(key) for key in keys] for line in lines if line.about]
    return list(dict.fromkeys(", ".join(map(cell, v)) for v in found if None not in v))


def without_record(lines: Sequence[LedgerLine]) -> list[str]:
    """Return the numbers of lines without recorded facts, such as "3" and "5 to 9"."""
    known = {(line.run, line.branch): line.about for line in lines if line.about}
    numbers = [
        number
        for number, line in enumerate(lines, start=1)
        if line.note is None and (line.run, line.branch) not in known
    ]
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in group] for _, group in groups]
    return [f"{r[0]}" if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in ranges]

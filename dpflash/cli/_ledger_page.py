"""The HTML page of `dpflash ledger report`, which presents ledgers to auditors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape

from dpflash._validate import counted
from dpflash.privacy.card import SEEDED
from dpflash.privacy.ledger import LOST, REFUSED, LedgerLine, today
from dpflash.privacy.ledger_proof import Proof
from dpflash.privacy.ledger_runs import (
    alone,
    by_run,
    cell,
    corrections_of,
    kept_of,
    label,
    runs_of,
    together,
    without_record,
)
from dpflash.privacy.privacy_unit import kind_of
from dpflash.privacy.source import library_version, source_digest
from dpflash.privacy.spending import DEFAULT_ACCOUNTANT, Spending

from ._tables import rounded_up

_RELATIONS = {
    "add_remove": "one dataset has one unit more than the other",
    "zero_out": "one dataset has nothing in place of one unit of the other; the number of units "
    "is public",
    "replace_one": "one dataset has another unit in place of one unit of the other",
}
_UNITS = {
    "sample": "one entry of the dataset, such as one record",
    "document": "one document",
    "preference pair": "one pair of a chosen and a rejected answer",
}
_NOT_COVERED = (
    "Training losses, metrics, gradient norms, batch sizes and times of steps.",
    "Results on private evaluation data, and the choice of a run or a checkpoint by such results.",
    "Runs on the same people that are in another ledger or in no ledger: their epsilons add up.",
    "What was computed from the private data before training, such as vocabularies, scalers and "
    "class weights.",
    "A person whose data are in several units: the guarantee is weaker for this person.",
    "The data that a pretrained base model was trained on before.",
)
_PROOF = (
    "<p>The head is the SHA-256 of the file: <code>sha256sum FILE</code> prints it. <code>"
    "head -n N FILE | sha256sum</code> prints the SHA-256 of the first N lines.</p>\n"
    "<p>The program that trains writes the ledger. A ledger shows what was recorded before each "
    "release. It does not show that the program, the data and the privacy units were what their "
    "names say.</p>"
)
_STYLE = """
:root { color-scheme: light; --ink: #1c2733; --soft: #5a6775; --line: #d8dee5; --blue: #1f5fa8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; color: var(--ink);
  background: #fff; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p, ul { margin: .5rem 0; max-width: 46rem; } ul { padding-left: 1.2rem; }
.soft { color: var(--soft); }
.total { border: 1px solid var(--line); border-left: .3rem solid var(--blue);
  padding: .75rem 1rem; }
.total b { font-size: 1.9rem; line-height: 1.2; color: var(--blue); }
section.run { border: 1px solid var(--line); padding: .75rem 1rem; margin: .75rem 0;
  break-inside: avoid; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(11rem, 100%), 1fr));
  gap: .5rem 1rem; margin: 0; }
dl .wide { grid-column: 1 / -1; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-size: .8rem; font-weight: normal; }
.number { text-align: right; padding: .3rem 0 .3rem .75rem; overflow-wrap: normal;
  font-variant-numeric: tabular-nums; }
code { font: .85rem/1.4 ui-monospace, monospace; }
"""


def page(proofs: Mapping[str, Proof], *, delta: float, key: str | None) -> str:
    """Return the page of verified ledgers of the same data.

    Args:
        proofs: name of each ledger -> its `Proof`.
        delta: delta at which every epsilon is computed.
        key: the public key that was passed to `verify`, or None.
    """
    ledgers, names = [proof.ledger for proof in proofs.values()], ", ".join(proofs)
    spending, lines = together(ledgers, DEFAULT_ACCOUNTANT)
    parts = [
        f"<h1>Ledger of private training</h1>\n<p class=soft>{escape(names)}, read on {today()} "
        f"by dpflash {escape(library_version())}</p>",
        _total(spending, delta),
        _heading("Epsilon by run"),
        _by_run_table(lines, spending, delta),
        _heading("The runs"),
        *(_run(run, spending, delta) for run in by_run(lines)),
        _heading("Is it unchanged?"),
        *(_proof(name, proof, key) for name, proof in proofs.items()),
        _PROOF,
        _heading("What epsilon does not cover"),
        _list(_NOT_COVERED),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">\n"
        f"<title>Ledger {escape(names)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _total(spending: Spending, delta: float) -> str:
    unit = spending.unit or "sample"
    in_words = _UNITS.get(unit, f"all entries of one {unit.partition(': ')[2] or 'user'}")
    if kind_of(unit) != unit and kind_of(unit) != "user":
        in_words += "; the assignment of entries to owners is public"
    return (
        f"<div class=total>epsilon of all runs together, at delta {delta:g}<br>"
        f"<b>{_epsilon(spending, delta)}</b><br>for {escape(in_words)}</div>\n"
        "<p>Epsilon and delta limit what anyone can learn from the released models about one "
        "privacy unit: for two datasets that differ in one unit, no outcome is more than "
        "e^epsilon times as likely with one dataset as with the other, but for a probability of "
        "delta.</p>\n"
        + _facts(
            ("privacy unit", unit),
            ("neighboring datasets", f"{spending.relation}: {_RELATIONS[spending.relation]}"),
            ("accountant", spending.accountant.mechanism()),
            ("mechanism", "Gaussian noise on sums of clipped gradients (DP-SGD)"),
        )
    )


def _epsilon(spending: Spending, delta: float) -> str:
    epsilon = spending.epsilon(delta).upper
    return f"at most {rounded_up(epsilon)}" if math.isfinite(epsilon) else "none: no privacy"


def _run(lines: list[LedgerLine], spending: Spending, delta: float) -> str:
    kinds = runs_of(lines)
    days, code = kept_of(lines, "day"), kept_of(lines, "version", "source")
    here = f"{library_version()}, {source_digest()}"
    if code == [here]:
        code = [f"{here} (the same code wrote this page)"]

    def values(key: str) -> str:
        found = [f"{x:.6g}" if isinstance(x := kind[key], float) else cell(x) for kind in kinds]
        return ", ".join(dict.fromkeys(found))

    facts = (
        ("epsilon of this run alone", _epsilon(alone(lines, spending), delta)),
        ("began on", days[:1]),
        ("continued on", days[1:]),
        ("data", kept_of(lines, "data")),
        ("number of privacy units", kept_of(lines, "dataset_size")),
        ("steps", str(sum(line.steps for line in lines))),
        ("sampler", values("sampler")),
        ("sample rate", values("sample_rate")),
        ("noise multiplier", values("noise_multiplier")),
        ("clipping bound", kept_of(lines, "max_grad_norm")),
        ("limit of epsilon, at delta", kept_of(lines, "max_epsilon", "at_delta")),
        ("seeded", kept_of(lines, "seeded")),
        ("relation of its sampler", values("neighboring_relation")),
        ("dpflash", code),
        ("run", kinds[0]["run"]),
    )
    shown = [(n, v if isinstance(v, str) else ", ".join(v)) for n, v in facts]
    return (
        f"<section class=run>\n<h3>{escape(label(kinds[0]))}</h3>\n"
        + _facts(*((name, value) for name, value in shown if value), wide=("dpflash", "run"))
        + "\n</section>"
    )


def _by_run_table(lines: list[LedgerLine], spending: Spending, delta: float) -> str:
    rows = []
    for own in by_run(lines):
        name = label(runs_of(own)[0]) + ", seeded" * ("yes" in kept_of(own, "seeded"))
        rows.append((name, str(sum(line.steps for line in own)), alone(own, spending)))
    seeded = f" {SEEDED}" if "yes" in kept_of(lines, "seeded") else ""
    rows.append(("all runs", str(sum(line.steps for line in lines)), spending))
    head = f"<tr><th>run<th class=number>steps<th class=number>epsilon at delta {delta:g}</tr>"
    return (
        f"<table>\n{head}\n"
        + "\n".join(
            f"<tr><td>{escape(name)}<td class=number>{steps}<td class=number>"
            f"{_epsilon(own, delta)}</tr>"
            for name, steps, own in rows
        )
        + "\n</table>\n<p class=soft>The last row is computed from the steps of all runs "
        "together. It is not the sum of the other rows." + seeded + "</p>"
    )


def _proof(name: str, proof: Proof, key: str | None) -> str:
    lines = len(proof.ledger.lines)
    signed = max((s.lines for s in proof.signatures if s.key == key), default=0)
    kept = "not compared"
    if proof.kept is not None:
        kept = f"is the head of the first {counted(proof.kept, 'line')}"
    facts = [("lines", str(lines)), ("head that was saved before", kept)]
    facts += [
        (
            f"signature of the first {counted(one.lines, 'line')}, {one.day}",
            f"key {one.key}" + (" (the public key that was passed)" if one.key == key else ""),
        )
        for one in proof.signatures
    ]
    facts.append(("head of all lines", proof.head))
    text = (
        "The digests of all lines are valid: no line was changed, removed, added or moved, unless "
        "all later lines were rewritten too."
    )
    proven = max(signed, proof.kept or 0)
    if proven == lines > 0:
        text += (
            " A saved head or a signature shows that the ledger had these lines and no others at "
            "that time. It does not show whether later lines were cut: compare with the newest "
            "saved head or signature."
        )
    elif proven:
        text += (
            f" A saved head or a signature shows that the first {counted(proven, 'line')} were "
            "not rewritten. It does not cover the later lines."
        )
    else:
        text += (
            " Only a head or a signature that was saved elsewhere can show that the ledger was "
            "not rewritten or cut at its end."
        )
    if proof.signatures and key is None:
        text += (
            " The signatures were not compared with a public key: they show this only if their "
            "key belongs to the person who signs."
        )
    return (
        f"<h3>{escape(name)}</h3>\n<p>{text}</p>\n"
        + _facts(*facts, wide=[name for name, _ in facts[1:]])
        + _list(_others(proof.ledger.lines))
    )


def _others(lines: list[LedgerLine]) -> list[str]:
    found = [
        f"Line {c['line']}, {c['day']}: the privacy unit {c['was']} was renamed {c['unit']}."
        for c in corrections_of(lines)
    ]
    found += [
        f"Line {number}: run {line.run[:12]} {line.note}. Do not publish this page or the ledger."
        for number, line in enumerate(lines, start=1)
        if line.note in (REFUSED, LOST)
    ]
    without = without_record(lines)
    if without:
        found.append(
            f"Lines {', '.join(without)}: written by other code or by an earlier version, without "
            "the name, day, code, data and clipping bound of the run."
        )
    return found


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _list(texts: Iterable[str]) -> str:
    items = "\n".join(f"<li>{escape(text)}" for text in texts)
    return f"\n<ul>\n{items}\n</ul>" if items else ""


def _facts(*facts: tuple[str, str], wide: Iterable[str] = ()) -> str:
    """Return HTML with names and values in columns; each name in `wide` has a row of its own."""
    rows = [
        f"<div{' class=wide' if name in wide else ''}><dt>{escape(name)}<dd>{escape(value)}</div>"
        for name, value in facts
    ]
    return "<dl>\n" + "\n".join(rows) + "\n</dl>"

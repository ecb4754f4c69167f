"""`dpflash ledger`: verifies, signs, reports and corrects the file that records releases."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from dpflash._validate import counted, probability
from dpflash.privacy.ledger import Ledger
from dpflash.privacy.ledger_proof import (
    Proof,
    make_key,
    private_key,
    public_key,
    sign,
    signatures_path,
    verify,
)
from dpflash.privacy.ledger_runs import corrections_of, refusals_of, without_record
from dpflash.privacy.spending import DEFAULT_ACCOUNTANT, Spending

from ._parser import Names, add_options
from ._runs import DELTA, accounting
from ._tables import as_json, table

_KEPT = {
    "--head HASH": "hash of the ledger that you saved, as dpflash train or an earlier verify "
    "printed it. The ledger must have had this hash, and may have grown since",
    "--public-key PEM": "file with a public key. FILE.signatures must have a signature by its key",
}
_UNPROVEN = (
    "Save the head elsewhere: whoever can write the file can cut lines from its end or rewrite "
    "the whole file. verify --head detects both in the lines that the saved head covers, and "
    "--public-key in the lines that the newest signature still there covers."
)


def add_ledger_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash ledger`."""
    parser.description = (
        "Verify the ledger that PrivacyEngine(ledger=...) or dpflash train wrote, sign it, write "
        "a report for auditors, or correct the name of its privacy unit."
    )
    names = parser.add_subparsers(dest="action", metavar="ACTION", required=True, action=Names)

    def action(
        name: str,
        run: Any,
        about: str,
        options: dict[str, str],
        *required: str,
        what: str = "the ledger",
        nargs: str | None = None,
    ) -> None:
        own = names.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        own.set_defaults(run=run)
        own.add_argument("file", metavar="FILE", help=what, nargs=nargs)
        add_options(own, options, required)

    action(
        "verify",
        _run_verify,
        "check whether a ledger was changed or cut since it was written: exit status 0 if it is "
        "sound, 1 if it is broken, 2 if it cannot be read",
        {**_KEPT, "--json": "print one JSON object instead"},
    )
    action(
        "report",
        _run_report,
        "write an HTML page for auditors, with runs, epsilon, privacy unit, head and signatures",
        {"--delta D": DELTA, "--out HTML": "file to write, such as report.html", **_KEPT},
        *("--delta", "--out"),
        what="the ledger, or several ledgers of the same data",
        nargs="+",
    )
    action(
        "sign",
        _run_sign,
        "verify a ledger, and add a signature of all its lines to FILE.signatures",
        {"--key PEM": "file with a private Ed25519 key. You are asked for its passphrase, if any"},
        "--key",
    )
    action(
        "key",
        _run_key,
        "write a new private Ed25519 key, such as officer.pem, and its public key beside it",
        {},
        what="new file for the private key",
    )
    action(
        "rename",
        _run_rename,
        "correct the name of a ledger's privacy unit, such as patient in place of patient_id, by "
        "a line that records both names",
        {"--unit-name NAME": "the new name"},
        "--unit-name",
    )


def _run_verify(args: argparse.Namespace) -> int:
    head, key = _kept(args)
    try:
        proof = _verified(args.file, head, key)
    except (ValueError, RuntimeError) as error:
        if isinstance(error.__cause__, OSError):  # the file cannot be read
            raise
        problem = {"sound": False, "problem": str(error)}
        print(as_json(problem) if args.json else f"broken: {error}")
        return 1
    lines = proof.ledger.lines
    report = {
        "sound": True,
        "problem": None,
        "lines": len(lines),
        "steps": proof.ledger.releases,
        "runs": len({line.run for line in lines}),
        "privacy_unit": proof.ledger.unit,
        "corrections": corrections_of(lines),
        "head": proof.head,
        "lines_of_kept_head": proof.kept,
        "signatures": [vars(one) for one in proof.signatures],
        "lines_without_record": without_record(lines),
        "without_guard": proof.is_alone,
        "private_refusals": refusals_of(lines),
    }
    print(as_json(report) if args.json else _as_text(report, args.file, key))
    if head is None and not args.json:
        print(f"\n{_UNPROVEN}")
    return 0


def _kept(args: argparse.Namespace) -> tuple[str | None, str | None]:
    head = None if args.head is None else args.head.lower()
    if head is not None and not re.fullmatch("[0-9a-f]{64}", head):
        raise ValueError(f"head={args.head!r}: expected 64 hexadecimal digits; pass all of them")
    return head, None if args.public_key is None else public_key(args.public_key)


def _verified(file: str, head: str | None, key: str | None) -> Proof:
    proof = verify(file, head=head, key=key)
    if not Path(file).exists():
        raise FileNotFoundError(f"ledger={file!r}: no such file; pass the path of a ledger")
    with accounting():
        Spending(DEFAULT_ACCOUNTANT, ledger=proof.ledger)  # checks the epsilon in the lines
    return proof


def _as_text(report: dict[str, Any], file: str, key: str | None) -> str:
    kept, without = report["lines_of_kept_head"], report["lines_without_record"]
    rows = [("privacy unit", report["privacy_unit"] or "none")]
    rows += [
        ("corrected", f"line {c['line']}, {c['day']}: {c['was']} -> {c['unit']}")
        for c in report["corrections"]
    ]
    rows.append(("head", report["head"]))
    if kept is not None:
        rows.append(("saved head", f"found: it covers the first {counted(kept, 'line')}"))
    rows += [
        ("signed", f"the first {counted(s['lines'], 'line')}, {s['day']}, key {s['key']}")
        for s in report["signatures"]
    ]
    own = [s["lines"] for s in report["signatures"] if key in (None, s["key"])]
    signed = max(own, default=0)
    if 0 < signed < report["lines"]:
        rows.append(("not signed", f"the last {counted(report['lines'] - signed, 'line')}"))
    if report["private_refusals"]:
        count = counted(report["private_refusals"], "run")
        rows.append(("private refusals", f"{count}; do not publish the ledger or its report"))
    if report["without_guard"]:
        text = f"whether later lines were cut, since {file}.guard is missing"
        rows.append(("not checked", text))
    if without:
        text = f"the day, code, data or bound of the run in lines {', '.join(without)}"
        rows.append(("not recorded", text))
    counts = ((report["lines"], "line"), (report["steps"], "step"), (report["runs"], "run"))
    return f"sound: {', '.join(counted(*c) for c in counts)}\n{table(rows)}"


def _run_report(args: argparse.Namespace) -> int:
    # Imported here, since `_ledger_page` computes a digest of the code, which needs torch.
    from ._ledger_page import page

    probability(delta=args.delta)
    if Path(args.out).suffix.lower() != ".html":
        raise ValueError(f"out={args.out!r}: expected a name such as report.html; pass one")
    head, key = _kept(args)
    if head is not None and len(args.file) > 1:
        raise ValueError(
            f"head={head!r} with {len(args.file)} ledgers: a head belongs to one ledger; pass "
            "--public-key, or verify each ledger with its own head"
        )
    proofs = {file: _verified(file, head, key) for file in args.file}
    with accounting():
        text = page(proofs, delta=args.delta, key=key)
    Path(args.out).write_text(text, encoding="utf-8")
    print(args.out)
    return 0


def _run_sign(args: argparse.Namespace) -> int:
    key = private_key(args.key)
    _verified(args.file, None, None)
    one = sign(args.file, key)
    lines = counted(one.lines, "line")
    print(f"{signatures_path(args.file)}: the first {lines}, signed on {one.day}, head {one.head}")
    return 0


def _run_key(args: argparse.Namespace) -> int:
    beside = make_key(args.file)
    print(f"{args.file}: the private key; keep it where no training job can read it")
    print(f"{beside}: the public key, {public_key(beside)}")
    return 0


def _run_rename(args: argparse.Namespace) -> int:
    was, unit = Ledger(args.file).rename(args.unit_name)
    print(f"{args.file}: {was} -> {unit}")
    return 0

"""`dpflash evaluate`: computes a trained model's loss, or a classifier's accuracy, on a file."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from dpflash._json import finite

from ._parser import add_options

_OPTIONS = {
    "--data PATH": "file or folder with the documents",
    "--unit UNIT": "unit as for dpflash train, which decides what a document is: a file (file or "
    "folder), or a line of a JSONL file (record or field:NAME) (default: record if --data is a "
    ".jsonl file, else file)",
    "--field NAME": "key of the text in a record (default: text)",
    "--label-field NAME": "key of the label in a record; needed for a classifier",
    "--seq-len N": "maximum number of tokens per window (default: the longest document, or the "
    "model's maximum)",
    "--max-windows N": "maximum number of windows of a language model (default: all)",
    "--json": "print one JSON object instead",
}
_COLUMNS = ("label", "texts", "recall", "precision")
_NOT_COVERED = (
    "Epsilon does not cover these figures: if the data are private, do not publish them."
)


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash evaluate`."""
    parser.description = (
        "Evaluate a trained model on the documents in --data. For a language model, print the "
        "loss per token and per byte, and the perplexity. For a classifier, print the accuracy, "
        "and the recall and the precision of each label. Epsilon does not cover these figures."
    )
    parser.add_argument("folder", metavar="DIR", help="folder of a run or of an export")
    add_options(parser, _OPTIONS, required=["--data"])
    parser.add_argument(
        "--suffixes", nargs="+", metavar="S", help="read only files with these suffixes"
    )
    parser.set_defaults(run=_run_evaluate, field="text")


def _run_evaluate(args: argparse.Namespace) -> int:
    from dpflash.release.text_model import TextModel
    from dpflash.train.data import ByteDocuments

    from ._tables import table

    is_records = args.label_field is not None or Path(args.data).suffix == ".jsonl"
    unit = args.unit or ("record" if is_records else "file")
    if args.label_field is not None:
        return _evaluate_labels(args, "record" if unit == "file" else unit)
    model = TextModel(args.folder)
    documents = ByteDocuments.read(args.data, unit=unit, field=args.field, suffixes=args.suffixes)
    found = model.evaluate(
        documents.contents,
        seq_len=args.seq_len,
        max_windows=args.max_windows,
        progress=not args.json and sys.stderr.isatty(),
    )
    if args.json:
        derived = {"bits_per_token": found.bits_per_token, "perplexity": found.perplexity}
        print(json.dumps(finite({**asdict(found), **derived})))
        return 0
    left_out = f" (left out: {documents.left_out})" if documents.left_out else ""
    rows = {
        "data": args.data,
        "documents": f"{found.documents}{left_out}",
        f"{model.token}s": f"{found.tokens}",
        f"nats per {model.token}": f"{found.nats_per_token:.4f}",
        f"bits per {model.token}": f"{found.bits_per_token:.4f}",
        f"perplexity per {model.token}": f"{found.perplexity:.4g}",
    }
    if found.bits_per_byte is not None:  # None if --max-windows left tokens out
        rows["bits per byte"] = f"{found.bits_per_byte:.4f}"
    print(f"{table(list(rows.items()))}\n{_NOT_COVERED}")
    return 0


def _evaluate_labels(args: argparse.Namespace, unit: str) -> int:
    from dpflash.release.text_classifier import TextClassifierModel
    from dpflash.train.data import ByteDocuments

    from ._tables import table

    model = TextClassifierModel(args.folder)
    documents = ByteDocuments.read(
        args.data,
        unit=unit,
        field=args.field,
        label_field=args.label_field,
        labels=model.labels,
        suffixes=args.suffixes,
    )
    found = model.evaluate(documents.contents)
    if args.json:
        print(json.dumps(finite(asdict(found))))
        return 0
    left_out = f" (left out: {documents.left_out})" if documents.left_out else ""
    rows = {
        "data": args.data,
        "texts": f"{found.texts}{left_out}",
        "accuracy": f"{found.accuracy:.4f}",
        "nats per text": f"{found.nats_per_text:.4f}",
    }
    by_label = [
        (
            name,
            f"{own['texts']}",
            *("-" if own[key] is None else f"{own[key]:.4f}" for key in ("recall", "precision")),
        )
        for name, own in found.by_label.items()
    ]
    print(f"{table(list(rows.items()))}\n\n{table(by_label, _COLUMNS)}")
    print(_NOT_COVERED)
    return 0

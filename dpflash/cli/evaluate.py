"""`dpflash evaluate`: the loss of a trained model on documents."""

from __future__ import annotations

import argparse
import json
import math
import sys


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash evaluate`."""
    parser.description = (
        "Compute the loss of a trained model on documents: per token, per byte, and as a "
        "perplexity. Epsilon does not cover the result."
    )
    parser.add_argument("folder", metavar="DIR", help="folder of a run or of an export")
    parser.add_argument(
        "--data", metavar="PATH", required=True, help="file or folder with the documents"
    )
    parser.add_argument(
        "--unit",
        default="file",
        help="file or folder: a document is a file; record or field:NAME: a line of a JSONL file "
        "(default: file)",
    )
    parser.add_argument(
        "--field", metavar="NAME", default="text", help="key of the text in a record"
    )
    parser.add_argument("--suffixes", nargs="+", metavar="S", help="file name suffixes to read")
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help="tokens per window (default: the longest document, or what the model takes)",
    )
    parser.add_argument(
        "--max-windows", type=int, metavar="N", help="maximum number of windows (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_evaluate)


def _run_evaluate(args: argparse.Namespace) -> int:
    from dpflash.release.text_model import TextModel
    from dpflash.train.data import ByteDocuments

    model = TextModel(args.folder)
    documents = ByteDocuments.read(
        args.data, unit=args.unit, field=args.field, suffixes=args.suffixes
    )
    found = model.evaluate(
        documents.contents,
        seq_len=args.seq_len,
        max_windows=args.max_windows,
        progress=not args.json and sys.stderr.isatty(),
    )
    figures = {
        "documents": found.documents,
        "tokens": found.tokens,
        "nats_per_token": found.nats_per_token,
        "bits_per_token": found.bits_per_token,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
    }
    if args.json:
        print(json.dumps(figures))
        return 0
    left_out = f" (left out: {documents.left_out})" if documents.left_out else ""
    rows = {
        "documents": f"{found.documents}{left_out}",
        f"{model.token}s": f"{found.tokens}",
        f"nats per {model.token}": f"{found.nats_per_token:.4f}",
        f"bits per {model.token}": f"{found.bits_per_token:.4f}",
        f"perplexity per {model.token}": f"{found.perplexity:.4g}",
    }
    if found.bits_per_byte is not None:  # with --max-windows that of a token is not that of bytes
        rows["bits per byte"] = f"{found.bits_per_byte:.4f}"
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))
    return 0

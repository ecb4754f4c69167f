"""`dpflash export`: writes the model of a run for release."""

from __future__ import annotations

import argparse

from ._parser import add_options

_OPTIONS = {
    "--out DIR": "new folder to write",
    "--keep-adapters": "write LoRA adapters separately, instead of merging them into the model's "
    "weights",
    "--ledgers FILE...": "ledgers of other runs that the weights come from, such as the ledger of "
    "the base model. The card then states the epsilon of each ledger and of all together",
}


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash export`."""
    parser.description = (
        "Write the model of a run into a new folder: model.safetensors, config.json and a model "
        "card (README.md), which states epsilon and what epsilon does not cover. Models of "
        "transformers load without dpflash; other models load by dpflash.load."
    )
    parser.add_argument(
        "folder", metavar="RUN", help="folder of a dpflash train run, or of a DPTrainer"
    )
    add_options(parser, _OPTIONS, required=["--out"])
    parser.set_defaults(run=_run_export, ledgers=[])


def _run_export(args: argparse.Namespace) -> int:
    from dpflash.privacy.card import TITLE
    from dpflash.release.export import CARD, export

    out = export(args.folder, args.out, keep_adapters=args.keep_adapters, ledgers=args.ledgers)
    card = (out / CARD).read_text(encoding="utf-8")
    statement = card.partition(f"{TITLE}\n\n")[2].partition("\n")[0]
    for path in sorted(out.iterdir()):
        print(path)
    print(statement)
    return 0

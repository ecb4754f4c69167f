"""`dpflash generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash generate`."""
    parser.description = (
        "Continue a text with the model of a run or of an export. The text is computed from the "
        "prompt and the weights alone, so it is as private as they are."
    )
    parser.add_argument("folder", metavar="DIR", help="folder of a run or of an export")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the text to continue")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", default=100, help="(default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=1.0,
        help="divides the logits; 0 takes the likeliest token (default: 1)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="choose among the K likeliest (default: all)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="make the choices repeatable")
    parser.set_defaults(run=_run_generate)


def _run_generate(args: argparse.Namespace) -> int:
    from dpflash.release.text_model import TextModel

    text = TextModel(args.folder).generate(
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(text)
    return 0

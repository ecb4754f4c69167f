"""`dpflash generate`: continues a text with a trained model."""

from __future__ import annotations

import argparse

from ._parser import add_options

_OPTIONS = {
    "--prompt TEXT": "the text to continue",
    "--max-new-tokens N": "maximum number of tokens to generate (default: 100)",
    "--temperature T": "divide the logits by T; 0 chooses the most likely token (default: 1)",
    "--top-k K": "choose among the K most likely tokens (default: all)",
    "--seed N": "seed of the random choices, to repeat them",
}


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash generate`."""
    parser.description = (
        "Continue a text with the model of a run or of an export. The new text depends on the "
        "training data through the weights alone, so the guarantee of the weights covers it."
    )
    parser.add_argument("folder", metavar="DIR", help="folder of a run or of an export")
    add_options(parser, _OPTIONS, required=["--prompt"])
    parser.set_defaults(run=_run_generate, max_new_tokens=100, temperature=1.0)


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

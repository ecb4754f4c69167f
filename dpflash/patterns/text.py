"""Parses an attention pattern from text, as on a command line. Letters: T tokens."""

import ast
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .base import Pattern

_EXAMPLE = "sliding_window(window=256)"
_FULL_LENGTH = 4096


def parse(
    text: str, kinds: Mapping[str, type[Pattern]], tokens: int
) -> tuple[type[Pattern], dict[str, Any]]:
    """Parse ``name`` or ``Name(argument=value, ...)`` into the pattern's class and arguments."""
    known = {_snake_case(name): kind for name, kind in kinds.items()}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        is_bare = isinstance(call, ast.Name)
        function = call.func if isinstance(call, ast.Call) else call
        if not isinstance(function, ast.Name) or (isinstance(call, ast.Call) and call.args):
            raise SyntaxError
        words = call.keywords if isinstance(call, ast.Call) else []
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in words}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"pattern={text!r}: expected a name with arguments; pass for example {_EXAMPLE!r}"
        ) from error
    name = _snake_case(function.id)
    if name not in known:
        raise ValueError(
            f"pattern={text!r}: expected one of {', '.join(sorted(known))}; pass a name for the "
            f"sizes of `dpflash bench`, or a name with arguments, as in {_EXAMPLE!r}"
        )
    allowed = [field.name for field in fields(known[name])]  # type: ignore[arg-type]
    unknown = sorted(arguments.keys() - allowed)
    if unknown:
        raise ValueError(
            f"pattern={text!r}: {known[name].__name__} has no argument {unknown[0]!r}; its "
            f"arguments are {', '.join(allowed)}"
        )
    return known[name], _usual_sizes(tokens).get(name, {}) if is_bare else arguments


def _usual_sizes(tokens: int) -> dict[str, dict[str, Any]]:
    """Return the default arguments of patterns that are given by name alone.

    Below 4,096 tokens, windows, segments and blocks are a quarter as long, since the sizes for
    long sequences would make the patterns nearly dense.
    """
    part = 1 if tokens >= _FULL_LENGTH else 4
    block, lengths = 64 // part, [length // part for length in (2048, 4096, 8192)]
    levels = ((block, 8 * block), (8 * block, 64 * block), (64 * block, -1))
    blocks = {"local_blocks": 1, "global_blocks": 1, "random_blocks": 3}
    return {
        "sliding_window": {"window": 1024 // part},
        "block_sparse": {"block_size": 2 * block, **blocks},
        "hierarchical": {"levels": levels, "block_size": block},
        "adaptive": {"block_size": block, "keep": 8},
        "dilated": {"segment_lengths": lengths, "dilation_rates": (1, 2, 4)},
    }


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")

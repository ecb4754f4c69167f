"""Argument parsers, which suggest names for unknown subcommands and options; option tables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dpflash._validate import did_you_mean

# Metavar of an option -> type of its value. Values of options with other metavars are text.
_TYPES: dict[str, type] = {
    **dict.fromkeys(("B", "K", "M", "N"), int),
    **dict.fromkeys(("C", "D", "E", "F", "P", "Q", "R", "S", "SECONDS", "T", "X"), float),
}

# A second name of an option, under which other tools have it.
_ALIASES = {"--learning-rate": ("--lr",)}


def add_options(
    parser: argparse._ActionsContainer, options: Mapping[str, str], required: Collection[str] = ()
) -> None:
    """Add options from a table of usages and help texts.

    A usage is "--delta D", "--batch-size B..." for one or more values, or "--pack" for a flag.
    """
    for usage, text in options.items():
        flag, _, word = usage.partition(" ")
        if not word:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        takes_several = word.endswith("...") and "," not in word
        word = word.removesuffix("...") if takes_several else word
        assert word in _TYPES or len(word) > 1, usage
        kind = _TYPES.get(word, str)
        is_required = flag in required
        nargs = "+" if takes_several else None
        names = (flag, *_ALIASES.get(flag, ()))
        parser.add_argument(
            *names, type=kind, metavar=word, help=text, required=is_required, nargs=nargs
        )


def as_typed(message: str, parser: argparse.ArgumentParser) -> str:
    """Replace arguments in a message by the command's options: `--steps 0` for `steps=0`."""
    options = _options_of(parser)

    def typed(found: re.Match[str]) -> str:
        name, equals, value = found[1], found[2], found[3]
        option = options.get(name)
        if option is None or not (equals or "_" in name):
            return found[0]
        if value == "None":
            return f"no {option}"
        if value == "False":
            return options.get(f"no_{name}", f"no {option}")
        follows = found.string[found.end() :][:1]
        is_alone = value == "True" or not equals or (follows != "" and follows in " ,;")
        return option if is_alone else f"{option} "

    # Keep Python code (`make_private(steps=)`, `optimizer.steps`), paths and quoted texts.
    option = r"(?<![\w.(/'\"-])([a-z_]+)\b(?!\()(=(?:(True|False|None)\b)?)?"
    parts = re.split(r"((?<!\w)'[^']*'|\([^()]*\))", message)
    parts[::2] = [re.sub(option, typed, part) for part in parts[::2]]
    return "".join(parts)


def _options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    found = {}
    for action in parser._actions:
        for option in action.option_strings:
            found[option.lstrip("-").replace("-", "_")] = option
        for subparser in action._name_parser_map.values() if isinstance(action, Names) else ():
            found |= _options_of(subparser)
    return found


class Parser(argparse.ArgumentParser):
    """A parser that does not accept abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but raise for unknown arguments also in a subcommand."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = next((u.partition("=")[0] for u in unknown if u.startswith("-")), "")
            hint = did_you_mean(option, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


class Names(argparse._SubParsersAction):
    """The action of subcommands, which suggests names for an unknown subcommand."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Disable argparse's own check; `__call__` reports unknown names.
        self.choices = None  # type: ignore[assignment]

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name, known = (values or ("",))[0], self._name_parser_map
        if name not in known:
            hint = did_you_mean(name, known)
            parser.error(f"{self.metavar}={name!r}: expected one of {', '.join(known)}{hint}")
        super().__call__(parser, namespace, values, option_string)

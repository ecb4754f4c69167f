"""Argument parsers that suggest a name for an unknown subcommand or option."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean ...?", or "" if no name is similar."""
    close = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser that does not accept abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in argparse, but the parser of a subcommand raises for unknown arguments itself."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = next((u.partition("=")[0] for u in unknown if u.startswith("-")), "")
            hint = did_you_mean(option, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


class Names(argparse._SubParsersAction):
    """The subcommands; suggests a name for an unknown one."""

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

"""How far a benchmark is, on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_BAR = "{desc}: {n_fmt}/{total_fmt} |{bar:12}| {elapsed} {postfix}"


class Progress:
    """Tells what is going on, and counts rows.

    Args:
        name: of the benchmark.
        is_shown: whether anything is written.
    """

    def __init__(self, name: str, *, is_shown: bool = True):
        self._name, self._begin = name, time.monotonic()
        self._has_lines = is_shown and not sys.stderr.isatty()
        self._rows = self._row = 0
        self._bar = tqdm(
            desc=name,
            total=0,
            bar_format=_BAR,
            dynamic_ncols=True,
            disable=not is_shown or self._has_lines,
            file=sys.stderr,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.close()

    def expect(self, rows: int) -> None:
        """Sets how many rows there will be; a part that makes rows of its own counts as one."""
        self._rows = self._bar.total = rows

    def say(self, what: str) -> None:
        """Tells a phase."""
        self._bar.set_postfix_str(what)
        if self._has_lines:
            seconds = int(time.monotonic() - self._begin)
            took = f"{seconds // 60}:{seconds % 60:02}"
            print(f"{self._name} {took} {what}", file=sys.stderr, flush=True)

    def begin(self, what: str, unit: str = "row") -> None:
        """Goes on to the next row, or part."""
        self._row += 1
        self._bar.update()
        self.say(f"{unit} {self._row} of {self._rows}: {what}")

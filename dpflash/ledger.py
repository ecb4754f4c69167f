"""The ledger: what was released, in a file of lines that are on disk before the releases leave."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpflash.accounting import Event, Gaussian, ShuffledGaussian, event_from_dict

# Far above any number of steps or samples, and exact as a float.
_GREATEST = 10**15
_KEYS = ("steps", "run", "event", "epsilon", "delta", "accountant")


@dataclass(frozen=True)
class LedgerLine:
    """One line: the steps it covers and what each of them cost.

    Attributes:
        first, last: numbers of the steps, counted through the whole ledger from 1.
        run: which run made them.
        event: what each step did; None where an earlier line has paid for it.
        epsilon: upper end of all steps up to the last, None where it was not known.
        delta: of that epsilon.
        accountant: which computed it.
    """

    first: int
    last: int
    run: str
    event: Event | None
    epsilon: float | None
    delta: float | None
    accountant: str

    @property
    def steps(self) -> int:
        """How many steps the line covers."""
        return self.last - self.first + 1


class Ledger:
    """An append-only file of JSON lines, read when it is opened.

    Attributes:
        lines: what the file held then.
        releases: steps in the file by now.

    Guarantees:
        A line is flushed to the disk before `append` returns, so a crash after it can only
        over-count. A file whose lines cannot be read is refused, never shortened.

    Raises:
        ValueError: naming the file and the line that is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        content = self.content()
        self.lines = self._read(content)
        self._payer: str | None = None
        for line in self.lines:
            self._payer = _payer_after(self._payer, line)
        self.releases = self.lines[-1].last if self.lines else 0
        self._size = len(content)

    def append(
        self,
        *,
        run: str,
        event: Event | None,
        epsilon: float | None = None,
        delta: float | None = None,
        accountant: str,
        count: int = 1,
    ) -> None:
        """Write the next `count` steps, and return when they are on the disk.

        Raises:
            ValueError: the line could not be read again.
            RuntimeError: the file is not as this object left it.
            OSError: the line could not be written; the file is as before.
        """
        record = {
            "steps": [self.releases + 1, self.releases + count],
            "run": run,
            "event": None if event is None else event.as_dict(),
            "epsilon": epsilon,
            "delta": delta,
            "accountant": accountant,
        }
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        # What the next opening would refuse must not get in.
        payer = _payer_after(self._payer, _parse(line))
        self._store(line)
        self._size += len(line)
        self.releases += count
        self._payer = payer

    def _store(self, line: bytes) -> None:
        # Only a ledger without lines may be made: one that is missing was spent.
        new = self._size == 0 and not self.path.exists()
        try:
            flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if new else 0)
            handle = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            if new:
                raise
            self._refuse_changed()
        try:
            if new:
                flush_folder(self.path.parent)
            self._write(handle, line)
        finally:
            os.close(handle)

    def digest(self, releases: int | None = None) -> str | None:
        """Digest of the lines of the first steps (all by default); None where there are fewer."""
        wanted = self.releases if releases is None else releases
        if wanted > self.releases:
            return None
        content = self.content()
        if wanted == self.releases:
            return _digest(content[: self._size])
        raw = content.splitlines(keepends=True)
        lines, taken = self._read(content), 0
        while taken < len(lines) and lines[taken].first <= wanted:
            taken += 1
        return _digest(b"".join(raw[:taken]))

    def content(self) -> bytes:
        """The whole file."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ValueError(
                f"ledger={str(self.path)!r}: cannot be read ({error.strerror}), so the privacy "
                "spent so far is unknown; pass the path of a file that can be read and written"
            ) from error

    def _read(self, content: bytes) -> list[LedgerLine]:
        *whole, rest = content.split(b"\n")
        lines: list[LedgerLine] = []
        payer: str | None = None
        for number, raw in enumerate(whole, start=1):
            try:
                line = _parse(raw)
                expected = lines[-1].last + 1 if lines else 1
                if line.first != expected:
                    raise ValueError(
                        f"it begins with step {line.first} where step {expected} is next: a line "
                        "is missing, doubled or out of order"
                    )
                payer = _payer_after(payer, line)
            except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
                raise ValueError(
                    f"ledger {self.path} is damaged at line {number} ({error}): the privacy spent "
                    "so far is unknown. Restore the file from a copy; do not delete the line"
                ) from error
            lines.append(line)
        if rest:
            raise ValueError(
                f"ledger {self.path} ends in the middle of line {len(lines) + 1}: a release was "
                "about to be made when the process died and was not made. Remove that last, "
                "unfinished line to go on"
            )
        return lines

    def _write(self, handle: int, line: bytes) -> None:
        if os.fstat(handle).st_size != self._size:
            self._refuse_changed()
        end = self._size + len(line)
        try:
            if os.write(handle, line) != len(line):
                raise OSError(f"ledger {self.path}: a line was written in part; disk full?")
            os.fsync(handle)
        except BaseException:
            # The release is not made; half a line would make the file unreadable. What another
            # process wrote meanwhile stays, and is found out at the next opening.
            if os.fstat(handle).st_size <= end:
                os.ftruncate(handle, self._size)
            raise
        if os.fstat(handle).st_size != end:
            self._refuse_changed()

    def _refuse_changed(self) -> None:
        raise RuntimeError(
            f"ledger {self.path} was changed or removed by another process or engine, so what "
            "this one knows of the privacy spent is incomplete. Give each running engine a "
            "ledger of its own, or start anew from this one"
        )


class LedgerCopy(Ledger):
    """What a worker knows of a ledger that another one keeps."""

    def __init__(self, path: str | os.PathLike[str], content: bytes):
        self._held = content
        super().__init__(path)

    def content(self) -> bytes:
        return self._held

    def _store(self, line: bytes) -> None:
        self._held += line


def _parse(raw: bytes) -> LedgerLine:
    """One line's values, checked; what is wrong with them as ValueError or KeyError."""
    record = json.loads(
        raw.decode("utf-8"),
        object_pairs_hook=_object,
        parse_int=_bounded,
        parse_float=_finite,
        parse_constant=_finite,
    )
    if not isinstance(record, dict):
        raise ValueError("not an object")
    if "release" in record:
        raise ValueError(
            "it is in the format of an older version, which did not tell the samplers apart; "
            "start a new ledger and add the old epsilon to the new one's"
        )
    if sorted(record) != sorted(_KEYS):
        raise ValueError(f"it has the keys {sorted(record)}, not {sorted(_KEYS)}")
    steps = record["steps"]
    if not isinstance(steps, list) or len(steps) != 2 or any(type(s) is not int for s in steps):
        raise ValueError(f"steps={steps!r}: expected two whole numbers")
    if steps[1] < steps[0]:
        raise ValueError(f"steps={steps!r}: the last is before the first")
    for name in ("run", "accountant"):
        if not isinstance(record[name], str) or not record[name]:
            raise ValueError(f"{name}={record[name]!r}: expected a name")
    epsilon, delta = record["epsilon"], record["delta"]
    if epsilon is not None and not (_is_number(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon={epsilon!r}: expected null or a number >= 0")
    if delta is not None and not (_is_number(delta) and 0 < delta < 1):
        raise ValueError(f"delta={delta!r}: expected null or 0 < delta < 1")
    if epsilon is not None and delta is None:
        raise ValueError(f"epsilon={epsilon!r} without a delta")
    event = record["event"]
    if event is not None and not isinstance(event, dict):
        raise ValueError(f"event={event!r}: expected null or an object")
    done = None if event is None else event_from_dict(event)
    if done is not None and not any(count for _, count in done.pairs()):
        raise ValueError(f"event={event!r} costs nothing, and no release does")
    return LedgerLine(
        first=steps[0],
        last=steps[1],
        run=record["run"],
        event=done,
        epsilon=epsilon,
        delta=delta,
        accountant=record["accountant"],
    )


def _payer_after(payer: str | None, line: LedgerLine) -> str | None:
    """The run whose pass over the data is paid for after a line, given that before it.

    Raises:
        ValueError: the line has no event, and its run has paid for no pass.
    """
    if line.event is None:
        if payer != line.run:
            raise ValueError(
                "event=null is for the later steps of a pass over shuffled data, and the lines "
                "before it are not of one that the same run has paid for"
            )
        return payer
    if isinstance(line.event, ShuffledGaussian):
        return line.run
    # A step on a batch of unknown origin comes between the steps of a pass.
    return payer if type(line.event) is Gaussian and payer == line.run else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bounded(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > _GREATEST:
        raise ValueError(f"a whole number of {len(text)} digits is above {_GREATEST:.0e}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands in it twice")
    return values


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def flush_folder(folder: Path) -> None:
    """Put the name of a new file on the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

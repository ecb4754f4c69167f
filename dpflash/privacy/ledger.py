"""The ledger: a file with one line for each release, written to disk before the release."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from dpflash.accounting import (
    CyclicPoissonGaussian,
    Event,
    Gaussian,
    RandomAllocationGaussian,
    ShuffledGaussian,
    event_from_dict,
)

from .ledger_file import LedgerFile, Tail
from .privacy_unit import SAMPLE, kind_of, renamed

# Upper limit of numbers in a line: far above any number of steps, and exact as a float.
_GREATEST = 10**15
_KEYS = ("steps", "run", "event", "epsilon", "delta", "accountant", "unit", "digest")
# Optional keys: "branch" after a checkpoint was loaded, "note" in a line without steps, "about" in
# a run's first line, "was" in a line that corrects the unit's name.
_OTHER_KEYS = {"branch", "note", "about", "was"}
REFUSED = "ended by a private refusal"
LOST = "ended with another rank, perhaps by a private refusal"
_RENAMED = "corrected the name of the privacy unit"
_DIGEST = b', "digest": "%s"}\n'
_DIGEST_LENGTH = len(_DIGEST % (b"0" * 32))


class _Cover(NamedTuple):
    """The later steps whose cost the event of an earlier line includes."""

    run: str
    branch: str | None  # None for any branch
    steps: float  # number of these steps; may be inf

    def is_of(self, line: LedgerLine) -> bool:
        return self.run == line.run and self.branch in (None, line.branch)


@dataclass(frozen=True)
class LedgerLine:
    """One line of the ledger: the steps it covers and their privacy event."""

    # numbers of the first and last step, counted through the whole ledger from 1
    first: int
    last: int
    run: str  # the run that made the steps
    # privacy event of each step; None if an earlier line's event includes the cost
    event: Event | None
    epsilon: float | None  # upper bound over all steps up to `last`; None if it was not computed
    delta: float | None  # the delta at which epsilon was computed
    accountant: str  # name of the accountant that computed epsilon
    digest: str  # digest of all earlier lines and of this line's other values
    unit: str  # the privacy unit in which neighboring datasets differ
    # the continuation of the run that made the steps; "" before a checkpoint was loaded. Two
    # continuations of a run have different noise, samples and digests.
    branch: str = ""
    # a note on what happened between two steps; such a line covers no step: last = first - 1
    note: str | None = None
    # facts about the run from this line on, see `source.about_run`; None if they did not change
    about: Mapping[str, Any] | None = None
    # the old name of the unit, in a line that corrects the name
    was: str | None = None

    @property
    def steps(self) -> int:
        """Number of steps that the line covers."""
        return self.last - self.first + 1


class Ledger:
    """An append-only file of JSON lines, read when it is opened.

    Each line contains a digest of all bytes before it, and the file's guard contains a copy of the
    last line (see `LedgerFile`). `lines` are the lines that the file had when it was opened, and
    `names` maps each renamed unit to its last name.

    Guarantees:
        A line is flushed to the disk before `append` returns, so a later crash can only
        over-count. A file is refused (ValueError) if a line cannot be read, or if the guard's line
        is missing because the file was changed, truncated or emptied. No line is ever removed,
        except an unfinished last line, whose release was not made.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = LedgerFile(path)
        content, self._tail = self._file.read()
        self._begin(path, content)
        self._check_guard(content)

    def _begin(self, path: str | os.PathLike[str], content: bytes) -> None:
        self.path = Path(path)
        self.lines = self._read(content)
        self._covered: _Cover | None = None
        self.names: dict[str, str] = {}
        for line in self.lines:
            self._covered = _covered_after(self._covered, line)
            self.names = _names_after(self.names, line)
        self.releases = self.lines[-1].last if self.lines else 0
        self._running = _hash(content)
        raw, last = content.splitlines(keepends=True), len(self.lines)
        while last and self.lines[last - 1].note is not None:
            last -= 1
        self._released = _hash(b"".join(raw[:last]))
        notes = [line.note for line in self.lines[last:] if line.was is None]
        self._last_note = notes[-1] if notes else None
        self._told: tuple[str, str, Mapping[str, Any] | None] | None = None

    @property
    def unit(self) -> str | None:
        """The privacy unit of the lines, under its last name; None if there is no line."""
        return self.called(self.lines[-1].unit) if self.lines else None

    def called(self, unit: str) -> str:
        """Return the last name of a unit, which may have been renamed."""
        return self.names.get(unit, unit)

    @property
    def head(self) -> str:
        """SHA-256 of the lines, as by `sha256sum FILE`; a copy saved elsewhere shows changes."""
        return hashlib.sha256(self.content()).hexdigest()

    @property
    def has_grown(self) -> bool:
        """Whether the file has lines that this object neither read nor wrote."""
        known = self._tail.size + len(self._tail.unfinished)
        return self.path.exists() and self.path.stat().st_size > known

    def append(
        self,
        *,
        run: str,
        event: Event | None,
        epsilon: float | None = None,
        delta: float | None = None,
        accountant: str,
        count: int = 1,
        unit: str = SAMPLE,
        branch: str = "",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one line for the next `count` steps, and return when it is on the disk.

        `about` is written with the first steps of a run, and again whenever it has changed.
        Raises RuntimeError if another process has added to the file or changed it, and OSError if
        the line could not be written; the file is then unchanged.
        """
        told = (run, branch, about)
        is_new = about is not None and told != self._told
        self._write(
            count,
            run=run,
            event=None if event is None else event.as_dict(),
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            unit=unit,
            **({"branch": branch} if branch else {}),
            **({"about": about} if is_new else {}),
        )
        self._released, self._told = self._running, told

    def note(self, note: str, *, run: str, accountant: str, unit: str) -> None:
        """Write a line without a step, unless the last line is this note. Raises as `append`."""
        if self._last_note != note:
            nothing = dict.fromkeys(("event", "epsilon", "delta"))
            self._write(0, run=run, **nothing, accountant=accountant, unit=unit, note=note)

    def rename(self, name: str) -> tuple[str, str]:
        """Write a line that renames the unit of all lines; return the old and the new unit.

        Raises ValueError if there is no line yet or the units are not users, and as `append`.
        """
        if self.unit is None:
            raise ValueError(f"ledger {self.path} has no line, so no privacy unit to rename")
        was, unit = self.unit, renamed(self.unit, name)
        if unit == was:
            raise ValueError(f"ledger {self.path}: its privacy unit is {unit!r} already")
        nothing = dict.fromkeys(("event", "epsilon", "delta"))
        last, about = self.lines[-1], {"day": today()}
        self._write(
            0, run=last.run, **nothing, accountant=last.accountant, unit=unit,
            note=_RENAMED, was=was, about=about,
        )  # fmt: skip
        self.lines = self._read(self.content())
        self.names = _names_after(self.names, self.lines[-1])
        return was, unit

    def _write(self, count: int, **values: Any) -> None:
        record = {"steps": [self.releases + 1, self.releases + count], **values}
        line = _with_digest(json.dumps(record, allow_nan=False).encode(), self._running)
        # Parse the line, which raises an error if the next reader would refuse it.
        covered = _covered_after(self._covered, _parse(line))
        running = self._running.copy()
        running.update(line)
        tail = self._store(line)
        self.releases += count
        self._covered = covered
        self._running, self._last_note = running, values.get("note")
        # Set `_tail` last: if an interrupt prevents it, the next line is refused.
        self._tail = tail

    def _store(self, line: bytes) -> Tail:
        return self._file.append(line, self._tail)

    def digest(self, releases: int | None = None) -> str | None:
        """Return the digest of lines to step `releases` (default: all); None beyond the last."""
        wanted = self.releases if releases is None else releases
        if wanted > self.releases:
            return None
        if wanted == self.releases:
            return self._released.hexdigest()
        content = self.content()
        raw = content.splitlines(keepends=True)
        lines, taken = self._read(content), 0
        while taken < len(lines) and lines[taken].first <= wanted:
            taken += 1
        return _hash(b"".join(raw[:taken])).hexdigest()

    def content(self) -> bytes:
        """Return the bytes of the lines that this object read or wrote; raise if they changed."""
        content = self._file.read()[0][: self._tail.size]
        if _hash(content).digest() != self._running.digest():
            self._file.refuse_changed()
        return content

    def _read(self, content: bytes) -> list[LedgerLine]:
        lines: list[LedgerLine] = []
        covered: _Cover | None = None
        running = _hash(b"")
        for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                line = _parse(raw)
                expected = lines[-1].last + 1 if lines else 1
                if line.first != expected:
                    raise ValueError(
                        f"it begins with step {line.first}, expected {expected}: a line is "
                        "missing, duplicated or out of order"
                    )
                covered = _covered_after(covered, line)
                _check_digest(raw + b"\n", running)
            except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
                raise ValueError(
                    f"ledger {self.path} is damaged at line {number} ({error}): the privacy spent "
                    "so far is unknown. Restore the file from a copy; do not delete the line"
                ) from error
            lines.append(line)
            running.update(raw + b"\n")
        return lines

    def _check_guard(self, content: bytes) -> None:
        guard, where = self._tail.guard, self._file.guard_path
        path, away = quote(str(self.path)), "" if guard is None else "move the guard away and "
        # `wc` counts complete lines, so the guard gets no line that is unfinished.
        last_line = f"head -n $(wc -l < {path}) {path} | tail -n 1"
        repair = (
            f"Without a copy, {away}compare the ledger with the hash of it that you saved last: "
            f"dpflash ledger verify {path} --head HASH. Only if no line was added and cut after "
            f"you saved that hash, make a new guard: {last_line} > {quote(str(where))}"
        )
        if guard is None:
            earlier = where.with_suffix(".head")
            if earlier.exists():
                raise ValueError(
                    f"ledger {self.path}: its guard {where} is missing. Earlier versions called "
                    f"it {earlier}; rename it: mv {quote(str(earlier))} {quote(str(where))}"
                )
            if self.lines or self._tail.unfinished:
                raise ValueError(
                    f"ledger {self.path}: its guard {where} is missing, so it is unknown whether "
                    f"lines were removed. Copy the guard too if the ledger was copied. {repair}"
                )
            return
        if not guard and len(self.lines) > 1:
            # An empty guard is valid only before or while the first line is written.
            raise ValueError(
                f"ledger {self.path} has {len(self.lines)} lines, and its guard {where} is empty, "
                f"so it is unknown whether lines were removed. Restore it from a copy. {repair}"
            )
        # After a crash the guard may hold an older line, since it is written after the file.
        if not guard or guard in content.splitlines(keepends=True):
            return
        try:
            step = _parse(guard.removesuffix(b"\n")).last
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"ledger {self.path}: its guard {where} is damaged ({error}). Restore it from a "
                f"copy. {repair}"
            ) from error
        if step > self.releases:
            raise ValueError(
                f"ledger {self.path} ends with step {self.releases}, and its guard {where} with "
                f"step {step}: the ledger was removed, emptied or truncated, and the privacy "
                "spent so far is unknown. Restore the ledger from a copy; for other data use "
                "another path"
            )
        raise ValueError(
            f"ledger {self.path} and its guard {where} differ in step {step}: one of them was "
            "changed or belongs to another ledger, and the privacy spent so far is unknown. "
            "Restore both from a copy"
        )


class LedgerCopy(Ledger):
    """The other ranks' copy in memory of the ledger that the first rank writes."""

    def __init__(self, path: str | os.PathLike[str], content: bytes):
        self._held = content
        self._tail = Tail(len(content), b"", b"", None)
        self._begin(path, content)

    @property
    def has_grown(self) -> bool:
        return False

    def content(self) -> bytes:
        return self._held

    def _store(self, line: bytes) -> Tail:
        self._held += line
        return self._tail


def today() -> str:
    """Return the day in UTC; a time of day would show the number of microbatches of a step."""
    return datetime.now(timezone.utc).date().isoformat()


def _parse(raw: bytes) -> LedgerLine:
    record = json.loads(
        raw.decode("utf-8"),
        object_pairs_hook=_object,
        parse_int=_bounded,
        parse_float=_finite,
        parse_constant=_finite,
    )
    if not isinstance(record, dict):
        raise ValueError("not an object")
    if sorted(record.keys() - _OTHER_KEYS) != sorted(_KEYS):
        raise ValueError(f"it has the keys {sorted(record)}, not {sorted(_KEYS)}")
    steps = record["steps"]
    if not isinstance(steps, list) or len(steps) != 2 or any(type(s) is not int for s in steps):
        raise ValueError(f"steps={steps!r}: expected two whole numbers")
    if "note" in record and (steps[1] != steps[0] - 1 or record["event"] is not None):
        raise ValueError("a note has neither steps nor an event")
    if "note" not in record and steps[1] < steps[0]:
        raise ValueError(f"steps={steps!r}: the last is before the first")
    for name in ("run", "accountant", "unit", "branch", "note", "was"):
        value = record.get(name, "none") if name in _OTHER_KEYS else record[name]
        if not _is_name(value):
            raise ValueError(f"{name}={value!r}: expected a name")
    about = record.get("about", {})
    if not isinstance(about, dict) or not all(map(_is_fact, about.values())):
        raise ValueError(f"about={about!r}: expected an object of names and numbers")
    unit = record["unit"]
    was: Any = record.get("was", unit)
    if kind_of(was) != kind_of(unit) or ("was" in record and "note" not in record):
        raise ValueError(f"was={was!r} and unit={unit!r}: a note can correct the name of users")
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
        raise ValueError(f"event={event!r} costs nothing, but every release has a cost")
    return LedgerLine(
        first=steps[0],
        last=steps[1],
        run=record["run"],
        event=done,
        epsilon=epsilon,
        delta=delta,
        accountant=record["accountant"],
        digest=record["digest"],
        unit=record["unit"],
        branch=record.get("branch", ""),
        note=record.get("note"),
        about=record.get("about"),
        was=record.get("was"),
    )


def _with_digest(record: bytes, before: hashlib.blake2b) -> bytes:
    covered = before.copy()
    covered.update(record)
    return record[:-1] + _DIGEST % covered.hexdigest().encode()


def _check_digest(raw: bytes, before: hashlib.blake2b) -> None:
    if _with_digest(raw[:-_DIGEST_LENGTH] + b"}", before) != raw:
        raise ValueError(
            "its digest is wrong: the line was changed, or an earlier line was removed or added"
        )


def _covered_after(covered: _Cover | None, line: LedgerLine) -> _Cover | None:
    """Return `covered` after this line: the later steps that events so far have paid for."""
    if line.note is not None:
        return covered
    own = covered if covered is not None and covered.is_of(line) else None
    if line.event is None:
        if own is None or own.steps < line.steps:
            raise ValueError(
                "event=null is for a later step of an epoch (shuffled batches, random allocation) "
                "or of a round (cyclic Poisson sampling), but no earlier line of the same run "
                "covers its epoch or round"
            )
        return own._replace(steps=own.steps - line.steps)
    if isinstance(line.event, ShuffledGaussian):
        return _Cover(line.run, line.branch, math.inf)
    if isinstance(line.event, CyclicPoissonGaussian):
        # None in place of the branch: a resumed run with a seed continues its round.
        return _Cover(line.run, None, line.event.bands - 1)
    if isinstance(line.event, RandomAllocationGaussian):
        return _Cover(line.run, None, line.event.steps - 1)
    # A step on a foreign batch, which costs a plain Gaussian event, leaves the cover as it is.
    return own if type(line.event) is Gaussian else None


def _names_after(names: dict[str, str], line: LedgerLine) -> dict[str, str]:
    """Return `names` after this line: the last name of each renamed unit."""
    if line.was is None:
        return names
    known = {line.was: line.was, **names}
    return {unit: line.unit if name == line.was else name for unit, name in known.items()}


def _is_name(value: object) -> bool:
    # Unprintable characters could hide other lines in a terminal.
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_fact(value: object) -> bool:
    return value is None or _is_number(value) or _is_name(value)


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
        raise ValueError("duplicate key")
    return values


def _hash(content: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)

"""The ledger: one line for each release, on disk before the release leaves."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


class Ledger:
    """An append-only file of JSON lines {"release", "noise_multiplier", "sample_rate"}.

    sample_rate is null for a step whose cost an earlier line of the same pass has paid.

    Guarantees:
        A line is flushed to the disk before `append` returns, so a crash after it can only
        over-count. A file whose lines cannot be read is refused, never shortened.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.releases = len(self.read())
        self._size = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[tuple[float, float | None]]:
        """(noise_multiplier, sample_rate) of each line.

        Raises:
            ValueError: naming the file and the line that is damaged.
        """
        if not self.path.exists():
            return []
        entries: list[tuple[float, float | None]] = []
        for number, line in enumerate(self.path.read_text("utf-8").split("\n")[:-1], start=1):
            try:
                record = json.loads(line)
                if record["release"] != number:
                    raise ValueError("a line is missing before it")
                rate = record["sample_rate"]
                entries.append(
                    (float(record["noise_multiplier"]), None if rate is None else float(rate))
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"ledger {self.path} is damaged at line {number} ({error}): the privacy spent "
                    "so far is unknown. Restore the file from a copy; do not delete the line"
                ) from error
        text = self.path.read_bytes()
        if text and not text.endswith(b"\n"):
            raise ValueError(
                f"ledger {self.path} ends in the middle of line {len(entries) + 1}: a release was "
                "about to be made when the process died and was not made. Remove that last, "
                "unfinished line to go on"
            )
        return entries

    def append(self, *, noise_multiplier: float, sample_rate: float | None) -> None:
        record = {
            "release": self.releases + 1,
            "noise_multiplier": noise_multiplier,
            "sample_rate": sample_rate,
        }
        line = json.dumps(record).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise RuntimeError(
                    f"ledger {self.path} was changed by another process or engine, so what this "
                    "one knows of the privacy spent is incomplete. Give each running engine a "
                    "ledger of its own, or start anew from this one"
                )
            try:
                if file.write(line) != len(line):
                    raise OSError(f"ledger {self.path}: a line was written in part; disk full?")
                os.fsync(file.fileno())
            except BaseException:
                # The release is not made; half a line would make the file unreadable.
                os.truncate(self.path, self._size)
                raise
            self._size = os.fstat(file.fileno()).st_size
        self.releases += 1

    def digest(self, releases: int | None = None) -> str | None:
        """Digest of the first lines (all by default); None where there are fewer."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        count = self.releases if releases is None else releases
        if len(lines) < count:
            return None
        return hashlib.blake2b(b"".join(lines[:count]), digest_size=16).hexdigest()

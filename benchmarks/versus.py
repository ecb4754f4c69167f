"""Measures two checkouts on one machine, in turns, call by call.

Each checkout has its own process, which imports the checkout's dpflash. The two processes take
turns (A B, B A, ...) on the same CPU and are timed by their process time on one thread, so that a
slower machine or CPU slows both. A launch is a pair of fresh copies of these processes, on the
next CPU. Addresses of data change with each launch, so launches, not rounds, are independent.
Addresses of code are the same in all launches. For this reason, checkouts with equal code differ
by one to three percent, and 95% intervals are too narrow: of 60 rows of equal code, only 44 had
an interval that contained the ratio 1. The threshold of the comparison covers this difference.

    dpflash bench versus OLD_CHECKOUT NEW_CHECKOUT --out DIR
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dpflash import _validate

from . import output
from .compare import run_compare
from .environment import commit, environment
from .suite import worst
from .timing import summarize
from .versus_worker import JOBS

Row = dict[str, Any]

# (launches, rounds per launch).
FULL, QUICK = (8, 6), (4, 3)
_PACKAGES = ("kernels", "accounting")
_HARNESS = {"versus_worker.py": "worker.py", "memory.py": "memory.py"}
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class WorkerError(ValueError):
    """Raised if the process of a checkout ended before it answered."""


def run_versus(
    old_checkout: str | os.PathLike[str],
    new_checkout: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    names: Sequence[str] = tuple(JOBS),
    launches: int = FULL[0],
    rounds: int = FULL[1],
    has_progress: bool = True,
) -> int:
    """Measure two checkouts in turns, write OLD.json and NEW.json, and compare the two files.

    The measured jobs are the `versus_worker.JOBS` of the dpflash that runs this function, not of
    the checkouts. A row is wrong if the new checkout's result differs from the old checkout's.
    Returns the result of `compare.run_compare`, which tests over launches if there are 3 or more.
    """
    _validate.positive_int(launches=launches, rounds=rounds)
    if launches * rounds < 2:
        raise ValueError("launches=1, rounds=1: one trial shows no spread; pass 2 or more rounds")
    folder = output.make_folder(out)
    checkouts = {"OLD": Path(old_checkout), "NEW": Path(new_checkout)}
    rows: dict[str, dict[str, Row]] = {side: {} for side in checkouts}
    with ExitStack() as stack:
        prefix = "dpflash-versus-"
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
        harness = _copy_harness(scratch / "harness")
        workers = {}
        for side, checkout in checkouts.items():
            tree = _copy_sources(checkout, scratch / side)
            workers[side] = _Worker(tree, harness, scratch / f"{side}.txt", checkout)
            # Ends the worker also during a launch, since the copy reads the same pipe.
            stack.callback(workers[side].process.communicate)
        numbers = range(launches)
        for launch in tqdm(numbers, unit="launch", disable=not has_progress, file=sys.stderr):
            _launch(workers, names, rounds, launch, rows, scratch)
    run = {"run": uuid.uuid4().hex, "launches": launches, "rounds": rounds}
    for side, checkout in checkouts.items():
        result = {
            "environment": {
                **environment("cpu", 1),
                "dpflash": workers[side].version,
                "commit": commit(checkout),
                "suite": "versus",
                "trials": launches * rounds,
                "clock": "process time",
                "versus": run,
            },
            "complete": True,
            "rows": [_finished(row) for row in rows[side].values()],
        }
        output.write_json(folder / f"{side}.json", result)
    old, new = (folder / f"{side}.json" for side in checkouts)
    return run_compare(old, new, json_path=folder / "comparison.json")


def _copy_harness(folder: Path) -> Path:
    package = folder / "versus_harness"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for source, target in _HARNESS.items():
        shutil.copyfile(Path(__file__).parent / source, package / target)
    return folder


def _copy_sources(checkout: Path, folder: Path) -> Path:
    """Copy the three packages of a checkout's dpflash into one tree, and return the tree."""
    packages = [f"{name}/__init__.py" for name in ("dpflash", *_PACKAGES)]
    missing = [file for file in packages if not (checkout / file).is_file()]
    if missing:
        raise ValueError(
            f"{os.fspath(checkout)!r} has no {missing[0]!r}; pass a checkout of dpflash"
        )
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(checkout / "dpflash", folder / "dpflash", ignore=ignored)
    for package in _PACKAGES:
        shutil.copytree(checkout / package, folder / "dpflash" / package, ignore=ignored)
    return folder


def _launch(
    workers: dict[str, _Worker],
    names: Sequence[str],
    rounds: int,
    launch: int,
    rows: dict[str, dict[str, Row]],
    scratch: Path,
) -> None:
    cpu = _cpu(launch)
    for worker in workers.values():
        worker.ask(do="launch", cpu=cpu)
    for name in names:
        for side in _order(workers, launch):
            row = rows[side].setdefault(name, output.row(name, JOBS[name][1], needs=None))
            if row["needs"] is None and row["correct"] is not False:
                result = os.fspath(scratch / f"{side}.pt") if launch == 0 else None
                _take(row, workers[side].ask(do="build", name=name, result=result))
        if launch == 0:
            _compare_results(rows["OLD"][name], rows["NEW"][name], scratch)
    for number in range(rounds):
        for name in names:
            for side in _order(workers, number):
                if _runs(rows[side][name]):
                    seconds = workers[side].ask(do="time", name=name)["seconds"]
                    rows[side][name].setdefault("samples_ms", []).append(1e3 * seconds)
    for worker in workers.values():
        worker.ask(do="end")


def _cpu(launch: int) -> int | None:
    """Return the CPU for both processes of a launch, or None to let the system choose.

    A CPU can be slower than others for minutes, if other jobs run on its core.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[launch % len(cpus)]


def _order(workers: dict[str, _Worker], number: int) -> Iterable[str]:
    return reversed(workers) if number % 2 else workers


def _runs(row: Row) -> bool:
    return row["needs"] is None and row["correct"] is True


def _take(row: Row, built: dict[str, Any]) -> None:
    """Write a process's answer to "build" into the row, with the smallest peak of all launches."""
    row.update({key: built[key] for key in ("needs", "tolerance") if key in built})
    peaks = (row["peak_memory_mb"], built.get("peak_memory_mb"))
    row["peak_memory_mb"] = min((peak for peak in peaks if peak is not None), default=None)


def _compare_results(old: Row, new: Row, scratch: Path) -> None:
    """Mark the new checkout's row as correct if its result equals the old checkout's."""
    old["correct"] = True if old["needs"] is None else None
    if old["needs"] or new["needs"]:
        new["needs"] = new["needs"] or "a result of the old checkout"
        return
    a, b = (torch.load(scratch / f"{side}.pt") for side in ("OLD", "NEW"))
    new["error"] = math.inf
    if [x.shape for x in a] == [y.shape for y in b]:
        pairs = zip(a, b, strict=True)
        new["error"] = worst(float((y - x).norm() / x.norm().clamp(min=1e-30)) for x, y in pairs)
    new["correct"] = new["error"] <= new["tolerance"]


def _finished(row: Row) -> Row:
    if not _runs(row):
        return {**row, "peak_memory_mb": None, "samples_ms": []}
    return {**row, **summarize([ms / 1e3 for ms in row["samples_ms"]]).as_row()}


class _Worker:
    def __init__(self, tree: Path, harness: Path, log: Path, checkout: Path) -> None:
        self._tree, self._log, self._checkout = tree, log, checkout
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "versus_harness.worker"],
                cwd=harness,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.fspath(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        hello = self._answer()
        strangers = [f for f in hello["files"] if not Path(f).is_relative_to(tree.resolve())]
        assert not strangers, strangers
        self.version = hello["version"]

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # reading the answer will fail too
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.kill()
            self.process.wait()
            said = self._log.read_text(errors="replace").strip()
            raise WorkerError(
                f"the process of {self._tree.name} ended: {said[-2000:]}; repair "
                f"{os.fspath(self._checkout)!r} or pass a checkout of dpflash that runs"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

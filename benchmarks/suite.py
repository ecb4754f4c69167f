"""Runs a benchmark: measures what it compares, and writes what was found.

A benchmark (`Suite`) is a plan of comparisons. What is compared takes turns, so that its ratios
hold on a machine that others use too; what is wrong, or cannot run here, has no figures but a
reason. The JSON is written again after each comparison, and the page and the picture after Ctrl-C
too, so that nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import output as results
from .document import Chart, Table, markdown
from .environment import environment
from .measuring import Bench, refuse
from .picture import draw
from .plan import Build, Comparison, Measurement, Request, Row, Subject, Unsupported
from .progress import Progress
from .roofline import measured_roofs
from .timing import Stopwatch

# What a benchmark's own file needs.
__all__ = [
    "Build",
    "Comparison",
    "Measurement",
    "Request",
    "Row",
    "Subject",
    "Suite",
    "Unsupported",
    "has_figures",
    "needs",
    "of_section",
    "run_suite",
    "worst",
    "wrong_peers",
    "wrong_rows",
]


def _nothing(rows: Sequence[Row]) -> Iterable[Row]:
    return ()


Part = Callable[[Request], Iterable[Row]]


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: of its files and on the command line.
        title: of its page.
        about: a paragraph on what is measured and how to read it.
        plan: comparisons, and parts that make rows of their own; called before anything is
            measured.
        derive: further rows, from those measured (exponents, insights).
        tables, charts: of its page and its picture.
        wall: its parts take the wall's clock, since processes wait for each other in them.
    """

    name: str
    title: str
    about: str
    plan: Callable[[Request], Iterable[Comparison | Part]]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    derive: Callable[[Sequence[Row]], Iterable[Row]] = _nothing
    wall: bool = False


def run_suite(suite: Suite, request: Request, folder: Path) -> dict[str, Any]:
    """Measures, and writes NAME.json, NAME.md and NAME.png into a folder that is there.

    After Ctrl-C they hold what was measured until then, and "complete" is False.

    Returns:
        What the JSON holds: "environment", "complete" and "rows".
    """
    results.require_drawing()
    threads = torch.get_num_threads()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    try:
        with Progress(suite.name, is_shown=request.has_progress) as progress:
            return _run(suite, request, folder, progress)
    finally:
        torch.set_num_threads(threads)


def _run(suite: Suite, request: Request, folder: Path, progress: Progress) -> dict[str, Any]:
    device, path = request.where, folder / f"{suite.name}.json"
    plan = list(suite.plan(request))
    progress.expect(
        sum(len(item.measurements) if isinstance(item, Comparison) else 1 for item in plan)
    )
    progress.say("measuring the machine's roofs: bytes/s of its memory, FLOP/s of its products")
    roofs = measured_roofs(device, quick=request.quick)
    stopwatch = Stopwatch(device, wall=suite.wall)
    rows: list[Row] = []
    found: dict[str, Any] = {
        "environment": {
            **environment(device.type, torch.get_num_threads()),
            "suite": suite.name,
            "quick": request.quick,
            **asdict(request.calls),
            "clock": stopwatch.name,
            "seed": request.seed,
            "max_seconds": request.limit,
            "roofs": {"flops": dict(roofs.flops), "bandwidth": roofs.bandwidth},
        },
        "complete": False,
        "rows": rows,
    }
    bench = Bench(request, stopwatch, roofs, folder / "traces", progress)
    try:
        for number, item in enumerate(plan):
            if isinstance(item, Comparison):
                rows += bench.rows(item)
            else:
                _add_part(rows, item, number, request, progress)
            results.write_json(path, found)
        progress.say("deriving")
        measured = tuple(rows)
        _add(rows, "derived", lambda: suite.derive(measured))
        found["complete"] = True
    finally:
        results.write_json(path, found)
        results.write_text(path.with_suffix(".md"), markdown(suite, found))
        results.write_picture(path.with_suffix(".png"), draw(suite, found))
    return found


def _add_part(
    rows: list[Row], part: Part, number: int, request: Request, progress: Progress
) -> None:
    """Adds the rows that a part of the plan makes, each as it comes."""
    # Of a nested function the one that made it.
    name = getattr(part, "__qualname__", type(part).__name__).split(".")[0].strip("_<>")
    about = (part.__doc__ or name.replace("_", " ")).splitlines()[0].rstrip(".")
    progress.begin(about, "part")

    def made() -> Iterator[Row]:
        for row in part(request):
            progress.say(f"{about}: {row['name']} is done")
            yield row

    _add(rows, f"{name}/{number}", made)


def _add(rows: list[Row], name: str, make: Callable[[], Iterable[Row]]) -> None:
    """Adds what is made; where that raises, a row of this name that says so."""
    try:
        for row in make():
            rows.append(row)
    except Exception as error:
        failed = results.row(name, {})
        refuse(failed, error)
        rows.append(failed)


def has_figures(found: Mapping[str, Any]) -> bool:
    """Whether anything was measured, and was right."""
    return any(row["correct"] is True or row["median_ms"] is not None for row in found["rows"])


def worst(errors: Iterable[float]) -> float:
    """The largest of some errors, at least one; infinite where one is no finite number."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def wrong_rows(found: Mapping[str, Any]) -> list[str]:
    """Names of what of ours did not compute the right thing, and has no figures therefore."""
    return [
        row["name"] for row in found["rows"] if row["correct"] is False and not row.get("peer")
    ]


def wrong_peers(found: Mapping[str, Any]) -> list[str]:
    """Names of what others compute wrongly, which is something found and no failure of the run."""
    return [row["name"] for row in found["rows"] if row["correct"] is False and row.get("peer")]


def needs(name: str, config: Mapping[str, Any], reason: str, **columns: Any) -> Row:
    """A row of something that cannot be measured here."""
    return results.row(name, config, needs=reason, **columns)


def of_section(rows: Iterable[Row], section: str) -> Iterator[Row]:
    """The rows of a section of the suite."""
    return (row for row in rows if row.get("section") == section)

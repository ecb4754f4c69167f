"""Accountants side by side: dpflash's, Opacus' and those of Google's dp_accounting, on one thread.

One query of 10,000 equal steps (median over the repetitions, each with a slightly different noise,
so that no cache helps), the same after one more step, the noise for a target epsilon, schedules
with up to 1,000 different noise levels, and the table of truths in tests/accounting/truth.json.
Queries: the providers take turns in one process. Everything else: each provider works in a process
of its own, from which what takes longer than --peer-limit (for the table --row-limit) is
ended and reported as "> 60 s". A provider that raises is reported with its message.

    python benchmarks/bench_accounting.py --json runs/bench_accounting.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import queue
import resource
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import opacus
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from opacus.accountants import RDPAccountant as OpacusRDPAccountant
from opacus.accountants.utils import get_noise_multiplier as opacus_get_noise_multiplier

import dpflash
from dpflash import accounting

ROOT = Path(__file__).resolve().parents[1]
OWN = ("contour", "pld", "rdp")
PEERS = ("opacus prv", "opacus rdp", "google pld", "google rdp")
OPACUS = {"opacus prv": PRVAccountant, "opacus rdp": OpacusRDPAccountant}
GOOGLE = {"google pld": PLDAccountant, "google rdp": RdpAccountant}

RATE, NOISE, STEPS, DELTA = 0.01, 1.0, 10_000, 1e-5
REPETITIONS = 11
SLOW_SECONDS, SLOW_REPETITIONS = 3.0, 3
# (target epsilon, sample rate, steps)
TARGETS = [
    (8.0, 0.01, 1000),
    (1.0, 0.01, 1000),
    (0.1, 0.01, 1000),
    (0.005, 0.01, 1000),
    (100.0, 0.1, 1000),
]
SCHEDULES = [(10, 100), (100, 10), (1000, 1)]  # phases, steps of each
LIMIT_GIB = 8

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps


def providers() -> list[str]:
    """Those that exist; says which of ours do not yet."""
    found = []
    for name in OWN:
        try:
            accounting.create_accountant(name)
        except ValueError:
            print(f"left out: this version has no accountant {name!r}", file=sys.stderr)
        else:
            found.append(name)
    return [*found, *PEERS]


def google_event(noise_multiplier: float, sample_rate: float) -> Any:
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian)


def build(provider: str, phases: list[Phase]) -> Any:
    """An accountant with this history."""
    if provider in GOOGLE:
        accountant = GOOGLE[provider]()
        for noise_multiplier, sample_rate, steps in phases:
            accountant.compose(google_event(noise_multiplier, sample_rate), steps)
        return accountant
    create = OPACUS.get(provider)
    accountant = create() if create else accounting.create_accountant(provider)
    accountant.history = [tuple(phase) for phase in phases]
    return accountant


def epsilon(provider: str, phases: list[Phase], delta: float) -> float:
    return float(build(provider, phases).get_epsilon(delta))


def calibrate(provider: str, target: float, sample_rate: float, steps: int) -> float:
    """The noise by the provider's own search."""
    arguments = {
        "target_epsilon": target,
        "target_delta": DELTA,
        "sample_rate": sample_rate,
        "steps": steps,
    }
    if provider in OPACUS:
        name = provider.removeprefix("opacus ")
        return float(opacus_get_noise_multiplier(accountant=name, **arguments))
    if provider in OWN:
        return accounting.get_noise_multiplier(accountant=provider, **arguments)
    return float(
        dp_accounting.calibrate_dp_mechanism(
            GOOGLE[provider],
            lambda noise: dp_accounting.SelfComposedDpEvent(
                google_event(noise, sample_rate), steps
            ),
            target,
            DELTA,
            dp_accounting.LowerEndpointAndGuess(0.1, 1.0),
            tol=1e-4,
        )
    )


def timed(work: Callable[[], float]) -> dict[str, object]:
    start = time.perf_counter()
    try:
        value = work()
    except MemoryError:
        return {"refused": "out of memory"}
    except Exception as error:  # whatever a peer raises is its answer
        message = " ".join(str(error).split())
        return {
            "refused": f"{type(error).__name__}: {message[:160]}",
            "seconds": time.perf_counter() - start,
        }
    # JSON has no inf and no nan.
    result = value if math.isfinite(value) else str(value)
    return {"value": result, "seconds": time.perf_counter() - start}


def queries(names: list[str], repetitions: int) -> list[dict[str, object]]:
    """One query cold, and one more after a further step; the providers take turns."""
    cold: dict[str, list[dict]] = {name: [] for name in names}
    warm: dict[str, list[dict]] = {name: [] for name in names}
    for name in names:
        epsilon(name, [(3.0, RATE, 10)], DELTA)
    for number in range(repetitions):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            done = cold[name]
            slow = len(done) and done[0]["seconds"] > SLOW_SECONDS
            if slow and len(done) >= SLOW_REPETITIONS:
                continue
            noise = NOISE + 1e-6 * number
            built: list[Any] = []

            def query(name: str = name, noise: float = noise, built: list = built) -> float:
                built.append(build(name, [(noise, RATE, STEPS)]))
                return float(built[0].get_epsilon(DELTA))

            def again(name: str = name, noise: float = noise, built: list = built) -> float:
                if name in GOOGLE:
                    built[0].compose(google_event(noise, RATE))
                else:
                    built[0].step(noise_multiplier=noise, sample_rate=RATE)
                return float(built[0].get_epsilon(DELTA))

            done.append(timed(query))
            warm[name].append(timed(again))
    rows = []
    for name in names:
        row: dict[str, object] = {"provider": name, **cold[name][0]}
        row["repetitions"] = len(cold[name])
        for kind, done in (("cold", cold[name]), ("warm", warm[name])):
            seconds = [entry["seconds"] for entry in done]
            row[f"{kind}_ms"] = 1e3 * statistics.median(seconds)
            row[f"{kind}_ms_range"] = [1e3 * min(seconds), 1e3 * max(seconds)]
        row.pop("seconds", None)
        rows.append(row)
    return rows


def schedule(phases: int, steps: int) -> list[Phase]:
    return [(1 + k / phases, RATE, steps) for k in range(phases)]


def table() -> list[dict[str, Any]]:
    return json.loads((ROOT / "tests/accounting/truth.json").read_text())


def phases_of(row: dict[str, Any]) -> list[Phase]:
    if "phases" in row:
        return [(noise, rate, steps) for noise, rate, steps in row["phases"]]
    return [(row["noise_multiplier"], row["sample_rate"], row["steps"])]


def cases(part: str, quick: bool) -> list[Callable[[str], float]]:
    """Work of a part as functions of the provider."""
    if part == "targets":
        return [
            lambda name, case=case: calibrate(name, *case) for case in TARGETS[: 2 if quick else 9]
        ]
    if part == "schedules":
        return [
            lambda name, case=case: epsilon(name, schedule(*case), DELTA)
            for case in SCHEDULES[: 1 if quick else 9]
        ]
    assert part == "table"
    rows = table()
    return [
        lambda name, row=row: epsilon(name, phases_of(row), row["delta"])
        for row in (rows[:6] if quick else rows)
    ]


def stream(part: str, provider: str, count: int, limit: float, options: list[str]) -> list[dict]:
    """Results of a part's cases from a child, which is ended and started anew at the limit."""
    results: list[dict] = []
    while len(results) < count:
        child = start(["--child", part, provider, "--first", str(len(results)), *options])
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=read_lines, args=(child, lines), daemon=True).start()
        lines.get()  # it has imported everything
        while len(results) < count:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                child.kill()
                results.append({"refused": f"> {limit:g} s"})
                break
            if line is None:
                results.append({"refused": f"the process died with code {child.wait()}"})
                break
            results.append(json.loads(line))
        child.wait()
    return results


def read_lines(child: subprocess.Popen, lines: queue.Queue) -> None:
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def start(arguments: list[str]) -> subprocess.Popen:
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **single},
    )


def work(args: argparse.Namespace) -> None:
    """What a child does: one JSON line per result."""
    limit = int(LIMIT_GIB * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    part, provider = args.child
    if part == "queries":
        names = provider.split(",")
        print(json.dumps(queries(names, 3 if args.quick else REPETITIONS)))
        return
    print("ready", flush=True)
    for case in cases(part, args.quick)[args.first :]:
        print(json.dumps(timed(lambda case=case: case(provider))), flush=True)


def true_epsilons(rows: list[dict[str, Any]]) -> None:
    """Add to each noise that was found the epsilon that it truly has."""
    spec = importlib.util.spec_from_file_location("oracle", ROOT / "tests/accounting/oracle.py")
    oracle = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = oracle
    spec.loader.exec_module(oracle)
    for row in rows:
        if isinstance(row.get("noise_multiplier"), float):
            phases = [(row["noise_multiplier"], row["sample_rate"], row["steps"])]
            row["true_epsilon"] = float(oracle.contour_epsilon(phases, DELTA)[0])


def environment(args: argparse.Namespace) -> dict[str, object]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    version = importlib.metadata.version
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"CPU {model}, 1 thread",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "opacus": opacus.__version__,
        "dp_accounting": version("dp-accounting"),
        "dpflash": dpflash.__version__,
        "commit": commit,
        "quick": args.quick,
        "peer_limit_s": args.peer_limit,
        "row_limit_s": args.row_limit,
    }


def shown(value: object, digits: int = 6) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def print_table(title: str, header: list[str], rows: Iterator[list[object]]) -> None:
    print(f"\n{title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(shown(cell) for cell in row) + " |", flush=True)


def measure_queries(names: list[str], options: list[str]) -> list[dict[str, Any]]:
    child = start(["--child", "queries", ",".join(names), *options])
    rows = json.loads(child.stdout.read().splitlines()[-1])
    child.wait()
    truth = next(
        float(row["epsilon"])
        for row in table()
        if phases_of(row) == [(NOISE, RATE, STEPS)] and row["delta"] == DELTA
    )
    for row in rows:
        value = row.get("value")
        row["truth"] = truth
        row["relative_error"] = value / truth - 1 if isinstance(value, float) else None
    print_table(
        f"One query, {STEPS} steps, q = {RATE}, s = {NOISE}, delta = {DELTA}; truth {truth:.6f}",
        ["provider", "cold ms", "warm ms", "epsilon", "relative error", "repetitions"],
        (
            [
                row["provider"],
                round(row["cold_ms"], 2),
                round(row["warm_ms"], 2),
                row.get("value", row.get("refused")),
                row["relative_error"],
                row["repetitions"],
            ]
            for row in rows
        ),
    )
    return rows


def measure_targets(names: list[str], args: argparse.Namespace, options: list[str]) -> list[dict]:
    rows: list[dict[str, Any]] = []
    targets = TARGETS[: 2 if args.quick else 9]
    for name in names:
        results = stream("targets", name, len(targets), args.peer_limit, options)
        for (target, rate, steps), result in zip(targets, results, strict=True):
            own = {"provider": name, "target_epsilon": target, "sample_rate": rate, "steps": steps}
            if "value" in result:
                own["noise_multiplier"] = result.pop("value")
            rows.append({**own, **result})
    if not args.quick:
        true_epsilons(rows)
    rows.sort(key=lambda row: [target[0] for target in targets].index(row["target_epsilon"]))
    print_table(
        f"The noise of a target at delta = {DELTA}",
        ["target", "q", "steps", "provider", "s", "seconds", "true epsilon"],
        (
            [
                row["target_epsilon"],
                row["sample_rate"],
                row["steps"],
                row["provider"],
                row.get("noise_multiplier", row.get("refused")),
                row.get("seconds", ""),
                row.get("true_epsilon", ""),
            ]
            for row in rows
        ),
    )
    return rows


def measure_schedules(
    names: list[str], args: argparse.Namespace, options: list[str]
) -> list[dict]:
    rows: list[dict[str, Any]] = []
    wanted = SCHEDULES[: 1 if args.quick else 9]
    for name in names:
        results = stream("schedules", name, len(wanted), args.peer_limit, options)
        for (phases, steps), result in zip(wanted, results, strict=True):
            rows.append({"provider": name, "phases": phases, "steps": steps, **result})
    rows.sort(key=lambda row: row["phases"])
    print_table(
        f"Schedules s = 1 ... 2, q = {RATE}, delta = {DELTA}",
        ["phases", "steps of each", "provider", "seconds", "epsilon"],
        (
            [
                row["phases"],
                row["steps"],
                row["provider"],
                row.get("seconds", ""),
                row.get("value", row.get("refused")),
            ]
            for row in rows
        ),
    )
    return rows


def measure_table(names: list[str], args: argparse.Namespace, options: list[str]) -> list[dict]:
    settings = table()[: 6 if args.quick else None]
    rows = [{**row, "truth": float(row.pop("epsilon")), "results": {}} for row in settings]
    for name in names:
        for row, result in zip(
            rows, stream("table", name, len(rows), args.row_limit, options), strict=True
        ):
            value = result.get("value")
            if isinstance(value, float | int):
                result["difference"] = value - row["truth"]
            row["results"][name] = result
    print_table(
        "The table of truths: value - truth",
        ["q", "s", "steps", "delta", "truth", *names],
        (
            [
                *(
                    [row["sample_rate"], row["noise_multiplier"], row["steps"]]
                    if "steps" in row
                    else ["", f"{len(row['phases'])} phases", ""]
                ),
                row["delta"],
                row["truth"],
                *(difference(row["results"][name]) for name in names),
            ]
            for row in rows
        ),
    )
    print_table(
        "Summary of the table; errors relative to the truth",
        [
            "provider",
            "answers",
            "inf or nan",
            "refused",
            "below truth",
            "median error",
            "greatest",
        ],
        (summary(name, rows) for name in names),
    )
    return rows


def difference(result: dict[str, Any]) -> str:
    if "difference" in result:
        return f"{result['difference']:+.2e}"
    return str(result.get("value", result.get("refused", "")[:24]))


def summary(name: str, rows: list[dict[str, Any]]) -> list[object]:
    results = [(row["truth"], row["results"][name]) for row in rows]
    known = [(truth, result["difference"]) for truth, result in results if "difference" in result]
    # What float64 can tell apart.
    below = sum(error < -1e-9 * truth - 1e-12 for truth, error in known)
    errors = [abs(error) / truth for truth, error in known if truth > 0]
    return [
        name,
        len(known),
        sum(isinstance(result.get("value"), str) for _, result in results),
        sum("refused" in result for _, result in results),
        below,
        statistics.median(errors) if errors else "",
        max(errors, default=""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_accounting.json"))
    parser.add_argument("--quick", action="store_true", help="a few cases of each part")
    parser.add_argument("--peer-limit", type=float, default=60, help="seconds of a case")
    parser.add_argument("--row-limit", type=float, default=20, help="seconds of a table's row")
    parser.add_argument("--providers", nargs="+", help="only these")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.child:
        work(args)
        return
    names = [name for name in providers() if args.providers is None or name in args.providers]
    options = ["--quick"] if args.quick else []
    result = {
        "environment": environment(args),
        "queries": measure_queries(names, options),
        "targets": measure_targets(names, args, options),
        "schedules": measure_schedules(names, args, options),
        "table": measure_table(names, args, options),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {args.json}")


if __name__ == "__main__":
    main()

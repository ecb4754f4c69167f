"""Measures isolation tests (trials): which couplings they refuse, and whether honest runs pass.

    python benchmarks/scripts/isolation_figures.py --out benchmarks/results/isolation.json

`power` has a row for each coupling of `couplings.py` and each strength a from 0 (honest) to 1:

- `refused`: the number of runs that ended before the fourth release
- `verified`: the number of other runs whose `engine.verified` is True at the end
- `total`: how far one privacy unit moves a logical batch's clipped sum, divided by the bound C.
  This is the largest distance for two entries of the unit and two bounds.
- `others`: how far the unit moves the sum of all other units, divided by C. If its own gradient
  has the direction of this change, the unit moves the whole sum by 1 + `others`.

Both are null if a trainer refuses even without trials. `unseen` has rows with a run that was not
refused and with `total` or 1 + `others` above 1.001. `honest` has the runs of
`tests/end_to_end/test_honest_runs.py`, `ranks` some on two processes; `--seed N` repeats one run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[1:1] = [str(TESTS / "end_to_end"), str(TESTS / "distributed")]

import couplings  # noqa: E402
import test_honest_runs as honest_runs  # noqa: E402
from distributed_world import World  # noqa: E402
from tqdm import tqdm  # noqa: E402

import dpflash  # noqa: E402
from dpflash.bench.environment import environment  # noqa: E402

STRENGTHS = (0.0, *(10.0**k for k in range(-6, 1)))
BOUNDS, CHANGES, CLAIMED = (1.0, 8.0), ("", "large"), 1.001
NAMES = ("kind", "layout", "units", "loop")  # `units` per microbatch


def power(case, a, runs):
    """Return a row with the figures of a coupling with one strength."""
    made, is_trainer = [], case[1] == "tokens"  # synthetic entries of a trainer raise ValueError
    for seed in range(runs):
        run = couplings.Run(*case, a, seed)
        try:
            run.go()
            made.append(run.engine.verified)
        except (dpflash.PrivateRefusal, ValueError) as error:
            if isinstance(error, ValueError) and not is_trainer:
                raise
            made.append("refused")
    row = {**dict(zip(NAMES, case, strict=True)), "a": a, "runs": runs}
    row |= {"refused": made.count("refused"), "verified": made.count(True)}
    moved = {"total": [], "others": []}
    try:
        for bound in BOUNDS[: 1 if is_trainer else None]:
            without = couplings.sum_of(*case, a, 0, change="none", max_grad_norm=bound)
            for change in CHANGES:
                for name, found in list(moved.items())[: 1 if is_trainer else None]:
                    options = {"change": change, "mutes": name == "others"}
                    own = couplings.sum_of(*case, a, 0, max_grad_norm=bound, **options)
                    found.append(float((own - without).norm()) / bound)
    except dpflash.PrivateRefusal:
        moved = {"total": [], "others": []}
    return row | {name: round(max(x), 7) if x else None for name, x in moved.items()}


def honest(seed, world=None):
    """Return a row for an honest run; `refused` has its refusal, `not_made` why it did not run."""
    row = {"seed": seed, "architecture": honest_runs.choices(seed)["architecture"]}
    given = (honest_runs.__file__, "train", 2)
    try:
        made = world and world.run(*given, seed=seed, on_ranks=True)[0]
        row["refused"], row["not_made"] = made or honest_runs.train(seed=seed)
    except Exception as error:
        row |= {"refused": None, "not_made": f"{type(error).__name__}: {error}"}
    return row


def summary(rows):
    made = Counter(row["architecture"] for row in rows if row["not_made"] is None)
    found = {"runs": made.total(), "by_architecture": dict(sorted(made.items()))}
    for name in ("refused", "not_made"):
        found[name] = [row for row in rows if row[name] is not None]
    return found


def _work(job):
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return json.dumps(job), power(*job) if isinstance(job, tuple) else honest(job)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/isolation.json"))
    parser.add_argument("--quick", action="store_true", help="few runs, in two minutes")
    parser.add_argument("--minutes", type=float, help="time limit; the same command continues")
    parser.add_argument("--seed", type=int, help="make only this honest run, and show it")
    args, begin = parser.parse_args(), time.monotonic()
    if args.seed is not None:
        print(honest_runs.choices(args.seed), *honest_runs.train(seed=args.seed), sep="\n")
        return
    jobs = []
    for case in couplings.CASES[:: 5 if args.quick else 1]:
        # A microbatch of one sample has no other samples to couple with.
        is_short = args.quick or (case[2] == 1 and case[0] != "state")
        jobs += [(case, a, 1 if args.quick else 5) for a in STRENGTHS[:: 7 if is_short else 1]]
    jobs += range(40 if args.quick else 3200)
    part = args.out.with_suffix(".part")  # rows of an interrupted campaign
    rows = dict(map(json.loads, part.read_text().splitlines())) if part.exists() else {}
    left = [job for job in jobs if json.dumps(job) not in rows]
    random.Random(0).shuffle(left)
    left.sort(
        key=lambda job: isinstance(job, int) or job[1] < CLAIMED - 1
    )  # strong couplings first
    with multiprocessing.get_context("spawn").Pool(2) as pool, part.open("a") as file:
        for key, row in tqdm(pool.imap_unordered(_work, left), total=len(left)):
            rows[key] = row
            print(json.dumps([key, row]), file=file, flush=True)
            if args.minutes and time.monotonic() > begin + 60 * args.minutes:
                break
    rows = [rows[key] for key in map(json.dumps, jobs) if key in rows]
    with World(2) as world:
        on_ranks = [honest(seed, world) for seed in range(4 if args.quick else 40)]
    found = {"environment": environment("cpu", 1) | {"quick": args.quick}}
    found["honest"] = summary([row for row in rows if "seed" in row])
    found["ranks"] = summary(on_ranks)
    table = [row for row in rows if "kind" in row]
    passed = [row for row in table if row["refused"] < row["runs"]]
    moving = [r for r in passed if max(r["total"] or 0, 1 + (r["others"] or 0)) > CLAIMED]
    found |= {"unseen": moving, "power": table}
    text = json.dumps(found).replace("[{", "[\n{").replace("}, ", "},\n").replace("}]", "}\n]")
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

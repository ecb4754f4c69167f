"""Whether `dpflash bench versus` tells a slowdown of 10 % from none: 20 trials of each.

Each trial compares two copies of this checkout. In an A/A trial they are equal, and nothing may be
flagged. In an A/B trial the second one is slowed: attention on the CPU, epsilon and each part of a
private step (the model's forward pass, `engine.backward`, the optimizer's step) keep the processor
busy for another tenth of the time that they just took; every row must be flagged as slower.

    python tests/benchmarks/check_compare.py --json benchmarks/results/DEVICE/compare_check.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dpflash.bench.environment import environment
from dpflash.bench.versus import run_versus

ROOT = Path(__file__).resolve().parents[2]
SLOWDOWN = 0.10
NAMES = ("attention/dense/T1024", "private step/flat", "accounting/contour")
# A file of the slowed copy, the class of the function if it is a method, and the function.
SLOWED = (
    ("kernels/attention.py", None, "attention_forward"),
    ("kernels/attention.py", None, "attention_backward"),
    ("accounting/accountant.py", "Accountant", "get_epsilon"),
    ("dpflash/nn/language_model.py", "LongContextLM", "forward"),
    ("dpflash/engine.py", "PrivacyEngine", "backward"),
    ("dpflash/optimizer.py", "PrivateOptimizer", "step"),
)
# What is slowed inside of something slowed is not slowed twice.
SLOWER = f"""
import functools
import threading
import time

_inside = threading.local()


def slower(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if getattr(_inside, "yes", False):
            return function(*args, **kwargs)
        _inside.yes = True
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            _inside.yes = False
            end = time.process_time()
            while time.process_time() - end < {SLOWDOWN} * (end - begin):
                pass

    return call
"""


def copy_checkout(folder: Path) -> Path:
    for house in ("dpflash", "kernels", "accounting"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / house, folder / house, ignore=ignored)
    return folder


def slow_down(checkout: Path) -> Path:
    (checkout / "kernels/_slower.py").write_text(SLOWER)
    for file, owner, name in SLOWED:
        path = checkout / file
        target = f"{owner}.{name}" if owner else name
        module = "._slower" if file.startswith("kernels/") else "dpflash.kernels._slower"
        with path.open("a") as source:
            source.write(f"\n\nfrom {module} import slower\n\n{target} = slower({target})\n")
    return checkout


def trial(old: Path, new: Path, args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        code = run_versus(
            old,
            new,
            out=out,
            names=NAMES,
            launches=args.launches,
            rounds=args.rounds,
            has_progress=False,
        )
        report = json.loads((Path(out) / "comparison.json").read_text())
    lines = {line["name"]: line for line in report["lines"]}
    return {
        "exit_code": code,
        "verdicts": {name: line["verdict"] for name, line in lines.items()},
        "ratios": {name: line["ratio"] for name, line in lines.items()},
        "intervals": {name: line["interval"] for name, line in lines.items()},
        "p": {name: line["p"] for name, line in lines.items()},
        "seconds": round(time.monotonic() - began, 1),
        "load_average": round(load, 1),
    }


def is_right(kind: str, found: dict[str, Any]) -> bool:
    verdicts = set(found["verdicts"].values())
    if kind == "A/A":
        return found["exit_code"] == 0 and verdicts <= {"unchanged", "undecided"}
    return found["exit_code"] == 1 and verdicts == {"slower"}


def write(path: Path, args: argparse.Namespace, trials: list[dict[str, Any]]) -> None:
    right = {kind: sum(t["right"] for t in trials if t["kind"] == kind) for kind in ("A/A", "A/B")}
    made = {kind: sum(t["kind"] == kind for t in trials) for kind in ("A/A", "A/B")}
    result = {
        "environment": {
            **environment("cpu", 1),
            "slowdown": SLOWDOWN,
            "names": NAMES,
            "launches": args.launches,
            "rounds": args.rounds,
        },
        "right": right,
        "made": made,
        "trials": trials,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--trials", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--launches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        plain, same = (copy_checkout(Path(folder) / name) for name in ("plain", "same"))
        slow = slow_down(copy_checkout(Path(folder) / "slow"))
        for number in tqdm(range(args.trials), unit="pair of trials"):
            for kind, new in (("A/A", same), ("A/B", slow)):
                found = trial(plain, new, args)
                right = is_right(kind, found)
                trials.append({"number": number, "kind": kind, "right": right, **found})
                shown = ", ".join(
                    f"{name} {ratio:.3f} ({found['verdicts'][name]})"
                    for name, ratio in found["ratios"].items()
                )
                tqdm.write(f"{kind} {'right' if right else 'WRONG'}: {shown}", file=sys.stdout)
                write(args.json, args, trials)
    for kind, text in (("A/A", "not flagged"), ("A/B", "every row flagged")):
        own = [t for t in trials if t["kind"] == kind]
        print(f"{kind}: {text} in {sum(t['right'] for t in own)} of {len(own)}")
    return int(not all(t["right"] for t in trials))


if __name__ == "__main__":
    sys.exit(main())

"""Attention and private training on several workers, as `dpflash bench scaling` measures them.

The Markdown and the picture are written beside the JSON.

    python benchmarks/bench_scaling.py --json runs/bench_scaling.json
    python benchmarks/bench_scaling.py --quick --workers 1,2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpflash.bench.results import make_folder
from dpflash.bench.scaling import run_scaling, wrong_rows
from dpflash.bench.workers import TaskError
from dpflash.cli.bench import add_scaling_arguments, scaling_request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_scaling.json"))
    add_scaling_arguments(parser)
    args = parser.parse_args()
    make_folder(args.json.parent)
    try:
        wrong = wrong_rows(run_scaling(scaling_request(args), args.json))
    except (TaskError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written to {args.json}", *(f"WRONG: {name}" for name in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

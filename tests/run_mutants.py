"""Runs the tests against broken versions of the library, each of which some test must catch.

    python tests/run_mutants.py                  # all of tests/mutants.json
    python tests/run_mutants.py --only NAME ...  # some of them
    python tests/run_mutants.py --check          # only whether the list fits the code

A mutant replaces one short piece of code (`old`, which occurs once in `file`) by a wrong one
(`new`). It is dead if one of its killers fails, and alive if all of them pass: then the tests
have lost the power to see this mistake. First all killers run on the code as it is.

After a refactoring, adapt `file` and `old` so that the mutant still breaks what `breaks` says.
After a cut of the tests, name other killers: of a test with cases always one of them, since the
suite leaves most of the others out.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.json"
KEYS = {"name", "breaks", "invariant", "file", "old", "new", "killers"}
AREAS = (*range(1, 17), "kernels", "accounting", "ranks", "audit")
TIMEOUT_S = 600

Mutant = dict[str, Any]


def read() -> list[Mutant]:
    """The list of mutants."""
    mutants: list[Mutant] = json.loads(LIST.read_text())
    return mutants


def problems(mutants: Sequence[Mutant]) -> list[str]:
    """What of the list does not fit the code, in words."""
    found = []
    names = collections.Counter(mutant["name"] for mutant in mutants)
    found += [
        f"{name}: {count} mutants have this name" for name, count in names.items() if count > 1
    ]
    for mutant in mutants:
        name = mutant["name"]
        if mutant.keys() != KEYS:
            found.append(f"{name}: expected the keys {sorted(KEYS)}")
            continue
        if mutant["invariant"] not in AREAS:
            found.append(f"{name}: invariant {mutant['invariant']!r} is none of {AREAS}")
        if mutant["old"] == mutant["new"]:
            found.append(f"{name}: old and new are equal")
        path = ROOT / mutant["file"]
        count = path.read_text().count(mutant["old"]) if path.is_file() else 0
        if count != 1:
            found.append(f"{name}: old occurs {count} times in {mutant['file']}, expected once")
        if not 1 <= len(mutant["killers"]) <= 3:
            found.append(f"{name}: {len(mutant['killers'])} killers, expected 1 to 3")
        found += [f"{name}: {problem}" for k in mutant["killers"] if (problem := _problem_with(k))]
    counts = collections.Counter(mutant["invariant"] for mutant in mutants)
    found += [
        f"invariant {number}: {counts[number]} mutants, expected at least 4"
        for number in range(1, 17)
        if counts[number] < 4
    ]
    return found


def _problem_with(node_id: str) -> str | None:
    """Why a pytest node id cannot be a killer: no such test, or no case of it is named."""
    file, _, function = node_id.partition("[")[0].partition("::")
    functions = _functions(ROOT / file) if (ROOT / file).is_file() else {}
    if function not in functions:
        return f"there is no test {node_id}"
    if functions[function] and "[" not in node_id:
        return f"{node_id} has cases, most of which are left out: name the one that fails"
    return None


_known: dict[Path, dict[str, bool]] = {}


def _functions(path: Path) -> dict[str, bool]:
    """Whether each function of a file has a decorator that makes cases of it."""
    if path not in _known:
        body = ast.parse(path.read_text()).body
        marks = {
            target.id
            for node in body
            if isinstance(node, ast.Assign) and "mark.parametrize(" in ast.unparse(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        _known[path] = {
            node.name: any(
                "mark.parametrize(" in ast.unparse(decorator) or ast.unparse(decorator) in marks
                for decorator in node.decorator_list
            )
            for node in body
            if isinstance(node, ast.FunctionDef)
        }
    return _known[path]


@contextlib.contextmanager
def copied_tree(compiled: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of the files that git tracks, and an environment in which `dpflash` is that copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree, site = Path(folder, "tree"), Path(folder, "site")
        for name in filter(None, listed.stdout.decode().split("\0")):
            if os.path.lexists(ROOT / name):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        (site / "dpflash").mkdir(parents=True)
        for path in (*(tree / "dpflash").iterdir(), tree / "kernels", tree / "accounting"):
            (site / "dpflash" / path.name).symlink_to(path)
        (site / "dpflash" / "bench").symlink_to(tree / "benchmarks")
        environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Each test session has an empty cache, and compiling takes longer than most killers.
            "CXX": f"{sys.executable} {__file__} --compile {compiled}",
        }
        yield tree, environment


def compile_once(folder: Path, command: list[str]) -> int:
    """Run a command of the C++ compiler, or copy what it made of the same sources before."""
    command = [os.environ.get("MUTANTS_CXX", "c++"), *command]
    if "-o" not in command:
        return subprocess.run(command).returncode
    made = Path(command[command.index("-o") + 1])
    sources = [Path(argument) for argument in command if argument.endswith(".cpp")]
    headers = sorted(path for source in sources[:1] for path in source.parent.glob("*.h"))
    options = [argument for argument in command if argument.startswith("-")]
    texts = [path.read_bytes() for path in (*sources, *headers)]
    kept = folder / hashlib.sha256(b"\0".join([*texts, *map(str.encode, options)])).hexdigest()
    if not kept.exists():
        done = subprocess.run(command)
        if done.returncode:
            return done.returncode
        part = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, part)
        os.replace(part, kept)
    shutil.copyfile(kept, made)
    return 0


def run(killers: Sequence[str], mutant: Mutant | None, compiled: Path) -> tuple[str, float, str]:
    """("dead", "alive" or "error", seconds, output) of the killers; None is the code as it is."""
    begin = time.monotonic()
    with copied_tree(compiled) as (tree, environment):
        if mutant is not None:
            path = tree / mutant["file"]
            path.write_text(path.read_text().replace(mutant["old"], mutant["new"]))
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *killers],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S * (1 if mutant else 6),
            )
            # An error in a fixture has exit status 1 too, and is no failed test.
            has_failed = done.returncode == 1 and "\nFAILED " in done.stdout
            state = "alive" if done.returncode == 0 else "dead" if has_failed else "error"
            output = done.stdout[-3000:] + done.stderr[-1000:]
        except subprocess.TimeoutExpired:
            state, output = "error", f"more than {TIMEOUT_S} s"
    return state, time.monotonic() - begin, output


def run_all(mutants: Sequence[Mutant], jobs: int) -> int:
    """Print a line for each mutant and a summary; returns 0 if all are dead."""
    begin = time.monotonic()
    killers = list(dict.fromkeys(k for mutant in mutants for k in mutant["killers"]))
    results = collections.Counter[str]()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-compiled-") as folder,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        compiled = Path(folder)
        unchanged = pool.submit(run, killers, None, compiled)
        waiting = {pool.submit(run, m["killers"], m, compiled): m for m in mutants}
        for future in concurrent.futures.as_completed(waiting):
            mutant = waiting[future]
            state, seconds, output = future.result()
            results[state] += 1
            print(
                f"{state:5}  {seconds:5.1f} s  [{mutant['invariant']}] {mutant['name']}",
                flush=True,
            )
            if state != "dead":
                print(f"       {mutant['breaks']}")
            if state == "error":
                print(output)
        state, seconds, output = unchanged.result()
    passes = state == "alive"
    if not passes:
        print(output)
    print(
        f"{len(killers)} killers on the code as it is: {'pass' if passes else 'FAIL'}, "
        f"{seconds:.1f} s\n{results['dead']} of {len(mutants)} mutants dead, {results['alive']} "
        f"alive, {results['error']} errors, {time.monotonic() - begin:.0f} s"
    )
    return 0 if passes and results["dead"] == len(mutants) else 1


def main() -> int:
    if sys.argv[1:2] == ["--compile"]:
        return compile_once(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="whether the list fits the code")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some mutants, by name")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    arguments = parser.parse_args()
    mutants = read()
    found = problems(mutants)
    if arguments.only:
        unknown = set(arguments.only) - {mutant["name"] for mutant in mutants}
        if unknown:
            parser.error(f"--only: there is no mutant {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant["name"] in arguments.only]
    if found:
        print("\n".join(found))
    if arguments.check or found:
        return int(bool(found))
    return run_all(mutants, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())

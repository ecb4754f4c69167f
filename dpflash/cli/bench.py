"""`dpflash bench`: runs benchmarks on this machine; results are JSON, Markdown and a picture."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import TYPE_CHECKING, Any

from ._parser import Names, add_options

if TYPE_CHECKING:
    from dpflash.bench.suite import Suite

_COMPARED = (
    "Exit status: 0 where nothing regressed, or nothing could be decided; 1 where a row is "
    "significantly slower by more than the threshold, takes more memory by as much, was right and "
    "is wrong or failed now, or lost its figures, or has another config;"
)
_OPTIONS = {
    "--quick": "small sizes, 5 trials: a first look in minutes, no figures to quote",
    "--device DEVICE": "auto (default), cpu or cuda",
    "--threads N": "threads of torch on the CPU (default all; 1 is steadiest, and what each rank "
    "has)",
    "--max-seconds S": "time limit for the calls of a row; slower rows are timed with fewer "
    "calls, 3 at least, or skipped and reported (default 60, quick 10)",
    "--seed N": "of inputs and weights (default 0)",
    "--traces": "write a torch.profiler trace and table of each row to DIR/traces",
}
_SCALING = (
    "strong scaling: all of the work is fixed, and P ranks divide it; weak scaling: the work of "
    "each rank is fixed. The ranks of a training step divide its samples, with a copy of the "
    "parameters on each (replicated) or with shards of them (fsdp2), or the tokens of each sample "
    "(context)."
)
_OUT = {"--out DIR": "folder of the results, made if missing"}


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash bench`."""
    from dpflash.bench.suites import SUITES

    parser.description = (
        "Measure on this machine, print what the figures come to, and write them to "
        "DIR/NAME.json, .md (tables, what their columns say) and .png."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True, action=Names)
    for name, about in SUITES.items():
        _add_suites(names, name, f"{about[0].upper()}{about[1:]}.", about, [name])
    everything = f"run {', '.join(SUITES)}, one after the other"
    _add_suites(names, "all", f"{everything.capitalize()}.", everything, list(SUITES))
    _add_compare(names)
    _add_versus(names)


def _add_suites(names: Any, name: str, description: str, about: str, suites: list[str]) -> None:
    parser = names.add_parser(
        name,
        help=about,
        description=f"{description} Nothing is timed before its result was checked. Exit status: "
        "0, also where a peer's result was wrong, which is a finding; 1 where one of dpflash was "
        "wrong or failed (the others are written); 2 for refused arguments; 130 after Ctrl-C "
        "(what was measured until then is written, marked as broken off).",
    )
    add_options(parser, _OPTIONS)
    if suites == ["scaling"]:
        group = parser.add_argument_group("scaling", _SCALING)
        sections = "attention, memory, reported and training by default; some alone are written "
        options = {
            "--ranks P,P,...": "numbers of ranks (default 1,2,4)",
            "--sections NAME,...": f"{sections}to files named after them",
        }
        add_options(group, options)
        parser.set_defaults(ranks="1,2,4", sections="attention,memory,reported,training")
    add_options(parser, _OUT, required=["--out"])
    parser.set_defaults(run=_run_suites, suites=suites, device="auto", seed=0)


def _run_suites(args: argparse.Namespace) -> int:
    from dpflash.bench.document import bullets, key_insights
    from dpflash.bench.isolated import brief
    from dpflash.bench.output import make_folder, require_drawing
    from dpflash.bench.suite import Request, has_figures, run_suite, wrong_rows
    from dpflash.bench.suites import suite_named

    # Invalid arguments raise here, before anything is measured.
    scaling = _scaling_suite(args) if args.suites == ["scaling"] else None
    request = Request(
        quick=args.quick,
        device=args.device,
        threads=args.threads,
        seed=args.seed,
        max_seconds=args.max_seconds,
        traces=args.traces,
    )
    require_drawing()
    folder = make_folder(args.out)
    wrong: list[str] = []
    for name in args.suites:
        path = folder / (scaling.name if scaling else name)
        files = f"{path}.json, {path}.md and {path}.png"
        try:
            found = run_suite(scaling or suite_named(name), request, folder)
        except KeyboardInterrupt:
            print(
                f"dpflash: bench {name} was broken off; what was measured until then, if "
                f"anything, is in {files}",
                file=sys.stderr,
            )
            raise
        except Exception as error:
            # Go on with the next suites.
            traceback.print_exc()
            print(f"dpflash: error: bench {name} broke off: {brief(error)}", file=sys.stderr)
            wrong.append(f"all of {name}")
            continue
        wrong += wrong_rows(found)
        if not has_figures(found):
            print(f"dpflash: bench {name} measured nothing here", file=sys.stderr)
        quick = " (a quick look, no figures to quote)" * args.quick
        print(f"{name}{quick}:\n{bullets(key_insights(found['rows']))}")
        peers = wrong_rows(found, peers=True)
        if peers:
            print(f"- Peers that were wrong or failed, without figures: {', '.join(peers)}.")
        print(f"written to {files}", flush=True)
    if wrong:
        print(f"dpflash: wrong or failed, and no figures: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def _add_compare(names: Any) -> None:
    parser = names.add_parser(
        "compare",
        help="did anything become slower from OLD.json to NEW.json?",
        description="Test whether rows of NEW.json are slower than the same ones of OLD.json. "
        "Separate runs also differ by what else the machine did, so that only clear differences "
        "count, and quick runs, or unlike loads of the machine, decide nothing on times; for a "
        f"decision, as in CI, take `dpflash bench versus`. {_COMPARED} 2 where the files cannot "
        "be compared, as those of different machines or settings, or broken off.",
    )
    parser.add_argument("old", metavar="OLD.json", help="the baseline")
    parser.add_argument("new", metavar="NEW.json", help="what is judged")
    threshold = {"--threshold R": "ignore slowdowns below this (default 0.05)"}
    add_options(parser, {**threshold, "--json FILE": "write the verdicts there too"})
    parser.set_defaults(run=_run_compare, threshold=0.05)


def _run_compare(args: argparse.Namespace) -> int:
    from dpflash.bench.compare import run_compare

    return run_compare(args.old, args.new, threshold=args.threshold, json_path=args.json)


def _add_versus(names: Any) -> None:
    parser = names.add_parser(
        "versus",
        help="two checkouts of dpflash, call by call in turns",
        description="Measure a small set of operations on two checkouts of this repository, "
        "which take turns call by call, and compare them. What slows the machine slows both, so "
        f"this is the one for CI. {_COMPARED} 2 where a checkout does not run.",
    )
    parser.add_argument("old", metavar="OLD", help="folder of a checkout")
    parser.add_argument("new", metavar="NEW", help="folder of another")
    quick = {"--quick": "half as many launches of half as many rounds: a look, which misses more"}
    add_options(parser, {**quick, **_OUT}, required=["--out"])
    parser.set_defaults(run=_run_versus)


def _run_versus(args: argparse.Namespace) -> int:
    from dpflash.bench.versus import FULL, QUICK, run_versus

    launches, rounds = QUICK if args.quick else FULL
    return run_versus(args.old, args.new, out=args.out, launches=launches, rounds=rounds)


def _scaling_suite(args: argparse.Namespace) -> Suite:
    from dpflash.bench.scaling import scaling_suite

    try:
        ranks = tuple(dict.fromkeys(int(part) for part in args.ranks.split(",")))
    except ValueError:
        raise ValueError(
            f"ranks={args.ranks!r}: expected numbers between commas; pass a list such as 1,2,4"
        ) from None
    return scaling_suite(ranks, sections=args.sections.split(","))

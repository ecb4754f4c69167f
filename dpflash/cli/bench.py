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
    "Exit status: 0 if no measurement regressed, or if nothing could be decided; 1 if a "
    "measurement is significantly slower or takes more memory by more than the threshold, has "
    "become wrong, has failed, has no figures any more, or has another configuration;"
)
_OPTIONS = {
    "--quick": "small sizes and 5 trials, for a first look in minutes; do not quote the figures",
    "--device DEVICE": "auto, cpu or cuda (default: auto)",
    "--threads N": "number of torch's threads on the CPU (default: all). With 1 thread, as each "
    "rank has, times vary least",
    "--max-seconds S": "time limit for one measurement. Slower ones are timed with fewer calls, "
    "at least 3, or are skipped and reported (default: 60, with --quick 10)",
    "--seed N": "seed of inputs and weights (default: 0)",
    "--traces": "write a trace and a table of torch.profiler for each measurement to DIR/traces",
}
_SCALING = (
    "In strong scaling the total work is fixed, and P ranks divide it. In weak scaling the work "
    "of each rank is fixed. The ranks of a training step divide its samples, with all parameters "
    "on each rank (replicated) or with sharded parameters (fsdp2), or they divide the tokens of "
    "each sample (context)."
)
_OUT = {"--out DIR": "folder for the results, which is created if it is missing"}


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash bench`."""
    from dpflash.bench.suites import SUITES

    parser.description = (
        "Run a benchmark on this machine, print a summary, and write the figures to "
        "DIR/NAME.json, DIR/NAME.md (tables with an explanation of their columns) and "
        "DIR/NAME.png."
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
        description=f"{description} An operation is timed only after its result was checked. Exit "
        "status: 0, also if the result of another library was wrong; 1 if an operation of dpflash "
        "was wrong or failed (the other figures are written); 2 for invalid arguments; 130 after "
        "Ctrl-C (the figures so far are written, marked as broken off).",
    )
    add_options(parser, _OPTIONS)
    if suites == ["scaling"]:
        group = parser.add_argument_group("scaling", _SCALING)
        sections = "parts to measure (default: attention,memory,reported,training). A selection "
        options = {
            "--ranks P,P,...": "numbers of ranks (default: 1,2,4)",
            "--sections NAME,...": f"{sections}is written to files named after the parts",
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
        help="test whether NEW.json is slower than OLD.json",
        description="Test whether measurements of NEW.json are slower than those of OLD.json. "
        "Separate runs also differ by the load of the machine, so only clear differences count. "
        "Times of --quick runs, and times under different loads, are not compared: in CI use "
        f"dpflash bench versus. {_COMPARED} 2 if the files cannot be compared, since their "
        "machines or settings differ or a run was broken off.",
    )
    parser.add_argument("old", metavar="OLD.json", help="results of the baseline")
    parser.add_argument("new", metavar="NEW.json", help="results to judge")
    threshold = {"--threshold R": "ignore relative slowdowns up to R (default: 0.05)"}
    add_options(parser, {**threshold, "--json FILE": "also write the verdicts to this file"})
    parser.set_defaults(run=_run_compare, threshold=0.05)


def _run_compare(args: argparse.Namespace) -> int:
    from dpflash.bench.compare import run_compare

    return run_compare(args.old, args.new, threshold=args.threshold, json_path=args.json)


def _add_versus(names: Any) -> None:
    parser = names.add_parser(
        "versus",
        help="compare the speed of two checkouts of dpflash",
        description="Measure a small set of operations on two checkouts of this repository, and "
        "compare them. The checkouts take turns call by call, so that the load of the machine "
        f"slows both: use it in CI. {_COMPARED} 2 if a checkout does not run.",
    )
    parser.add_argument("old", metavar="OLD", help="folder of a checkout")
    parser.add_argument("new", metavar="NEW", help="folder of the other checkout")
    quick = {"--quick": "half as many launches of half as many rounds, which detects less"}
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

"""`dpflash bench`: measurements on this machine, as JSON, Markdown and a picture."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpflash.bench.scaling import Request

__all__ = ["add_bench_parser", "add_scaling_arguments", "scaling_request"]


def add_bench_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the subcommands of `dpflash`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine",
        description="Measure on this machine, and write DIR/NAME.json, .md and .png.",
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    scaling = names.add_parser(
        "scaling",
        help="attention and private training on several workers",
        description="Start worker processes on this machine (a GPU each where there are as many, "
        "else one thread each) and measure attention, its memory and private training steps on "
        "them; then model larger clusters, which is marked as no measurement. Some 20 minutes. "
        "Exit status: 0, 1 where a worker failed or a result was wrong, 2 for refused arguments.",
    )
    add_scaling_arguments(scaling)
    _add_out(scaling)
    scaling.set_defaults(run=_run_scaling)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder of the results, made if missing"
    )


def add_scaling_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure; `scaling_request` reads it."""
    parser.add_argument(
        "--workers",
        metavar="P,P,...",
        default="1,2,4",
        help="numbers of worker processes (default 1,2,4)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, 5 trials: a first look in minutes"
    )
    parser.add_argument(
        "--sections",
        metavar="S,S,...",
        help="attention, memory, reported, training, model (default all)",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument(
        "--timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="that one task of the workers may take (default 900)",
    )
    model = parser.add_argument_group("model of larger clusters, no measurement")
    model.add_argument(
        "--flops",
        type=float,
        action="append",
        default=[],
        metavar="F",
        help="FLOP/s of a worker to assume beside the measured ones (bfloat16); may be repeated",
    )
    model.add_argument("--link", help="nvlink or infiniband (default both)")
    model.add_argument("--link-gbps", type=float, metavar="GB/S", help="gigabytes/s of the link")
    model.add_argument("--link-latency-us", type=float, metavar="US", help="its latency")


def _run_scaling(args: argparse.Namespace) -> int:
    from dpflash.bench.results import make_folder
    from dpflash.bench.scaling import run_scaling, wrong_rows
    from dpflash.bench.workers import TaskError

    request = scaling_request(args)
    path = make_folder(args.out) / "scaling.json"
    try:
        wrong = wrong_rows(run_scaling(request, path))
    except TaskError as error:
        print(f"dpflash: error: {error}", file=sys.stderr)
        return 1
    print(f"written to {path}, {path.with_suffix('.md')} and {path.with_suffix('.png')}")
    if wrong:
        print(f"dpflash: wrong results, and no figures: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def scaling_request(args: argparse.Namespace) -> Request:
    """The request that arguments of `add_scaling_arguments` make."""
    from dpflash.bench.scaling import SECTIONS, Request

    changes = {
        "workers": _numbers(args.workers),
        "sections": args.sections.split(",") if args.sections else SECTIONS,
        "device": args.device,
        "timeout": args.timeout,
        "flops": tuple(args.flops),
        "link": args.link,
        "link_gbps": args.link_gbps,
        "link_latency_us": args.link_latency_us,
    }
    return Request.quick(**changes) if args.quick else Request(**changes)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(
            f"workers={text!r}: expected numbers between commas; pass such as 1,2,4"
        ) from None

"""`dpflash audit` attacks private training to test whether the claimed epsilon holds."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dpflash._validate import finite, optional, positive, positive_int, probability

from ..noise import Banded
from ._figures import check_plot, save
from ._parser import add_options
from ._runs import POISSON, sample_rate_of
from ._tables import as_json

if TYPE_CHECKING:
    from ..audit.report import AuditReport

_STEPS, _CANARIES, _DELTA = 100, 1000, 1e-5
_SIZES = ("batch_size", "num_samples")
_OPTIONS = {
    "--noise-multiplier S": "standard deviation of the noise over the clipping bound, e.g. 1.1",
    "--sample-rate Q": "probability of a sample in a batch, in (0, 1]; default 1, no subsampling",
    "--batch-size B": "with --num-samples, in place of --sample-rate: expected samples per batch",
    "--num-samples M": "with --batch-size: samples of the data set. The audit's own data are its "
    "canaries, so only their ratio counts",
    "--steps N": f"releases; default {_STEPS}",
    "--canaries N": f"number of canaries (default {_CANARIES}); more give tighter bounds",
    "--delta D": "of the claim; default 1e-5",
    "--confidence P": "of each of the two bounds; default 0.95",
    "--bands B": "banded noise over B steps, optimized for the steps, and cyclic Poisson sampling",
    "--clipping NAME": "flat (default) or per_layer, see make_private",
    "--accountant NAME": "contour (default), pld or rdp, whose claim is tested",
    "--black-box": "score losses of canary documents of a small language model, in place of "
    "releases; much weaker, and without named checks",
    "--device DEVICE": "cpu (default) or cuda",
    "--seed N": "derive coins, keys and noise from this number",
    "--json": "print one JSON object instead",
    "--plot FILE.png": "plot the trade-off curve that is claimed and the errors found; needs "
    "matplotlib",
}


@dataclass(frozen=True)
class _Audit:
    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float
    max_grad_norm: float
    clipping: str | None
    accountant: str
    privacy_unit: str = "sample"
    noise_coefficients: tuple[float, ...] = (1.0,)


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash audit`."""
    parser.description = (
        "Attack private training with canaries, through the real engine, loader, clipping, noise "
        "and accountant: lower bounds on epsilon beside the claimed one, and named checks of what "
        "scores of canaries cannot see. With --sample-rate 1 each canary is in or out anew at "
        "every step, and one release is claimed; below 1 it is in or out of the whole run, and "
        "all steps are claimed. Exit status: 0 if nothing refutes the claim, 1 if something does, "
        "2 if nothing could be audited. A pass is a test, not a proof."
    )
    parser.add_argument(
        "--run",
        dest="folder",
        metavar="FOLDER",
        help="audit the settings of a dpflash train run, or of a DPTrainer, and write audit.json "
        "into its folder, which its model card then reports; in place of --noise-multiplier, "
        "--sample-rate, --steps and --delta",
    )
    add_options(parser, _OPTIONS)
    parser.add_argument(
        "--no-ranks",
        dest="ranks",
        action="store_false",
        help="leave out the checks of two ranks, which need processes of their own",
    )
    parser.set_defaults(run=_run, canaries=_CANARIES, confidence=0.95, device="cpu")
    parser.set_defaults(sampler=POISSON)


def _run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        check_plot(args.plot, "contour")
    probability(confidence=args.confidence)
    positive_int(canaries=args.canaries)
    asked = _from_options(args) if args.folder is None else _from_run(args)
    report = _audit(args, asked)
    if args.folder is not None:
        from ..audit.report import AUDIT

        text = as_json({"settings": asdict(asked), **report.as_dict()})
        (Path(args.folder) / AUDIT).write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        save(report.figure(), args.plot)
    print(as_json(report.as_dict()) if args.json else report)
    return 0 if report.ok else 1


def _from_options(args: argparse.Namespace) -> _Audit:
    if args.noise_multiplier is None:
        raise ValueError(
            "noise_multiplier=None: pass --noise-multiplier S, or --run FOLDER for the settings "
            "of a run"
        )
    positive(noise_multiplier=args.noise_multiplier)
    finite(noise_multiplier=args.noise_multiplier)
    optional(positive_int, **{name: getattr(args, name) for name in _SIZES})
    optional(positive, sample_rate=args.sample_rate)
    rate = sample_rate_of(args)
    rate = 1.0 if rate is None else rate
    steps = _STEPS if args.steps is None else args.steps
    positive_int(steps=steps)
    delta = _DELTA if args.delta is None else args.delta
    probability(delta=delta)
    bands = 1 if args.bands is None else args.bands
    positive_int(bands=bands)
    return _Audit(
        noise_multiplier=args.noise_multiplier,
        sample_rate=rate,
        steps=steps,
        delta=delta,
        max_grad_norm=1.0,
        clipping=args.clipping,
        accountant=args.accountant or "contour",
        noise_coefficients=Banded.optimized(bands=bands, steps=steps).coefficients,
    )


def _from_run(args: argparse.Namespace) -> _Audit:
    from ..release.load import report_of

    fixed = ("noise_multiplier", "sample_rate", "steps", "delta", "clipping", "accountant")
    for name in (*fixed, *_SIZES, "bands"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"{name}={getattr(args, name)!r} with --run, whose report has it; drop one of the "
                "two"
            )
    path = report_of(Path(args.folder))
    if not path.is_file():
        raise ValueError(
            f"run={args.folder!r}: has no {path.name}; pass the folder of a finished dpflash "
            "train run, or of a DPTrainer that saved its model"
        )
    report = json.loads(path.read_text(encoding="utf-8"))
    if not report["noise_multiplier"]:
        raise ValueError(f"run={args.folder!r}: was trained without noise, so it claims nothing")
    named = {f.name: report[f.name] for f in fields(_Audit)}
    coefficients = tuple(report["noise_coefficients"])
    steps = report["steps"] + report["lost_steps"]
    return _Audit(**{**named, "steps": steps, "noise_coefficients": coefficients})


def _audit(args: argparse.Namespace, asked: _Audit) -> AuditReport:
    # Imported here, since `dpflash --help` starts without torch.
    from ..audit.black_box import train_on_documents
    from ..audit.ranks import Audited, RankFailure
    from ..audit.run import audit_losses, auditable, run_audit
    from ..config import PerformanceConfig, PrivacyConfig
    from ..engine import PrivacyEngine

    bands = len(asked.noise_coefficients)
    noise = Banded(bands=bands, coefficients=asked.noise_coefficients) if bands > 1 else None
    privacy, performance = auditable(
        PrivacyConfig(
            sampling="poisson" if noise is None else "cyclic_poisson",
            noise_mechanism=noise,
            max_grad_norm=asked.max_grad_norm,
            noise_multiplier=asked.noise_multiplier,
            clipping=asked.clipping,
        ),
        PerformanceConfig(),
        sample_rate=asked.sample_rate,
        steps=asked.steps,
    )
    arguments = {"accountant": asked.accountant, "seed": args.seed}
    audited = Audited(PrivacyEngine, arguments, privacy, performance)
    if args.black_box:
        scores, included, accountant = train_on_documents(
            audited,
            canaries=args.canaries,
            seed=args.seed,
            device=args.device,
            progress=not args.json,
        )
        return audit_losses(
            scores, included, accountant,
            steps=asked.steps, delta=asked.delta, confidence=args.confidence, seed=args.seed,
            privacy_unit=asked.privacy_unit,
        )  # fmt: skip
    try:
        return run_audit(
            audited, canaries=args.canaries, delta=asked.delta, confidence=args.confidence,
            seed=args.seed, ranks=args.ranks, device=args.device, progress=not args.json,
            privacy_unit=asked.privacy_unit,
        )  # fmt: skip
    except RankFailure as error:
        raise ValueError(str(error)) from error

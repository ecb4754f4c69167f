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
    "--sample-rate Q": "probability that a sample is in a batch, in (0, 1] (default: 1, no "
    "subsampling)",
    "--batch-size B": "expected number of samples per batch; with --num-samples, in place of "
    "--sample-rate",
    "--num-samples M": "number of samples of the dataset, with --batch-size. Only the ratio "
    "matters, since the audit trains on its canaries alone",
    "--steps N": f"number of optimizer steps (default: {_STEPS})",
    "--canaries N": f"number of canaries; more give tighter bounds (default: {_CANARIES})",
    "--delta D": "delta of the claimed epsilon (default: 1e-5)",
    "--confidence P": "confidence of each of the two lower bounds (default: 0.95)",
    "--bands B": "audit banded noise over B steps with cyclic Poisson sampling (default: "
    "independent noise)",
    "--clipping NAME": "flat or per_layer, as in make_private (default: flat)",
    "--accountant NAME": "accountant that claims epsilon: contour, pld or rdp (default: contour)",
    "--black-box": "attack the losses of canary documents in a small language model instead of "
    "the releases. This attack is much weaker, and the named checks are left out",
    "--device DEVICE": "cpu or cuda (default: cpu)",
    "--seed N": "seed of the canaries' coins, the keys and the noise, to repeat an audit",
    "--json": "print one JSON object instead",
    "--plot FILE.png": "write a plot of the claimed trade-off curve and the attack's errors; "
    "needs matplotlib",
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
        "Attack private training with canaries (made-up samples), through the real engine, "
        "loader, clipping, noise and accountant. The audit prints lower bounds on epsilon beside "
        "the claimed epsilon, and named checks for errors that no attack on canaries can detect. "
        "With --sample-rate 1, a coin decides anew for each step whether a canary takes part, and "
        "the claim is the epsilon of one step. Below 1, a coin decides for the whole run, and the "
        "claim is the epsilon of all steps. Exit status: 0 if nothing refutes the claim, 1 if "
        "something does, 2 if nothing could be audited. A passed audit is a test, not a proof."
    )
    parser.add_argument(
        "--run",
        dest="folder",
        metavar="FOLDER",
        help="audit the settings of a dpflash train run or of a DPTrainer, in place of those by "
        "--noise-multiplier, --sample-rate, --steps and --delta. The result is written to "
        "audit.json in the folder, and the model card states it",
    )
    add_options(parser, _OPTIONS)
    parser.add_argument(
        "--no-ranks",
        dest="ranks",
        action="store_false",
        help="leave out the checks on two ranks, which start two processes",
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
        from ..privacy.source import code_digest

        about = {"settings": asdict(asked), "code": code_digest(), "ranks": args.ranks}
        text = as_json({**about, **report.as_dict()})
        (Path(args.folder) / AUDIT).write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        save(report.figure(), args.plot)
    print(as_json(report.as_dict()) if args.json else report)
    if args.folder is not None and not args.json:
        print("The claimed epsilon is of this run alone, without other runs of its ledger.")
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
                f"{name}={getattr(args, name)!r} with --run: the run's report has this value; "
                "drop one of the two"
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

"""Reads a run from command-line options: sampler, number of steps, neighboring relation."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from dpflash._validate import large_delta, one_of, optional, positive_int, probability
from dpflash.accounting import (
    Accountant,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    PoissonGaussian,
    RandomAllocationGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    create_accountant,
    epochs_to_steps,
)
from dpflash.accounting.events import RELATIONS
from dpflash.noise import Banded
from dpflash.privacy.spending import DEFAULT_ACCOUNTANT, convert_event

from ._parser import add_options

POISSON, FIXED_SIZE, SHUFFLED = "poisson", "fixed_size", "shuffled"
TRUNCATED_POISSON, CYCLIC_POISSON = "truncated_poisson", "cyclic_poisson"
ALLOCATION = "random_allocation"

# Sampler -> the arguments that it uses in addition to the noise.
_USES = {
    POISSON: ("sample_rate", "batch_size", "num_samples", "examples_per_unit", "steps"),
    FIXED_SIZE: ("batch_size", "num_samples", "steps"),
    SHUFFLED: ("epochs",),
    TRUNCATED_POISSON: ("sample_rate", "batch_size", "num_samples", "max_batch_size", "steps"),
    ALLOCATION: ("batch_size", "num_samples", "epochs"),
    CYCLIC_POISSON: ("sample_rate", "batch_size", "num_samples", "bands", "steps"),
}
_EVENTS: dict[str, Any] = {
    POISSON: PoissonGaussian,
    FIXED_SIZE: FixedSizeGaussian,
    SHUFFLED: ShuffledGaussian,
    TRUNCATED_POISSON: TruncatedPoissonGaussian,
    ALLOCATION: RandomAllocationGaussian,
    CYCLIC_POISSON: CyclicPoissonGaussian,
}
# The remedy in errors about an argument that the sampler does not use.
_INSTEAD = {
    "steps": "pass the number of epochs as --epochs",
    "max_batch_size": "drop it, or pass --sampler truncated_poisson",
    "examples_per_unit": "drop it, or pass --sampler poisson",
    "bands": "drop it, or pass --sampler cyclic_poisson",
}
# The first five options are attributes of a `Run`, see OF_RUN.
COUNTS = (
    *("batch_size", "num_samples", "max_batch_size", "examples_per_unit", "bands"),
    *("steps", "epochs"),
)
OF_RUN = COUNTS[:5]

DELTA = "delta of the guarantee, well below 1 / dataset size, e.g. 1e-6"
_OPTIONS = {
    "--delta D": DELTA,
    "--sampler SAMPLER": "how batches are sampled: poisson (each sample enters each batch "
    "independently), fixed_size (each batch is a random subset of --batch-size samples), shuffled "
    "(each epoch divides the shuffled dataset into batches; no amplification), "
    "truncated_poisson (poisson with at most --max-batch-size samples), cyclic_poisson (poisson "
    "from one of --bands parts of the dataset, in turn, for banded noise) or random_allocation "
    "(each sample enters one random batch of each epoch) (default: poisson)",
    "--sample-rate Q": "probability that a sample is in a batch: expected batch size / dataset "
    "size. Instead of it, pass --batch-size and --num-samples",
    "--batch-size B": "number of samples per batch; with Poisson sampling the expected number",
    "--num-samples M": "number of samples of the dataset",
    "--max-batch-size K": "maximum number of samples per batch, with --sampler truncated_poisson",
    "--examples-per-unit K": "maximum number of samples of one user (or another unit). Epsilon "
    "then protects all samples of a user together, while each sample is sampled and clipped "
    "separately, as by make_private(unit_sampling='example'). Leave it out if users are sampled "
    "and clipped as a whole, as by dpflash train --unit folder. Only with --sampler poisson "
    "(default: epsilon protects single samples)",
    "--bands N": "with --sampler cyclic_poisson: number of steps over which banded noise is "
    "correlated, which is also the number of parts of the dataset",
    "--steps N": "number of optimizer steps; with --sampler shuffled or random_allocation pass "
    "--epochs instead",
    "--epochs N": "number of epochs, with --sampler shuffled or random_allocation. An epoch of "
    "shuffled costs as much as one step without sampling, whatever its number of batches",
    "--neighboring-relation RELATION": "how two neighboring datasets differ: add_remove (one has "
    "one sample more), zero_out (one sample is replaced by nothing) or replace_one (one sample is "
    "replaced by another). dpflash train states zero_out; Poisson sampling has the same epsilon "
    "under add_remove (default: zero_out for shuffled, replace_one for fixed_size, add_remove for "
    "the other samplers)",
    "--accountant NAME": "contour, pld, rdp, gaussian (sample rate 1 only), prv (Opacus' PRV "
    "accountant) or gdp (an approximation, not a bound) (default: "
    f"{DEFAULT_ACCOUNTANT})",
}


@dataclass(frozen=True)
class Run:
    """A training run. A field is None if it is unknown or the sampler does not use it."""

    sampler: str
    neighboring_relation: str
    count: int | None  # number of steps, or of epochs
    sample_rate: float | None
    batch_size: int | None
    num_samples: int | None
    max_batch_size: int | None
    examples_per_unit: int | None  # largest number of samples of a unit; None: a sample is a unit
    bands: int | None  # number of bands of the noise

    @property
    def counts_epochs(self) -> bool:
        """Whether `count` is a number of epochs instead of steps."""
        return "epochs" in _USES[self.sampler]

    @property
    def lacks_rate(self) -> bool:
        """Whether the sample rate is unknown and the sampler needs one."""
        return self.sample_rate is None and self.sampler != SHUFFLED

    @property
    def steps(self) -> int:
        """The number of steps of an epoch of random allocation."""
        assert self.batch_size is not None and self.num_samples is not None
        return -(-self.num_samples // self.batch_size)

    def event(self, noise_multiplier: float) -> Event:
        """Return the accountant's event of one step, round of steps, or epoch (see `unit`)."""
        kind = UnitPoissonGaussian if self.examples_per_unit else _EVENTS[self.sampler]
        own = {f.name: getattr(self, f.name) for f in fields(kind) if hasattr(self, f.name)}
        if self.bands is not None:
            own["sample_rate"] = Banded(bands=self.bands).rate_of_part(own["sample_rate"])
        event = kind(noise_multiplier=noise_multiplier, **own)
        return convert_event(event, self.neighboring_relation)

    @property
    def unit(self) -> str:
        """The steps that one event covers: "step", "epoch" or "round of N steps"."""
        if self.bands is not None:
            return f"round of {self.bands} steps"
        return "epoch" if self.counts_epochs else "step"

    def events(self, count: int | None = None) -> int:
        """Return the number of `event`s in `count` steps or epochs; None means the run's count."""
        count = self.count if count is None else count
        assert count is not None
        return -(-count // (self.bands or 1))

    def spills(self, delta: float) -> bool:
        """Whether batches are truncated with a probability above delta: epsilon is infinite."""
        return self.count is not None and self.event(1.0).failure() * self.count >= delta

    def epoch(self) -> int:
        """Return the expected number of steps of one epoch; 1 if `count` counts epochs."""
        if self.counts_epochs:
            return 1
        assert self.sample_rate is not None
        return epochs_to_steps(epochs=1, sample_rate=self.sample_rate)

    def accountant(self, name: str) -> Accountant:
        """Return an empty accountant under the run's relation."""
        return create_accountant(name, neighboring_relation=self.neighboring_relation)

    def spent(self, name: str, noise_multiplier: float, count: int | None = None) -> Accountant:
        """Return an accountant of the whole run, or of `count` steps or epochs of it."""
        accountant = self.accountant(name)
        accountant.compose(self.event(noise_multiplier), self.events(count))
        return accountant


def add_run_arguments(
    parser: argparse.ArgumentParser, usages: Mapping[str, str] | None = None
) -> None:
    """Add the arguments that describe a run. `usages` replaces the usages of some options."""
    usages = usages or {}
    options = {usages.get(usage, usage): text for usage, text in _OPTIONS.items()}
    add_options(parser, options, required=["--delta"])
    parser.set_defaults(sampler=POISSON, accountant=DEFAULT_ACCOUNTANT)


def run_of(args: argparse.Namespace) -> Run:
    """Return the run that the arguments describe; refuse wrong, unused or missing arguments.

    `count` or `sample_rate` is None if no argument determines it; callers decide whether this is
    an error.
    """
    one_of(sampler=(args.sampler, tuple(_USES)))
    one_of(neighboring_relation=(args.neighboring_relation, (None, *RELATIONS)))
    probability(delta=args.delta)
    create_accountant(args.accountant)
    optional(positive_int, **{name: getattr(args, name) for name in COUNTS})
    _refuse_unused(args)
    run = Run(
        sampler=args.sampler,
        neighboring_relation=args.neighboring_relation or _EVENTS[args.sampler].relation,
        count=args.epochs if "epochs" in _USES[args.sampler] else args.steps,
        sample_rate=sample_rate_of(args),
        **{name: getattr(args, name) for name in OF_RUN},
    )
    if run.lacks_rate and run.sampler != POISSON:
        raise ValueError(
            f"batch_size=None: the {run.sampler} sampler needs it; pass --batch-size B"
            + (", or --sample-rate Q" if run.sampler == TRUNCATED_POISSON else "")
        )
    if run.sampler == CYCLIC_POISSON and run.bands is None:
        raise ValueError(
            "bands=None: the cyclic_poisson sampler needs it; pass --bands N, or --sampler poisson"
        )
    # Create an event now, which raises for invalid values, before a search starts.
    (replace(run, sample_rate=1.0) if run.lacks_rate else run).event(1.0)
    problem = args.num_samples and large_delta(args.delta, args.num_samples, "sample")
    if problem:
        print(f"dpflash: warning: {problem}", file=sys.stderr)
    return run


def _refuse_unused(args: argparse.Namespace) -> None:
    for name in ("sample_rate", *COUNTS):
        value = getattr(args, name)
        if value is None or name in _USES[args.sampler]:
            continue
        instead = _INSTEAD.get(name, "drop it")
        if name == "epochs":
            rate = sample_rate_of(args)
            instead = "pass --steps"
            if rate:
                batches = epochs_to_steps(epochs=1, sample_rate=rate)
                steps = epochs_to_steps(epochs=value, sample_rate=1 / batches)
                instead += f" {steps}, of {batches} in each epoch of the loader"
        elif name == "sample_rate" and args.sampler in (FIXED_SIZE, ALLOCATION):
            instead = "pass --batch-size and --num-samples"
        raise ValueError(
            f"{name}={value!r}: the {args.sampler} sampler does not use it; {instead}"
        )


def sample_rate_of(args: argparse.Namespace) -> float | None:
    """Return the sample rate from --sample-rate or from two sizes; None if neither is given."""
    rate, batch_size, num_samples = args.sample_rate, args.batch_size, args.num_samples
    if rate is not None:
        PoissonGaussian(noise_multiplier=1.0, sample_rate=rate)
        if batch_size is not None:
            raise ValueError(
                f"sample_rate={rate!r}, batch_size={batch_size!r}: expected one of the two; drop "
                "--sample-rate or --batch-size"
            )
    is_counted = args.sampler in (FIXED_SIZE, TRUNCATED_POISSON, ALLOCATION)
    if args.sampler == TRUNCATED_POISSON and args.max_batch_size is None:
        raise ValueError(
            "max_batch_size=None: the truncated_poisson sampler needs it; pass --max-batch-size K"
        )
    if num_samples is None and (is_counted or batch_size is not None):
        raise ValueError(
            f"num_samples=None: the {args.sampler} sampler needs it"
            f"{'' if is_counted else ' with --batch-size'}; pass --num-samples M"
        )
    if rate is not None:
        if num_samples is not None and not is_counted:
            raise ValueError(
                f"sample_rate={rate!r}, num_samples={num_samples!r}: the sample rate suffices; "
                "drop --num-samples, or pass --batch-size instead of --sample-rate"
            )
        return float(rate)
    if batch_size is None:
        if num_samples is not None and not is_counted:
            raise ValueError(
                f"num_samples={num_samples!r}: --num-samples needs --batch-size; pass both or "
                "neither"
            )
        return None
    if batch_size > num_samples:
        raise ValueError(
            f"batch_size={batch_size!r}: expected at most num_samples={num_samples!r}; pass a "
            "smaller batch"
        )
    if args.sampler == ALLOCATION:
        return 1 / -(-num_samples // batch_size)
    return float(batch_size / num_samples)


@contextmanager
def accounting() -> Iterator[None]:
    """Silence the "gdp" warning, which tables repeat; turn ImportError into ValueError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="accountant='gdp'")
        try:
            yield
        except ImportError as error:
            raise ValueError(str(error)) from error

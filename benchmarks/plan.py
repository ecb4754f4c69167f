"""What a benchmark is planned from: subjects, measurements, comparisons, and how to measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dpflash import _validate

from .timing import FULL, QUICK, Effort, Step, usable_device
from .work import Work

Row = dict[str, Any]


class Unsupported(Exception):
    """This cannot run here; the message says what it would need."""


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        step: one call.
        error: relative error of what it computes; called before anything is timed, None where
            `what is right` is checked by another row of the comparison.
        tolerance: that the error may have.
        tokens: that one call goes through.
        work: of one call, where it is known.
        dtype: of its products, for the roofs.
        figures: further columns of its row.
        told: further columns that only its calls tell; read after the last one.
    """

    step: Step
    error: Callable[[], float]
    tolerance: float
    tokens: int | None = None
    work: Callable[[], Work] | None = None
    dtype: str = "float32"
    figures: Mapping[str, Any] = field(default_factory=dict)
    told: Callable[[], Mapping[str, Any]] = dict


# Makes a subject from device, seed and a measurement's config, all by keyword.
Build = Callable[..., Subject]


@dataclass(frozen=True)
class Measurement:
    """A row to be.

    Attributes:
        name: of the row, unlike all others.
        build: makes the subject, may raise `Unsupported`. Called in other processes too.
        config: what it is called with, besides device and seed; plain values. Column "config".
        columns: further columns of the row, such as "section"; "peer" is True where somebody
            else's code is measured, which may be wrong without being a failure of ours.
    """

    name: str
    build: Build
    config: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Measurements that take turns.

    Attributes:
        measurements: at least one.
        baseline: name of the one over whose time the others' "speedup" is; None for none.
    """

    measurements: Sequence[Measurement]
    baseline: str | None = None


@dataclass(frozen=True)
class Request:
    """How to measure.

    Attributes:
        quick: small sizes and few trials, for a look.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        threads: of torch on the CPU; None for as many as it has.
        seed: of inputs and weights.
        max_seconds: that a row may take for all of its calls; None for 60, quick 10.
        traces: whether a trace of each row is written.
        has_progress: whether stderr tells how far the run is.
        effort: calls of each row; None for 5 + 20, quick 2 + 5.
    """

    quick: bool = False
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    max_seconds: float | None = None
    traces: bool = False
    has_progress: bool = True
    effort: Effort | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"device={self.device!r}: expected 'auto', 'cpu' or 'cuda'; 'cuda' is any GPU "
                "that torch knows, and CUDA_VISIBLE_DEVICES says which"
            )
        if self.threads is not None:
            _validate.positive_int(threads=self.threads)
        if self.max_seconds is not None:
            _validate.positive(max_seconds=self.max_seconds)
        if self.device == "cuda":
            usable_device(self.device)

    @property
    def where(self) -> torch.device:
        """The device that "auto" stands for."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(auto if self.device == "auto" else self.device)

    @property
    def calls(self) -> Effort:
        """How often each row is called."""
        return self.effort or (QUICK if self.quick else FULL)

    @property
    def limit(self) -> float:
        """Seconds for all calls of a row."""
        return self.max_seconds or (10.0 if self.quick else 60.0)

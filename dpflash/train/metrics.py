"""metrics.jsonl: one line for each step, written as soon as the step is released."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from .._json import finite

METRICS = "metrics.jsonl"


def append_metrics(
    folder: Path,
    *,
    step: int,
    epsilon: float | None,
    delta: float,
    loss: float | None,
    tokens_per_second: float | None,
) -> None:
    """Append the figures of a step to the file in a job's folder.

    Each line is a JSON object. The guarantee covers ``step``, ``epsilon`` and ``delta``. Epsilon
    is the upper bound and includes lost steps. Epsilon is null without noise, and for some steps
    with slow accountants. The guarantee does not cover the values under ``private``, which are
    computed from the sampled documents: ``loss`` (bits per token, byte or text,
    times class weights; null if no document was sampled) and ``tokens_per_second`` (without
    padding).

    A resumed run appends lines. If a crash lost steps, use the last line of each step.
    """
    public = {"step": step, "epsilon": finite(epsilon), "delta": delta}
    private = {"loss": finite(loss), "tokens_per_second": finite(tokens_per_second)}
    line = json.dumps({**public, "private": private}, allow_nan=False)
    only_its_owner = partial(os.open, mode=0o600)
    with open(folder / METRICS, "a", encoding="utf-8", opener=only_its_owner) as file:
        file.write(line + "\n")

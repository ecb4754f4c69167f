"""Subjects of `test_suite.py` and functions of `test_isolated.py`, in a file to be imported."""

import io
import math
import os
import warnings
from multiprocessing import resource_tracker

import torch
from tqdm import tqdm

from dpflash.bench import work
from dpflash.bench.suite import Subject, Unsupported


def product(*, device, seed, size, kind="right"):
    """A subject: a product of matrices, or one that is none."""
    if kind == "absent":
        raise Unsupported("a machine that was never built")
    if kind == "greedy":
        torch.ones(2**50)
    if kind == "broken":
        raise ArithmeticError("a bug")
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, size, generator=generator) for _ in range(2))
    calls = []

    def step():
        calls.append(kind)
        # Not in the two calls that are probed.
        if kind == "late" and len(calls) > 3:
            raise ArithmeticError("a bug in the fourth call")
        if kind == "warning":
            warnings.warn("all is lost", stacklevel=1)
        if kind == "interrupted" and len(calls) > 3:
            raise KeyboardInterrupt
        return left @ right

    def error():
        assert not calls, "timed before it was checked"
        return {"wrong": 1.0, "nan": math.nan}.get(kind, 0.0)

    def count():
        if kind == "uncounted":
            raise ArithmeticError("a bug in the count")
        return work.count_work(step)

    return Subject(
        step,
        error,
        1e-6,
        tokens=size,
        work=count,
        figures={"kind": kind},
        late_figures=lambda: {"calls": len(calls)},
    )


def grow(size):
    return float(torch.ones(size).sum())


def stand_still():
    while True:
        pass


def leave():
    os._exit(3)


def registered_with_a_bar():
    """Resources that the system would have to clean up after this process."""
    names = []
    resource_tracker.register = lambda name, kind: names.append(kind)
    for _ in tqdm(range(1), file=io.StringIO()):
        pass
    return names

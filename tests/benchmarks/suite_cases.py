"""What the toy benchmark of `test_suite.py` measures; other processes import it."""

import os

import torch

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
        return left @ right

    def error():
        assert not calls, "timed before it was checked"
        return 1.0 if kind == "wrong" else 0.0

    return Subject(
        step,
        error,
        1e-6,
        tokens=size,
        work=lambda: work.count_work(step),
        figures={"kind": kind},
    )


def grow(size):
    return float(torch.ones(size).sum())


def stand_still():
    while True:
        pass


def leave():
    os._exit(3)

"""Membership attacks on one noisy release by somebody who knows all but one sample's presence.

A coin decides whether the target sample is in the batch. The attacker knows the clipped sum of
either case, the noise's std, the divisor and the learning rate, sees the released numbers and
guesses. Honest Gaussian noise of std sigma C lets nobody be right more often than
Phi(1 / (2 sigma)); noise made of floating-point numbers does. Three attacks:

support   Box-Muller takes a radius sqrt(-2 ln u) of a number u with 24 bits. Is u 2^24 an integer
          for the pairs of elements that would be noise in one case, and in the other?
grid      Is there a float32 normal that the step's own arithmetic turns into each released number?
          A weight that only the target touches is pure noise without it, with digits of its own.
learned   The attacker runs the mechanism with keys of its own and learns which low bits of the
          candidates' noise differ between the cases: digits, place on the public grid, lattices of
          u, repetitions, correlations.

An attack that finds nothing, or fails on the attacker's own releases, falls back on the likelihood
ratio of the Gaussian, which is the best there is against honest noise.

    python tests/attacks/attacks.py --json runs/attacks.json      # a quarter of an hour
    python tests/attacks/attacks.py --targets dpflash --views "p.grad, fp64" --sigmas 1

Exit status 1 if an attack beats honest noise's limit against dpflash or the exact reference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacked import (
    GRID,
    LEARNING_RATE,
    SAMPLES,
    TARGETS,
    VIEWS,
    WEIGHTS,
    Array,
    Known,
    Mechanism,
    mechanism,
)
from scipy.special import ndtr
from tqdm import tqdm

from dpflash.bench.environment import environment

SIGMAS = (0.5, 1.0, 3.3, 10.0, 100.0)
TRIALS = 400
# Releases of each case that the learning attacker makes by itself.
LESSONS = 64


# The attacks: whether the target is in, or None where an attack cannot tell


def likelihood(known: Known, seen: Array) -> bool:
    """What the likelihood ratio of honest Gaussians says."""
    absent, present = known.sums
    return bool((known.total(seen) - (absent + present) / 2) @ (present - absent) > 0)


def lattice_scores(known: Known, seen: Array, distance: int) -> Array:
    """How close exp(-r^2 / 2) 2^24 is to integers in each case; a standard normal if it is not."""
    length = seen.size // (2 * distance) * 2 * distance

    def pairs(values: Array) -> tuple[Array, Array]:
        cut = values[:length].reshape(-1, 2, distance)
        return cut[:, 0].ravel(), cut[:, 1].ravel()

    total = known.total(seen)
    # What is not known of u 2^24: the release, the radius and its logarithm are rounded.
    blur = sum(pairs(np.abs(total))) / known.std * 2.0 ** (24 - known.digits)
    touched = np.logical_or(*pairs(known.touched))
    scores = []
    for noise in total - known.sums:
        radius = np.hypot(*pairs(noise / known.std))
        sharp = touched & (radius * (blur + radius) < 0.3)
        scores.append(_closeness(np.exp(-(radius[sharp] ** 2) / 2) * 2.0**24))
    return np.array(scores)


def _closeness(values: Array) -> float:
    """Large where the values are near integers, else a standard normal number."""
    if values.size <= 20:
        return 0.0
    return float(np.cos(2 * math.pi * values).sum() / math.sqrt(values.size / 2))


def support_attack(known: Known, seen: Array) -> bool | None:
    """Attack (a): the pairs that Box-Muller can make of 24-bit numbers."""
    scores = lattice_scores(known, seen, known.distance)
    # Of honest noise one of two scores exceeds 6 with probability 2e-9.
    return bool(scores.argmax()) if scores.max() > 6 else None


def misses(known: Known, seen: Array) -> Array:
    """For each case, how many of the numbers no float32 normal gives."""
    touched = known.touched
    released, sums = seen[touched], known.sums[:, touched]
    # In float64 the attacker's own arithmetic rounds too.
    slack = np.abs(released) * (0.0 if known.digits == 24 else 2.0**-48)
    std = np.float32(known.std) if known.digits == 24 else known.std
    found = []
    for total, noise in zip(sums, known.total(seen)[touched] - sums, strict=True):
        z = (noise / std).astype(np.float32)
        step = np.spacing(np.abs(z))
        hit = np.zeros(z.shape, dtype=bool)
        for shift in range(-3, 4):
            again = _forward(known, total, z + np.float32(shift) * step)
            hit |= np.abs(again - released) <= slack
        found.append(float((~hit).sum()))
    return np.array(found)


def _forward(known: Known, total: Array, z: Array) -> Array:
    """The step's own arithmetic from float32 normals to released numbers."""
    if known.digits == 53:
        return (total + known.std * z.astype(np.float64)) * known.scale
    noise = np.float64(np.float32(known.std)) * z.astype(np.float64)
    if not known.fused:
        noise = noise.astype(np.float32).astype(np.float64)
    grad = torch.from_numpy((total + noise).astype(np.float32) / np.float32(SAMPLES))
    return (grad if known.scale > 0 else -LEARNING_RATE * grad).double().numpy()


def grid_attack(known: Known, seen: Array) -> bool | None:
    """Attack (b): the numbers that a float32 normal and the sum of one case can make."""
    if known.digits < 24:
        return None
    counts = misses(known, seen)
    return bool(counts.argmin()) if counts.max() >= 4 * counts.min() + 5 else None


def clues(known: Known, seen: Array) -> Array:
    """Figures of the noise's low bits in each case, `[2, clues]`, which honest noise leaves alone.

    The first `_IMPOSSIBLE` count what one of some mechanisms cannot release in that case.
    """
    touched = known.touched
    total = known.total(seen)[touched]
    size = np.frexp(total)[1]
    # Where the release has digits down to the grid.
    fine = size - known.digits <= GRID
    columns = [misses(known, seen)] if known.digits >= 24 else [np.zeros(2)]
    rows: list[list[float]] = []
    for noise in total - known.sums[:, touched]:
        digits, last = _digits(noise)
        found = [_mean(last[fine] < GRID + bits) for bits in (0, 1, 2, 4, 6)]
        cancelled = np.frexp(noise)[1] - size
        for least, most in ((-99, 0), (1, 2), (3, 99)):
            found.append(_mean(digits[(cancelled >= least) & (cancelled <= most)]))
        z = noise / known.std
        found += _inverse_cdf_scores(known, total, z)
        found += [1 - np.unique(np.abs(noise)).size / noise.size, float(np.square(z * z).mean())]
        found += [float(z[lag:] @ z[:-lag]) / z.size for lag in (1, 2, 8)]
        rows.append(found)
    columns += [*np.array(rows).T]
    columns += [lattice_scores(known, seen, distance) for distance in (1, 8)]
    return np.stack(columns, axis=1)


_IMPOSSIBLE = 2


def _digits(values: Array) -> tuple[Array, Array]:
    """Significant binary digits of each number, and the exponent of the last one."""
    fraction, exponent = np.frexp(values)
    whole = np.abs(fraction * 2.0**53).astype(np.int64)
    zeros = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    return np.where(whole == 0, 0, 53 - zeros), np.where(whole == 0, 999, exponent - 53 + zeros)


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else 0.0


def _inverse_cdf_scores(known: Known, total: Array, z: Array) -> list[float]:
    """How close Phi(z) 2^bits is to half integers, as it is for normals by the inverse of Phi."""
    u, density = ndtr(z), np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    blur = density * np.abs(total) / known.std * 2.0**-known.digits
    return [_closeness(u[blur < 0.2 * 2.0**-bits] * 2.0**bits) for bits in (16, 20, 24, 32)]


Attack = Callable[[Known, Array], bool | None]
# Released numbers of each case.
Lessons = tuple[Sequence[Array], Sequence[Array]]


def rehearsed(attack: Attack, known: Known, lessons: Lessons) -> Attack:
    """The attack, unless it is wrong in the attacker's own releases of one of the cases."""
    for present, seen in enumerate(lessons):
        guesses = [guess for one in seen if (guess := attack(known, one)) is not None]
        if sum(guess == bool(present) for guess in guesses) < 0.9 * len(guesses):
            return lambda known, seen: None
    return attack


class LearnedAttack:
    """Attack (c): the clues that differ between the cases in releases of the attacker's own."""

    def __init__(self, known: Known, lessons: Lessons) -> None:
        # [case of the lesson, lesson, case of the clue, clue]
        found = np.array([[clues(known, seen) for seen in case] for case in lessons])
        self._means = found.mean(1)
        self._variance = found.var(1).mean(0) + 1e-18
        error = np.sqrt(2 * self._variance / found.shape[1])
        self._telling = np.abs(self._means[1] - self._means[0]) > 6 * error
        self._never = (found[..., :_IMPOSSIBLE] == 0).all(1)

    def __call__(self, known: Known, seen: Array) -> bool | None:
        found = clues(known, seen)
        strange = (self._never & (found[:, :_IMPOSSIBLE] != 0)).any((1, 2))
        if strange[0] != strange[1]:
            return bool(strange[0])
        if not self._telling.any():
            return None
        distances = ((found - self._means) ** 2 / self._variance)[:, self._telling]
        # No clue, which may have a heavier tail than a Gaussian's, decides by itself.
        clue = np.clip((distances[0] - distances[1]) / 2, -8, 8).sum()
        difference = known.sums[1] - known.sums[0]
        ratio = (known.total(seen) - known.sums.mean(0)) @ difference / known.std**2
        return bool(clue + ratio > 0)


# Trials


def limit(sigma: float, count: int) -> float:
    """Right guesses that honest noise allows: their mean and four standard deviations."""
    p = ndtr(1 / (2 * sigma))
    return float(count * p + 4 * math.sqrt(count * p * (1 - p)))


def trials(
    attacked: Mechanism, own: Mechanism, *, count: int, lessons: int, coins: np.random.Generator
) -> dict[str, dict[str, int]]:
    """How many of `count` guesses are right ("right"), and how many an attack made ("told").

    Args:
        attacked: the target.
        own: the same, with keys of the attacker's own.
        count: number of releases; each attack guesses at each.
        lessons: releases of each case that the attacker makes by itself first.
        coins: decides whether the target sample is in.
    """
    releases = [[own.release(present) for _ in range(lessons)] for present in (False, True)]
    rehearsal = own.known, (releases[0], releases[1])
    attacks: dict[str, Attack] = {
        "support": rehearsed(support_attack, *rehearsal),
        "grid": rehearsed(grid_attack, *rehearsal),
        "learned": LearnedAttack(*rehearsal),
    }
    right = dict.fromkeys(("likelihood", *attacks), 0)
    told = dict.fromkeys(attacks, 0)
    for present in (coins.integers(2, size=count) == 1).tolist():
        seen = attacked.release(present)
        usual = likelihood(attacked.known, seen)
        right["likelihood"] += usual == present
        for name, attack in attacks.items():
            guess = attack(attacked.known, seen)
            told[name] += guess is not None
            right[name] += (usual if guess is None else guess) == present
    return {"right": right, "told": told}


def measured(
    target: str, view: str, sigma: float, args: argparse.Namespace, coins: np.random.Generator
) -> dict[str, Any]:
    """A row of the results."""
    seeds = (None, None) if args.seed is None else (args.seed, args.seed + 1)
    attacked, own = (mechanism(target, view, sigma, seed=seed) for seed in seeds)
    found = trials(attacked, own, count=args.trials, lessons=args.lessons, coins=coins)
    most = limit(sigma, args.trials)
    return {
        "target": target,
        "view": view,
        "sigma": sigma,
        "trials": args.trials,
        **found,
        "limit": most,
        "beaten_by": [name for name, right in found["right"].items() if right > most],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Right guesses, as text."""
    names = ("likelihood", "support", "grid", "learned")
    heads = ("target", "view", "sigma", *names, "limit", "")
    lines = [
        (
            row["target"],
            row["view"],
            f"{row['sigma']:g}",
            *(str(row["right"][name]) for name in names),
            f"{row['limit']:.1f} of {row['trials']}",
            "broken" if row["beaten_by"] else "holds",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *lines)
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=list(VIEWS))
    parser.add_argument("--sigmas", nargs="+", type=float, default=list(SIGMAS))
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--lessons", type=int, default=LESSONS)
    parser.add_argument("--seed", type=int, help="of keys, coins and torch's generator")
    parser.add_argument("--json", type=Path, help="where the results are written")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    coins = np.random.default_rng(args.seed)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    cases = [
        (target, view, sigma)
        for target in args.targets
        for view in TARGETS[target]
        if view in args.views
        for sigma in args.sigmas
    ]
    rows: list[dict[str, Any]] = []
    held = {"environment": environment("cpu", 1), "weights": WEIGHTS, "rows": rows}
    for target, view, sigma in tqdm(cases, unit="row"):
        rows.append(measured(target, view, sigma, args, coins))
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    ours = ("dpflash", "exact reference")
    return int(any(row["beaten_by"] for row in rows if row["target"] in ours))


if __name__ == "__main__":
    sys.exit(main())

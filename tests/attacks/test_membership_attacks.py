"""Whether one release tells that a sample was in the batch, beyond what its Gaussian noise allows.

A slice of `tests/attacks/attacks.py`; `DPFLASH_FULL=1` makes it 400 trials of each attack on
every view at five sigmas. Seeds are fixed. With other seeds honest noise would exceed the limit,
four standard deviations above the mean, with probability 3e-5 for each attack.
"""

import importlib
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import ndtri

HERE = Path(__file__).resolve().parent
FULL = os.environ.get("DPFLASH_FULL") == "1"


def _load(name):
    sys.path.insert(0, str(HERE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(HERE))


attacked, attacks = _load("attacked"), _load("attacks")
VIEWS, on_grid = attacked.VIEWS, attacked.on_grid
WEIGHTS, TRIALS, LESSONS = 4096, 48, 8
SIGMAS = (1.0, 10.0)
# View and sigma. Of 8 digits, "p.grad, bf16", all attacks are blind today as well.
CASES = [*itertools.product(("p.grad", "weights"), SIGMAS), ("p.grad, fp64", 10.0)]
if FULL:
    WEIGHTS, TRIALS, LESSONS = attacked.WEIGHTS, attacks.TRIALS, attacks.LESSONS
    SIGMAS = attacks.SIGMAS
    CASES = [*itertools.product(sorted(VIEWS.keys() - {"p.grad, bf16"}), SIGMAS)]


def right_guesses(make, *, trials=TRIALS, lessons=LESSONS):
    """Right guesses of each attack, of `trials`, against the mechanism make(seed)."""
    torch.manual_seed(0)
    coins = np.random.default_rng(0)
    return attacks.trials(make(1), make(2), count=trials, lessons=lessons, coins=coins)["right"]


def of(target, view, sigma):
    return lambda seed: attacked.mechanism(target, view, sigma, seed=seed, weights=WEIGHTS)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("view", ["p.grad", "weights"])
def test_every_attack_wins_against_torch_normal(view, sigma):
    right = right_guesses(of("torch.normal", view, sigma))
    assert right.pop("likelihood") <= attacks.limit(sigma, TRIALS) < min(right.values())


@pytest.mark.parametrize(("view", "sigma"), CASES)
def test_no_attack_beats_honest_noise_against_dpflash(view, sigma):
    right = right_guesses(of("dpflash", view, sigma))
    assert max(right.values()) <= attacks.limit(sigma, TRIALS)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_no_attack_beats_honest_noise_in_the_8_digits_of_bfloat16(sigma):
    right = right_guesses(of("dpflash", "p.grad, bf16", sigma))
    assert max(right.values()) <= attacks.limit(sigma, TRIALS)


@pytest.mark.parametrize(
    ("view", "sigma"), [("p.grad", 0.5), ("weights", 1.0), ("p.grad, fp64", 10.0)]
)
def test_against_an_exact_release_all_attacks_are_right_as_often_as_the_likelihood(view, sigma):
    right = right_guesses(of("exact reference", view, sigma))
    mean = TRIALS * attacks.ndtr(1 / (2 * sigma))
    for guesses in right.values():
        # No attack may fall behind either, or its defeat would say nothing.
        assert 2 * mean - attacks.limit(sigma, TRIALS) <= guesses <= attacks.limit(sigma, TRIALS)


class SumOffTheGrid(attacked.ExactStep):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.known.sums[1] += 2.0 ** (attacked.GRID - 1) * self.known.touched


class SinglePrecisionNormals(attacked.ExactStep):
    def normals(self):
        return super().normals().astype(np.float32).astype(np.float64)


class NormalsOf32Bits(attacked.ExactStep):
    def normals(self):
        words = self._generator.integers(1 << 32, size=self.known.sums.shape[1])
        return ndtri((words + 0.5) * 2.0**-32)


class NoiseOnACoarserGrid(attacked.ExactStep):
    def noise(self):
        return 4 * on_grid(super().noise() / 4, np.rint)


class NoiseAddedInSinglePrecision(attacked.ExactStep):
    def release(self, present):
        total = self.known.sums[int(present)].astype(np.float32)
        return self.seen((total + self.noise().astype(np.float32)).astype(np.float64))


class NoiseOfHalfTheWeightsUsedTwice(attacked.ExactStep):
    def noise(self):
        return np.tile(super().noise()[: WEIGHTS // 2], 2)


@pytest.mark.parametrize(
    ("broken", "view", "sigma"),
    [
        (SumOffTheGrid, "p.grad, fp64", 10.0),
        (SinglePrecisionNormals, "p.grad, fp64", 10.0),
        (NormalsOf32Bits, "p.grad, fp64", 10.0),
        (NoiseOnACoarserGrid, "p.grad, fp64", 10.0),
        (NoiseAddedInSinglePrecision, "p.grad", 1.0),
        (NoiseOfHalfTheWeightsUsedTwice, "p.grad, fp64", 10.0),
    ],
)
def test_a_release_that_is_almost_exact_loses(broken, view, sigma):
    right = right_guesses(lambda seed: broken(VIEWS[view], sigma, seed, WEIGHTS))
    assert right["learned"] > attacks.limit(sigma, TRIALS)


def test_the_script_writes_what_was_attacked_on_what_and_how_often_it_was_right(tmp_path, capsys):
    path = tmp_path / "attacks.json"
    options = ["--targets", "torch.normal", "--views", "p.grad", "--sigmas", "10"]
    options += ["--trials", "32", "--lessons", "4", "--seed", "0", "--json", str(path)]
    assert attacks.main(options) == 0  # what others make may be broken
    held = json.loads(path.read_text())
    assert {"device", "torch", "dpflash", "commit", "date"} <= held["environment"].keys()
    (row,) = held["rows"]
    assert row["right"]["support"] == row["right"]["grid"] == row["trials"] == 32
    assert "broken" in capsys.readouterr().out.splitlines()[-1]

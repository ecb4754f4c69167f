"""Computes the noise of random allocation and of Poisson sampling at equal epsilon.

    python benchmarks/scripts/random_allocation.py --out benchmarks/results/random_allocation.json

The accountant computes the figures; nothing is trained. Both samplers have equal expected batch
size and epochs. `ratio` is random allocation's noise multiplier divided by Poisson sampling's;
`epsilon_of_poisson` is Poisson sampling's epsilon with the noise of random allocation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dpflash.accounting import (
    ContourAccountant,
    PoissonGaussian,
    RandomAllocationGaussian,
    noise_multiplier_for,
)

STEPS_PER_EPOCH, EPOCHS, EPSILONS, DELTA = (10, 100, 1000), (1, 10), (0.5, 1.0, 3.0, 8.0), 1e-6


def rows():
    """Yield the figures of all runs and epsilons."""
    for steps in STEPS_PER_EPOCH:
        for epochs in EPOCHS:
            for epsilon in EPSILONS:
                yield row(steps, epochs, epsilon)


def row(steps, epochs, epsilon):
    """Return the figures of one run."""

    def allocated(noise):
        return RandomAllocationGaussian(noise_multiplier=noise, steps=steps)

    def poisson(noise):
        return PoissonGaussian(noise_multiplier=noise, sample_rate=1 / steps)

    target = {"target_epsilon": epsilon, "target_delta": DELTA}
    noise = noise_multiplier_for(allocated, epochs, **target)
    other = noise_multiplier_for(poisson, epochs * steps, **target)
    accountant = ContourAccountant()
    accountant.compose(poisson(noise), epochs * steps)
    return {
        "steps_per_epoch": steps,
        "epochs": epochs,
        "epsilon": epsilon,
        "delta": DELTA,
        "noise_multiplier": noise,
        "noise_multiplier_of_poisson": other,
        "ratio": noise / other,
        "epsilon_of_poisson": accountant.get_epsilon(DELTA),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON to write")
    out = parser.parse_args().out
    found = list(rows())
    for x in found:
        run = "{steps_per_epoch} steps an epoch, {epochs} epochs, epsilon {epsilon:g}: noise "
        figures = "{noise_multiplier:.3f}, ratio {ratio:.3f}, Poisson {epsilon_of_poisson:.3f}"
        print(f"{run}{figures}".format(**x))
    if out:
        lines = ",\n".join(json.dumps(x) for x in found)
        out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

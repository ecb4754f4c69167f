"""Computes the error of the iterates at equal epsilon: banded noise against independent noise.

    python benchmarks/scripts/noise_quality.py --out benchmarks/results/noise_quality.json

Matrices and the accountant determine the errors; nothing is trained. Banded noise uses cyclic
Poisson sampling, independent noise (one band) Poisson sampling with the same expected batch size.
`error` is computed by `dpflash.noise.compare_bands`; `ratio` is the error divided by the error of
one band.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dpflash.noise import compare_bands

RUNS = ((10_000, 250, 10), (50_000, 500, 3), (10_000, 2_500, 10), (50_000, 5_000, 10))
EPSILONS, DELTA = (1.0, 3.0, 8.0), 1e-5


def rows():
    for num_samples, batch_size, epochs in RUNS:
        for epsilon in EPSILONS:
            found = compare_bands(
                num_samples=num_samples,
                batch_size=batch_size,
                epochs=epochs,
                target_epsilon=epsilon,
                target_delta=DELTA,
                bands=[1 << i for i in range((num_samples // batch_size).bit_length())],
            )
            (one,) = (x for x in found if x.noise.bands == 1)
            for x in sorted(found, key=lambda x: x.noise.bands):
                yield {
                    "num_samples": num_samples,
                    "batch_size": batch_size,
                    "epochs": epochs,
                    "epsilon": epsilon,
                    "delta": DELTA,
                    "bands": x.noise.bands,
                    "noise_multiplier": x.noise_multiplier,
                    "error": x.expected_error,
                    "ratio": x.expected_error / one.expected_error,
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON to write")
    out = parser.parse_args().out
    found = list(rows())
    for row in found:
        run = "{num_samples:,} samples, batch {batch_size}, {epochs} epochs, epsilon {epsilon:g}"
        figures = "{bands:3} bands, noise multiplier {noise_multiplier:.3f}: {ratio:.3f}"
        print(f"{run}, {figures}".format(**row))
    if out:
        lines = ",\n".join(json.dumps(row) for row in found)
        out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

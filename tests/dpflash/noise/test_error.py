"""Expected error of banded noise, beside explicit matrices, jax_privacy and opake."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpflash.noise import Banded, error

PEER = json.loads((Path(__file__).parent / "peers.json").read_text())


def _name(row):
    return "-".join(f"{key}{row[key]}" for key in ("steps", "bands", "momentum") if key in row)


def _iterates(steps, momentum, weight_decay):
    """The matrix that SGD's own loop is, one unit gradient after another."""
    columns = []
    for gradients in np.eye(steps):
        parameter, buffer, seen = 0.0, 0.0, []
        for gradient in gradients:
            buffer = momentum * buffer + gradient
            parameter = (1 - weight_decay) * parameter + buffer
            seen.append(parameter)
        columns.append(seen)
    return np.array(columns).T


@pytest.mark.parametrize("momentum, weight_decay", [(0.0, 0.0), (0.9, 0.0), (0.5, 0.01)])
def test_error_is_that_of_explicit_matrices(momentum, weight_decay):
    steps, noise = 23, Banded(bands=5)
    c = sum(x * np.eye(steps, k=-i) for i, x in enumerate(noise.coefficients))
    b = _iterates(steps, momentum, weight_decay) @ np.linalg.inv(c)
    each = np.linalg.norm(c[:, 0]) * np.linalg.norm(b, axis=1)
    options = {"steps": steps, "momentum": momentum, "weight_decay": weight_decay}
    assert noise.expected_error(**options) == pytest.approx(np.sqrt(np.mean(each**2)), rel=1e-9)
    assert noise.expected_error(**options, statistic="max") == pytest.approx(max(each), rel=1e-9)


@pytest.mark.parametrize("row", PEER["optimized"] + PEER["opake"], ids=_name)
def test_optimized_coefficients_and_errors_are_those_of_jax_privacy_and_opake(row):
    options = {"steps": row["steps"], "momentum": row.get("momentum", 0.0)}
    noise = Banded.optimized(bands=row["bands"], **options)
    np.testing.assert_allclose(noise.coefficients, row["coefficients"], rtol=0.01, atol=2**-9)
    for statistic in {"rms", "max"} & row.keys():
        found = noise.expected_error(**options, statistic=statistic)
        assert found == pytest.approx(row[statistic], rel=5e-4)  # coefficients are rounded


@pytest.mark.parametrize("row", PEER["workloads"], ids=_name)
def test_errors_of_momentum_and_weight_decay_are_those_of_jax_privacy(row):
    noise = Banded(bands=len(row["coefficients"]), coefficients=row["coefficients"])
    options = {key: row[key] for key in ("steps", "momentum", "weight_decay")}
    for statistic in ("rms", "max"):
        found = noise.expected_error(**options, statistic=statistic)
        assert found == pytest.approx(row[statistic], rel=1e-6)


@pytest.mark.parametrize("row", PEER["sensitivities"], ids=_name)
def test_sensitivities_are_those_of_jax_privacy(row):
    noise = Banded(bands=len(row["coefficients"]), coefficients=row["coefficients"])
    options = {key: row[key] for key in ("steps", "separation", "participations")}
    assert noise.sensitivity(**options) == pytest.approx(row["sensitivity"], rel=1e-6)


@pytest.mark.parametrize("momentum, weight_decay", [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_optimized_noise_is_a_minimum(momentum, weight_decay):
    options = {"steps": 60, "momentum": momentum, "weight_decay": weight_decay}
    best = Banded.optimized(bands=5, **options)
    least, rng = best.expected_error(**options), np.random.default_rng(6)
    assert least <= Banded(bands=5).expected_error(**options)
    for _ in range(50):
        moved = np.array(best.coefficients[1:]) + rng.normal(scale=0.02, size=4)
        moved = np.minimum.accumulate(np.clip(moved, 0, 1))
        other = Banded(bands=5, coefficients=(1.0, *moved.tolist()))
        assert other.expected_error(**options) > least * (1 - 1e-8)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="momentum=1.0: expected 0 <= momentum < 1"):
        Banded(bands=2).expected_error(steps=3, momentum=1.0)
    with pytest.raises(ValueError, match="bands=4: expected at most steps=3"):
        Banded.optimized(bands=4, steps=3)
    with pytest.raises(ValueError, match="statistic='mean'"):
        Banded(bands=2).expected_error(steps=3, statistic="mean")


@pytest.mark.parametrize("bands", [255, 256, 1000])
def test_quotients_by_long_divisors_are_those_of_the_recursion(bands):
    divisor, series = error.square_root(bands), error.workload(3001, 0.9, 0.001)
    found = error.divided(series, divisor)
    expected = [np.zeros(0)]
    for i in range(len(series)):
        last = np.concatenate(expected)[-1:-bands:-1]
        expected.append(np.array([series[i] - divisor[1 : 1 + len(last)] @ last]))
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-9, atol=1e-9)

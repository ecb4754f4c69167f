"""Error of the iterates at equal epsilon."""

import json
from pathlib import Path

import pytest

from dpflash.accounting import (
    CyclicPoissonGaussian,
    create_accountant,
    get_noise_multiplier,
)
from dpflash.noise import compare_bands

ROOT = Path(__file__).resolve().parents[3]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "noise_quality.json").read_text())
PEER = json.loads((Path(__file__).parent / "peers.json").read_text())["amplified"]
# (samples, batch, epsilon) -> the least error over that of independent noise, computed
# beforehand from matrices and an accountant alone. Batches of a tenth at epsilon 1 gain nothing.
LEAST = {
    **{(10_000, 250, epsilon): x for epsilon, x in {1: 0.98, 3: 0.85, 8: 0.64}.items()},
    **{(50_000, 500, epsilon): x for epsilon, x in {1: 0.84, 3: 0.62, 8: 0.49}.items()},
    **{(10_000, 2_500, 1): 1.0, (50_000, 5_000, 1): 1.0},
}


def _run(row, bands):
    arguments = {key: row[key] for key in ("num_samples", "batch_size", "epochs")}
    return compare_bands(
        **arguments, target_epsilon=row["epsilon"], target_delta=row["delta"], bands=bands
    )


@pytest.mark.parametrize("run", LEAST, ids=str)
def test_least_error_is_within_two_percent_of_what_was_expected(run):
    rows = [x for x in MEASURED if (x["num_samples"], x["batch_size"], x["epsilon"]) == run]
    assert [row["bands"] for row in rows] == [1 << i for i in range(len(rows))]
    assert min(row["ratio"] for row in rows) == pytest.approx(LEAST[run], rel=0.02)


@pytest.mark.parametrize("bands, index", [(8, 9), (1, 18), (4, 20)])
def test_measured_errors_are_reproduced(bands, index):
    row = MEASURED[index]
    assert row["bands"] == bands
    (found,) = _run(row, [bands])
    assert found.noise.bands == bands
    assert found.noise_multiplier == pytest.approx(row["noise_multiplier"], rel=1e-3)
    assert found.expected_error == pytest.approx(row["error"], rel=1e-3)


@pytest.mark.parametrize("row", PEER, ids=lambda row: f"b{row['bands']}-eps{row['epsilon']}")
def test_errors_at_equal_epsilon_are_those_of_jax_privacy(row):
    epochs = row["steps"] * row["batch_size"] / row["num_samples"]
    (found,) = _run({**row, "epochs": epochs}, [row["bands"]])
    assert found.expected_error == pytest.approx(row["loss"], rel=0.01)


def test_the_least_error_comes_first_and_meets_the_target():
    run = {"num_samples": 400, "batch_size": 50, "epochs": 2, "epsilon": 8.0, "delta": 1e-3}
    found = _run(run, None)
    assert {x.noise.bands for x in found} == {1, 2, 4, 8}
    errors = [x.expected_error for x in found]
    assert errors == sorted(errors)
    for x in found:
        accountant = create_accountant("contour")
        event = x.noise.event(noise_multiplier=x.noise_multiplier, sample_rate=1 / 8, steps=16)
        accountant.compose(event)
        assert accountant.get_epsilon(1e-3) <= 8
    (one,) = (x for x in found if x.noise.bands == 1)
    assert one.noise_multiplier == get_noise_multiplier(
        target_epsilon=8, target_delta=1e-3, sample_rate=1 / 8, steps=16
    )


def test_more_bands_than_batches_of_an_epoch_are_refused():
    run = {"num_samples": 400, "batch_size": 50, "epochs": 2, "epsilon": 8.0, "delta": 1e-3}
    with pytest.raises(ValueError, match="sample_rate=0.125: bands=9"):
        _run(run, [9])
    with pytest.raises(ValueError, match="batch_size=50: expected at most num_samples=40"):
        _run({**run, "num_samples": 40}, [1])


RUN = {"num_samples": 400, "target_epsilon": 8.0, "target_delta": 1e-3}


def test_a_last_round_of_fewer_steps_is_paid_whole_as_in_training():
    (found,) = compare_bands(**RUN, batch_size=50, epochs=1.25, bands=[4])
    assert found.steps == 10

    def epsilon(rounds):
        accountant = create_accountant("contour")
        noise = found.noise_multiplier
        event = CyclicPoissonGaussian(noise_multiplier=noise, sample_rate=0.5, bands=4)
        accountant.compose(event, rounds)
        return accountant.get_epsilon(1e-3)

    assert 0.99 * 8 < epsilon(3) <= 8


def test_an_epoch_is_a_pass_over_the_loader():
    run = {"num_samples": 2000, "batch_size": 128, "target_epsilon": 3.0, "target_delta": 1e-5}
    assert [compare_bands(**run, epochs=x, bands=[1])[0].steps for x in (3, 0.5)] == [48, 8]


def test_runs_are_compared_at_one_sum_of_learning_rates():
    found = compare_bands(**RUN, batch_size=[25, 50], epochs=[1, 2], bands=[1, 2])
    alone = compare_bands(**RUN, batch_size=50, epochs=2, bands=[2])[0]
    of = {(run.batch_size, run.epochs, run.noise.bands): run for run in found}
    assert len(of) == 8 and of[50, 2, 2] == alone
    assert [run.steps for run in (of[25, 1, 1], of[50, 2, 1])] == [16, 16]
    errors = [run.expected_error / run.steps for run in found]
    assert errors == sorted(errors) == [run.scaled_error for run in found]
    # By hand: independent noise of T steps has iterates of the variances 1, ..., T.
    run = of[25, 2, 1]
    deviation = run.noise_multiplier / 25 * (33 / 2) ** 0.5
    assert run.scaled_error == pytest.approx(deviation / 32, rel=1e-12)


@pytest.mark.parametrize("memory, most", [(8 * 3 * 100, 4), (8 * 3 * 100 - 1, 2), (1, 1)])
def test_states_of_all_parameters_fit_into_the_memory(memory, most):
    found = compare_bands(**RUN, batch_size=50, epochs=2, parameters=100, max_memory=memory)
    assert max(run.noise.bands for run in found) == most
    assert max(run.noise.state_bytes(100) for run in found) <= memory


def test_a_memory_without_parameters_and_bands_that_cannot_be_drawn_are_refused():
    run = {**RUN, "batch_size": 50, "epochs": 2}
    with pytest.raises(ValueError, match="parameters=None with max_memory=9"):
        compare_bands(**run, max_memory=9)
    with pytest.raises(ValueError, match=r"bands=\[4\]: .*max_memory=9 bytes"):
        compare_bands(**run, bands=[4], parameters=100, max_memory=9)
    tight = {**run, "target_epsilon": 0.03}
    assert {x.noise.bands for x in compare_bands(**tight, bands=[1, 4, 8])} == {1, 4}
    with pytest.raises(
        ValueError, match=r"bands=\[8\]: noise of so many bands would not be exact"
    ):
        compare_bands(**tight, bands=[8])


@pytest.mark.cases(0)
def test_the_search_ends_where_the_error_has_risen_twice():
    run = {"num_samples": 10_000, "batch_size": 250, "epochs": 2, "target_delta": 1e-5}
    for epsilon in (1.0, 8.0):
        tried = compare_bands(**run, target_epsilon=epsilon)
        (best, *_) = compare_bands(**run, target_epsilon=epsilon, bands=[1, 2, 4, 8, 16, 32])
        assert tried[0] == best
        assert max(x.noise.bands for x in tried) == min(4 * best.noise.bands, 32)

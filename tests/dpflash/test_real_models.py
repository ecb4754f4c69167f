"""Architectures of transformers train privately as a loop over single samples, or are refused."""

import json
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
import models_table  # noqa: E402
from real_models import (  # noqa: E402
    BATCH,
    MODELS,
    REFUSED,
    clipped_sum,
    norm,
    sample_gradients,
)

TRAINED = [name for name in MODELS if name not in REFUSED]


def _options(clipping, bound):
    mode = {"clipping": "flat", "grad_sample_mode": "ghost"}
    chosen = mode if clipping == "ghost" else {"clipping": clipping}
    return {**chosen, "one_part": True, "exact": False, "max_grad_norm": bound}


CLIPPINGS = ["flat", "ghost", "per_layer", "per_block"]


@pytest.mark.cases(12)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("name", TRAINED)
def test_a_private_step_is_that_of_a_loop_over_samples(name, clipping, private, sums, distance):
    data = MODELS[name].batch()
    gradients = sample_gradients(MODELS[name].build(), data, MODELS[name].losses)
    norms = [norm(grads, grads) for grads in gradients]
    # Clipping factors are rounded down to float32.
    for bound, tolerance in ((1e6, MODELS[name].rounding), (statistics.median(norms) / 2, 5e-7)):
        engine, model, *_ = private(MODELS[name].build(), *data, **_options(clipping, bound))
        engine.backward(MODELS[name].losses(model, *data))
        groups = engine.groups()
        assert sum(group.bound**2 for group in groups) <= bound**2
        found, expected = sums(engine, model), clipped_sum(gradients, groups)
        assert distance({n: found[n] for n in expected}, expected) <= tolerance


@pytest.mark.cases(4)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("name", TRAINED)
def test_one_sample_moves_the_sum_by_at_most_the_bound(name, clipping, private, sums, distance):
    data, bound, found = MODELS[name].batch(), 1e-2, []
    for size in (BATCH, BATCH - 1):
        part = [t[:size] for t in data]
        engine, model, *_ = private(MODELS[name].build(), *part, **_options(clipping, bound))
        engine.backward(MODELS[name].losses(model, *part))
        found.append(sums(engine, model))
    moved = distance(*found, absolute=True)
    assert moved <= bound * (1 + 1e-9)
    assert moved >= bound * (0.999 if clipping in ("flat", "ghost") else 0.3)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_by_sample_is_refused(name, private):
    data = MODELS[name].batch()
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[name]):
        engine, model, *_ = private(MODELS[name].build(), *data, one_part=True)
        engine.backward(MODELS[name].losses(model, *data))


def test_the_page_is_that_of_the_committed_results_and_has_all_models():
    results = json.loads(models_table.RESULTS.read_text())
    assert models_table.PAGE.read_text() == models_table.page(results)
    assert list(results["models"]) == list(MODELS)
    errors = [
        (name, column, cell["error"])
        for name, cells in results["models"].items()
        for column, cell in cells.items()
        if "error" in cell
    ]
    assert all(error <= models_table.limit(name, column) for name, column, error in errors)
    trained = [name for name, cells in results["models"].items() if "error" in cells["flat"]]
    assert set(trained) == set(TRAINED) and len(trained) >= 40

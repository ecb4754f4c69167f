"""What tests of this folder share; they import `kinds`."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch

# As in tests/distributed; never `tests/` itself.
sys.path.insert(0, str(Path(__file__).parent))
from kinds import loss_of  # noqa: E402


def middle(norms):
    ordered = sorted(norms)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


@pytest.fixture
def agree(oracle, private, sums, distance):
    """agree(plain, batch, kind): the sum without a bound, and the clipped one, are the loop's."""

    def check(plain, batch, kind, *, train=None):
        batch = [t.double() if t.is_floating_point() else t for t in batch]
        expected, reference = plain(*batch), oracle(plain, loss_of, *batch)
        clipping = kind.get("clipping", "flat")
        runs = [(math.inf, "flat", 1e-10), (middle(reference.norms()), clipping, 1e-6)]
        for bound, clipping, tolerance in runs:
            engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=bound, **kind)
            model.train(plain.training if train is None else train)
            torch.testing.assert_close(model(*batch), expected, rtol=1e-10, atol=1e-10)
            engine.backward(loss_of(model, *batch))
            wanted = reference.clipped_sum(bound, clipping)
            assert distance(sums(engine, model), wanted) <= tolerance

    return check


@pytest.fixture
def from_loop(oracle, private, sums, distance):
    """from_loop(plain, losses, *batch, **options): how far the clipped sum is from the loop's."""

    def measure(plain, losses, *batch, **options):
        expected = oracle(plain, losses, *batch)
        engine, model, *_ = private(copy.deepcopy(plain), **options)
        engine.backward(losses(model, *batch))
        bound, clipping = options["max_grad_norm"], options.get("clipping", "flat")
        return distance(sums(engine, model), expected.clipped_sum(bound, clipping))

    return measure

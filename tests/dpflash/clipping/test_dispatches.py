"""How many operators of torch a private step calls for each parameter, beyond a plain one."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpflash.clipping import compiling


class Called(TorchDispatchMode):
    """Counts the operators that a block calls."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def called(layers, private, **options):
    """By a step on samples and padding rows, with its load; a plain step where private is None."""
    torch.manual_seed(0)
    # Of these shapes a step moves fewer bytes where it keeps no per-sample gradients.
    sizes = [(64, 16), (16, 64)] * (layers // 2)
    model = nn.Sequential(*(nn.Linear(*of_layer, bias=False) for of_layer in sizes))
    x = torch.randn(64, 16, 64)
    if private is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Called() as found:
            model(x[:4]).square().mean((1, 2)).sum().backward()
            optimizer.step()
        return found.counts
    engine, model, optimizer, loader = private(
        model, x, batch_size=4, noise_multiplier=1.0, verify_first_batch=False, **options
    )
    batches = iter(loader)
    while True:
        with Called() as found:
            (batch,) = next(batches)
            engine.backward(model(batch).square().mean((1, 2)))
            optimizer.step()
        if loader.is_last and loader.is_real.sum() > 1:
            return found.counts


@pytest.mark.parametrize(
    ("options", "most"), [({}, 0), ({"clipping": "per_layer"}, 3)], ids=["flat", "per_layer"]
)
def test_a_step_calls_few_operators_for_each_parameter(options, most, private, monkeypatch):
    monkeypatch.setattr(compiling, "_has_begun", False)
    plain = sum(called(12, None).values()) - sum(called(4, None).values())
    more = called(12, private, **options) - called(4, private, **options)
    assert (sum(more.values()) - plain) / 8 <= most, more.most_common(12)
    assert not {"aten.equal.default", "aten.nonzero.default"} & more.keys()

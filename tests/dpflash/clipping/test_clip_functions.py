"""Clipping functions against their formula, and refused ways to clip."""

import math

import pytest
import torch
from torch import nn

import dpflash


class Model(nn.Module):
    """Embedding (untied), a wide layer of several tiles, a norm and a small head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 24)
        self.wide = nn.Linear(24, 300)
        self.narrow = nn.Linear(300, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 13, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.narrow(torch.tanh(self.wide(x)))))


def loss(model, tokens):
    return dpflash.losses.cross_entropy(model(tokens), tokens.roll(1, 1))


@pytest.mark.parametrize("function", ["hard", "automatic"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_clip_functions_do_what_their_formula_says(
    function, clipping, oracle, private, sums, distance
):
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(13, (4, 6))
    exact = oracle(model, loss, tokens)
    bound = 0.8 * sorted(exact.norms())[1]
    engine, private_model, *_ = private(
        model, max_grad_norm=bound, clipping=clipping, clip_function=function
    )
    engine.backward(loss(private_model, tokens))
    found = sums(engine, private_model)
    if function == "hard":
        expected = exact.clipped_sum(bound, clipping)
    else:
        layers = [exact.names] if clipping == "flat" else exact.layers()
        share = bound / math.sqrt(len(layers))
        expected = {n: torch.zeros_like(g) for n, g in exact.grads[0].items()}
        for names in layers:
            for sample, norm in zip(exact.grads, exact.norms(names), strict=True):
                for n in names:
                    expected[n] += sample[n] * share / (norm + 0.01)
    assert distance(found, expected) <= 2e-6


def test_groups_tell_their_bounds_and_the_sensitivity(private):
    engine, model, *_ = private(Model(), max_grad_norm=2.0, clipping="per_layer")
    groups = engine.groups()
    assert sum(group.bound**2 for group in groups) <= 4.0
    assert 2.0 * (1 - 1e-9) <= groups.sensitivity <= 2.0
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert "narrow" in str(groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipping": "per_block"}, "'per_block' was removed: per_layer is faster and smaller"),
        ({"clipping": "per_layer", "grad_sample_mode": "instantiate"}, "modes belong to"),
        ({"clipping": "per_layer", "grad_sample_mode": "ew"}, "grad_sample_mode='ew' with"),
        ({"clipping": "adaptive"}, "no bound here that follows"),
        ({"clip_function": "automatic", "max_grad_norm": math.inf}, "needs a finite bound"),
        ({"clip_function": "soft"}, "clip_function='soft'"),
    ],
    ids=str,
)
def test_ways_to_clip_that_cannot_be_are_refused(options, message, private):
    with pytest.raises(ValueError, match=message):
        private(Model(), **options)
    with pytest.raises(ValueError, match="no private model"):
        dpflash.PrivacyEngine().groups()


def test_opacus_default_mode_passes_with_clipping_of_layers(private):
    engine, *_ = private(Model(), clipping="per_layer", grad_sample_mode="hooks")
    assert len(list(engine.groups())) > 1

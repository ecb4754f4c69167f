"""per_block clipping through the engine, against a float64 loop over samples and tiles."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpflash
from dpflash.kernels import BLOCK


class Model(nn.Module):
    """Embedding (untied), a wide layer of several tiles, a norm and a small head."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(13, 24)
        self.wide = nn.Linear(24, 300)
        self.narrow = nn.Linear(300, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 13, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.narrow(torch.tanh(self.wide(x)))))


def loss(model, tokens):
    return dpflash.losses.cross_entropy(model(tokens), tokens.roll(1, 1))


def tiles_of(name, shape, tied):
    """The slices of a parameter's clipping groups."""
    matrices = {"wide.weight", "narrow.weight"} | (set() if tied else {"head.weight"})
    if name not in matrices:
        return [tuple(slice(None) for _ in shape)]
    rows, columns = (range(0, size, side) for size, side in zip(shape, BLOCK, strict=True))
    return [(slice(r, r + BLOCK[0]), slice(c, c + BLOCK[1])) for r in rows for c in columns]


def clipped_by_hand(grads, bound, tied):
    """sum over samples and tiles, each clipped to its part of the bound by element count."""
    elements = sum(g.numel() for g in grads[0].values())
    total = {name: torch.zeros_like(g) for name, g in grads[0].items()}
    for sample in grads:
        for name, grad in sample.items():
            for tile in tiles_of(name, grad.shape, tied):
                share = bound * math.sqrt(grad[tile].numel() / elements)
                norm = float(grad[tile].norm())
                total[name][tile] += grad[tile] * min(1.0, share / norm if norm > 0 else 1.0)
    return total


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_per_block_sums_equal_the_loop_over_samples_and_tiles(
    tied, reduction, oracle, private, sums, distance
):
    torch.manual_seed(0)
    model = Model(tied)
    tokens = torch.randint(13, (5, 9))
    exact = oracle(model, loss, tokens)
    bound = 0.5 * sorted(exact.norms())[2]
    expected = clipped_by_hand(exact.grads, bound, tied)
    engine, model, *_ = private(
        model, max_grad_norm=bound, clipping="per_block", loss_reduction=reduction
    )
    losses = loss(model, tokens)
    if reduction is None:
        engine.backward(losses)
    else:
        losses.mean().backward()
    assert distance(sums(engine, model), expected) <= 2e-6


def test_a_chunked_head_is_one_group(private):
    torch.manual_seed(0)
    model = dpflash.nn.LongContextLM(
        17, 16, 1, 2, max_seq_len=16, chunked_loss=True, tie_embeddings=False
    )
    tokens = torch.randint(17, (3, 9))
    engine, model, *_ = private(model, clipping="per_block")
    assert {g.name: g.tiles for g in engine.groups()}["lm_head.weight"] == 1
    engine.backward(model(tokens, tokens.roll(1, 1)))
    share = engine._backward.groups[0].share
    assert share > 0 and all(torch.isfinite(x).all() for x in engine._step.sums.values())


def test_groups_tell_bounds_tiles_and_the_sensitivity(private):
    engine, model, *_ = private(Model(), max_grad_norm=2.0, clipping="per_block")
    groups = {group.name: group for group in engine.groups()}
    assert groups["wide.weight"].tiles == 3 and groups["narrow.weight"].tiles == 3
    assert groups["embedding.weight"].tiles == 1
    assert sum(g.bound**2 for g in groups.values()) <= 4.0
    assert engine.groups().sensitivity == pytest.approx(2.0, rel=1e-9)
    assert engine.groups().sensitivity <= 2.0
    assert {p for g in groups.values() for p in g.parameters} == dict(
        model.named_parameters()
    ).keys()
    assert "wide.weight" in str(engine.groups())


@settings(max_examples=30)
@given(data=st.data())
def test_adding_one_sample_moves_the_per_block_sum_by_at_most_the_bound(data):
    seed = data.draw(st.integers(0, 2**20))
    scale = data.draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e3, 1e15, math.inf, math.nan]))
    bound = data.draw(st.sampled_from([1e-3, 1.0, 50.0]))
    torch.manual_seed(seed)
    x = torch.randn(4, 3, 20)
    x[3] *= scale
    model = nn.Linear(20, 140)
    engine = dpflash.PrivacyEngine(seed=seed)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        foreign_batches=True,
        clipping="per_block",
    )
    totals = []
    for batch in (x, x[:3]):
        engine.backward(model(batch).square().sum((1, 2)))
        totals.append({n: s.double() for n, s in engine._step.sums.items()})
        optimizer.zero_grad()
    moved = math.sqrt(sum(float((totals[0][p] - totals[1][p]).square().sum()) for p in totals[0]))
    # Sums of four samples round by some 2^-24 of their size, at most 4 bounds.
    assert moved <= bound * (1 + 4 * 4 * 2.0**-24)


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


def test_plan_explains_each_matrix_in_words_and_figures(private):
    for kind, mode in (
        ({"grad_sample_mode": "instantiate"}, "instantiate"),
        ({"clipping": "per_block"}, "tiles"),
    ):
        engine, model, *_ = private(Model(), **kind)
        with pytest.raises(ValueError, match="before the private model has run"):
            engine.plan()
        model(torch.randint(13, (3, 5)))
        uses = {use.parameter: use for use in engine.plan()}
        assert uses["wide.weight"].grad_sample_mode == mode
        assert "wide.weight" in str(engine.plan())


def test_per_block_refuses_what_it_cannot_do(private):
    with pytest.raises(ValueError, match="clip_function='automatic'"):
        private(Model(), clipping="per_block", clip_function="automatic")
    with pytest.raises(ValueError, match="grad_sample_mode='instantiate'"):
        private(Model(), clipping="per_block", grad_sample_mode="instantiate")
    with pytest.raises(ValueError, match="clip_function='soft'"):
        private(Model(), clip_function="soft")
    with pytest.raises(ValueError, match="before make_private"):
        dpflash.PrivacyEngine().groups()

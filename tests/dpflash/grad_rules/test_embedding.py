"""A sample with an index that a table does not have adds nothing, and no error tells of it."""

import pytest
import torch
from torch import nn

from dpflash import PrivateRefusal

IDS = torch.tensor([[1, 2, 3, 0], [2, 2, 5, 1], [3, 0, 1, 1], [6, 5, 4, 3]])


class Scaled(nn.Embedding):
    """With a forward of its own, as those of Gemma and BART."""

    def forward(self, input):
        return super().forward(input) * 2


class Flattened(nn.Embedding):
    """Returns one row for each token."""

    def forward(self, input):
        return super().forward(input).flatten(0, 1)


class Model(nn.Module):
    def __init__(self, kind, trained, positions=None):
        super().__init__()
        torch.manual_seed(0)
        self.table = kind(7, 4, padding_idx=0).requires_grad_(trained)
        self.places = nn.Embedding(4, 4).requires_grad_(trained)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.positions = positions or (lambda ids: torch.arange(ids.shape[1])[None])

    def forward(self, ids):
        # Each token sees the one before it.
        h = self.table(ids).view(*ids.shape, 4) + self.places(self.positions(ids))
        return self.head(h + self.mix(h).roll(1, 1).tanh()).mean((1, 2))


def released(model, ids, private, options):
    engine, model, optimizer, _ = private(model, **options)
    losses = model(ids)
    engine.backward(losses.mean() if "loss_reduction" in options else losses)
    optimizer.step()
    return [p.grad for p in model.parameters() if p.requires_grad], engine


@pytest.mark.parametrize("token", [7, 400, -1])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Flattened])
@pytest.mark.parametrize(
    "options",
    [
        {"grad_sample_mode": "instantiate"},
        {"grad_sample_mode": "ghost"},
        {"clipping": "per_layer"},
        {"loss_reduction": "mean"},
    ],
    ids=["instantiate", "ghost", "per layer", "mean"],
)
def test_a_sample_with_an_unknown_token_adds_nothing(token, trained, kind, options, private):
    bad = IDS.clone()
    bad[0, 2] = token
    found, engine = released(Model(kind, trained), bad, private, options)
    assert engine.diagnostics()["nonfinite_samples"] == 1
    others, _ = released(Model(kind, trained), IDS[1:], private, options)
    for a, b in zip(found, others, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


class OfItsOwn(nn.Module):
    """Looks up in a parameter of a module that has layers too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(nn.functional.embedding(ids, self.table)).mean((1, 2))


def test_an_unknown_token_in_a_models_own_table_adds_nothing(private):
    bad = IDS.clone()
    bad[0, 2] = 7
    found, _ = released(OfItsOwn(), bad, private, {})
    others, _ = released(OfItsOwn(), IDS[1:], private, {})
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, others, strict=True))


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    "positions",
    [
        lambda ids: torch.arange(5)[None],
        lambda ids: torch.arange(5).expand(len(ids), 5),
        lambda ids: torch.arange(5),
    ],
    ids=["one row", "expanded", "no row"],
)
def test_positions_that_all_samples_share_remove_none_of_them(positions, trained, private):
    """The longest sample decides how many there are; it must not remove the others."""
    model = Model(nn.Embedding, trained, positions)
    with pytest.raises(IndexError):
        released(model, torch.cat([IDS, IDS[:, :1]], 1), private, {})


@pytest.mark.parametrize(
    ("positions", "cause"),
    [
        (lambda ids: torch.arange(4)[None], r"^module 'mix' .* the first, 'places', got \[1, "),
        (lambda ids: torch.arange(4), r"^indices of embedding 'places'"),
    ],
    ids=["one row", "no row"],
)
def test_positions_before_any_other_trained_layer_are_to_be_expanded(positions, cause, private):
    """The first trained layer determines B, and a frozen table of tokens is none."""
    model = Model(nn.Embedding, True, positions)
    model.table.requires_grad_(False)
    with pytest.raises(PrivateRefusal, match=rf"{cause}.*expand\(B, "):
        released(model, IDS, private, {})
    model = Model(nn.Embedding, True, lambda ids: torch.arange(4).expand(len(ids), -1))
    model.table.requires_grad_(False)
    released(model, IDS, private, {})


class Tied(nn.Module):
    """Logits of a table, by a head that is tied to it or not."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids)).square().mean((1, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_the_row_of_padding_gets_no_noise_unless_a_head_trains_it(tied, private):
    (table, *_), _ = released(Tied(tied), IDS, private, {"noise_multiplier": 1.0})
    noised = table.ne(0).all(1)
    assert noised.tolist() == [row != 2 or tied for row in range(7)]

"""Look-ups in tables by layers that have no rule of their own: options hold for every sample."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpflash.grad_rules.convert import check_model

try:
    from transformers.models.bart.modeling_bart import (
        BartLearnedPositionalEmbedding,
        BartScaledWordEmbedding,
    )
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
except ImportError:
    BartScaledWordEmbedding = None
needs_transformers = pytest.mark.skipif(
    BartScaledWordEmbedding is None, reason="needs transformers"
)

ROWS, WIDTH, PADDING = 9, 4, 3


class Scaled(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * 2.5


class Functional(nn.Module):
    """A leaf layer that calls PyTorch's functions itself."""

    def __init__(self, lookup):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.lookup = lookup

    def forward(self, x):
        # The table is used beside the look-up, where padding means nothing.
        return self.lookup(x, self.weight) + self.weight[PADDING]


class BartPositions(nn.Module):
    """Learned positions and scaled words, as BART adds them."""

    def __init__(self):
        super().__init__()
        self.words = BartScaledWordEmbedding(ROWS, WIDTH, PADDING, embed_scale=2.0)
        self.positions = BartLearnedPositionalEmbedding(8, WIDTH)

    def forward(self, x):
        return self.words(x) + self.positions(x)


LAYERS = {
    "subclass": lambda: Scaled(ROWS, WIDTH, padding_idx=PADDING),
    "from-the-end": lambda: Scaled(ROWS, WIDTH, padding_idx=PADDING - ROWS),
    "F.embedding": lambda: Functional(lambda x, w: F.embedding(x, w, padding_idx=PADDING)),
    "F.embedding-negative": lambda: Functional(
        lambda x, w: F.embedding(x, w, padding_idx=PADDING - ROWS)
    ),
    "torch.embedding": lambda: Functional(lambda x, w: torch.embedding(w, x, PADDING)),
    "aten": lambda: Functional(lambda x, w: torch.ops.aten.embedding(w, x, padding_idx=PADDING)),
    "aten-default": lambda: Functional(lambda x, w: torch.ops.aten.embedding.default(w, x, 3)),
    "no-padding": lambda: Functional(lambda x, w: torch.embedding(w, x)),
    "bag": lambda: Functional(
        lambda x, w: F.embedding_bag(x, w, padding_idx=PADDING, mode="sum").unsqueeze(1)
    ),
    "bart": pytest.param(BartPositions, marks=needs_transformers),
    "gemma3": pytest.param(
        lambda: Gemma3TextScaledWordEmbedding(ROWS, WIDTH, PADDING, embed_scale=1.5),
        marks=needs_transformers,
    ),
}


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.layer(x))


def loss(model, x):
    return model(x).square().flatten(1).sum(1)


def padded_tokens():
    """Several padded tokens in every sample, each with its own number of them."""
    x = torch.randint(0, ROWS, (4, 6), generator=torch.Generator().manual_seed(3))
    for sample in range(4):
        x[sample, sample : sample + 2 + sample % 2] = PADDING
    return x


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_a_padded_token_has_no_gradient_in_any_sample(build, clipping, oracle, private, sums):
    torch.manual_seed(0)
    net = Net(build()).double()
    x = padded_tokens()
    reference = oracle(net, loss, x)
    engine, model, optimizer, _ = private(net, max_grad_norm=float("inf"), clipping=clipping)
    for sample, expected in enumerate(reference.grads):
        alone = torch.zeros(4, dtype=torch.float64)
        alone[sample] = 1
        engine.backward(alone * loss(model, x))
        found = sums(engine, model)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12, msg=name)
        optimizer.zero_grad()


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_padding_counts_in_no_samples_norm(clipping, oracle, private, sums, distance):
    torch.manual_seed(0)
    net = Net(Scaled(ROWS, WIDTH, padding_idx=PADDING)).double()
    x = padded_tokens()
    reference = oracle(net, loss, x)
    bound = sorted(reference.norms())[1]
    engine, model, _, _ = private(net, max_grad_norm=bound, clipping=clipping)
    engine.backward(loss(model, x))
    assert distance(sums(engine, model), reference.clipped_sum(bound, clipping)) < 1e-6


def test_an_empty_batch_is_looked_up_too(private, sums):
    net = Net(Scaled(ROWS, WIDTH, padding_idx=PADDING))
    _, model, _, _ = private(net)
    assert model(torch.zeros(0, 6, dtype=torch.long)).shape == (0, 6, 2)


def test_a_padding_row_that_the_table_lacks_is_refused(private):
    _, model, _, _ = private(Net(Functional(lambda x, w: F.embedding(x, w, padding_idx=ROWS))))
    with pytest.raises(ValueError, match=r"'layer'.*padding_idx=9"):
        model(padded_tokens())


@pytest.mark.parametrize(
    ("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)]
)
@pytest.mark.parametrize("lookup", [F.embedding, F.embedding_bag], ids=lambda f: f.__name__)
def test_options_without_a_rule_are_refused_in_a_functional_look_up(
    lookup, option, value, private
):
    layer = Functional(lambda x, w: lookup(x, w, **{option: value}).view(1, -1, WIDTH))
    before = layer.weight.detach().clone()
    _, model, _, _ = private(Net(layer))
    with pytest.raises(ValueError, match=f"'layer'.*{option}={value}.*pass {option}="):
        model(padded_tokens())
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    "lookup",
    [
        lambda x, w: torch.embedding(w, x, -1, True),
        lambda x, w: torch.embedding(w, x, sparse=True),
        lambda x, w: torch.embedding(torch.embedding_renorm_(w, x, 1.0, 2.0), x),
    ],
    ids=["freq", "sparse", "renorm"],
)
def test_options_without_a_rule_are_refused_in_a_low_level_look_up(lookup, private):
    _, model, _, _ = private(Net(Functional(lookup)))
    with pytest.raises(ValueError, match="'layer' looks up in a table with"):
        model(padded_tokens())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: Scaled(ROWS, WIDTH, max_norm=1.0),
        lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0),
        lambda: nn.EmbeddingBag(ROWS, WIDTH, max_norm=1.0),
    ],
    ids=["subclass", "Embedding", "EmbeddingBag"],
)
def test_a_table_whose_rows_the_data_rewrite_is_refused_even_frozen(layer, frozen):
    model = Net(layer())
    model.layer.requires_grad_(not frozen)
    with pytest.raises(ValueError, match=r"'layer'"):
        check_model(model)
    if frozen:
        with pytest.raises(ValueError, match=r"max_norm=1\.0.*max_norm=None"):
            check_model(model)
        model.layer.max_norm = None
        check_model(model)


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_options_without_a_rule_are_refused_in_a_subclass(option):
    with pytest.raises(ValueError, match=f"'layer' has {option}=True"):
        check_model(Net(Scaled(ROWS, WIDTH, **{option: True})))

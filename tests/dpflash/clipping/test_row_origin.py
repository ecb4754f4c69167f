"""Layers that get a row for each token: taken where the rows are those of samples, in order."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpflash
from dpflash import PrivateRefusal
from dpflash.clipping.row_origin import batch_sizes_of_rows

EVERY_KIND = (
    {"grad_sample_mode": "instantiate"},
    {"grad_sample_mode": "book_keeping"},
    {"grad_sample_mode": "ghost"},
    {"clipping": "per_layer"},
)


class Scale(nn.Module):
    """A layer of the generic rule, whose outputs have the shape of its inputs."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return torch.tanh(x * self.weight)


class Flattened(nn.Module):
    """A block as OPT's, on tokens [B T, E]; `rows` makes them of [B, T, E], `back` undoes it."""

    def __init__(self, rows=lambda x: x.reshape(-1, x.shape[-1]), back=None, mlp=None):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.rms, self.scale = nn.RMSNorm(6), Scale(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.rows, self.back = rows, back or (lambda x, like: x.view(like.shape))

    def forward(self, x):
        hidden = self.first(x)
        rows = self.rows(hidden)
        inner = self.down(F.gelu(self.up(self.norm(rows))))
        return self.back(rows + self.scale(self.rms(rows + inner)), hidden)


def losses(model, x):
    return 10 * model(x).square().flatten(1).mean(1)


def batch(samples=4, tokens=3):
    return torch.randn(samples, tokens, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: next(iter(kind.values())))
@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (1, 3), (3, 3)], ids=str)
def test_flattened_tokens_give_what_unflattened_ones_do(shape, kind, private, sums):
    torch.manual_seed(0)
    whole, model = Flattened(lambda x: x), Flattened()
    whole.load_state_dict(model.state_dict())
    found = []
    for one in (whole, model):
        engine, made, _, _ = private(one, batch_size=4, **kind)
        engine.backward(losses(made, batch(*shape)))
        found.append(sums(engine, made))
    for name, total in found[0].items():
        assert torch.allclose(total, found[1][name], atol=1e-6), name


def test_the_sum_is_that_of_a_loop_over_samples(private, oracle, sums, distance):
    torch.manual_seed(0)
    model = Flattened()
    expected = oracle(model, losses, batch())
    bound = sorted(expected.norms())[1]
    engine, made, _, _ = private(copy.deepcopy(model).double(), max_grad_norm=bound)
    engine.backward(losses(made, batch().double()))
    assert distance(sums(engine, made), expected.clipped_sum(bound)) <= 1e-6


def test_crops_of_an_image_are_rows_of_their_sample(private, oracle, sums, distance):
    class Crops(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.conv = nn.Linear(4, 4), nn.Conv1d(2, 3, 2)

        def forward(self, x):  # [B, crops, 2, 4]
            return self.conv(self.mix(x).flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)

    torch.manual_seed(0)
    model, x = Crops(), torch.randn(3, 5, 2, 4)
    expected = oracle(model, losses, x)
    engine, made, _, _ = private(copy.deepcopy(model).double(), max_grad_norm=0.1)
    engine.backward(losses(made, x.double()))
    assert distance(sums(engine, made), expected.clipped_sum(0.1)) <= 1e-6


def test_looked_up_rows_of_choices_have_the_shape_that_they_have_in_the_plain_model(
    private, oracle, sums, distance
):
    class Choices(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, x):  # [B, n, n]: other code fits too where a dimension is too many
            return self.table(x.view(-1, x.shape[2])).mean(1).view(len(x), -1)

    torch.manual_seed(0)
    model, x = Choices(), torch.randint(0, 9, (4, 3, 3))
    expected = oracle(model, losses, x)
    engine, made, _, _ = private(copy.deepcopy(model).double(), max_grad_norm=0.1)
    assert torch.allclose(made(x), model.double()(x))
    engine.backward(losses(made, x))
    assert distance(sums(engine, made), expected.clipped_sum(0.1)) <= 1e-6


SEQUENCES = {
    "gru": (nn.GRU(4, 4, batch_first=True), lambda layer, x: layer(x)[0]),
    "lstm": (nn.LSTM(4, 4, batch_first=True), lambda layer, x: layer(x)[0]),
    "cell": (nn.GRUCell(4, 4), lambda layer, x: layer(x.flatten(0, 1))),
    "torch": (nn.MultiheadAttention(4, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
    "own": (dpflash.nn.MultiheadAttention(4, 2), lambda layer, x: layer(x)),
}


@pytest.mark.parametrize(("layer", "call"), SEQUENCES.values(), ids=SEQUENCES)
def test_a_layer_that_takes_one_sequence_of_a_sample_refuses_several(layer, call, private):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Linear(4, 4), copy.deepcopy(layer)

        def forward(self, x):
            return call(self.layer, self.first(x).flatten(0, 1))

    engine, model, _, _ = private(Several())
    with pytest.raises(PrivateRefusal, match="^input of module 'layer.*several rows of each"):
        model(torch.randn(3, 2, 5, 4))


def _time_first(x):
    return x.transpose(0, 1).reshape(-1, x.shape[-1])


def _from_time_first(x, like):
    return x.view(like.shape[1], like.shape[0], -1).transpose(0, 1)


ORDER = torch.randperm(12, generator=torch.Generator().manual_seed(2))


def _shuffled(x):
    return x.reshape(-1, x.shape[-1])[ORDER]


def _repeated_outside(x):
    """[2, B T, E] flattened: twice all samples."""
    return (x.reshape(-1, x.shape[-1]) * torch.ones(2, 1, 1)).reshape(-1, x.shape[-1])


ORDERS = {
    "time-first": (_time_first, _from_time_first),
    "shuffled": (_shuffled, lambda x, like: x[ORDER.argsort()].view(like.shape)),
    "product-from-the-left": (
        lambda x: torch.eye(12).flip(0) @ x.reshape(-1, 6),
        None,
    ),
    "repeated-outside": (_repeated_outside, lambda x, like: x[:12].view(like.shape)),
}


@pytest.mark.parametrize("proof", [True, False], ids=["proof", "no-proof"])
@pytest.mark.parametrize("order", list(ORDERS))
def test_rows_in_another_order_are_refused_by_the_layer_s_name(order, proof, private):
    """Without the proof of the first batch too."""
    torch.manual_seed(0)
    engine, model, _, _ = private(Flattened(*ORDERS[order]), verify_first_batch=proof)
    refused = "^module 'norm' got another first dimension.*Give every layer.*once for each$"
    # Rows that are mixed are seen by the repeated forward, which comes first.
    refused += "|changed for a sample" if proof else ""
    with pytest.raises(PrivateRefusal, match=refused):
        engine.backward(losses(model, batch()))
    assert not engine._step.sums


@pytest.mark.parametrize("seed", range(4))
def test_as_many_tokens_as_samples_in_another_order_are_refused_by_the_proof(seed, private):
    """[T, B, E] has the shape of [B, T, E], and the first batch tells them apart."""
    torch.manual_seed(seed)
    model = Flattened(lambda x: _time_first(x), _from_time_first)
    engine, model, _, _ = private(model)
    with pytest.raises(RuntimeError, match="nothing was released"):
        engine.backward(losses(model, torch.randn(4, 4, 5)))
    assert not engine._step.sums


def test_a_sum_of_rows_in_two_orders_is_refused(private):
    torch.manual_seed(0)
    model = Flattened(lambda x: x.reshape(-1, 6) + _time_first(x))
    engine, model, _, _ = private(model, verify_first_batch=False)
    with pytest.raises(PrivateRefusal, match="^module 'norm' got another first dimension"):
        engine.backward(losses(model, batch()))


@pytest.mark.parametrize("is_first", [True, False])
def test_indices_that_samples_share_are_told_to_be_expanded(is_first, private):
    class Relative(nn.Module):
        def __init__(self, *sizes):
            super().__init__()
            self.bias, self.body = nn.Embedding(5, 1), nn.Linear(5, 5)
            self.sizes = sizes

        def forward(self, x):
            indices = (torch.arange(3)[:, None] - torch.arange(3) + 2).expand(*self.sizes, 3, 3)
            bias = self.bias(indices) if is_first else None
            y = self.body(x)
            bias = self.bias(indices) if bias is None else bias
            return bias.squeeze(-1) @ y

    engine, model, _, _ = private(Relative())
    with pytest.raises(PrivateRefusal, match=r"indices of 'bias'.*indices\.expand\(B, \*indices"):
        engine.backward(losses(model, batch()))
    engine, model, _, _ = private(Relative(4))
    engine.backward(losses(model, batch()))


def test_inputs_without_gradients_are_told_by_the_view_that_they_are(private, sums):
    class First(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.layer, self.rows = nn.Linear(5, 6), rows

        def forward(self, x):
            return self.layer(self.rows(x)).view(4, 3, 6)

    torch.manual_seed(0)
    engine, model, _, _ = private(First(lambda x: x.view(-1, 5)))
    engine.backward(losses(model, batch()))
    assert sums(engine, model)["layer.weight"].norm() > 0
    for rows in (_time_first, lambda x: x.transpose(0, 1).contiguous().view(-1, 5)):
        engine, model, _, _ = private(First(rows))
        with pytest.raises(PrivateRefusal, match="than the batch that the model saw"):
            engine.backward(losses(model, batch()))


def test_a_checkpointed_block_of_flattened_tokens_gives_the_same_sum(private, sums):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Flattened):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    plain, model = Flattened(), Checkpointed()
    model.load_state_dict(plain.state_dict())
    found = []
    for one in (plain, model):
        engine, made, _, _ = private(one)
        engine.backward(losses(made, batch()))
        found.append(sums(engine, made))
    assert all(torch.equal(total, found[1][name]) for name, total in found[0].items())


def test_a_product_of_rows_that_mix_samples_hides_the_batch():
    """[2, 3, 4] as [3, 8]: its second row has tokens of both samples."""
    x = (torch.randn(2, 3, 4, requires_grad=True) * 2).view(3, 8)
    assert 2 in batch_sizes_of_rows(x.view(6, 4))
    assert 2 not in batch_sizes_of_rows((x @ torch.randn(8, 4)).view(6, 2))

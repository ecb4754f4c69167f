"""Parameters on modules that have layers below them, and layers that share or flatten samples."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpflash import PrivacyEngine, PrivateRefusal

WIDTH = 4
# As many samples as tokens and features, so that a mistaken dimension has the right size.
BATCH = 4


class Owner(nn.Module):
    """Uses its parameters in many ways, and reads the weight of a layer that it calls too."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, WIDTH + 1, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.decay = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kernel = nn.Parameter(torch.randn(WIDTH, 1, 3))
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x, mask=None):
        batch = x.shape[0]
        x = torch.cat((self.token.expand(batch, -1, -1), self.project(x)), dim=1) + self.positions
        x = x * self.scale.sigmoid()[None, None, :]
        x = torch.einsum("bte,ef->btf", x, -torch.exp(self.decay.float().to(x.dtype)))
        x = F.conv1d(x.transpose(1, 2), self.kernel, padding=1, groups=WIDTH).transpose(1, 2)
        x = x + self.table.index_select(0, torch.arange(x.shape[1])).unsqueeze(0)
        for layer in self.layers:
            x = x + layer(x)
        x = torch.stack((x, x @ self.project.weight.t()), dim=1).sum(1)
        return x if mask is None else x * mask


def squares(model, x):
    return model(x).square().flatten(1).sum(1)


def of_a_model(owner):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), owner, nn.Linear(WIDTH, 2)).double()


def inputs(batch=BATCH):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, WIDTH, WIDTH, dtype=torch.float64, generator=generator)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("batch", [1, BATCH, 7])
def test_each_use_of_a_parameter_gives_the_gradients_of_single_samples(
    batch, clipping, private, oracle, sums, distance
):
    x, plain = inputs(batch), of_a_model(Owner())
    expected = oracle(plain, squares, x).clipped_sum(1e6)
    engine, model, *_ = private(
        copy.deepcopy(plain), x, one_part=True, exact=False, clipping=clipping, max_grad_norm=1e6
    )
    assert torch.allclose(model(x), plain(x), rtol=1e-12)
    engine.backward(squares(model, x))
    found = sums(engine, model)
    assert distance({n: found[n] for n in expected}, expected) <= 1e-12
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(engine.detach(model)[1]) is Owner


def test_recomputed_owners_have_the_same_gradients(private, sums, distance):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.owner = Owner()

        def forward(self, x):
            return checkpoint(self.owner, x, use_reentrant=False)

    x, found = inputs(), []
    for recomputed in (False, True):
        torch.manual_seed(0)
        owner = Recomputed() if recomputed else nn.ModuleList([Owner()])
        module = of_a_model(owner if recomputed else owner[0])
        engine, model, *_ = private(module, x, one_part=True)
        engine.backward(squares(model, x))
        found.append({n.replace(".owner", ""): s for n, s in sums(engine, model).items()})
    assert distance(*found) <= 1e-12


class Token(nn.Module):
    """A class token before a layer, of which the first output is taken, or all of it."""

    def __init__(self, layer, batch_first):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layer, self.batch_first = layer, batch_first

    def forward(self, x):
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1)
        y = self.layer(x if self.batch_first else x.transpose(0, 1))
        y = y[0] if isinstance(y, tuple) else y
        return y if self.batch_first else y.transpose(0, 1)


class States(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x, state=None):
        return self.layer(x, None if state is None else state.transpose(0, 1).contiguous())[0]


class Recurrent(nn.Module):
    """A trained first state of a recurrent layer, and a trained scale that is returned."""

    def __init__(self):
        super().__init__()
        self.states, self.state = States(), nn.Parameter(torch.randn(2, WIDTH))
        self.scale = Temperature()

    def forward(self, x):
        y, scale = self.scale(self.states(x, self.state.expand(len(x), -1, -1)))
        return y * scale[..., None]


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.project = nn.Parameter(torch.randn(())), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.project(x), self.scale.exp().expand(len(x), 1)


def encoder(batch_first, computed=False):
    sizes = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0}
    layer = nn.TransformerEncoderLayer(**sizes, batch_first=batch_first)
    if computed:
        nn.utils.parametrizations.weight_norm(layer.linear1)
    return nn.TransformerEncoder(layer, 1)


BELOW = {
    "encoder": lambda: Token(encoder(True), True),
    "batch second": lambda: Token(encoder(False), False),
    "batch second, computed": lambda: Token(encoder(False, computed=True), False),
    "recurrent": lambda: Token(States(), True),
    "recurrent with a state": Recurrent,
}


# As many samples as tokens, or not.
@pytest.mark.parametrize("batch", [1, BATCH, WIDTH + 1])
@pytest.mark.parametrize("build", BELOW.values(), ids=BELOW)
def test_torch_layers_below_an_owner_give_the_gradients_of_single_samples(build, batch, from_loop):
    x, plain = inputs(batch), of_a_model(build())
    assert from_loop(plain, squares, x, exact=False, max_grad_norm=1e6) <= 1e-10


class PackedToken(Token):
    """Packs rows of several lengths for its layer."""

    def forward(self, x):
        lengths = x[:, 0, 0].gt(0) + 1
        packed = pack_padded_sequence(x + self.token, lengths, True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], True, total_length=x.shape[1])[0]


@pytest.mark.parametrize("kind", [Token, PackedToken])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_that_an_owner_calls_itself_is_refused(kind, batch_first, private):
    layer, x = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first), inputs()
    engine, model, *_ = private(of_a_model(kind(layer, batch_first)), x, one_part=True)
    message = rf"'1' \({kind.__name__}\) .* calls a layer LSTM itself.* takes and returns"
    with pytest.raises(ValueError, match=message):
        engine.backward(squares(model, x))


def test_a_computed_weight_that_is_read_below_an_owner_is_refused_or_frozen(private):
    # In this order of dimensions attention runs for each sample, and reads the weight.
    x, plain = inputs(), of_a_model(Token(encoder(False), False))
    attention = plain[1].layer.layers[0].self_attn
    nn.utils.parametrizations.weight_norm(attention.out_proj)
    engine, model, *_ = private(copy.deepcopy(plain), x, one_part=True)
    with pytest.raises(RuntimeError, match="reads parameter 'original0'"):
        engine.backward(squares(model, x))
    attention.requires_grad_(False)
    engine, model, *_ = private(copy.deepcopy(plain), x, one_part=True)
    assert torch.allclose(model(x), plain(x), rtol=1e-12)


def test_attention_with_a_forward_of_its_own_is_no_owner(private):
    class Self(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    with pytest.raises(ValueError, match="with a forward of its own"):
        private(of_a_model(Self(WIDTH, 2, batch_first=True)), inputs(), one_part=True)


class Deep(nn.Module):
    """Reads the parameters of layers below it, and calls a part of them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = x + layer(x)
        x = self.stack[1:](x) * self.scale
        for parameter in self.stack[0].parameters():
            x = x @ parameter if parameter.ndim > 1 else x + parameter
        named = dict(self.layers[2].named_parameters())
        return F.linear(x, **named) * self.layers[0].state_dict(keep_vars=True)["bias"]


# In a batch of one, a parameter that is read past its handle makes no difference to the forward.
@pytest.mark.parametrize("batch", [1, BATCH])
def test_parameters_that_are_read_below_an_owner_and_parts_of_containers_have_gradients(
    batch, from_loop
):
    options = {"exact": False, "max_grad_norm": 1e6, "verify_first_batch": False}
    assert from_loop(of_a_model(Deep()), squares, inputs(batch), **options) <= 1e-12


class Replaces(Owner):
    def forward(self, x):
        weights = {"weight": self.decay, "bias": self.scale}
        return torch.func.functional_call(self.project, weights, x)


class Checkpoints(Owner):
    def forward(self, x):
        return checkpoint(self.project, x, use_reentrant=False) * self.scale


class Mixing(Owner):
    def forward(self, x):
        x = x - x.mean(0, keepdim=True)
        return self.project(x) * self.scale


class Below(Owner):
    """A layer below it mixes samples."""

    def __init__(self):
        super().__init__()
        self.mean = Mean()

    def forward(self, x):
        return self.mean(self.project(x)) * self.scale


class Mean(nn.Module):
    def forward(self, x):
        return x + x.mean(0, keepdim=True)


class Chosen(Owner):
    def forward(self, x):
        return self.project(x) * self.scale + x[x > 0].sum()


class Number(Owner):
    def forward(self, x):
        return (self.project(x) * self.scale).sum()


class Kept(Owner):
    def forward(self, x, cache):
        return self.project(x) * self.scale


class Flat(Owner):
    def forward(self, x, others):
        return self.project(x) * self.scale + others.sum()


class Positioned(Owner):
    def forward(self, x, positions):
        return self.project(x) * self.scale + positions[:, None]


class Caller(nn.Module):
    """Calls an owner with a second argument."""

    def __init__(self, owner, extra):
        super().__init__()
        self.owner, self.extra = owner, extra

    def forward(self, x):
        return self.owner(x, self.extra(x))


REFUSALS = {
    "mixes": (Mixing, "gives a sample alone another result than in a batch"),
    "mixes below": (Below, "samples whose losses have weight 0|changed for a sample"),
    "chooses": (Chosen, "cannot run sample by sample.*boolean mask"),
    "a number": (Number, r"returned a number for one sample.*\.expand\(len\(x\), 1\)"),
    "replaces": (Replaces, r"'1' \(Replaces\) replaces parameter 'weight' of a layer below it"),
    "checkpoints": (Checkpoints, r"'1' \(Checkpoints\) has layers below it that activation"),
    "a cache": (lambda: Caller(Kept(), lambda x: object()), "use_cache=False"),
    "flattened": (
        lambda: Caller(Flat(), lambda x: x.detach().flatten(0, 1)),
        r"first dimension is not the batch.*pass it as x\[None\]",
    ),
    "flattened to a square": (
        lambda: Caller(Flat(), lambda x: x[:4, 0].detach()),
        "whose first dimension is not the batch",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_an_owner_cannot_tell_apart_is_refused(build, message, private):
    x = torch.randn(8, WIDTH, WIDTH, dtype=torch.float64)
    engine, model, *_ = private(of_a_model(build()), x, one_part=True)
    with pytest.raises((ValueError, RuntimeError), match=message):
        engine.backward(squares(model, x))


def test_positions_stay_shared_in_a_batch_of_as_many_samples(private):
    plain = of_a_model(Caller(Positioned(), lambda x: torch.arange(WIDTH)))
    engine, model, *_ = private(copy.deepcopy(plain), inputs(), verify_first_batch=False)
    for batch in (WIDTH + 2, WIDTH):
        assert torch.allclose(model(inputs(batch)), plain(inputs(batch)), rtol=1e-12)


def test_an_owner_in_torch_compile_is_refused(private):
    x = inputs()
    engine, model, *_ = private(of_a_model(Owner()), x, one_part=True)
    engine.prepare(BATCH)
    with pytest.raises(Exception, match="leave out torch.compile"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


def test_a_level_that_compiles_says_which_owner_it_leaves_eager(private):
    x = inputs().float()
    engine, model, *_ = private(of_a_model(Owner()).float(), x, optimize="aggressive")
    assert "'1' runs sample by sample" in str(engine.optimization)
    assert engine.optimization.autocast
    engine.backward(squares(model, x))


class Normed(nn.Module):
    """A weight that is computed from parameters, and a batch norm that may be frozen."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
        self.norm = nn.BatchNorm1d(WIDTH).requires_grad_(False).eval()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_weight_norm_and_frozen_batch_norms_train(clipping, from_loop):
    x, plain = inputs(), Normed().double()
    plain.norm.running_mean.normal_()
    assert "conv.parametrizations.weight.original0" in dict(plain.named_parameters())
    options = {"exact": False, "clipping": clipping, "max_grad_norm": 1e6}
    assert from_loop(plain, squares, x, **options) <= 1e-12


def test_a_frozen_part_of_a_computed_weight_that_trains_again_is_refused(private):
    plain, x = Normed(), inputs().float()
    magnitude = plain.conv.parametrizations.weight.original0.requires_grad_(False)
    _, model, *_ = private(plain, x, one_part=True)
    model(x)
    magnitude.requires_grad_(True)
    with pytest.raises(RuntimeError, match="original0' was frozen"):
        model(x)


def test_a_frozen_batch_norm_that_leaves_eval_is_refused(private):
    x = inputs().float()
    engine, model, *_ = private(Normed(), x, one_part=True)
    model.train()
    with pytest.raises(RuntimeError, match=r"'norm'.*\.eval\(\)"):
        model(x)
    model.norm.eval()
    engine.backward(squares(model, x))
    model.norm.requires_grad_(True)
    with pytest.raises(RuntimeError, match="was frozen"):
        model(x)


def test_a_sparse_embedding_trains_with_dense_gradients(private, oracle, sums, distance):
    tokens = torch.randint(0, 5, (BATCH, 3))
    plain = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 2)).double()
    dense = copy.deepcopy(plain)
    dense[0].sparse = False
    expected = oracle(dense, squares, tokens).clipped_sum(0.5)
    engine, model, *_ = private(plain, tokens, one_part=True, max_grad_norm=0.5)
    engine.backward(squares(model, tokens))
    assert distance(sums(engine, model), expected) <= 1e-6


class Returns(nn.Module):
    """A scaled layer, whose forward also returns something that is no tensor."""

    def __init__(self, extra):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.linear = nn.Linear(3, 2)
        self.extra = extra

    def forward(self, x):
        return self.extra, self.linear(x) * self.scale


@pytest.mark.parametrize("extra", [None, 7, "text"], ids=str)
def test_what_is_no_tensor_is_returned_as_it_is(extra, from_loop):
    def losses(model, x):
        returned, y = model(x)
        assert returned == extra
        return y.square().sum((1, 2))

    x = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    options = {"max_grad_norm": 0.5, "exact": False}
    assert from_loop(Returns(extra).double(), losses, x, **options) <= 5e-7


def test_an_object_that_may_keep_tensors_of_one_sample_is_refused(private):
    engine, made, *_ = private(Returns(object()))
    with pytest.raises(ValueError, match="returned an object of object, which may keep tensors"):
        made(torch.zeros(4, 5, 3))


class ScaledByLabel(nn.Module):
    """A table of its own, read by the labels `[B]`, and a random mask."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0.5, 2.0, 5))
        self.linear = nn.Linear(3, 3)

    def forward(self, x, y):
        z = torch.tanh(self.linear(x)) * self.table[y].unsqueeze(-1)
        return nn.functional.dropout(z, 1e-9)


def test_one_label_does_not_make_labels_of_a_batch_shared(private, oracle, sums, distance):
    def losses(model, x, y):
        return model(x, y).reshape(len(x), -1).square().mean(1)

    torch.manual_seed(0)
    model, x = ScaledByLabel(), torch.randn(6, 3)
    y = torch.tensor([1, 2, 3, 1, 2, 4])
    expected = oracle(model, losses, x, y).clipped_sum(0.1)
    engine, made, *_ = private(model, max_grad_norm=0.1)
    made(x, y[:1])
    engine.backward(losses(made, x, y))
    assert distance(sums(engine, made), expected) <= 1e-6


def test_labels_of_another_length_than_the_batch_are_refused(private):
    _, made, *_ = private(ScaledByLabel())
    x, y = torch.randn(6, 3), torch.tensor([1, 2, 3, 1, 2, 3])
    made(x, y)
    with pytest.raises(PrivateRefusal, match="one entry for each sample before"):
        made(x, y[:3])


class WeighedTasks(nn.Module):
    """Returns the weights of its tasks with their outputs."""

    def __init__(self, returned):
        super().__init__()
        self.log_variances = nn.Parameter(torch.linspace(0.5, 2.0, 3))
        self.linear, self.returned = nn.Linear(3, 3), returned

    def forward(self, x):
        return self.linear(x), self.returned(self.log_variances, x)


def weighed(model, x):
    outputs, log_variances = model(x)
    return (outputs.square() * torch.exp(-log_variances) + log_variances).sum(1)


def test_a_returned_parameter_is_refused_with_the_line_that_works(private, oracle, sums, distance):
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    remedy = r"Return log_variances.expand\(len\(x\), -1\)"
    with pytest.raises(RuntimeError, match=f"its parameter 'log_variances' itself.*{remedy}"):
        weighed(private(WeighedTasks(lambda own, x: own))[1], x)
    (problem,) = (
        PrivacyEngine()
        .check(WeighedTasks(lambda own, x: own), (x,), lambda model, batch: weighed(model, *batch))
        .problems
    )
    assert re.search(remedy, problem.remedy)
    model = WeighedTasks(lambda own, x: own.expand(len(x), -1))
    expected = oracle(model, weighed, x).clipped_sum(0.1)
    engine, made, *_ = private(model, max_grad_norm=0.1)
    engine.backward(weighed(made, x))
    assert distance(sums(engine, made), expected) <= 1e-6


class Masked(nn.Module):
    """A random mask, and a table whose length is its own, which looks like a batch of as many."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear, self.rate = nn.Linear(3, 3), rate
        self.weights = torch.linspace(0.5, 2.0, 12).view(4, 3)

    def forward(self, x, weights):
        # [B, T, E], and weights [T, E] of positions.
        x = F.dropout(self.linear(x).transpose(0, 1), self.rate).transpose(0, 1)
        return x * weights * self.scale


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.masked = Masked()

    def forward(self, x):
        return self.masked(x, self.masked.weights)


def test_a_forward_with_random_masks_is_compared_too(private):
    torch.manual_seed(0)
    _, made, *_ = private(WithTable())
    with pytest.raises(RuntimeError, match="gives a sample alone another result"):
        made(torch.randn(4, 4, 3))


# Transposed, a mask lies in another order in memory than it does for each sample.
@pytest.mark.parametrize("batch", [4, 6])
def test_random_masks_alone_are_no_difference(batch, private):
    torch.manual_seed(0)
    engine, made, *_ = private(Masked())
    x, weights = torch.randn(batch, 4, 3), torch.randn(batch, 4, 3)
    _, unproven, *_ = private(Masked(), verify_first_batch=False)
    state = torch.get_rng_state()
    outputs = made(x, weights)
    assert (outputs == 0).any() and not (outputs == 0).all()
    # The comparison draws nothing that a later forward would.
    drawn = torch.rand(3)
    torch.set_rng_state(state)
    unproven(x, weights)
    assert torch.equal(torch.rand(3), drawn)


class Sinusoids(nn.Module):
    def forward(self, tokens):
        return torch.arange(tokens * WIDTH, dtype=torch.float64).view(tokens, WIDTH).sin()


class Table(nn.Module):
    """A trained layer that gets a table which all samples share."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return self.project(torch.linspace(0, 1, tokens * WIDTH).double().view(1, tokens, WIDTH))


class Rotary(nn.Module):
    def forward(self, x):
        return x.new_ones(x.shape[1:]).cumsum(0).cos().unsqueeze(0)


class Located(nn.Module):
    """Adds positions that a layer below makes from the number of tokens."""

    def __init__(self, positions):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.positions, self.project = positions, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        given = x if isinstance(self.positions, Rotary) else x.shape[1]
        x = self.project(x) + self.positions(given)
        return (x @ x.transpose(1, 2)).softmax(-1) @ x * self.scale


# As many tokens as samples, from the first batch on or after the model is proven.
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("lengths", [(8,), (5, 6, 7, 8)], ids=str)
@pytest.mark.parametrize("positions", [Sinusoids, Table, Rotary])
def test_positions_made_below_an_owner_are_shared_whatever_their_number(
    positions, lengths, batch, private, oracle, sums, distance
):
    plain = of_a_model(Located(positions()))
    engine, model, optimizer, _ = private(
        copy.deepcopy(plain), inputs(batch), one_part=True, exact=False, lr=0.0
    )
    for tokens in lengths:
        x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64)
        expected = oracle(plain, squares, x).clipped_sum(1.0)
        engine.backward(squares(model, x))
        found = sums(engine, model)
        assert distance({n: found[n] for n in expected}, expected) <= 1e-6
        optimizer.step()
        optimizer.zero_grad()


class Later(nn.Module):
    """Passes a table `[T, T]` from some length on."""

    def __init__(self):
        super().__init__()
        self.owner = Mixed()

    def forward(self, x):
        tokens = x.shape[1]
        table = torch.arange(tokens * tokens).view(tokens, tokens).double()
        return self.owner(x, table if tokens == 8 else None)


class Mixed(Owner):
    def forward(self, x, table):
        x = self.project(x) * self.scale
        return x if table is None else table.softmax(-1) @ x


def test_an_argument_that_comes_after_the_proof_is_compared_too(private):
    engine, model, optimizer, loader = private(of_a_model(Later()), inputs(60), batch_size=20)
    for (x,) in loader:
        engine.backward(squares(model, x))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.verified is True
    # A refused call is refused again.
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gives a sample alone another result"):
            model(torch.randn(8, 8, WIDTH, dtype=torch.float64))


class InPlace(Owner):
    """Halves its second argument, which its caller reads afterwards."""

    def forward(self, x, mask):
        if mask is not None:
            mask.mul_(0.5)
        return self.project(x) * self.scale


class ReadsLater(nn.Module):
    """Passes a mask in calls of `WIDTH` tokens."""

    def __init__(self):
        super().__init__()
        self.owner = InPlace()

    def forward(self, x):
        mask = x.detach().sigmoid() if x.shape[1] == WIDTH else None
        y = self.owner(x, mask)
        return y if mask is None else y * mask


@pytest.mark.parametrize("lengths", [(WIDTH,), (5, 5, WIDTH)], ids=["at first", "later"])
def test_an_argument_changed_in_place_is_changed_once(lengths, private, oracle, sums, distance):
    plain = nn.Sequential(ReadsLater(), nn.Linear(WIDTH, 2)).double()
    engine, model, optimizer, _ = private(
        copy.deepcopy(plain), inputs(8), one_part=True, exact=False, max_grad_norm=1e6, lr=0.0
    )
    for tokens in lengths:
        x = torch.randn(8, tokens, WIDTH, dtype=torch.float64)
        expected = oracle(plain, squares, x).clipped_sum(1e6)
        engine.backward(squares(model, x))
        found = sums(engine, model)
        assert distance({n: found[n] for n in expected}, expected) <= 1e-12
        optimizer.step()
        optimizer.zero_grad()


class Hooked(nn.Module):
    """Turns a gradient around, with a layer below or without."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = self.layer(x) * self.scale
        if y.requires_grad:
            y.register_hook(lambda grad: -grad)
        return y * self.scale


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Linear(WIDTH, WIDTH)], ids=["leaf", "owner"])
def test_a_hook_on_a_gradient_that_would_be_lost_is_refused(layer, private):
    engine, model, *_ = private(of_a_model(Hooked(layer)), inputs(), one_part=True)
    with pytest.raises(RuntimeError, match="module '1' registers a hook on the gradient"):
        engine.backward(squares(model, inputs()))


class Keeps(nn.Module):
    """What its forward keeps is of one batch."""

    def __init__(self, keep):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.linear = nn.Linear(3, 2)
        self.keep, self.kept, self._rows, self.named = keep, None, [], {"y": [None]}
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = nn.functional.dropout(self.linear(x) * self.scale, 1e-9)
        if self.keep == "attribute":
            self.kept = y.detach()
        elif self.keep == "list":
            self._rows.append(y.detach())
        elif self.keep == "dict":
            self.named["y"][0] = y.detach()
        return y if self.kept is None else y - self.kept.mean()


@pytest.mark.parametrize(
    ("keep", "named"), [("attribute", "'kept'"), ("list", "'_rows'"), ("dict", "'named'")]
)
def test_a_forward_that_keeps_something_is_refused_and_keeps_nothing(keep, named, private):
    _, made, *_ = private(Keeps(keep))
    with pytest.raises(RuntimeError, match=f"sets its attribute {named}"):
        made(torch.zeros(4, 3))
    assert made.kept is None and made._rows == [] and made.named == {"y": [None]}


class KeepsBelow(nn.Module):
    """Writes into a list of a layer below it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 3)
        self.linear.rows = []

    def forward(self, x):
        y = self.linear(x) * self.scale
        self.linear.rows.append(y)
        return sum(self.linear.rows)


def test_what_is_kept_below_an_owner_does_not_reach_the_next_batch(private):
    _, made, *_ = private(KeepsBelow(), verify_first_batch=False)
    x = torch.randn(4, 3)
    assert torch.equal(made(x), made(x)) and made.linear.rows == []


def test_a_counter_advances_once_a_call(private):
    _, made, *_ = private(Keeps("nothing"))
    for calls in (1, 2, 3):
        made(torch.zeros(4, 3))
        assert made.calls == calls


class Labeled(nn.Module):
    """A layer and an embedding of labels, called with `[B]` or one of them."""

    def __init__(self):
        super().__init__()
        self.linear, self.labels = nn.Linear(3, 3), nn.Embedding(5, 3)

    def forward(self, x, y):
        return self.linear(x) * self.labels(y)


def test_one_index_does_not_make_the_indices_of_a_batch_positions(private):
    _, made, *_ = private(Labeled(), verify_first_batch=False)
    y = torch.tensor([1, 2, 3, 1])
    made(torch.zeros(4, 3), y[:1])
    with pytest.raises(PrivateRefusal, match="one index for each sample, or positions"):
        made(torch.zeros(4, 3), y)

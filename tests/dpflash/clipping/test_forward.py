"""Each call of the model infers its batch size anew, whatever was called before."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash.optimize import wrapper as leveled

BOUND = 0.7
SLACK = 1e-5


class Positions(nn.Module):
    """Tokens, and positions that the samples share."""

    def __init__(self, indices=lambda length: torch.arange(length)[None], again=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(12, 4)
        self.head = nn.Linear(4, 3)
        self.indices, self.again = indices, again

    def embedded(self, tokens):
        return self.tokens(tokens) + self.positions(self.indices(tokens.shape[1]))

    def forward(self, tokens):
        if self.again:
            hidden = checkpoint(self.embedded, tokens, use_reentrant=False)
        else:
            hidden = self.embedded(tokens)
        return self.head(torch.tanh(hidden))


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def by_itself(layer):
    """Calls one layer only, without gradient or with it."""
    return lambda model, x: model[layer](x)


def without_grad(model, x):
    with torch.no_grad():
        model(x)


def in_eval_mode(model, x):
    model.eval()
    model(x)
    model.train()


def failing(model, x):
    with pytest.raises(RuntimeError):
        model(x[:, :3])


def several(*sizes):
    return lambda model, x: [model(x[:size]) for size in sizes]


BEFORE = {
    "a look": several(8),
    "no_grad": without_grad,
    "eval": in_eval_mode,
    "failed": failing,
    "first layer": by_itself(0),
    "last layer": by_itself(2),
    "1 and 8": several(1, 8),
    "8 and 4": several(8, 4),
}
every_before = pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
every_kind = pytest.mark.parametrize(
    "kind",
    [
        *({"grad_sample_mode": mode} for mode in ("instantiate", "book_keeping", "ghost")),
        {"clipping": "per_layer"},
        {"loss_reduction": "sum"},
        {"optimize": "none"},
    ],
    ids=lambda kind: "-".join(kind.values()),
)


def length_of(sums):
    return float(sum(t.double().square().sum() for t in sums.values())) ** 0.5


@every_kind
@every_before
def test_one_sample_counts_once_whatever_the_model_was_called_on_before(
    before, kind, private, sums
):
    engine, model, *_ = private(two_layers(), max_grad_norm=BOUND, **kind)
    x = torch.randn(8, 4)
    before(model, x)
    losses = 100 * model(x[:1]).square().sum(1)
    assert losses.shape == (1,)
    if "loss_reduction" in kind:
        losses.sum().backward()
    else:
        engine.backward(losses)
    assert 0.9 * BOUND < length_of(sums(engine, model)) <= BOUND * (1 + SLACK)


@every_before
def test_a_sample_more_moves_the_sum_by_at_most_the_bound_whatever_was_called_before(
    before, private, sums
):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def total(size):
        engine, model, *_ = private(two_layers(), max_grad_norm=BOUND)
        before(model, x)
        engine.backward(100 * model(x[:size]).square().sum(1))
        return sums(engine, model)

    for size in (2, 4, 8):
        with_it, without = total(size), total(size - 1)
        change = {name: with_it[name] - without[name] for name in with_it}
        assert 0.9 * BOUND < length_of(change) <= BOUND * (1 + SLACK)


@pytest.mark.parametrize("layer", [0, slice(0, 2), slice(0, 3)], ids=str)
def test_layers_that_are_called_by_themselves_take_no_sample_for_shared(layer, private, sums):
    engine, model, *_ = private(two_layers(), max_grad_norm=BOUND)
    x = torch.randn(8, 4)
    model(x)
    losses = 100 * model[layer](x[:1]).square().sum(1)
    engine.backward(losses)
    assert length_of(sums(engine, model)) <= BOUND * (1 + SLACK)


@every_kind
def test_one_output_that_is_expanded_to_a_batch_of_losses_is_refused(kind, private):
    engine, model, *_ = private(two_layers(), **kind)
    x = torch.randn(8, 4)
    model(x)
    with pytest.raises(dpflash.PrivateRefusal, match="than the batch that the model saw") as e:
        engine.backward(model(x[:1]).expand(8, 3).square().sum(1))
    assert e.value.details == {"losses": 8, "batch_size": 1}


def test_calls_of_different_sizes_in_one_loss_are_refused(private):
    engine, model, *_ = private(two_layers())
    x = torch.randn(8, 4)
    for one, other in ((8, 1), (1, 8)):
        with pytest.raises((RuntimeError, ValueError), match="batch"):
            engine.backward((model(x[:one]) + model(x[:other])).square().sum(1))
        assert not engine._step.sums


def test_a_compiled_model_counts_one_sample_once_after_a_look_at_eight(private, sums, monkeypatch):
    monkeypatch.setattr(leveled, "_BACKEND", "aot_eager")
    engine, model, *_ = private(two_layers(), max_grad_norm=BOUND, optimize="aggressive")
    x = torch.randn(8, 4)
    model(x)
    losses = 100 * model(x[:1]).square().sum(1)
    assert engine.optimization.compiled and losses.shape == (1,)
    engine.backward(losses)
    assert length_of(sums(engine, model)) <= BOUND * (1 + SLACK)


# What the samples share


def loss_of(outputs):
    return outputs.square().sum((1, 2))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_positions_are_shared_by_the_samples_of_each_call(
    ndim, clipping, again, private, sums, distance, oracle
):
    torch.manual_seed(0)

    def indices(length):
        return torch.arange(length)[(None,) * (ndim - 1)]

    model = Positions(indices, again)
    tokens = torch.randint(9, (5, 7))
    reference = Positions(lambda length: torch.arange(length)[None])
    reference.load_state_dict(model.state_dict())

    def twice(model, tokens):
        return loss_of(model(tokens) + model(tokens.flip(1)))

    expected = oracle(reference, twice, tokens).clipped_sum(BOUND, clipping)
    engine, made, *_ = private(model, max_grad_norm=BOUND, clipping=clipping)
    made(tokens[:3])
    engine.backward(twice(made, tokens))
    assert distance(sums(engine, made), expected) <= 1e-5


def test_positions_through_a_layer_that_is_called_by_itself_are_refused_with_the_way_out(private):
    engine, model, *_ = private(Positions())
    tokens = torch.randint(9, (5, 7))
    model(tokens)
    with pytest.raises(
        dpflash.PrivateRefusal, match="only in a call of the model itself.* expand it"
    ):
        engine.backward(loss_of(model.head(model.embedded(tokens))))
    assert not engine._step.sums


class Sliced(nn.Module):
    """The second layer gets one row of what the first one gives."""

    def __init__(self, taken):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.taken = taken

    def forward(self, x):
        hidden = self.first(x)
        return hidden[:, :3] + self.second(self.taken(hidden))


@pytest.mark.parametrize(
    "taken", [lambda h: h[:1], lambda h: h.mean(0, keepdim=True)], ids=["row", "mean"]
)
def test_one_row_made_from_the_batch_inside_of_the_model_is_not_taken_for_shared(taken, private):
    _, model, *_ = private(Sliced(taken))
    with pytest.raises(dpflash.PrivateRefusal, match="'second' is .*depends on layers that") as e:
        model(torch.randn(8, 4))
    assert e.value.details == {"shape": (1, 4), "batch_size": 8}


class TableFirst(nn.Module):
    """A table of 8 rows that belong to no sample comes before the data."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        rows = self.table(torch.arange(8)[:, None])[:, 0]
        return self.layer(x) + rows[:, :3]


def test_a_batch_of_one_is_not_expanded_to_rows_that_are_no_samples(private):
    _, model, *_ = private(TableFirst())
    with pytest.raises(dpflash.PrivateRefusal, match="no tensor that.*or call it twice;"):
        model(torch.randn(1, 4))


def test_indices_of_a_batch_are_not_taken_for_positions_since_another_number_was_drawn(private):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    _, model, _, loader = private(model, torch.zeros(64, dtype=torch.long), batch_size=8)
    for (drawn,) in loader:
        assert len(drawn) not in (1, 5)
        said = r"may be one index .*\(indices\[:, None\]\)\.squeeze\(1\) for one index"
        with pytest.raises(dpflash.PrivateRefusal, match=said):
            model(torch.randint(9, (5,)))
        break


class Positioned(nn.Module):
    """Positions as models often look them up, at [T]."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(16, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.tokens(x) + self.places(torch.arange(x.shape[1]))).mean((1, 2))


def test_positions_stay_positions_where_their_number_is_once_that_of_the_samples(private, sums):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Positioned(), max_grad_norm=50.0)
    with pytest.raises(
        dpflash.PrivateRefusal, match="may be one index for each sample, or positions"
    ):
        model(torch.randint(9, (6, 6)))
    for tokens in (5, 6):
        x = torch.randint(9, (6, tokens))
        engine.backward(model(x))
        found = sums(engine, model)["places.weight"]
        plain = Positioned()
        plain.load_state_dict(model.state_dict())
        plain(x).sum().backward()
        torch.testing.assert_close(found.float(), plain.places.weight.grad)
        optimizer.zero_grad()


def test_copies_of_a_private_model_and_what_detach_gives_back_are_of_the_plain_class(private):
    plain = two_layers()
    kind = type(plain)
    engine, model, *_ = private(plain)
    assert isinstance(model, kind) and type(model).__qualname__ == kind.__qualname__
    assert type(copy.deepcopy(model)) is kind
    assert type(engine.detach(model)) is kind


class Failing(Positions):
    """Code of a model that fails after its embeddings."""

    shared, error = True, RuntimeError

    def forward(self, tokens):
        self.head(self.embedded(tokens) if self.shared else self.tokens(tokens))
        raise self.error("as it was")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, torch.OutOfMemoryError])
def test_only_an_operation_that_fails_after_a_shared_input_is_told_of_it(shared, error, private):
    plain = Failing()
    plain.shared, plain.error = shared, error
    tokens = torch.zeros(4, 3, dtype=torch.long)
    _, model, *_ = private(plain, tokens)
    with pytest.raises(error) as caught:
        model(tokens)
    if shared and error is RuntimeError:
        assert "as it was\nThe input [1, ...] of 'positions' is shared" in str(caught.value)
    else:
        assert str(caught.value) == "as it was"


class Replacing(Positions):
    def forward(self, tokens):
        embedded = self.embedded(tokens)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        return self.head(embedded)


def test_a_refusal_of_a_layer_after_a_shared_input_stays_as_it_is(private):
    tokens = torch.zeros(4, 3, dtype=torch.long)
    _, model, *_ = private(Replacing(), tokens)
    with pytest.raises(RuntimeError, match="^parameter 'head.weight' is not the one"):
        model(tokens)


def clamped(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.3)


def scaled_together(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def given_other_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def loaded(model):
    model.load_state_dict({n: 0.5 * t for n, t in model.state_dict().items()})


@pytest.mark.parametrize("write", [clamped, scaled_together, given_other_data, loaded])
@every_kind
def test_parameters_may_be_written_in_place_before_a_forward(write, kind, private, sums, distance):
    """Also after an evaluation of the same microbatch."""
    x, found = torch.randn(8, 4), []
    for late in (False, True):
        model = two_layers()
        if not late:
            write(model)
        options = {"max_grad_norm": BOUND, "verify_first_batch": False, **kind}
        engine, model, _, loader = private(model, x, batch_size=8, **options)
        (rows,) = next(iter(loader))
        if late:
            model(rows)
            write(model)
        losses = 100 * model(rows).square().sum(1)
        if "loss_reduction" in kind:
            losses.sum().backward()
        else:
            engine.backward(losses)
        found.append(sums(engine, model))
    assert distance(*found) <= 1e-6


def test_losses_of_two_prepared_passes_do_not_mix(private):
    engine, model, *_ = private(nn.Linear(3, 2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = 0
    for _ in range(2):
        engine.prepare(2)
        losses = losses + compiled(torch.randn(2, 3)).square().mean(1)
    with pytest.raises(RuntimeError, match="more than one forward"):
        engine.backward(losses)


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3), (4, 2, 5, 3)], ids=str)
@pytest.mark.parametrize("attention", [False, True])
def test_what_a_private_layer_returns_may_be_changed_in_place(attention, shape, private):
    layer = dpflash.nn.MultiheadAttention(3, 1) if attention else nn.Linear(3, 2)
    engine, model, *_ = private(layer)
    outputs = model(torch.randn(4, 5, 3))[0] if attention else model(torch.randn(shape))
    engine.backward(outputs.relu_().flatten(1).sum(1))


# A convolution reads its weight through the handle, under vmap; the others keep it themselves.
@pytest.mark.parametrize("again", [False, True], ids=["losses-made", "a-second-forward"])
@pytest.mark.parametrize("layer", [nn.Conv1d(3, 3, 1), nn.Linear(4, 4)], ids=["conv", "linear"])
def test_parameters_written_between_a_forward_and_its_backward_are_refused(layer, again, private):
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer))
    engine, model, *_ = private(model, torch.randn(8, 3, 4))
    x = torch.randn(4, 3, 4)
    outputs = model(x)
    scaled_together(model)
    if again:
        outputs = outputs + model(x)
    with pytest.raises(
        RuntimeError, match=r"'1.weight' was changed in place|an inplace operation"
    ):
        engine.backward(outputs.square().sum((1, 2)))
    assert not engine._step.sums


class Fails(torch.autograd.Function):
    """The identity; its forward or its backward runs out of memory."""

    @staticmethod
    def forward(ctx, x, error, in_backward):
        ctx.error = error
        if not in_backward:
            raise error
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise ctx.error


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
def test_an_error_of_memory_names_the_rows_and_the_argument(error, in_backward, private):
    class Layer(nn.Module):
        def forward(self, x):
            return Fails.apply(x, error, in_backward)

    engine, model, _, loader = private(nn.Sequential(nn.Linear(4, 2), Layer()), torch.ones(24, 4))
    with pytest.raises(torch.OutOfMemoryError, match="(?s)memory.*physical_batch_size=") as caught:
        engine.backward(model(next(iter(loader))[0]).sum(1))
    assert f"has {loader.slots} rows" in str(caught.value)

"""nn.LSTM, nn.GRU and nn.RNN train privately as they are."""

import copy
import math

import pytest
import torch
from kinds import KINDS, every_kind, loss_of, scrambled
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash.grad_rules import recurrent

every_order = pytest.mark.parametrize("batch_first", [True, False], ids=["batch", "steps"])
B, T, IN, H = 5, 6, 3, 4
LENGTHS = torch.tensor([4, 6, 1, 6, 3])

CELLS = {
    "lstm": lambda **options: nn.LSTM(IN, H, **options),
    "gru": lambda **options: nn.GRU(IN, H, **options),
    "rnn": lambda **options: nn.RNN(IN, H, **options),
    "relu": lambda **options: nn.RNN(IN, H, nonlinearity="relu", **options),
    "projected": lambda **options: nn.LSTM(IN, H, proj_size=2, **options),
}
every_cell = pytest.mark.parametrize("cell", CELLS)
OPTIONS = {
    "plain": {},
    "no_bias": {"bias": False},
    "deep": {"num_layers": 2, "dropout": 0.0},
    "both_ways": {"bidirectional": True},
    "deep_both_ways": {"num_layers": 2, "bidirectional": True},
}


class Net(nn.Module):
    """A trained layer before a recurrent one; outputs and last states go into the result.

    Args:
        given: initial states depend on the data.
        packed: "sorted", "unsorted" or None.
    """

    def __init__(self, cell, given=False, packed=None, batch_first=True, **options):
        super().__init__()
        self.inner = nn.Linear(IN, IN)
        self.net = CELLS[cell](batch_first=batch_first, **options)
        self.given, self.packed, self.batch_first = given, packed, batch_first
        self.states = nn.Linear(IN, H + 2)

    def forward(self, x, lengths=None):
        x = torch.tanh(self.inner(x))
        order = None
        if self.packed == "sorted":
            lengths, order = lengths.sort(descending=True)
            x = x[order]
        hx = self.initial(x) if self.given else None
        sequence = x if self.batch_first else x.transpose(0, 1)
        if self.packed:
            sequence = pack_padded_sequence(
                sequence, lengths, self.batch_first, enforce_sorted=self.packed == "sorted"
            )
        y, states = self.net(sequence, hx)
        if self.packed:
            y, _ = pad_packed_sequence(y, self.batch_first, total_length=x.shape[1])
        y = y if self.batch_first else y.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        parts = [y.flatten(1), *(2 * s.transpose(0, 1).flatten(1) for s in states)]
        result = torch.cat(parts, 1)
        return result if order is None else result[order.argsort()]

    def initial(self, x):
        count = self.net.num_layers * (1 + self.net.bidirectional)
        numbers = self.states(x[:, 0])
        h = numbers[:, : self.net.proj_size or H].expand(count, -1, -1)
        c = numbers[:, 2:].expand(count, -1, -1)
        return (h, c) if isinstance(self.net, nn.LSTM) else h


def samples(batch=B, steps=T):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, steps, IN, generator=generator)
    return x * torch.tensor([1.0, 3.0, 0.2, 0.5, 2.0])[torch.arange(batch) % 5].view(-1, 1, 1)


@every_kind
@every_order
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
@pytest.mark.parametrize("packed", [None, "unsorted"], ids=["padded", "packed"])
@pytest.mark.parametrize("options", OPTIONS)
@every_cell
def test_it_agrees_with_torch_and_with_single_samples(
    cell, options, packed, given, batch_first, kind, agree
):
    torch.manual_seed(0)
    plain = Net(cell, given, packed, batch_first, **OPTIONS[options])
    agree(scrambled(plain), (samples(), *([LENGTHS] if packed else [])), kind)


@every_order
@every_cell
def test_as_many_steps_as_samples_are_not_taken_for_samples(cell, batch_first, agree):
    torch.manual_seed(0)
    agree(scrambled(Net(cell, batch_first=batch_first)), (samples(T),), KINDS[1])


@pytest.mark.parametrize("shape", [(1, T), (B, 1), (1, 1)], ids=["B1", "T1", "B1-T1"])
@every_cell
def test_one_sample_and_one_step_agree(cell, shape, agree):
    torch.manual_seed(0)
    agree(scrambled(Net(cell, batch_first=False)), (samples(*shape),), KINDS[0])


FROZEN = {
    "recurrent_weights": lambda n: "weight_hh" in n,
    "biases": lambda n: "bias_" in n,
    "last_layer": lambda n: "net" in n and "_l1" in n,
    "all_of_it": lambda n: "inner" in n,
}


@every_kind
@pytest.mark.parametrize("case", FROZEN)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_frozen_parameters_do_not_count(cell, case, kind, agree):
    torch.manual_seed(0)
    model = Net(cell, num_layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(FROZEN[case](name))
    agree(scrambled(model), (samples(),), kind)


class Twice(nn.Module):
    """An encoder that reads twice, and a decoder that starts from its states with its weights."""

    def __init__(self, cell):
        super().__init__()
        self.encoder = CELLS[cell](batch_first=True)
        self.decoder = CELLS[cell](batch_first=True)
        self.decoder.weight_hh_l0 = self.encoder.weight_hh_l0

    def forward(self, x):
        _, states = self.encoder(x)
        _, states = self.encoder(x.flip(1), states)
        return self.decoder(x, states)[0]


@every_kind
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_module_called_twice_with_a_tied_weight_agrees(cell, kind, agree):
    torch.manual_seed(0)
    agree(scrambled(Twice(cell)), (samples(),), kind)


STEPS = {
    "lstm": lambda bias: nn.LSTMCell(IN, H, bias),
    "gru": lambda bias: nn.GRUCell(IN, H, bias),
    "rnn": lambda bias: nn.RNNCell(IN, H, bias),
    "relu": lambda bias: nn.RNNCell(IN, H, bias, nonlinearity="relu"),
}


class Stepwise(nn.Module):
    def __init__(self, cell, bias=True):
        super().__init__()
        self.inner = nn.Linear(IN, IN)
        self.cell = STEPS[cell](bias)

    def forward(self, x):
        state, found = None, []
        for step in torch.tanh(self.inner(x)).unbind(1):
            state = self.cell(step, state)
            found.append(state[1] + state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


@every_kind
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("cell", STEPS)
def test_single_steps_agree_with_torch_and_with_single_samples(cell, bias, kind, agree):
    torch.manual_seed(0)
    agree(scrambled(Stepwise(cell, bias)), (samples(),), kind)


@pytest.mark.parametrize("cell", STEPS)
def test_the_first_batch_proves_single_steps(cell, private):
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(Stepwise(cell), samples(60), batch_size=20)
    for (x,) in loader:
        engine.backward(loss_of(model, x)), optimizer.step()
    assert engine.verified is True


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda m, x: m(x[0, 0])[0], r"unsqueeze\(0\)"),
        (
            lambda m, x: m(x[:, 0], (torch.zeros(1, H),) * 2)[0],
            "expected .B, H. for each state",
        ),
    ],
    ids=["unbatched", "one_state"],
)
def test_a_single_step_that_tells_no_samples_is_refused(use, words, private):
    _, model, _, _ = private(Uses(nn.LSTMCell(IN, H), use, first=False))
    with pytest.raises(dpflash.PrivateRefusal, match=words):
        model(samples())


class Checkpointed(Net):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("kind", KINDS[1:4], ids=["book_keeping", "ghost", "per_layer"])
def test_activation_checkpointing_agrees(kind, agree):
    torch.manual_seed(0)
    agree(scrambled(Checkpointed("lstm", batch_first=False)), (samples(),), kind)


@every_cell
def test_bf16_autocast_agrees_with_float32_to_its_digits(cell, private, sums, distance):
    torch.manual_seed(0)
    plain, found = Net(cell, num_layers=2), []
    for enabled in (False, True):
        engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=math.inf)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = model(samples())
            losses = y.float().square().mean(1)
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        engine.backward(losses)
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) <= 2e-2


def test_dropout_between_layers_draws_a_mask_for_each_sample(private):
    torch.manual_seed(0)
    _, model, _, _ = private(Net("gru", num_layers=2, dropout=0.5))
    same = samples()[:1].expand(B, -1, -1)
    y = model(same)
    assert not torch.equal(y[0], y[1])
    y = model.eval()(same)
    assert torch.equal(y[0], y[1])


@every_kind
@pytest.mark.parametrize("packed", [None, "unsorted"])
@pytest.mark.parametrize("cell", ["projected", "gru"])
def test_removing_a_sample_changes_the_sum_by_at_most_c(cell, packed, kind, private, sums):
    torch.manual_seed(0)
    options = {"packed": packed, "batch_first": False, "num_layers": 2, "bidirectional": True}
    plain = scrambled(Net(cell, **options)).float()
    batch, bound = (samples(), *([LENGTHS] if packed else [])), 0.7
    found = []
    for kept in [torch.ones(B)] + [1 - row for row in torch.eye(B)]:
        engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=bound, **kind)
        engine.backward(kept * 50 * loss_of(model, *batch))
        found.append(torch.cat([t.double().flatten() for t in sums(engine, model).values()]))
    moves = [float((found[0] - other).norm()) for other in found[1:]]
    assert max(moves) <= bound * (1 + 2**-18)
    assert min(moves) >= 0.3 * bound


@pytest.mark.parametrize("packed", [None, "unsorted"], ids=["padded", "packed"])
@every_cell
def test_the_first_batch_proves_it(cell, packed, private):
    torch.manual_seed(0)
    # One sample is longer than all others; where it is replaced, the rest keep their bits.
    lengths = torch.tensor([4, 5, 1, 2, 3]).repeat(12)
    lengths[7] = T
    rows = (samples(60), *([lengths] if packed else []))
    for seed in range(3):
        net = Net(cell, packed=packed, batch_first=False, bidirectional=True)
        engine, model, optimizer, loader = private(net, *rows, batch_size=20, seed=seed)
        for batch in loader:
            engine.backward(loss_of(model, *batch)), optimizer.step()
        assert engine.verified is True


def test_packed_sequences_are_padded_to_the_longest_so_far(private, monkeypatch):
    """A batch without the longest sample is padded, and so rounded, like the batch with it."""
    padded = []

    def record(sequence, **options):
        padded.append(options["total_length"])
        return pad_packed_sequence(sequence, **options)

    monkeypatch.setattr(recurrent, "pad_packed_sequence", record)
    engine, model, _, _ = private(Net("gru", packed="unsorted"))
    for lengths, longest in (([4, 5, 1], 5), ([4, 2, 1], 5), ([4, 6, 1], 6), ([4, 5, 1], 6)):
        padded.clear()
        # More than once, where the first batches are compared.
        model(samples(3), torch.tensor(lengths))
        assert set(padded) == {longest}


def test_samples_that_the_model_sorts_by_length_are_refused(private):
    torch.manual_seed(0)
    engine, model, _, _ = private(Net("lstm", packed="sorted"))
    # Equal lengths are in order, so that the proof would pass.
    for lengths in (LENGTHS.repeat(4), torch.full((20,), 3)):
        with pytest.raises(ValueError, match="packed with enforce_sorted=True"):
            loss_of(model, samples(20), lengths)


def test_an_empty_batch_gives_zeros(private, sums):
    engine, model, _, _ = private(Net("lstm", batch_first=False))
    engine.backward(loss_of(model, samples()[:0]))
    assert not any(t.any() for t in sums(engine, model).values())


def test_a_sample_that_is_not_finite_contributes_zero(private, sums, distance):
    torch.manual_seed(0)
    plain, x, found = Net("lstm", batch_first=False), samples(), []
    for value in (1.0, math.inf):
        engine, model, _, _ = private(copy.deepcopy(plain))
        losses = loss_of(model, x)
        weights = torch.tensor([1.0, 0.0 if value == 1 else value, 1.0, 1.0, 1.0])
        engine.backward(weights * losses)
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) == 0


class Uses(nn.Module):
    """Calls a layer with another shape than the model's batch."""

    def __init__(self, layer, use, first):
        super().__init__()
        self.first = nn.Linear(IN, IN) if first else nn.Identity()
        self.layer, self.use = layer, use

    def forward(self, x):
        return self.use(self.layer, self.first(x))


REFUSED = {
    "unbatched": (lambda m, x: m(x[0])[0], "unsqueeze"),
    "not_transposed": (lambda m, x: m(x)[0], "batch_first=True"),
    "nested": (lambda m, x: m(torch.nested.nested_tensor(list(x)))[0], "is nested"),
    "one_state": (
        lambda m, x: m(x.transpose(0, 1), (torch.zeros(1, 1, H), torch.zeros(1, B, H)))[0],
        "layers first and the input's batch second",
    ),
}


@pytest.mark.parametrize("first", [True, False], ids=["after_a_layer", "first"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_use_that_tells_no_samples_is_refused_by_name(case, first, private):
    use, words = REFUSED[case]
    _, model, _, _ = private(Uses(nn.LSTM(IN, H), use, first))
    with pytest.raises(dpflash.PrivateRefusal, match=words) as error:
        model(samples())
    assert "'layer'" in str(error.value)


class OwnForward(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: OwnForward(IN, H), "OwnForward, a nn.GRU with a forward of its own"),
        (lambda: parametrizations.weight_norm(nn.LSTM(IN, H), "weight_hh_l0"), "weight_hh_l0"),
        (lambda: parametrizations.spectral_norm(nn.GRU(IN, H), "weight_ih_l0"), "weight_ih_l0"),
        (lambda: parametrizations.weight_norm(nn.LSTMCell(IN, H), "weight_hh"), "weight_hh"),
    ],
    ids=["forward", "weight_norm", "spectral_norm", "cell"],
)
def test_parameters_that_the_rule_would_not_see_are_refused(build, words, private):
    with pytest.raises(ValueError, match=words):
        private(nn.Sequential(nn.Linear(IN, IN), build()))


def test_a_model_that_mixes_samples_over_steps_is_refused_by_the_proof(private):
    """As many steps as samples, and nobody transposed: the layer reads the samples as steps."""
    torch.manual_seed(0)

    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.LSTM(IN, H)

        def forward(self, x):
            return self.net(x)[0]

    engine, model, _, _ = private(Wrong())
    with pytest.raises(RuntimeError, match=r"'net'|'\(the model itself\)'|output"):
        engine.backward(loss_of(model, samples(18, 18)))


def test_compiling_it_is_refused_with_a_way_out(private):
    torch.compiler.reset()
    engine, model, _, _ = private(Net("lstm"))
    engine.prepare(B)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # By default the compiler itself refuses recurrent layers.
    with (
        torch._dynamo.config.patch(allow_rnn=True),
        pytest.raises(Exception, match=r"no private backward under torch\.compile"),
    ):
        compiled(samples())
